"""Into how many parts the positions of a microbatch are cut, where tensor parallel sends one part while it computes another.

With p parts all but one p-th of a collective can go beside products; each part also costs one more collective, and its
products have fewer rows.
"""

from __future__ import annotations

# Small messages and products reach less of what links and processors can. In the planner's model (`plan/overlap.py`; 72B on A100, H100
# and B300, 8B on H200; tensor 2 to 8, microbatches of 1 to 8 sequences of 4,096, or one of up to 32,768) four parts are best, or within
# 2 % of it, where each has 1,024 positions of a rank; with fewer two are, and four may be slower than none. Not measured on GPUs.
MOST, ENOUGH = 4, 1024


def parts(microbatch: int, positions_of_a_rank: int) -> int:
    """How many parts: a divisor of the microbatch's sequences if there is one, else of a rank's positions.

    2 where it can be, more where they stay large; at most 4. Whole sequences come first: their parts stand one after the
    other in memory, and nothing is copied to put them in order. 1: neither can be cut.
    """
    sequences = sequence_parts(microbatch, positions_of_a_rank)
    return sequences if sequences > 1 else _divisor(positions_of_a_rank, positions_of_a_rank)


def sequence_parts(microbatch: int, positions_of_a_rank: int) -> int:
    """How many of the parts are made between sequences; 1: sequences stay together, and their positions are cut."""
    return _divisor(microbatch, microbatch * positions_of_a_rank)


def _divisor(of: int, positions: int) -> int:
    """The largest of `of` that leaves parts of enough of these positions; else the smallest that cuts at all, or 1."""
    able = [n for n in range(2, MOST + 1) if of % n == 0]
    return max([n for n in able if positions // n >= ENOUGH] or able[:1] or [1])
