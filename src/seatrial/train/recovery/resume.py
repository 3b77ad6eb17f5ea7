"""Resuming from a checkpoint: the newest that all ranks can read undamaged."""

from __future__ import annotations

from collections.abc import Callable

import torch

from seatrial.base.errors import RunFailed
from seatrial.checkpoint.manifest import Damaged, Manifest, Progress
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.job import Job
from seatrial.job.optimizers import optimizer_named
from seatrial.job.parameters import is_router_bias
from seatrial.model.decoder import whole_shapes
from seatrial.model.lora import is_adapter
from seatrial.parallel.mesh import Mesh
from seatrial.record import events
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.train.checkpointing.places import Distrusted, Places, last_saved
from seatrial.train.records import Records

# Fills model and optimizer from a checkpoint; raises Damaged.
Fill = Callable[[CheckpointWeights], Progress]


class Resume:
    """One start's search of the checkpoints, newest first; all ranks make the same calls and get the same results."""

    def __init__(self, job: Job, folder: RunFolder, records: Records, mesh: Mesh) -> None:
        """Remove partial files of crashed saves. Raises OSError or StorageError if the checkpoints cannot be listed."""
        self._job, self._folder, self._records, self._mesh = job, folder, records, mesh
        self._places = Places(job, folder)
        self._step = self._place = 0
        self._distrusted = Distrusted(read_events(folder)[0] if mesh.rank == 0 else [])
        if mesh.rank == 0:
            self._places.prepare()
            for name in self._places.remove_leftovers():
                self._event("checkpoint_removed", f"removed {name}: an unfinished save or removal")

    @property
    def step(self) -> int:
        """Step of the newest usable checkpoint, 0 if there is none."""
        return self._step

    def find_newest(self) -> int:
        """Find the newest usable checkpoint; its step, or 0."""
        places = self._places
        found = [
            (step, index)
            for step, index in (places.candidates() if self._mesh.rank == 0 else [])
            if not self._distrusted.has(places.urls[index], places.name_of(index, step), step)
        ]
        self._step = self._share(found[0][0] if found else 0)
        self._place = self._share(found[0][1] if found else 0)
        return self._step

    def refuse_fresh_start(self) -> None:
        """Raise RunFailed if the run has saved a checkpoint: starting over is the user's decision."""
        saved = self._share(last_saved(self._folder) if self._mesh.rank == 0 else 0)
        if saved:
            where = " and ".join(self._places.urls)
            raise RunFailed(
                f"this run has saved step {saved}, but {where} has no usable checkpoint",
                hint="restore one (is the disk mounted?), or start over with --fresh",
            )

    def fill(self, fill: Fill) -> Progress | None:
        """Every rank reads its share of the checkpoint that `find_newest` found. None if a rank found damage.

        That rank records the damage; the checkpoint is quarantined, and the next `find_newest` finds an older one.
        """
        name = self._places.name_of(self._place, self._step)
        problem, progress = None, None
        try:
            opened = self._places.place(self._place).open(self._step)
            try:
                _check_content(self._job, name, opened.manifest)
                progress = fill(opened)
            finally:
                opened.close()
        except Damaged as error:
            problem = error.message
            self._event("checkpoint_damaged", problem, "warning", step=self._step)
        if not self._share(0 if problem is None else 1):
            if self._mesh.rank == 0:
                self._event("resumed", f"resuming after step {self._step}", step=self._step, checkpoint=name)
            return progress
        if self._mesh.rank == 0:
            aside = self._places.place(self._place).set_aside(self._step, "damaged")
            self._event("checkpoint_set_aside", f"{name} is damaged and quarantined as {aside}", "warning")
        return None

    def _event(self, kind: str, message: str, severity: events.Severity = "info", **data: object) -> None:
        self._records.event(kind, message, severity=severity, data=data or None)

    def _share(self, value: int) -> int:
        """Sum over ranks; also a barrier."""
        return int(self._mesh.sum_over_ranks(torch.tensor([value], device=self._mesh.device)).item())


def _check_content(job: Job, name: str, manifest: Manifest) -> None:
    """Raise Damaged unless the checkpoint contains this model, whole, with its optimizer state."""
    arch = job.architecture
    if manifest.architecture != arch.as_dict():
        raise Damaged(f"{name} belongs to another model than this job's")
    optimizer = optimizer_named(job.optimizer.name)
    for tensor, shape in whole_shapes(arch).items():
        frozen = is_router_bias(tensor) or (arch.lora is not None and not is_adapter(tensor))
        for kind in ("model", *(() if frozen else optimizer.states_of(tensor, shape))):
            entry = manifest.tensors.get(f"{kind}/{tensor}")
            if entry is None:
                raise Damaged(f"{name} has no tensor {kind}/{tensor}")
            if entry.shape != shape:
                raise Damaged(f"{name}: {kind}/{tensor} has the shape {entry.shape}, this model's is {shape}")
