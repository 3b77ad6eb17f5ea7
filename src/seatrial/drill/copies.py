"""The copy of a job that a drill runs: shorter, with more frequent checkpoints and snapshots, otherwise unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.base.errors import InputError
from seatrial.job import Job
from seatrial.job.changed import Copy, changed_job

DEFAULT_STEPS = 16
LEAST_STEPS = 12  # two checkpoints and three snapshots before the fault, and steps to recover in after it

_LONGEST_HANG_S = 4.0  # a hang must be detected within the drill, not after the job's half minute


@dataclass(frozen=True)
class Cadence:
    """Step intervals of the events in a copy; every fault comes after two checkpoints and some snapshots."""

    steps: int

    @property
    def snapshot(self) -> int:
        return max(2, self.steps // 5)

    @property
    def checkpoint(self) -> int:
        return max(3, self.steps // 4)

    @property
    def verify(self) -> int:
        return 2

    @property
    def fault(self) -> int:
        """The step after which a fault is injected: just before a snapshot, to lose most, and between two saves."""
        step = self.steps // 2 + 1
        while (step + 1) % self.snapshot or not step % self.checkpoint:
            step += 1
        return step

    @property
    def unverified_snapshot(self) -> int:
        """A step, not after `fault`, whose snapshot precedes the comparison of its weights, if there is one."""
        later = (s for s in range(self.fault, 0, -1) if not s % self.snapshot and s % self.verify)
        return next(later, self.fault)


@dataclass(frozen=True)
class Plan:
    """Parameters of one scenario's run."""

    cadence: Cadence
    steps: int  # of the run
    seed: int = 0  # determines everything random in it
    seconds: float = 0.0  # how long a lasting scenario injects faults
    first_step_s: float = 0.0  # limit for the end of its first step; 0: as in the job

    @property
    def fault(self) -> int:
        return self.cadence.fault


def copy_of(
    job: Job,
    *,
    name: str,
    stores: Sequence[str],
    plan: Plan,
    spares: int = 0,
    replicas: bool = False,
    keep: int = 0,
) -> Copy:
    """`job` as run `name`, trained according to `plan` on the prepared `stores`, with at least `keep` checkpoints kept.

    `replicas`: with at least two replicas of the weights, whatever the job has. Raises InputError if its ranks allow no
    such layout.
    """
    layouts: list[dict[str, Any]] = [{}]
    if replicas and job.layout.replicate < 2:
        layouts = list(_replicated(job))
    refused: InputError | None = None
    for layout in layouts:
        wanted = _changed_keys(job, name, stores, plan, spares, max(3, keep, job.checkpoint.keep), layout)
        try:
            return changed_job(job, wanted)
        except InputError as error:
            refused = error
    raise refused or InputError(f"the {job.layout.world_size} ranks of {job.name} cannot hold two replicas")


_NO_VALIDATION = "it changes nothing of the training"


def _changed_keys(
    job: Job,
    name: str,
    stores: Sequence[str],
    plan: Plan,
    spares: int,
    keep: int,
    layout: Mapping[str, Any],
) -> dict[str, tuple[Any, str]]:
    """key -> (value, why)."""
    own, cadence = job.resilience, plan.cadence
    wanted: dict[str, tuple[Any, str]] = {
        "name": (name, "the live run is not touched"),
        "data.train": (
            list(stores) if isinstance(job.data.train, list) else stores[0],
            "prepared once for all runs of the drill",
        ),
        "data.validation": (None, _NO_VALIDATION),
        "train.validate_every_steps": (None, _NO_VALIDATION),
        "train.validate_samples": (None, _NO_VALIDATION),
        "cluster.port": (None, "leaves the live run's port free"),
        "cluster.spares": (spares, "what this scenario needs" if spares else "this scenario has none"),
        "train.steps": (plan.steps, "short"),
        "train.batch_ramp": ([], "every step is as long as after the ramp"),
        "train.sample_tokens": (0, "no sample text at the end"),
        "optimizer.warmup_steps": (
            min(job.optimizer.warmup_steps, cadence.steps),
            "not longer than the copy",
        ),
        "optimizer.decay": (
            "constant",
            "so that the learning rate of a step does not depend on their number",
        ),
        "optimizer.decay_steps": (None, "it applies to another decay"),
        "checkpoint.every_steps": (cadence.checkpoint, "several within the copy"),
        "checkpoint.keep": (keep, "enough to fall back on, and to compare with"),
        "checkpoint.keep_every_steps": (0, "all are deleted with the copy"),
        "checkpoint.folder": (None, "the live run's storage is not touched"),
        "checkpoint.fallback": (None, "the live run's storage is not touched"),
        "resilience.max_restarts": (max(own.max_restarts, 100), "recovery is what is drilled"),
        "resilience.snapshot_every_steps": (cadence.snapshot, "several within the copy"),
        "resilience.verify_every_steps": (cadence.verify, "several within the copy"),
        "resilience.hang_min_s": (
            min(own.hang_min_s, _LONGEST_HANG_S),
            "a short copy: hangs are detected sooner",
        ),
        "resilience.first_step_s": (
            min(own.first_step_s, plan.first_step_s or own.first_step_s),
            "several times what the reference needed for its first step",
        ),
        "resilience.node_wait_s": (min(own.node_wait_s, 2.0), "a short copy"),
        "resilience.evict_after": (
            1000 if plan.seconds else max(own.evict_after, 2),
            "the faults are the drill's, not the node's",
        ),
        "resilience.allow_gpu_reset": (False, "a drill resets no GPU"),
        "resilience.allow_node_drain": (False, "a drill drains no node"),
        "watch.metrics_port": (None, "leaves the live run's ports free"),
    }
    if not own.snapshot_every_steps:
        wanted["resilience.snapshot_every_steps"] = (0, "off in the job")
    if not own.verify_every_steps:
        wanted["resilience.verify_every_steps"] = (0, "off in the job")
    for key, value in layout.items():
        wanted[f"parallel.{key}"] = (value, "two replicas of the weights, so that they can be compared")
    return wanted


def _replicated(job: Job) -> Iterator[dict[str, Any]]:
    """Layouts of the same number of ranks with two replicas, the most similar first."""
    at = job.layout
    shard = at.sample_shards
    if shard % 2 == 0:
        yield {"replicate": 2 * at.replicate, "shard": shard // 2}
    if at.context % 2 == 0:
        yield {"replicate": 2 * at.replicate, "shard": shard, "context": at.context // 2}
    if at.tensor % 2 == 0:
        yield {"replicate": 2 * at.replicate, "shard": shard, "tensor": at.tensor // 2}
    if at.pipeline % 2 == 0 and at.pipeline > 2:
        yield {"replicate": 2 * at.replicate, "shard": shard, "pipeline": at.pipeline // 2}
    if at.pipeline == 2:
        yield {
            "replicate": 2 * at.replicate,
            "shard": shard,
            "pipeline": 1,
            "schedule": "1f1b",
            "stages_per_rank": 1,
        }
