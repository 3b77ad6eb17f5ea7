"""One rank of bench/checkpoint.py: trains, and saves in the requested way, alternating with the others.

    python checkpoint_ranks.py '{"rank": 0, "world": 2, "port": ..., "folder": ..., ...}'

Rank 0 prints one JSON line per measurement.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from seatrial.base.box import Box
from seatrial.checkpoint.manifest import Manifest, Progress, folder_name
from seatrial.checkpoint.place import open_place
from seatrial.checkpoint.staging import AsyncWriter
from seatrial.checkpoint.write import Piece

_STATE_BYTES_A_PARAMETER = 12  # fp32 weight and two moments
_TIMEOUT = timedelta(minutes=10)


class Training:
    """A stack of linear layers under AdamW; each rank has half of the rows of every layer."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.rank, self.world = plan["rank"], plan["world"]
        width, rows = plan["width"], plan["batch"]
        layers = max(1, round(plan["bytes"] / self.world / (width * width * _STATE_BYTES_A_PARAMETER)))
        torch.manual_seed(self.rank)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = torch.randn(rows, width)
        self.steps = 0
        self.step([0.0])

    def step(self, told: list[float]) -> tuple[float, list[float]]:
        """One step with one all-reduce, as in training; its seconds, and the sum of the ranks' `told` values."""
        begin = time.perf_counter()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        vector = torch.tensor([loss.item(), *told], dtype=torch.float64)
        dist.all_reduce(vector)
        self.steps += 1
        return time.perf_counter() - begin, vector[1:].tolist()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name."""
        found: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            found[f"model/{name}"] = p.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{kind}/{name}"] = self.optimizer.state[p][kind]
        return found

    @property
    def bytes(self) -> int:
        """Bytes of this rank's state."""
        return sum(t.nbytes for t in self.tensors().values())


class Ours:
    """The writer used in training: stages, writes, reads back, hashes, commits."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.writer = AsyncWriter(rank=training.rank, world_size=training.world, device=torch.device("cpu"))
        self.run = folder / "run"
        if training.rank == 0:
            (self.run / "control").mkdir(parents=True)
            (self.run / "control" / "generation").write_text("1\n")
            open_place(str(folder)).prepare()
        dist.barrier()
        self.pieces = [self._piece(key, t) for key, t in training.tensors().items()]
        self.writer.prepare(self.pieces)
        self.attempt = 0

    def _piece(self, key: str, tensor: Tensor) -> Piece:
        rows, columns = tensor.shape
        rank, world = self.training.rank, self.training.world
        return Piece(key, tensor, Box((rank * rows, 0), (rows, columns)), (world * rows, columns))

    def save(self) -> Callable[[list[float]], tuple[list[float], bool]]:
        """Start a save. The returned function takes the last sums; it returns the next value to sum, and whether the save is done."""
        self.attempt += 1
        number = self.attempt
        self.writer.stage(self.pieces)
        self.writer.order_part(number, str(self.folder), number, 1, True)
        own = {"part": 0.0, "commit": 0.0}
        ordered = False

        def poll(sums: list[float]) -> tuple[list[float], bool]:
            nonlocal ordered
            for outcome in self.writer.poll():
                assert outcome.ok or outcome.what == "removed", outcome
                own[outcome.what] = 1.0
            if self.training.rank == 0 and not ordered and sums[:1] == [float(self.training.world)]:
                self.writer.order_commit(number, str(self.folder), self._manifest(number), self.run, 1, 0)
                ordered = True
            return [own["part"], own["commit"]], sums[1:] == [1.0]

        return poll

    def _manifest(self, number: int) -> Manifest:
        return Manifest(
            progress=Progress(number, 0, 0, 1),
            time=time.time(),
            seed=0,
            architecture={},
            layout={"world_size": self.training.world},
            job_sha256="",
            code="",
            read_back=False,
            files=[],
            tensors={},
        )

    def newest(self) -> Path:
        return self.folder / folder_name(self.attempt)

    def close(self) -> None:
        """End the writing process."""
        self.writer.wait_removed(60)
        self.writer.close()


class Peers:
    """The three ways of torch.distributed.checkpoint, and torch.save; each into a new folder."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        mesh = init_device_mesh("cpu", (training.world,))
        # As FSDP gives it: tensors cut by rows.
        self.state = {
            key: DTensor.from_local(t, mesh, [Shard(0)], run_check=False)
            for key, t in training.tensors().items()
        }
        self.group = dist.new_group(
            backend="gloo", timeout=_TIMEOUT
        )  # saving may not meet training's collectives
        self.number = 0
        self.stager: Any = None

    def _new(self) -> Path:
        self.number += 1
        return self.folder / f"peer-{self.number}"

    def dcp_sync(self) -> None:
        """Synchronous: all ranks wait until everything is written."""
        dcp.save(self.state, checkpoint_id=self._new(), process_group=self.group)

    def torch_save(self) -> None:
        """One file per rank."""
        path = self._new()
        path.mkdir(exist_ok=True)
        torch.save(self.training.tensors(), path / f"rank-{self.training.rank}.pt")

    def dcp_async(self, kind: AsyncCheckpointerType) -> Callable[[list[float]], tuple[list[float], bool]]:
        """Copied, then written by a thread or a process."""
        answer = dcp.async_save(
            self.state, checkpoint_id=self._new(), process_group=self.group, async_checkpointer_type=kind
        )
        future = getattr(answer, "upload_completion", answer)

        def poll(sums: list[float]) -> tuple[list[float], bool]:
            if future.done():
                future.result()
            return [float(future.done())], sums == [float(self.training.world)]

        return poll


def main() -> int:
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(plan["port"]),
        "RANK": str(plan["rank"]),
        "WORLD_SIZE": str(plan["world"]),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    training, folder = Training(plan), Path(plan["folder"])
    ours = Ours(training, folder)
    peers = Peers(training, folder)
    tell(plan, what="size", bytes=training.bytes * training.world, rank_bytes=training.bytes)
    ways: dict[str, Callable[[], Any]] = {
        "ours": ours.save,
        "dcp async thread": lambda: peers.dcp_async(AsyncCheckpointerType.THREAD),
        "dcp async process": lambda: peers.dcp_async(AsyncCheckpointerType.PROCESS),
        "dcp sync": peers.dcp_sync,
        "torch.save": peers.torch_save,
    }
    for turn in range(plan["rounds"] + 1):  # the first warms up
        for name in [n for n in ways if n not in plan["without"]]:
            measure(plan, training, name, ways[name], turn)
            for old in folder.glob("peer-*"):
                if training.rank == 0:
                    shutil.rmtree(old, ignore_errors=True)
            dist.barrier()
    ours.close()
    tell(plan, what="checkpoint", path=str(ours.newest()))
    dist.destroy_process_group()
    return 0


def measure(plan: dict[str, Any], training: Training, name: str, way: Callable[[], Any], turn: int) -> None:
    """Steps without saving, then one save, and steps until it is complete."""
    if training.rank == 0:
        os.sync()  # what the way before has written is not this one's burden
    dist.barrier()
    base = [training.step([0.0])[0] for _ in range(plan["steps"])]
    dist.barrier()
    begin, cpu = time.perf_counter(), time.thread_time()
    poll = way()
    stall, cpu = time.perf_counter() - begin, time.thread_time() - cpu
    during: list[float] = []
    sums: list[float] = []
    while poll is not None and len(during) < plan["most"]:
        own, done = poll(sums)
        if done:
            break
        seconds, sums = training.step(own)
        during.append(seconds)
    complete = time.perf_counter() - begin
    slowest = torch.tensor([stall, cpu], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    stall, cpu = slowest.tolist()
    tell(
        plan,
        what="save",
        way=name,
        turn=turn,
        stall_s=stall,
        stall_cpu_s=cpu,
        complete_s=complete,
        finished=len(during) < plan["most"],
        base_s=base,
        during_s=during,
    )


def tell(plan: dict[str, Any], **values: Any) -> None:
    if plan["rank"] == 0:
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    sys.exit(main())
