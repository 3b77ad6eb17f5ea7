"""Number of positions whose logits the head computes at a time (`parallel/loss.py`); the planner reads it too."""

from __future__ import annotations

import math

# 512 MiB in fp32, beside 256 MiB in bf16. At a vocabulary of 152k that is 512 positions, enough for efficient products;
# 4,096 where eight tensor-parallel ranks share it. Not measured on GPUs. Microbatches of more than eight such parts exceed it.
LOGITS = 2**27
# The head's gradient adds up over the parts in the weight's type. In bf16 its error, random, is 0.19 % in one part, 0.35 %
# in eight, 0.96 % in 64.
MOST_PARTS = 8


def loss_rows(columns: int, positions: int) -> int:
    """Positions of a part, of all `positions` of a microbatch, with `columns` vocabulary entries on a rank.

    The largest power of two with at most `LOGITS` logits, or more, so that there are at most `MOST_PARTS` parts.
    """
    return max(1 << (LOGITS // columns).bit_length() - 1, math.ceil(positions / MOST_PARTS))
