"""One state of training through layout after layout: each loads what another has saved, and saves it again.

    python reshard_ranks.py CASES.json OUT_FOLDER

A case is {"name", "layout", "tied", "load": [FOLDER, STEP] or null, "train": steps, "save": [FOLDER, STEP] or null}. What
each rank then holds, in memory and not by what it saved, lies in OUT_FOLDER.
"""

from __future__ import annotations

import sys
from typing import Any

import parity_ranks
from parity_ranks import CLIP, LR, NoisyWeights, arch_of, own_batch

from seatrial.checkpoint.place import open_place
from seatrial.job.schema import OptimizerSection
from seatrial.parallel.mesh import Mesh
from seatrial.train.checkpointing import state
from seatrial.train.optimizer import build_optimizer
from seatrial.train.step import train_step


def move(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Load, train, save, and tell what this rank holds."""
    # Whoever loads has other weights before: what it leaves untouched shows.
    source = NoisyWeights(arch_of(case), seed=7 if case["load"] else 1)
    model = parity_ranks.build(case, mesh, source)
    settings = OptimizerSection(**{"lr": LR, **case.get("optimizer", {})})
    optimizer = build_optimizer(model.shards, settings, mesh)
    step, updates = 0, 0
    if case["load"] is not None:
        folder, step = case["load"]
        checkpoint = open_place(folder).open(step)
        progress = state.restore(model, optimizer, checkpoint)
        checkpoint.close()
        assert progress.step == step
        updates = int(state.updates(optimizer))
    losses = []
    for n in range(updates, updates + case["train"]):
        result = train_step(model, optimizer, *own_batch(n, mesh), None, lr=LR, clip_norm=CLIP)
        losses.append(result.read()[:2])
    if case["save"] is not None:
        pieces = state.lasting_pieces(model, optimizer) + state.random_pieces(mesh.rank, mesh.device)
        parity_ranks.save(case, mesh, *case["save"], pieces)
    tensors = [("model", s.name, s.box.offsets, s.local.clone()) for s in model.shards if s.box.numel]
    tensors += [(kind, s.name, s.box.offsets, values.clone()) for kind, s, values in optimizer.state()]
    counts = {float(count) for count in optimizer.counts()}
    return {"tensors": tensors, "updates": counts, "losses": losses}


if __name__ == "__main__":
    sys.exit(parity_ranks.main(move))
