"""Sequences of each step: a constant global batch, or one that grows during training (`train.batch_ramp`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Steps = TypeVar("_Steps", int, npt.NDArray[np.int64])


@dataclass(frozen=True)
class BatchSizes:
    """The global batch of each step, in sequences. Steps count from 1."""

    phases: tuple[tuple[int, int], ...]  # (steps before it, sequences a step); before the first one 0 steps

    @classmethod
    def of(cls, global_batch: int, ramp: Iterable[tuple[int, int]] = ()) -> BatchSizes:
        """`ramp`: (steps, sequences) of each phase; `global_batch` follows it."""
        phases, before = [], 0
        for steps, size in ramp:
            phases.append((before, size))
            before += steps
        return cls((*phases, (before, global_batch)))

    @property
    def largest(self) -> int:
        return self.phases[-1][1]

    @property
    def ramp(self) -> int:
        """Steps before the first one with the largest batch."""
        return self.phases[-1][0]

    def __str__(self) -> str:
        """In words: "64 for 500 steps, 128 for 1,000, then 256"."""
        words = [f"{size:,} for {steps:,}" for steps, size in self.within(self.ramp)]
        if not words:
            return f"{self.largest:,}"
        return ", ".join([f"{words[0]} steps", *words[1:], f"then {self.largest:,}"])

    def size(self, step: int) -> int:
        """Sequences of `step`."""
        first, end = self.samples(step)
        return end - first

    def first_sample(self, step: _Steps) -> _Steps:
        """Sequences of all steps before `step`; also of an array of steps."""
        total, smaller = 0 * step, 0
        for before, size in self.phases:
            since = step - 1 - before
            total = total + (size - smaller) * since * (since > 0)
            smaller = size
        return total

    def samples(self, step: int) -> tuple[int, int]:
        """(first, end) of the samples of `step`."""
        return self.first_sample(step), self.first_sample(step + 1)

    def growth(self, step: int, later: int) -> float:
        """The batch of step `later` over that of `step`; 1 if there is no such step."""
        return self.size(later) / (self.size(step) or self.size(later) or 1)

    def total(self, steps: int) -> int:
        """Sequences of the first `steps` steps."""
        return self.first_sample(steps + 1)

    def within(self, steps: int) -> Iterator[tuple[int, int]]:
        """(steps, sequences a step) of each phase within the first `steps` steps."""
        ends = [before for before, _ in self.phases[1:]] + [steps]
        for (before, size), end in zip(self.phases, ends, strict=True):
            if min(end, steps) > before:
                yield min(end, steps) - before, size
