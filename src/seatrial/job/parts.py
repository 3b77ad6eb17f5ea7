"""Number of parts that a microbatch's positions are split into: tensor parallel sends one while it computes another.

With p parts all but one p-th of a collective can overlap with products; each part also costs one more collective, and
its products have fewer rows.
"""

from __future__ import annotations

# Small messages and products use links and processors less efficiently. In the planner's model (`plan/cost/overlap.py`;
# 72B on A100, H100 and B300, 8B on H200; tensor 2 to 8, microbatches of 1 to 8 sequences of 4,096, or one of up to
# 32,768) four parts are best, or within 2 % of the best, if each has 2,048 positions of a rank; with fewer, two are
# best, and four may be slower than not splitting. Not measured on GPUs.
MOST, ENOUGH = 4, 2048


def parts(microbatch: int, positions_of_a_rank: int) -> int:
    """Number of parts: a divisor of the microbatch's sequences if there is one, else of a rank's positions.

    At least 2 if possible, more if they stay large; at most 4. Splitting between sequences is preferred: such parts are
    contiguous in memory, and nothing is copied to reorder them. 1: neither can be split.
    """
    sequences = sequence_parts(microbatch, positions_of_a_rank)
    return sequences if sequences > 1 else _divisor(positions_of_a_rank, positions_of_a_rank)


def sequence_parts(microbatch: int, positions_of_a_rank: int) -> int:
    """Number of parts if split between sequences; 1: sequences stay together, and their positions are split."""
    return _divisor(microbatch, microbatch * positions_of_a_rank)


def _divisor(of: int, positions: int) -> int:
    """The largest divisor of `of` that leaves parts of ENOUGH of these positions; else its smallest above 1, or 1."""
    able = [n for n in range(2, MOST + 1) if of % n == 0]
    return max([n for n in able if positions // n >= ENOUGH] or able[:1] or [1])
