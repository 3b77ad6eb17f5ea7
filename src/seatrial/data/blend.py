"""The source of the sample at each position, when a run blends several; exact at every prefix.

With shares w_i (weights over their sum), let n_i(p) be the number of the first p samples that are of source i. Then

    |n_i(p) - w_i p| < 1        for every source i and every prefix p, however long the run is.

This condition gives the j-th sample of a source a window of positions, [floor((j-1)/w_i), ceil(j/w_i)). Each
position takes, of the samples whose window has begun, the one whose window ends first (ties: the lower
source). Some assignment within all windows exists (Tijdeman, "The chairman assignment problem", 1980), and
earliest deadline first finds one if there is one (unit jobs; Pfair windows: Baruah, Cohen, Plaxton and
Varvel, "Proportionate Progress", 1996).

Seeking does not start at 0. At position t, n_i is floor or ceil of w_i t; take any such counts that sum to t and
continue by the same rule. Let D be the latest end of a window that is open at t. Where the guessed and the true
sequence differ, they differ in samples whose windows end by D: a difference moves to another sample only when one
side takes it as its earliest, so never to a later end. By D the true side has taken all of those, and both have taken
equally many, so from D on they are identical. D is at most ceil(1/w_i) away: the cost of a seek is bounded by the
smallest share and does not grow with the position. Integers only: the order is the same on every platform.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heappushpop
from math import gcd, isfinite, lcm

import numpy as np
import numpy.typing as npt

from seatrial.job.numbers import shares

# With a common denominator up to this, one table has a whole period; else tables of _BLOCK positions, made as needed.
_WHOLE_PERIOD = 1 << 14
_BLOCK = 1 << 10
_BLOCKS_KEPT = 64

Indices = npt.NDArray[np.int64]


def source_seed(seed: int, source: int, n_sources: int) -> int:
    """The seed of the order within one source: sources of the same size must not share one order.

    The only source of a run gets the run's own seed.
    """
    if not 0 <= source < n_sources:
        raise ValueError(f"no source {source} of {n_sources}")
    if n_sources == 1:
        return seed
    text = f"seatrial blend 1: seed {seed} source {source}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass(frozen=True)
class _Block:
    """Consecutive positions: the source of each, its index in that source, and the counts after the last."""

    sources: npt.NDArray[np.uint32]
    indices: Indices
    end: list[int]


class Blend:
    """Position of a sample -> (source, index of the sample in that source's own endless sequence).

    `weights` need not sum to 1; ValueError if one is not finite and positive. Safe to use from several
    threads and after a fork.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or not all(isfinite(w) and w > 0 for w in weights):
            raise ValueError(f"weights must be positive numbers, not {list(weights)}")
        self.shares = shares(weights)
        self.n_sources = len(self.shares)
        # Source i occurs `_quota[i]` times in each `period` positions, and every period is the same.
        self.period = lcm(*(s.denominator for s in self.shares))
        self._quota = [s.numerator * (self.period // s.denominator) for s in self.shares]
        assert sum(self._quota) == self.period
        assert gcd(*self._quota) == 1
        self._block = self.period if self.period <= _WHOLE_PERIOD else _BLOCK
        # If started this many positions earlier, guessed counts have converged to the true ones.
        self._settled = max(-(-self.period // q) for q in self._quota) + 1
        self._blocks: dict[int, _Block] = {}

    def locate(self, position: int) -> tuple[int, int]:
        """(source, index in it) of the sample at `position`, counted from 0; ValueError if negative."""
        if position < 0:
            raise ValueError(f"no sample at {position}")
        period, within = divmod(position, self.period)
        number, offset = divmod(within, self._block)
        block = self._get(number)
        source = int(block.sources[offset])
        return source, period * self._quota[source] + int(block.indices[offset])

    def locate_many(self, positions: npt.NDArray[np.integer]) -> tuple[Indices, Indices]:
        """(sources, indices in them) of many positions, int64, of the same shape; ValueError if one is negative."""
        flat = np.asarray(positions, dtype=np.int64).ravel()
        sources, indices = np.empty_like(flat), np.empty_like(flat)
        if flat.size and int(flat.min()) < 0:
            raise ValueError(f"no sample at {int(flat.min())}")
        if self.period < 1 << 63:
            periods, within = np.divmod(flat, self.period)
        else:
            periods, within = np.zeros_like(flat), flat
        numbers, offsets = np.divmod(within, self._block)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            block = self._get(number)
            sources[here] = block.sources[offsets[here]]
            indices[here] = block.indices[offsets[here]]
        if periods.any():  # then the period, and with it every quota, fits
            indices += periods * np.array(self._quota, dtype=np.int64)[sources]
        shape = np.shape(positions)
        return sources.reshape(shape), indices.reshape(shape)

    def counts(self, position: int) -> list[int]:
        """The number of samples of each source before `position`."""
        if position < 0:
            raise ValueError(f"no sample at {position}")
        period, within = divmod(position, self.period)
        number, offset = divmod(within, self._block)
        counts = self._start(number)
        for source in self._get(number).sources[:offset].tolist():
            counts[source] += 1
        return [period * q + n for q, n in zip(self._quota, counts, strict=True)]

    def _get(self, number: int) -> _Block:
        block = self._blocks.get(number)
        if block is None:
            length = min(self._block, self.period - number * self._block)
            block = self._make(number * self._block, self._start(number), length)
            self._blocks[number] = block
            # list() first: another thread may add one concurrently.
            for old in list(self._blocks)[:-_BLOCKS_KEPT]:
                self._blocks.pop(old, None)
        return block

    def _start(self, number: int) -> list[int]:
        """The number of samples of each source before block `number` of a period."""
        before = self._blocks.get(number - 1)
        if before is not None:
            return list(before.end)
        start = number * self._block
        guess_at = max(0, start - self._settled)
        return self._make(guess_at, self._guess(guess_at), start - guess_at).end

    def _guess(self, position: int) -> list[int]:
        """Counts at `position`, each floor or ceil of share x position; exact at 0, else a guess."""
        counts, rest = zip(*(divmod(q * position, self.period) for q in self._quota), strict=True)
        guess = list(counts)
        by_rest = sorted(range(self.n_sources), key=lambda i: (-rest[i], i))
        for source in by_rest[: position - sum(counts)]:
            guess[source] += 1
        return guess

    def _make(self, start: int, counts: list[int], length: int) -> _Block:
        """The `length` positions starting at `start`, before which each source occurred `counts` times."""
        begins, keys = self._windows(start, counts, length)
        # Keys: (end of the window, source) in one integer, so that the smallest is the next sample.
        first = int(np.searchsorted(begins, 0, side="right"))
        waiting: list[int] = keys[:first].tolist()
        heapify(waiting)
        chosen: list[int] = []
        later, at = keys[first:].tolist(), 0
        # The number of windows that begin at or before each position, not counting the first ones.
        until = (np.searchsorted(begins, np.arange(length), side="right") - first).tolist()
        for end in until:
            if at == end:
                chosen.append(heappop(waiting))
                continue
            for key in later[at : end - 1]:
                heappush(waiting, key)
            chosen.append(heappushpop(waiting, later[end - 1]))
            at = end
        sources = (np.array(chosen, dtype=np.int64) % self.n_sources).astype(np.uint32)
        indices = np.empty(length, dtype=np.int64)
        end_counts = list(counts)
        for source in range(self.n_sources):
            here = np.flatnonzero(sources == source)
            indices[here] = counts[source] + np.arange(len(here))
            end_counts[source] += len(here)
        return _Block(sources, indices, end_counts)

    def _windows(self, start: int, counts: list[int], length: int) -> tuple[Indices, Indices]:
        """(begins, keys) of all windows that begin before `start + length` and are not taken, by begin.

        Begins and the ends in the keys are relative to `start`.
        """
        begins, keys = [], []
        for source, (quota, count) in enumerate(zip(self._quota, counts, strict=True)):
            # The windows of samples count, count + 1, ... meet at (m period - rest) / quota, m = 0, 1, ...
            rest = quota * start - count * self.period
            n = max(0, -(-(quota * length + rest) // self.period))
            if (n + 2) * self.period < 1 << 62:
                edges = np.arange(n + 1, dtype=np.int64) * self.period - rest
                begin, remainder = np.divmod(edges, quota)
            else:
                pairs = [divmod(m * self.period - rest, quota) for m in range(n + 1)]
                begin = np.array([b for b, _ in pairs], dtype=np.int64)
                remainder = np.array([r > 0 for _, r in pairs], dtype=np.int64)
            ends = begin[1:] + (remainder[1:] > 0)
            begins.append(begin[:-1])
            keys.append(ends * self.n_sources + source)
        joined, joined_keys = np.concatenate(begins), np.concatenate(keys)
        order = np.argsort(joined, kind="stable")
        return joined[order], joined_keys[order]
