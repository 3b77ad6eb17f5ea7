"""Overhead of frontier accounting: step times of one run with and without it, in alternating turns.

    python bench/accounting.py [--rounds 6] [--steps 5] [--tensor 2] [--pipeline 1] [--shard 1]

Ranks are forked, on gloo. Each turn is a few steps with the accounting clock and the wrappers of torch's methods, or without
both; the order alternates, so that noise of the machine affects both equally. Printed are the ratio of each pair of turns'
medians, and its median. If that is within noise, use the second figure: the number of stage changes and wrapped calls per step,
times their cost measured in isolation.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from seatrial.data.loader import BatchLoader
from seatrial.data.prepare import resolve_stores
from seatrial.job import Job, job_from_text, preset_text
from seatrial.job.layout import Layout
from seatrial.model.initialise import RandomWeights
from seatrial.parallel.blocked import Blocked
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.mesh import build_mesh
from seatrial.parallel.stage_clock import StageClock
from seatrial.record.folder import RunFolder
from seatrial.record.stages import FORWARD
from seatrial.train.loop import Loop
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.rank import settings_of
from seatrial.train.records import into_file

LIMIT = 1.005


@contextlib.contextmanager
def accounted(loop: Loop) -> Iterator[None]:
    """Context in which step times are accounted."""
    loop._accounting._blocked.install()
    loop.model.clock.start()
    try:
        yield
    finally:
        loop._accounting._blocked.remove()
        loop.model.clock.stop()


def steps(loop: Loop, first: int, count: int) -> list[float]:
    """Seconds of each step, as `Loop.run` executes a step without a save."""
    seconds = []
    for step in range(first, first + count):
        begin = time.perf_counter()
        loop._start(step)
        loop._accounting.lap(step)
        loop._read_results(leave=0)
        seconds.append(time.perf_counter() - begin)
    return seconds


def job_of(arguments: argparse.Namespace, folder: Path) -> Job:
    layout = {n: getattr(arguments, n) for n in ("tensor", "pipeline", "shard")}
    return job_from_text(
        preset_text("first-voyage"),
        name="first-voyage",
        base_folder=folder,
        overrides=[
            "cluster.nodes=1",
            f"cluster.gpus_per_node={layout['tensor'] * layout['pipeline'] * layout['shard']}",
            *(f"parallel.{name}={size}" for name, size in layout.items()),
            "train.steps=100000",
        ],
    )


def rank_main(arguments: argparse.Namespace, folder: Path, job: Job, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.layout.world_size))
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    mesh = build_mesh(job.layout, torch.device("cpu"), timedelta(minutes=2))
    (store,) = resolve_stores(job.data, folder / ".data", folder)
    loader = BatchLoader(
        store,
        sequence_length=job.train.sequence_length,
        batches=job.train.batches,
        seed=job.train.seed,
        vocab_size=job.architecture.vocab_size,
    )
    model = ParallelModel(
        job.architecture, mesh, settings_of(job, mesh.device), RandomWeights(job.architecture, job.train.seed)
    )
    run = RunFolder(folder / job.name)
    loop = Loop(job, run, into_file(run, 1, rank), model, ShardedAdamW(model.shards, job.optimizer), loader)
    loop._begin(1)
    loop._accounting._blocked.remove()
    model.clock.stop()
    ratios, middle = [], {True: [], False: []}
    step = 1
    for turn in range(arguments.rounds + 1):
        now = {}
        for counting in (True, False) if turn % 2 else (False, True):
            with accounted(loop) if counting else contextlib.nullcontext():
                now[counting] = statistics.median(steps(loop, step, arguments.steps))
            step += arguments.steps
        if turn:  # the first one warms up
            ratios.append(now[True] / now[False])
            for counting, seconds in now.items():
                middle[counting].append(seconds)
    changes = changes_in(loop, step)
    if rank == 0:
        each, plain = cost_of_a_change_s(), statistics.median(middle[False])
        ratio = statistics.median(ratios)
        print(f"{job.layout}: a step takes {plain * 1000:.1f} ms")
        print(
            f"  with to without   {ratio:8.4f}    (turns {min(ratios):.3f} to {max(ratios):.3f}, limit {LIMIT})"
        )
        print(
            f"  {changes} changes of stage, {each * 1e6:.2f} us each: {100 * changes * each / plain:.3f} % of a step"
        )
    dist.barrier()
    dist.destroy_process_group()


def changes_in(loop: Loop, step: int) -> int:
    """How often the stage changes in a step of this rank."""
    enter, count = StageClock.enter, 0

    def counted(clock: StageClock, stage: int) -> int:
        nonlocal count
        count += stage != clock.stage
        return enter(clock, stage)

    StageClock.enter = counted  # type: ignore[method-assign]
    with accounted(loop):
        steps(loop, step, 1)
    StageClock.enter = enter  # type: ignore[method-assign]
    return count


def cost_of_a_change_s(times: int = 20_000) -> float:
    """Seconds of one: half of a collective's, by the wrapper that issues it and counts its bytes."""
    clock = StageClock(torch.device("cpu"))
    clock.start()
    clock.enter(FORWARD)

    class Group:
        group_name = "tensor"

    place = SimpleNamespace(
        tensor=Group, shard=None, replicate=None, pipeline=None, ends=None, layout=Layout()
    )
    issue = Blocked(clock, place)._issuing(lambda group, tensors, options: None)  # type: ignore[arg-type]
    tensors = [torch.empty(1)]
    begin = time.perf_counter()
    for _ in range(times):
        issue(Group, tensors, None)  # type: ignore[arg-type]
    return (time.perf_counter() - begin) / times / 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    for name, size in (("tensor", 2), ("pipeline", 1), ("shard", 1)):
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = job_of(arguments, folder)
        run = RunFolder(folder / job.name)
        for path in (run.control, run.checkpoints):
            path.mkdir(parents=True)
        run.generation_file.write_text("1")
        resolve_stores(job.data, folder / ".data", folder)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        pids = []
        for rank in range(job.layout.world_size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rank_main(arguments, folder, job, rank, port)
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            pids.append(pid)
        return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
