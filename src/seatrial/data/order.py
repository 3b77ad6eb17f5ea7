"""The order of the samples: a pure function of (seed, epoch, position), with nothing to store or to shuffle.

Each epoch visits the samples in its own keyed permutation: a Feistel network over pairs (left, right) of
numbers below ceil(sqrt(n)), walked along its cycle until it lands below n (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002). The square is at most 2 sqrt(n) larger than n, so a second walk is
rare. Integers and hashlib only: the order is the same on every platform and Python version.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import isqrt

# Four rounds give a pseudorandom permutation in theory (Luby and Rackoff), for large halves. Data sets of
# a few samples have halves of 2 or 3 values and need more before each order is about as likely as another.
_ROUNDS = 8
_MASK = (1 << 64) - 1


def sample_index(position: int, *, seed: int, samples_per_epoch: int) -> tuple[int, int]:
    """(epoch, index of the sample) at `position`, which counts from 0 over all epochs; O(1) time and memory.

    Within an epoch every index in [0, samples_per_epoch) comes exactly once.
    """
    if position < 0 or seed < 0 or samples_per_epoch < 1:
        raise ValueError(f"no sample at {position=} with {seed=}, {samples_per_epoch=}")
    epoch, index = divmod(position, samples_per_epoch)
    side = isqrt(samples_per_epoch - 1) + 1
    keys = _round_keys(seed, epoch)
    while True:
        left, right = divmod(index, side)
        for key in keys:
            left, right = right, (left + _mix(right ^ key)) % side
        index = left * side + right
        if index < samples_per_epoch:
            return epoch, index


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.shake_256(f"seatrial order 1: seed {seed} epoch {epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
