"""What is told of checkpoints on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from seatrial.base import units
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.interval import Interval


class Event(Protocol):
    """Appends an event, in one rank."""

    def __call__(
        self,
        kind: str,
        message: str,
        *,
        severity: events.Severity = "info",
        data: dict[str, Any] | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class Attempt:
    """A checkpoint under way: the same in every rank but for its times, which are this rank's."""

    number: int
    step: int
    place: int  # 0, or 1 for the fallback
    ordered_at: float
    staged_at: float
    stalled_s: float  # training waited that long for this rank's copy
    committing: bool = False


class SaveEvents:
    """The events of one leg's saves. All but `own_part` is rank 0's: in other ranks nothing happens."""

    def __init__(
        self, event: Event, folder: RunFolder, generation: int, rank: int, urls: Sequence[str]
    ) -> None:
        self._event = event
        self._folder, self._generation, self._rank, self._urls = folder, generation, rank, urls

    def saved(self, attempt: Attempt, address: str, size: int, seconds: float) -> None:
        """It is complete, `seconds` after its copy was begun."""
        where = f", in the fallback {self._urls[attempt.place]}" if attempt.place else ""
        self._event(
            "checkpoint_saved",
            f"checkpoint of step {attempt.step} saved in {seconds:.2f} s, training waited {attempt.stalled_s:.2f} s{where}",
            data={
                "step": attempt.step,
                "folder": address,
                "bytes": size,
                "seconds": seconds,
                "stalled_s": attempt.stalled_s,
                "fallback": attempt.place > 0,
            },
        )

    def failed(self, attempt: Attempt, ranks: list[int], problem: str, again: int | None) -> None:
        """The parts of `ranks` could not be written, rank 0's because of `problem`; `again`: the place tried next."""
        who = "" if ranks == [0] else f"; {_ranks(ranks)} could not write"
        why = problem if 0 in ranks else "see the events of those ranks"
        follows = "training goes on" if again is None else f"trying {self._urls[again]}"
        self._event(
            "checkpoint_failed",
            f"the checkpoint of step {attempt.step} could not be written: {why}{who}; {follows}",
            severity="error",
            data={"step": attempt.step, "ranks": ranks, "folder": self._urls[attempt.place]},
        )

    def own_part(self, step: int, problem: str) -> None:
        """This rank, not rank 0, could not write its part."""
        # A full disk may refuse this line too; the failure itself is told by rank 0.
        with contextlib.suppress(OSError):
            events.append(
                self._folder,
                "checkpoint_failed",
                f"rank {self._rank} could not write its part of step {step}: {problem}",
                severity="error",
                generation=self._generation,
                rank=self._rank,
                data={"step": step},
            )

    def late(self, step: int, writing: int) -> None:
        """The save that is due after `step` has to wait."""
        self._event(
            "checkpoint_late",
            f"the checkpoint that is due after step {step} comes later: that of step {writing} is still being written",
            severity="warning",
            data={"step": step, "writing": writing},
        )

    def overdue(self, step: int, at_risk_s: float) -> None:
        """Training waits."""
        self._event(
            "checkpoint_overdue",
            f"training waits after step {step}: {units.duration(at_risk_s)} of work are in no checkpoint",
            severity="warning",
            data={"step": step, "at_risk_s": at_risk_s},
        )

    def interval(self, chosen: Interval) -> None:
        """Another interval was chosen."""
        self._event(
            "checkpoint_interval",
            f"a checkpoint every {chosen.steps} steps: {chosen.reason}",
            data={"steps": chosen.steps, "interval_s": chosen.interval_s},
        )

    def removed(self, names: Sequence[str], why: str, problem: str | None) -> None:
        """Old checkpoints are gone; `problem`: what kept others from it."""
        for name in names:
            self._event("checkpoint_removed", f"removed {name}: {why}")
        if problem is not None:
            message = f"old checkpoints could not be removed: {problem}"
            self._event("checkpoint_failed", message, severity="warning")

    def distrusted(self, name: str, step: int, why: str, error: str | None) -> None:
        """A checkpoint was set aside, or with `error` could not be."""
        if error is not None:
            message = f"{name} must not be used ({why}), and could not be set aside: {error}"
            # Whoever looks for a checkpoint passes it over, see `Resume`.
            data = {"step": step, "distrusted": name}
            self._event("checkpoint_failed", message, severity="error", data=data)
        else:
            message = f"{name} is set aside: {why}"
            self._event("checkpoint_set_aside", message, severity="warning", data={"step": step})


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
