"""The state of a run as a checkpoint sees it: weights, optimizer, random state and position."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import seatrial
from seatrial.base.box import Box
from seatrial.checkpoint import write
from seatrial.checkpoint.manifest import Manifest, Progress
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.checkpoint.write import Piece
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.train.optimizer import ShardedAdamW


@cache
def code_version() -> str:
    """Version and hash of Seatrial's own source, so that a checkpoint says which code made it."""
    root = Path(seatrial.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return f"{seatrial.__version__}+{digest.hexdigest()[:12]}"


def _pieces(model: ParallelModel, optimizer: ShardedAdamW) -> Iterator[Piece]:
    """What this rank saves: the boxes that it owns."""
    for s in model.shards:
        if s.owner and s.box.numel:
            yield Piece(f"model/{s.name}", s.local, s.box, s.whole)
    for kind, s, values in optimizer.state():
        if s.owner:
            yield Piece(f"{kind}/{s.name}", values, s.box, s.whole)
    rank = model.mesh.rank
    for key, values in _random_state(model.mesh.device).items():
        # One tensor a rank: its name must tell the rank, since a key stands for one whole tensor.
        yield Piece(f"{key}/{rank}", values, Box.whole(values.shape), tuple(values.shape))


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(device)
    return state


def save(
    job: Job, model: ParallelModel, optimizer: ShardedAdamW, checkpoints: Path, progress: Progress
) -> Path:
    """Write a checkpoint; all ranks call it. Raises SaveFailed in every rank if one could not write."""
    mesh = model.mesh
    manifest = Manifest(
        progress=progress,
        time=time.time(),
        seed=job.train.seed,
        architecture=job.architecture.as_dict(),
        layout=mesh.layout.as_dict(),
        job_sha256=hashlib.sha256(job.to_toml().encode()).hexdigest(),
        code=code_version(),
        files=[],
        tensors={},
    )

    def agree(ok: bool) -> int:
        failed = torch.tensor([0.0 if ok else 1.0], device=mesh.device)
        return int(mesh.sum_over_ranks(failed).item())

    return write.save(
        checkpoints,
        manifest,
        _pieces(model, optimizer),
        rank=mesh.rank,
        world_size=mesh.layout.world_size,
        agree=agree,
    )


@torch.no_grad()
def restore(model: ParallelModel, optimizer: ShardedAdamW, checkpoint: CheckpointWeights) -> Progress:
    """Everything but the weights from `checkpoint`, which any layout may have written; the position in the run."""
    for kind, s, values in optimizer.state():
        values.copy_(checkpoint.read_kind(kind, s.name, s.box, values.dtype))
    progress = checkpoint.manifest.progress
    optimizer.set_step(progress.step)
    rank = model.mesh.rank
    cpu = checkpoint.tensor(rank, f"rng/cpu/{rank}")
    if cpu is not None:
        torch.set_rng_state(cpu)
    cuda = checkpoint.tensor(rank, f"rng/cuda/{rank}")
    if cuda is not None and model.mesh.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, model.mesh.device)
    return progress
