"""scale.json: the finished runs of a measurement, by which it is resumed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seatrial.base.atomic import write_json
from seatrial.base.files import read_json
from seatrial.job import Job
from seatrial.record.jsonl import plain
from seatrial.record.typed import decode
from seatrial.scale.trial import Trial

SCHEMA_VERSION = 1
_FILE = "scale.json"
# Keys that do not change the measured work of a rank, or are set per size.
_FREE = {
    "cluster": {"nodes", "spares", "port"},
    "parallel": {"shard", "replicate"},
    "train": {"steps", "sample_tokens", "batch_ramp"},
    "data": {"train"},  # data is identified by its content
}


@dataclass
class State:
    """The runs of one measurement, in `folder`."""

    folder: Path
    identity: Mapping[str, Any]
    trials: list[Trial] = field(default_factory=list)

    @property
    def spent(self) -> float:
        """GPU hours of all runs, including discarded ones."""
        return sum(trial.gpu_hours for trial in self.trials)

    def good(self, nodes: int) -> list[Trial]:
        """The valid runs of this size."""
        return [t for t in self.trials if t.nodes == nodes and not t.problem]

    def add(self, trial: Trial) -> None:
        """Add one run, and replace the file. Raises OSError."""
        self.trials.append(trial)
        self.save()

    def save(self) -> None:
        """Write the file. Raises OSError."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "identity": dict(self.identity),
            "trials": [asdict(trial) for trial in self.trials],
        }
        write_json(self.folder / _FILE, plain(document))


def identity_of(job: Job, mode: str, steps: int, digests: list[str]) -> dict[str, Any]:
    """The values that must be equal for runs to belong to one measurement, as a flat dict.

    In weak scaling the global batch is identified by its part per data-parallel rank, so that the same job with another
    number of nodes and a proportional batch continues the measurement.
    """
    kept: dict[str, Any] = {}
    for name in type(job.file).model_fields:
        section = getattr(job.file, name)
        values = section.model_dump() if hasattr(section, "model_dump") else None
        if values is not None and name != "model":
            kept[name] = {k: v for k, v in values.items() if k not in _FREE.get(name, ())}
    if mode == "weak":
        kept["train"]["global_batch"] = f"{job.microbatches * job.train.microbatch} a replica"
    kept |= {"model": job.architecture.as_dict(), "init_from": job.model.init_from}
    text = json.dumps(kept, sort_keys=True, default=str)
    return {
        "job": hashlib.sha256(text.encode()).hexdigest(),
        "mode": mode,
        "steps": steps,
        "data": digests,
    }


def open_state(runs: Path, job: Job, identity: Mapping[str, Any], *, fresh: bool) -> State:
    """The latest measurement of this job with this identity in `runs`/.scale, else a new one (not yet on disk)."""
    root = runs / ".scale"
    names = [] if fresh or not root.is_dir() else sorted(root.glob(f"{job.name}-[0-9]*"), reverse=True)
    for folder in names:
        found = _load(folder)
        if found is not None and found.identity == identity:
            return found
    return State(_unused(root, job.name), identity)


def _unused(root: Path, name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder, n = root / f"{name}-{stamp}", 1
    while folder.exists():
        n += 1
        folder = root / f"{name}-{stamp}-{n}"
    return folder


def _load(folder: Path) -> State | None:
    """The state in `folder`; None if it cannot be read: its runs are then not used."""
    try:
        document = read_json(folder / _FILE)
        if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
            return None
        return State(folder, document["identity"], [decode(Trial, t) for t in document["trials"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None
