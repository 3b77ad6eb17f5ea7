"""Which checkpoint a run continues from: the newest that every rank's share of the hashes agrees with."""

from __future__ import annotations

from pathlib import Path

import torch

from seatrial.base.errors import RunFailed
from seatrial.checkpoint.manifest import Damaged, Manifest, folder_name, named, step_of, verify
from seatrial.checkpoint.read import CheckpointWeights, set_aside
from seatrial.checkpoint.write import remove_leftovers
from seatrial.job.architecture import Architecture
from seatrial.model.decoder import whole_shapes
from seatrial.parallel.mesh import Mesh
from seatrial.record import events
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.train.optimizer import STATE


def choose_checkpoint(
    arch: Architecture, folder: RunFolder, generation: int, mesh: Mesh
) -> CheckpointWeights | None:
    """The newest undamaged checkpoint, None in a run that never saved one; all ranks call it and get the same.

    Rank 0 proposes, every rank verifies its share of the files, and one that finds damage says which. A damaged
    checkpoint is set aside and the one before it is tried. RunFailed if the run has saved some and none can be used:
    to start over is the user's decision.
    """

    def tell(kind: str, message: str, severity: events.Severity = "info", **data: object) -> None:
        events.append(
            folder, kind, message, severity=severity, generation=generation, rank=mesh.rank, data=data or None
        )

    def share(value: int) -> int:
        """The sum over ranks; also a barrier."""
        return int(mesh.sum_over_ranks(torch.tensor([value], device=mesh.device)).item())

    if mesh.rank == 0:
        for path in remove_leftovers(folder.checkpoints):
            tell("checkpoint_removed", f"removed {path.name}: a save or a removal that did not finish")
    while True:
        found = named(folder.checkpoints) if mesh.rank == 0 else []
        step = share((step_of(found[0]) or 0) if found else 0)
        if step == 0:
            saved = share(_last_saved(folder) if mesh.rank == 0 else 0)
            if saved:
                raise RunFailed(
                    f"this run has saved step {saved}, but {folder.checkpoints} holds no checkpoint that can be used",
                    hint="put one back (is the disk mounted?), or start over with --fresh",
                )
            return None
        candidate = folder.checkpoints / folder_name(step)
        problem, manifest = None, None
        try:
            manifest = verify(candidate, mesh.rank, mesh.layout.world_size)
            _check_content(arch, candidate, manifest)
        except Damaged as error:
            problem = error.message
            tell("checkpoint_damaged", problem, "warning", step=step)
        if not share(0 if problem is None else 1):
            if mesh.rank == 0:
                tell("resumed", f"resuming after step {step}", step=step, checkpoint=str(candidate))
            return CheckpointWeights(candidate, manifest)
        if mesh.rank == 0:
            aside = set_aside(candidate)
            tell(
                "checkpoint_set_aside",
                f"{candidate.name} is damaged and set aside as {aside.name}",
                "warning",
            )


def _last_saved(folder: RunFolder) -> int:
    """The last step that the run's events call saved, and that the run did not take back itself; 0 if none."""
    steps: set[int] = set()
    for event in read_events(folder)[0]:
        step = (event.data or {}).get("step")
        if isinstance(step, int) and event.kind == "checkpoint_saved":
            steps.add(step)
        elif isinstance(step, int) and event.kind == "checkpoint_set_aside":
            steps.discard(step)
    return max(steps, default=0)


def _check_content(arch: Architecture, folder: Path, manifest: Manifest) -> None:
    """Damaged unless the checkpoint holds this model, whole, with its optimizer's state."""
    if manifest.architecture != arch.as_dict():
        raise Damaged(f"{folder} is of another model than this job's")
    for kind in ("model", *STATE):
        for name, shape in whole_shapes(arch).items():
            entry = manifest.tensors.get(f"{kind}/{name}")
            if entry is None:
                raise Damaged(f"{folder} has no tensor {kind}/{name}")
            if entry.shape != shape:
                raise Damaged(f"{folder}: {kind}/{name} has the shape {entry.shape}, this model's is {shape}")
