"""Four ranks, forked, on gloo: faults in one of them, and what every one of them makes of it.

    python guard_ranks.py FOLDER

Each rank leaves {layout and fault: what it saw} in a file of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop_cases import Run, flip_bit
from torch import Tensor

from seatrial.job.layout import Layout
from seatrial.parallel.build import Shard
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.train.health.replicas import CorruptState

WORLD = 4
LAYOUTS = {
    "replicas": Layout(replicate=2, tensor=2),
    "pipeline": Layout(pipeline=2, tensor=2),
}
TIMEOUT = timedelta(seconds=60)


def first(run: Run, kind: Callable[[Shard], bool]) -> Shard:
    return next(s for s in run.model.shards if kind(s) and s.local.numel())


def flips_at_rest(run: Run, rank: int, step: int) -> None:
    whole = run.model.forward_backward

    def forward_backward(*batch: Tensor | None) -> Tensor:
        if run.passes[-1] == step and run.model.mesh.rank == rank:
            flip_bit(run.model.shards[0].local)
        return whole(*batch)

    run.model.forward_backward = forward_backward  # type: ignore[method-assign]


def miscounts(run: Run, rank: int, step: int, kind: Callable[[Shard], bool]) -> None:
    whole = run.optimizer.update

    def update(lr: float, scale: Tensor | None) -> None:
        whole(lr, scale)
        if run.passes[-1] == step and run.model.mesh.rank == rank:
            flip_bit(first(run, kind).local)

    run.optimizer.update = update  # type: ignore[method-assign]


def norm(s: Shard) -> bool:
    return s.holders > 1


def matrix(s: Shard) -> bool:
    return "mlp" in s.name


def embedding(s: Shard) -> bool:
    return s.name == "model.embed_tokens.weight"


def spoils(run: Run, rank: int, step: int) -> None:
    if run.model.mesh.rank == rank:
        run.spoil(step)


FAULTS: dict[str, Callable[[Run], None]] = {
    "none": lambda run: None,
    "nan on 2": lambda run: spoils(run, 2, 3),
    "flip on 2": lambda run: flips_at_rest(run, 2, 3),
    "norm of 1": lambda run: miscounts(run, 1, 3, norm),
    "matrix of 1": lambda run: miscounts(run, 1, 3, matrix),
    "embedding of 1": lambda run: miscounts(run, 1, 3, embedding),
    "leave": lambda run: run.watcher.leave.update({3: "yielded"} if run.model.mesh.rank == 1 else {}),
}


def overrides(layout: Layout) -> list[str]:
    own = ["train.steps=5", "cluster.gpus_per_node=4", "optimizer.warmup_steps=1"]
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "replicate": layout.replicate}
    return own + [f"parallel.{name}={size}" for name, size in sizes.items()]


def see(root: Path, mesh: Mesh, plant: Callable[[Run], None] | None) -> dict[str, Any]:
    run = Run(root, *overrides(mesh.layout), place=mesh, watched=plant is not None)
    if plant is not None:
        plant(run)
    seen: dict[str, Any] = {}
    try:
        seen["how"] = run.loop.run(1)
    except CorruptState as error:
        seen |= {"how": "corrupt", "blamed": error.blamed, "good": error.last_good_step, "step": error.step}
    seen["findings"] = [[signal, step, blamed] for signal, step, _, blamed in run.watcher.findings]
    seen["passes"] = run.passes
    seen["state"] = [t.flatten().view(torch.int32).sum().item() for t in run.state()]
    seen["applied"] = run.loop.applied
    return seen


def main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    seen = {}
    for name, layout in LAYOUTS.items():
        mesh = build_mesh(layout, torch.device("cpu"), TIMEOUT)
        seen[f"{name}: unwatched"] = see(folder / name / "unwatched", mesh, None)
        for fault, plant in FAULTS.items():
            seen[f"{name}: {fault}"] = see(folder / name / fault, mesh, plant)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    children = []
    for number in range(WORLD):
        pid = os.fork()
        if pid == 0:
            main(number, where)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    sys.exit(max(map(abs, codes)))
