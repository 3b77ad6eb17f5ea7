"""Which checkpoint a run continues from: the newest that every rank's share of the hashes agrees with."""

from __future__ import annotations

import torch

from seatrial.checkpoint.manifest import Damaged, folder_name, named, step_of, verify
from seatrial.checkpoint.read import CheckpointWeights, set_aside
from seatrial.checkpoint.write import remove_leftovers
from seatrial.parallel.mesh import Mesh
from seatrial.record import events
from seatrial.record.folder import RunFolder


def choose_checkpoint(folder: RunFolder, generation: int, mesh: Mesh) -> CheckpointWeights | None:
    """The newest undamaged checkpoint, None if there is none; all ranks call it and get the same.

    Rank 0 proposes, every rank verifies its share of the files, and one that finds damage says which. A damaged
    checkpoint is set aside and the one before it is tried.
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
            return None
        candidate = folder.checkpoints / folder_name(step)
        problem, manifest = None, None
        try:
            manifest = verify(candidate, mesh.rank, mesh.layout.world_size)
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
