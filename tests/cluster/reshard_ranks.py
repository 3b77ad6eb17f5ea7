"""One state of training through layout after layout: each loads what another has saved, and saves it again.

    python reshard_ranks.py CASES.json OUT_FOLDER

A case is {"name", "layout", "tied", "load": [FOLDER, STEP] or null, "train": steps, "save": [FOLDER, STEP] or null}. What
each rank then holds, in memory and not by what it saved, lies in OUT_FOLDER.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity_ranks  # also for the path to saving
import torch
from parity_ranks import CLIP, LENGTH, LR, MICROBATCH, SEQUENCES, TIMEOUT, NoisyWeights, batch

import saving
from seatrial.checkpoint.manifest import Manifest, Progress
from seatrial.checkpoint.place import open_place
from seatrial.job.architecture import Architecture
from seatrial.job.schema import OptimizerSection
from seatrial.parallel.build import ParallelModel, Settings
from seatrial.parallel.mesh import Mesh
from seatrial.train.checkpointing import state
from seatrial.train.optimizer import ShardedOptimizer, build_optimizer
from seatrial.train.step import train_step


def arch_of(case: dict[str, Any]) -> Architecture:
    """Heads enough for four ranks of tensor parallel."""
    return replace(parity_ranks.arch_of(case), num_key_value_heads=4)


def build(case: dict[str, Any], mesh: Mesh) -> tuple[ParallelModel, ShardedOptimizer]:
    arch = arch_of(case)
    share = SEQUENCES // mesh.layout.data_parallel
    parallel = Settings(
        sequence_length=LENGTH,
        microbatch=MICROBATCH,
        microbatches=share // MICROBATCH,
        global_tokens=SEQUENCES * LENGTH,
        precision="fp32",
        activation_checkpointing="none",
        compile=False,
        reshard_after_forward=True,
    )
    # Whoever loads has other weights before: what it leaves untouched shows.
    model = ParallelModel(
        arch, mesh, parallel, NoisyWeights(arch, seed=7 if case["load"] else 1), timeout=TIMEOUT
    )
    settings = OptimizerSection(**{"lr": LR, **case.get("optimizer", {})})
    return model, build_optimizer(model.shards, settings, mesh)


def move(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Load, train, save, and tell what this rank holds."""
    model, optimizer = build(case, mesh)
    step, updates = 0, 0
    if case["load"] is not None:
        folder, step = case["load"]
        checkpoint = open_place(folder).open(step)
        progress = state.restore(model, optimizer, checkpoint)
        checkpoint.close()
        assert progress.step == step
        updates = int(state.updates(optimizer))
    share = SEQUENCES // mesh.layout.data_parallel
    losses = []
    for n in range(updates, updates + case["train"]):
        rows = batch(n)[mesh.data_rank * share : (mesh.data_rank + 1) * share]
        result = train_step(
            model, optimizer, rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, lr=LR, clip_norm=CLIP
        )
        losses.append(result.read()[:2])
    if case["save"] is not None:
        save(case, mesh, model, optimizer, *case["save"])
    tensors = [("model", s.name, s.box.offsets, s.local.clone()) for s in model.shards if s.box.numel]
    tensors += [(kind, s.name, s.box.offsets, values.clone()) for kind, s, values in optimizer.state()]
    counts = {float(count) for count in optimizer.counts()}
    return {"tensors": tensors, "updates": counts, "losses": losses}


def save(
    case: dict[str, Any],
    mesh: Mesh,
    model: ParallelModel,
    optimizer: ShardedOptimizer,
    folder: str,
    step: int,
) -> None:
    manifest = Manifest(
        progress=Progress(step=step, tokens=0, next_sample=0, generation=1),
        time=0.0,
        seed=0,
        architecture=arch_of(case).as_dict(),
        layout=mesh.layout.as_dict(),
        job_sha256="",
        code="",
        read_back=False,
        files=[],
        tensors={},
    )

    def agree(ok: bool) -> int:
        return int(mesh.sum_over_ranks(torch.tensor([0.0 if ok else 1.0])).item())

    pieces = state.lasting_pieces(model, optimizer) + state.random_pieces(mesh.rank, mesh.device)
    Path(folder).mkdir(exist_ok=True)
    saving.save(
        Path(folder),
        manifest,
        [piece for piece in pieces if piece.owner],
        rank=mesh.rank,
        world_size=mesh.layout.world_size,
        agree=agree,
    )


if __name__ == "__main__":
    sys.exit(parity_ranks.main(move))
