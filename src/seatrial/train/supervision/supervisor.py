"""The training loop's interfaces to its rank's supervisor. Without one it trains unsupervised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from seatrial.record.messages import Leaving


class Supervisor(Protocol):
    """Receives a heartbeat for every step and requests early exits. No method blocks."""

    def leave_request(self) -> Leaving | None:
        """The request to leave at the end of the step that starts now, if any."""
        ...

    def beat(self, step: int, seconds: float, first: bool) -> None:
        """Send a heartbeat: `step` is done; `first`: it is this process's first of the generation."""
        ...

    def validating(self, step: int, batch: int) -> None:
        """Send a heartbeat: all ranks begin `batch`, from 1, of the validation after `step`."""
        ...

    def finding(
        self, signal: str, step: int, message: str, data: dict[str, Any], blamed: Sequence[int]
    ) -> None:
        """Report that something is wrong with `step`; `blamed` are the ranks that the evidence points to, if any."""
        ...


class RollbackBound(Protocol):
    """A check or store that limits how far back the run may still go."""

    @property
    def rollback_bound(self) -> int | None:
        """The earliest step the run may yet roll back to, or distrust everything after; None: it cannot go back."""
        ...


class Snapshots(RollbackBound, Protocol):
    """Copies of this rank's state in memory."""

    @property
    def busy(self) -> bool:
        """Whether `take` could not copy now, because the last copy is still being written."""
        ...

    def due(self, step: int) -> bool:
        """Whether a copy is to be made after `step`; the same answer in every rank."""
        ...

    def take(self, step: int) -> bool:
        """Copy the state, the one after `step`; the tensors may change as soon as this returns.

        False if nothing was copied.
        """
        ...


# Rolls back to the newest snapshot that every rank has: restores weights, optimizer and its step count, and returns the
# step, or None if there is none. All ranks call it, at the same step, and get the same result.
Rollback = Callable[[], int | None]
