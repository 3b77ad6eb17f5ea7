"""Number of positions whose logits the head computes at a time (`parallel/loss.py`); the planner reads it too."""

from __future__ import annotations

# 512 MiB in fp32, beside 256 MiB in bf16. At a vocabulary of 152k that is 512 positions, enough for efficient products;
# 4,096 where eight tensor-parallel ranks share it. Not measured on GPUs.
LOGITS = 2**27


def loss_rows(columns: int) -> int:
    """The largest power of two of positions with at most `LOGITS` logits, of `columns` vocabulary entries on a rank."""
    return 1 << (LOGITS // columns).bit_length() - 1
