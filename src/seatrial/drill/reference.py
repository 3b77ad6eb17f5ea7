"""The undisturbed run, to which every drilled run is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from seatrial.base.errors import RunFailed
from seatrial.drill.drill_run import DrillRun, Overdue
from seatrial.drill.evidence import Losses, losses_of, read_metrics_of, relative
from seatrial.drill.injection import Planted
from seatrial.drill.run_state import RunState
from seatrial.drill.weights import compare
from seatrial.job import Job
from seatrial.job.changed import Copy
from seatrial.job.layout import Layout
from seatrial.job.shapes import at_shape
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder

_LIMIT_S = 1800.0
# Two undisturbed runs are one sample of how far apart runs of the same job end; the next two may be further apart.
MARGIN = 10.0
_MOST = 0.1  # of anything; a tensor of zeros is 1 away


@dataclass(frozen=True)
class Reference:
    """An undisturbed run, as far as it has been trained."""

    copy: Copy
    folder: RunFolder
    losses: Losses
    steps: int
    step_s: float  # median
    first_step_s: float  # from its first start to the end of its first step
    seconds: float  # of its process from start to end, for the latest start
    device: str  # of rank 0: "cpu", or the GPU's name
    again: Reference | None = None  # the same job once more, on GPUs

    def checkpoint(self, step: int) -> Path:
        """The folder of its checkpoint of `step`."""
        return self.folder.checkpoints / f"step-{step:08d}"

    def apart(self, steps: int) -> dict[tuple[int, str], float]:
        """(step, what) -> relative difference of two undisturbed runs up to then; empty if there is one.

        What: "loss" and "gradient norm" of each step, "weights" of the checkpoint of step `steps`. Raises Damaged if that does
        not match its manifest.
        """
        found: dict[tuple[int, str], float] = {}
        if self.again is None:
            return found
        for step in range(1, steps + 1):
            pairs = zip(("loss", "gradient norm"), self.again.losses[step], self.losses[step], strict=True)
            for what, ours, theirs in pairs:
                found[step, what] = max(found.get((step - 1, what), 0.0), relative(ours, theirs))
        found[steps, "weights"] = _weights_apart(self.again.checkpoint(steps), self.checkpoint(steps))
        return found

    def tolerance(self, steps: int) -> dict[tuple[int, str], float]:
        """How far a run of `steps` may be from this one (see Criteria)."""
        return {key: MARGIN * apart for key, apart in self.apart(steps).items()}

    def judge_again(self) -> None:
        """Raise RunFailed if the two undisturbed runs are too far apart to compare other runs with them."""
        (_, what), apart = max(self.apart(self.steps).items(), key=lambda item: item[1])
        text = f"two undisturbed copies of the job differ by {apart:.1e} relative in {what}"
        if self.copy.job.train.deterministic and apart:
            raise RunFailed(
                f"{text}, with train.deterministic", hint="drill it with --set train.deterministic=false"
            )
        if apart * MARGIN > _MOST:
            raise RunFailed(
                f"{text}: comparing other runs with them would prove nothing",
                hint="drill it with --set train.deterministic=true, or with a smaller --set optimizer.lr",
            )


@cache
def _weights_apart(ours: Path, theirs: Path) -> float:
    """Compared once: every scenario needs it."""
    return compare(ours, theirs).largest


def run_reference(
    root: Path,
    copy: Copy,
    *,
    on_poll: Callable[[RunState], None] | None = None,
    limit_s: float = _LIMIT_S,
    last: int | None = None,
) -> Reference:
    """Train `copy` to its end, or to step `last`. Raises RunFailed if anything went wrong: it would be useless for comparison."""
    run = DrillRun(root, copy.job, limit_s=limit_s, on_poll=on_poll)
    steps = last or copy.job.train.steps
    try:
        run.start([] if last is None else [Planted.stop(last, run.log)])
        try:
            code = run.wait_end()
        except Overdue:
            raise RunFailed(
                f"the undisturbed copy did not end within {limit_s:.0f} s",
                hint=f"see {run.log}; give fewer --steps",
            ) from None
        run.wait_gone()
    finally:
        run.close()
    folder = run.folder
    events, _ = read_events(folder)
    alarm = next((e for e in events if e.kind in ("recovering", "run_failed", "gave_up")), None)
    records, problems = read_metrics_of(folder)
    if code != 0 or alarm is not None or problems or run.left:
        what = f": {alarm.message}" if alarm is not None else ""
        raise RunFailed(
            f"the undisturbed copy of the job ended with exit code {code}{what}",
            hint=f"a drill needs a job that runs: see {run.log} and `seatrial watch {folder.path} --once`",
        )
    losses = losses_of(records)
    if sorted(losses) != list(range(1, steps + 1)):
        raise RunFailed(f"the undisturbed copy has not recorded every step: {folder.metrics}")
    return Reference(
        copy=copy,
        folder=folder,
        losses=losses,
        steps=steps,
        step_s=median(r.step_time_s for r in records),
        first_step_s=min(r.time for r in records) - min(e.time for e in events),
        seconds=run.seconds,
        device=next((str(e.data.get("device")) for e in events if e.kind == "device" and e.data), "cpu"),
    )


def run_replay(
    root: Path,
    job: Job,
    layouts: Sequence[tuple[Layout, int]],
    *,
    on_poll: Callable[[RunState], None] | None = None,
) -> Reference:
    """Train `job` without a fault as run NAME-replay, in each layout up to its step. Raises RunFailed like `run_reference`."""
    name = f"{job.name}-replay"
    for layout, last in layouts:
        shape = at_shape(job, layout)
        cluster = shape.file.cluster.model_copy(update={"spares": 0})
        file = shape.file.model_copy(update={"name": name, "cluster": cluster})
        copy = Copy(replace(shape, file=file), ())
        reference = run_reference(root, copy, on_poll=on_poll, last=last)
    return reference


def longer(reference: Reference, copy: Copy) -> Copy:
    """The copy that continues `reference` from its end to the steps of `copy`."""
    job = reference.copy.job
    train = job.file.train.model_copy(update={"steps": copy.job.train.steps})
    return Copy(replace(job, file=job.file.model_copy(update={"train": train})), reference.copy.changes)
