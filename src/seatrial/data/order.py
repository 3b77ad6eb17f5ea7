"""The order of the samples: a pure function of (seed, epoch, position), with nothing to store or to shuffle.

Each epoch visits the samples in its own keyed permutation: a Feistel network over pairs (left, right) of
numbers below ceil(sqrt(n)), walked along its cycle until it lands below n (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002). The square is at most 2 sqrt(n) larger than n, so a second walk is
rare. Integers and hashlib only: the order is the same on every platform and Python version.

`sample_index` defines the order, one position at a time; `sample_indices` computes the same for a range of
positions with numpy.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

# Four rounds give a pseudorandom permutation in theory (Luby and Rackoff), for large halves. Data sets of
# a few samples have halves of 2 or 3 values and need more before each order is about as likely as another.
_ROUNDS = 8
_MASK = (1 << 64) - 1
# Below this count, a scalar loop is faster than about a hundred numpy calls.
_FEW = 18

_Words = npt.NDArray[np.uint64]


def sample_index(position: int, *, seed: int, samples_per_epoch: int) -> tuple[int, int]:
    """(epoch, index of the sample) at `position`, counted from 0 over all epochs; O(1) time and memory.

    Within an epoch every index in [0, samples_per_epoch) occurs exactly once.
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


def sample_indices(first: int, count: int, *, seed: int, samples_per_epoch: int) -> npt.NDArray[np.int64]:
    """int64 [count]: the indices of the samples at positions first, ..., first + count - 1.

    The same as `sample_index` of each. ValueError as there, and for more than 2^62 samples per epoch.
    """
    if first < 0 or count < 0 or seed < 0 or not 1 <= samples_per_epoch <= 1 << 62:
        raise ValueError(f"no samples [{first}, {first + count}) with {seed=}, {samples_per_epoch=}")
    if count < _FEW:
        found = [
            sample_index(p, seed=seed, samples_per_epoch=samples_per_epoch)[1]
            for p in range(first, first + count)
        ]
        return np.array(found, dtype=np.int64)
    indices = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, begin = divmod(first + done, samples_per_epoch)
        n = min(count - done, samples_per_epoch - begin)
        part = np.arange(begin, begin + n, dtype=np.uint64)
        indices[done : done + n] = _permuted(part, _round_keys(seed, epoch), samples_per_epoch)
        done += n
    return indices


def _permuted(index: _Words, keys: tuple[int, ...], n: int) -> _Words:
    """The image of each of `index`, all below `n`, under the epoch's permutation."""
    side = isqrt(n - 1) + 1
    index = _once(index, keys, side)
    outside = np.flatnonzero(index >= n)
    while outside.size:
        index[outside] = _once(index[outside], keys, side)
        outside = outside[index[outside] >= n]
    return index


def _once(index: _Words, keys: tuple[int, ...], side: int) -> _Words:
    divisor = np.uint64(side)
    left, right = index // divisor, index % divisor
    for key in keys:
        # Reduced before it is added: `left + mix` can pass 2^64, where numpy wraps around and Python does not.
        total = left + _mix_words(right ^ np.uint64(key)) % divisor
        # If the total is below the divisor, the difference wraps around to a huge number.
        left, right = right, np.minimum(total, total - divisor)
    return left * divisor + right


def _mix_words(x: _Words) -> _Words:
    """`_mix` of each, modulo 2^64 like numpy's integers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.shake_256(f"seatrial order 1: seed {seed} epoch {epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
