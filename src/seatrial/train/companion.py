"""What the training loop needs of whoever watches over its rank. Without a companion it trains unsupervised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

# Why a rank leaves before the last step, its state saved: the layout changes, or the machine is taken away.
Leaving = Literal["yielded", "preempted"]

# How a leg of the loop ended.
Ending = Literal["done", "yielded", "preempted"]


class Companion(Protocol):
    """Hears of every step and says when to leave. No method waits for anything."""

    def wants(self) -> Leaving | None:
        """What this rank is asked to do at the end of the step that begins now."""
        ...

    def beat(self, step: int, seconds: float, first: bool) -> None:
        """`step` is done; `first`: it is the first of this leg of the process."""
        ...

    def finding(
        self, signal: str, step: int, message: str, data: dict[str, Any], blamed: Sequence[int]
    ) -> None:
        """Something is wrong with `step`; `blamed` are the ranks that the evidence points at, none if it does not."""
        ...


class Doubts(Protocol):
    """What may find later that a state was no good."""

    @property
    def reach(self) -> int | None:
        """The earliest step that the run may yet go back to, or trust nothing after; None: it cannot go back."""
        ...


class Snapshots(Doubts, Protocol):
    """Copies of this rank's state in memory."""

    @property
    def busy(self) -> bool:
        """Whether `take` could not copy now, because the last copy is still being written."""
        ...

    def due(self, step: int) -> bool:
        """Whether a copy is to be made after `step`; the same answer in every rank."""
        ...

    def take(self, step: int) -> bool:
        """Copy the state, which is the one after `step`; the tensors may change as soon as this returns.

        False where nothing was copied.
        """
        ...


# Back to the newest state that every rank holds in memory: restores weights, optimizer and its count of steps, and
# returns the step, or None where there is none. All ranks call it, at the same step, and get the same answer.
Rollback = Callable[[], int | None]
