"""One rank: `python -m seatrial.train.worker RUN_FOLDER --generation N`, with torchrun's environment.

Every way of starting ranks ends here: forked by the nursery, started by an agent, or by torchrun itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from seatrial.base import atomic
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, InputError, SeatrialError
from seatrial.checkpoint.manifest import folder_name
from seatrial.checkpoint.read import CheckpointWeights, newest_verified
from seatrial.checkpoint.write import remove_leftovers
from seatrial.data.loader import BatchLoader
from seatrial.data.prepare import check_store, data_cache, resolve_store
from seatrial.job import Job, load_job
from seatrial.model.hf import HuggingFaceWeights
from seatrial.model.initialise import RandomWeights
from seatrial.model.source import WeightSource
from seatrial.parallel.build import ParallelModel, Settings
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.train import state
from seatrial.train.loop import Loop
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.sample import write_sample

# How long a collective may wait for a rank before it is an error.
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Place:
    """What torchrun's environment says of this process."""

    rank: int
    local_rank: int
    world_size: int
    node: int
    device: str

    @classmethod
    def from_environment(cls) -> Place:
        """Raises InputError naming every variable that is missing."""
        missing = [
            k
            for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            if k not in os.environ
        ]
        if missing:
            raise InputError(
                f"the environment has no {', '.join(missing)}",
                hint="start ranks with `seatrial train JOB`, or with torchrun -m seatrial.train.worker RUN_FOLDER",
            )
        device = os.environ.get("SEATRIAL_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            node=int(os.environ.get("GROUP_RANK", "0")),
            device=device,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank; the exit code. A failure is written to the rank's error file and its log."""
    parser = argparse.ArgumentParser(prog="seatrial.train.worker", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--generation", type=int, default=None)
    arguments = parser.parse_args(argv)
    folder = RunFolder(arguments.run)
    generation = arguments.generation or folder.last_generation()
    place = None
    try:
        place = Place.from_environment()
        _train(folder, generation, place)
    except Exception as error:  # noqa: BLE001  the process ends here, whatever it was, and must say why
        return _report(error, folder, generation, place)
    return EXIT_DONE


def _train(folder: RunFolder, generation: int, place: Place) -> None:
    job = load_job(RunFolder.open(folder.path).job_toml)
    if place.world_size != job.layout.world_size:
        raise InputError(
            f"the job has {job.layout.world_size} ranks, the environment says {place.world_size}",
            hint="start as many ranks as cluster.nodes x cluster.gpus_per_node",
        )
    device = _join(place)
    mesh = build_mesh(job.layout, device, _TIMEOUT)
    torch.manual_seed(job.train.seed + place.rank)
    loader = _loader(job, folder)
    resumed_from = _choose_checkpoint(folder, generation, mesh)
    model = ParallelModel(
        job.architecture, mesh, settings_of(job), resumed_from or _first_weights(job), timeout=_TIMEOUT
    )
    optimizer = ShardedAdamW(model.shards, job.optimizer)
    first_step = 1
    if resumed_from is not None:
        first_step = state.restore(model, optimizer, resumed_from).step + 1
    Loop(job, folder, generation, model, optimizer, loader).run(first_step)
    dist.barrier()
    dist.destroy_process_group()
    if place.rank == 0:
        write_sample(job, folder, generation, device)


def _join(place: Place) -> torch.device:
    """Become a member of the world; the device of this rank."""
    if place.device == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        dist.init_process_group("nccl" if place.device == "cuda" else "gloo", timeout=_TIMEOUT)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise InputError(
                f"port {os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']} is in use",
                hint="leave cluster.port out, and a free port is taken",
            ) from error
        raise
    return device


def _loader(job: Job, folder: RunFolder) -> BatchLoader:
    train = job.train
    store = resolve_store(job.data, data_cache(folder.path.parent), folder.path)
    check_store(
        store,
        vocab_size=job.architecture.vocab_size,
        sequence_length=train.sequence_length,
        global_batch=train.global_batch,
        tokenizer_spec=job.data.tokenizer,
    )
    return BatchLoader(
        store,
        sequence_length=train.sequence_length,
        global_batch=train.global_batch,
        seed=train.seed,
        vocab_size=job.architecture.vocab_size,
    )


def _choose_checkpoint(folder: RunFolder, generation: int, mesh: Mesh) -> CheckpointWeights | None:
    """The checkpoint to continue from. Rank 0 looks, verifies and cleans up; all follow it."""
    step = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    if mesh.rank == 0:
        for path in remove_leftovers(folder.checkpoints):
            events.append(
                folder,
                "checkpoint_removed",
                f"removed {path.name}: a save that did not finish",
                generation=generation,
            )

        def set_aside(aside: Path, why: str) -> None:
            message = f"checkpoint set aside as {aside.name}: {why}"
            events.append(
                folder,
                "checkpoint_set_aside",
                message,
                severity="warning",
                generation=generation,
                data={"why": why},
            )

        found = newest_verified(folder.checkpoints, set_aside)
        if found is not None:
            chosen = CheckpointWeights(found)
            step[0] = chosen.step
            events.append(
                folder,
                "resumed",
                f"resuming after step {chosen.step}",
                generation=generation,
                data={"step": chosen.step, "checkpoint": str(found)},
            )
    mesh.sum_over_ranks(step)
    if not step.item():
        return None
    return CheckpointWeights(folder.checkpoints / folder_name(int(step.item())))


def _first_weights(job: Job) -> WeightSource:
    if job.model.init_from is None:
        return RandomWeights(job.architecture, job.train.seed)
    weights = HuggingFaceWeights(Path(job.model.init_from))
    weights.check(job.architecture)
    return weights


def settings_of(job: Job) -> Settings:
    """What the parallel model is told of a job."""
    train = job.train
    return Settings(
        sequence_length=train.sequence_length,
        microbatch=train.microbatch,
        microbatches=job.microbatches,
        global_tokens=train.global_batch * train.sequence_length,
        precision=train.precision,
        activation_checkpointing=train.activation_checkpointing,
        compile=train.compile,
        reshard_after_forward=job.parallel.reshards,
    )


# What torch says when another process of the group went away, in gloo's and in NCCL's words.
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused|was aborted)|broken pipe|closed by peer|connectFullMesh|socket error"
    r"|remote process exited|NCCL .*(unhandled system error|remote error)|store.*(wait|get).*timeout|recv(),? "
    r"failed|Failed to recv",
    re.IGNORECASE,
)


def is_consequence(error: BaseException) -> bool:
    """Whether `error` only says that some other process went away.

    The pipeline wraps what happened in its stages in errors of its own, so the whole chain is looked at.
    """
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, RuntimeError | ConnectionError) and _PEER_GONE.search(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _report(error: Exception, folder: RunFolder, generation: int, place: Place | None) -> int:
    when = time.time()
    text = "".join(traceback.format_exception(error))
    ours = isinstance(error, SeatrialError)
    code = error.exit_code if isinstance(error, SeatrialError) else EXIT_FAILED
    print(error.render() if isinstance(error, SeatrialError) else text, file=sys.stderr, flush=True)
    if place is not None:
        path = folder.rank_error(generation, place.node, place.rank)
        record = {
            "time": when,
            "rank": place.rank,
            "node": place.node,
            "type": type(error).__name__,
            "message": str(error),
            "traceback": None if ours else text,
            "consequence": is_consequence(error),
            "exit_code": code,
            "hint": error.hint if isinstance(error, SeatrialError) else None,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, json.dumps(record))
        except OSError as second:
            print(f"could not write {path}: {second}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
