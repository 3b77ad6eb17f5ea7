"""Into how many parts the positions of a microbatch are cut, where tensor parallel sends one part while it computes another.

With p parts all but one p-th of a collective can go beside products; each part also costs one more collective, and its
products have fewer rows.
"""

from __future__ import annotations

MOST = 4


def parts(microbatch: int, positions_of_a_rank: int) -> int:
    """How many parts: a divisor of the microbatch's sequences if there is one, else of a rank's positions; at most 4.

    Whole sequences come first: their parts stand one after the other in memory, and nothing is copied to put them in
    order. 1: neither can be cut.
    """
    sequences = sequence_parts(microbatch)
    return sequences if sequences > 1 else _largest_divisor(positions_of_a_rank)


def sequence_parts(microbatch: int) -> int:
    """How many of the parts are made between sequences; 1: sequences stay together, and their positions are cut."""
    return _largest_divisor(microbatch)


def _largest_divisor(of: int) -> int:
    return max(n for n in range(1, MOST + 1) if of % n == 0)
