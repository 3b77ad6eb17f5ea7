"""The run's events about checkpoints in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.base import units
from seatrial.record.interval import Interval
from seatrial.train.records import Records


@dataclass(frozen=True)
class Attempt:
    """A checkpoint in flight: the same in every rank except for its times, which are this rank's."""

    number: int
    step: int
    place: int  # 0, or 1 for the fallback
    ordered_at: float
    staged_at: float
    stalled_s: float  # how long training waited for this rank's copy
    committing: bool = False


class SaveEvents:
    """The events of one generation's saves. Only rank 0 records them, except `own_part`; elsewhere calls are no-ops."""

    def __init__(self, records: Records, urls: Sequence[str]) -> None:
        self._records, self._urls = records, urls

    def saved(self, attempt: Attempt, address: str, size: int, seconds: float) -> None:
        """The checkpoint is complete, `seconds` after its copy began."""
        where = f", in the fallback {self._urls[attempt.place]}" if attempt.place else ""
        self._records.event_of_first(
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
        follows = "training continues" if again is None else f"trying {self._urls[again]}"
        self._records.event_of_first(
            "checkpoint_failed",
            f"the checkpoint of step {attempt.step} could not be written: {why}{who}; {follows}",
            severity="error",
            data={"step": attempt.step, "ranks": ranks, "folder": self._urls[attempt.place]},
        )

    def own_part(self, step: int, problem: str) -> None:
        """This rank, which is not rank 0, could not write its part."""
        # A full disk may refuse this line too; rank 0 reports the failure as well.
        with contextlib.suppress(OSError):
            self._records.event(
                "checkpoint_failed",
                f"rank {self._records.rank} could not write its part of step {step}: {problem}",
                severity="error",
                data={"step": step},
            )

    def late(self, step: int, writing: int) -> None:
        """The save due after `step` is delayed."""
        self._records.event_of_first(
            "checkpoint_late",
            f"the checkpoint due after step {step} is delayed: that of step {writing} is still being written",
            severity="warning",
            data={"step": step, "writing": writing},
        )

    def overdue(self, step: int, at_risk_s: float) -> None:
        """Training waits for a checkpoint, with `at_risk_s` of unsaved training."""
        self._records.event_of_first(
            "checkpoint_overdue",
            f"training waits for a checkpoint after step {step}: {units.duration(at_risk_s)} of training is unsaved",
            severity="warning",
            data={"step": step, "at_risk_s": at_risk_s},
        )

    def interval(self, chosen: Interval) -> None:
        """A new interval was chosen."""
        self._records.event_of_first(
            "checkpoint_interval",
            f"a checkpoint every {chosen.steps} steps: {chosen.reason}",
            data={"steps": chosen.steps, "interval_s": chosen.interval_s},
        )

    def removed(self, names: Sequence[str], why: str, problem: str | None) -> None:
        """Old checkpoints were removed; `problem`: why others could not be."""
        for name in names:
            self._records.event_of_first("checkpoint_removed", f"removed {name}: {why}")
        if problem is not None:
            message = f"old checkpoints could not be removed: {problem}"
            self._records.event_of_first("checkpoint_failed", message, severity="warning")

    def distrusted(self, name: str, step: int, why: str, error: str | None) -> None:
        """A checkpoint was quarantined, or with `error` could not be."""
        if error is not None:
            message = f"{name} must not be used ({why}), but could not be quarantined: {error}"
            # The search for a checkpoint skips it, see `Resume`.
            data = {"step": step, "distrusted": name}
            self._records.event_of_first("checkpoint_failed", message, severity="error", data=data)
            self._records.settle()  # before any rank can resume from it
        else:
            message = f"{name} is quarantined: {why}"
            self._records.event_of_first(
                "checkpoint_set_aside", message, severity="warning", data={"step": step}
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
