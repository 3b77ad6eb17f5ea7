"""Ranks with real supervisor clients, for tests that are their agent. Forks one for each line of stdin.

    python hang_ranks.py      {"rank", "log", "env", "plan"} a line

A rank trains the small model of parity_ranks.py, generation after generation. Its plan: {"layout", "steps", "async_tensor",
"fault": {"step", "kind"}}; before the forward pass of its first block in that step it says {"fault": kind} and does what `kind` says.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import parity_ranks as small
import torch
import torch.distributed as dist

from seatrial.base import process
from seatrial.job.layout import Layout
from seatrial.job.schema import OptimizerSection
from seatrial.parallel.mesh import build_mesh
from seatrial.record.messages import Exit, RankSpec
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.step import train_step
from seatrial.train.supervision import peers
from seatrial.train.supervision.peers import teardown, wait_for_store
from seatrial.train.supervision.supervisor_client import SupervisorClient

COMPARED = 3  # steps whose losses are told: the third depends on two updates


def hang(kind: str) -> None:
    """Never return, in one of the ways in which a rank can hang."""
    if kind == "sleep":
        while True:
            time.sleep(3600)
    elif kind == "spin":
        while True:
            pass
    elif kind == "gil-waiting":
        # PyDLL keeps Python's global lock during the call; the second lock of a mutex never returns.
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    elif kind == "gil-busy":
        sum(range(1 << 62))
    raise ValueError(kind)


class Rank:
    def __init__(self, number: int, plan: dict[str, Any]) -> None:
        self.number = number
        self.plan = plan
        self.step = 0
        supervisor_client = SupervisorClient.from_environment()
        assert supervisor_client is not None
        self.supervisor_client = supervisor_client

    def serve(self) -> int:
        while (order := self.supervisor_client.next_order()) is not None:
            if isinstance(order, Exit):
                return order.code
            message = ""
            try:
                self.train(order)
            except RuntimeError as error:
                message = f"{type(error).__name__}: {error}"
            begin = time.perf_counter()
            teardown()
            torn_down_s = time.perf_counter() - begin
            if not message:
                self.supervisor_client.finished("done", self.step)
                continue
            left = {
                "teardown_s": torn_down_s,
                "threads": len(os.listdir("/proc/self/task")),
                "fds": len(os.listdir("/proc/self/fd"))
                - len(peers._broken),  # those are released with the next order
                "groups": sum(isinstance(o, dist.ProcessGroup) for o in gc.get_objects()),
            }
            self.tell_test(left=left)
            self.supervisor_client.parked(self.step, message)
        return 0

    def tell_test(self, **message: Any) -> None:
        """What no agent would take."""
        self.supervisor_client._channel.send(message)

    def train(self, rank_spec: RankSpec) -> None:
        begin = time.perf_counter()
        layout = Layout(**self.plan["layout"])
        if self.number:
            wait_for_store("127.0.0.1", rank_spec.master_port, timeout_s=30.0)
        small.join(layout, self.number, rank_spec.master_port)
        mesh = build_mesh(layout, torch.device("cpu"), small.TIMEOUT)
        case = {"tied": True, "async_tensor": self.plan.get("async_tensor", False)}
        model = small.build(case, mesh, small.NoisyWeights(small.arch_of(case), seed=1))
        optimizer = ShardedAdamW(model.shards, OptimizerSection(lr=small.LR))
        self.plant(model)
        losses = []
        for step in range(1, self.plan["steps"] + 1):
            self.step = step
            ids, target = small.own_batch(self.step, mesh)
            result = train_step(model, optimizer, ids, target, lr=small.LR, clip_norm=small.CLIP)
            losses.append(result.read()[0])
            if self.step == 1:
                self.tell_test(first={"seconds": time.perf_counter() - begin})
            if self.step == COMPARED:
                self.tell_test(losses=losses)
            self.supervisor_client.beat(self.step, 0.0, self.step == 1)

    def plant(self, model: Any) -> None:
        fault = self.plan.get("fault")
        if fault is None:
            return

        def before_forward(*_: Any) -> None:
            if self.step == fault["step"]:
                self.tell_test(fault=fault["kind"])
                hang(fault["kind"])

        model.stages[0].blocks[0].register_forward_pre_hook(before_forward)


def main() -> int:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    process.become_subreaper()
    for line in sys.stdin:
        order = json.loads(line)

        def body(order: dict[str, Any] = order) -> int:
            os.environ.update(order["env"])
            return Rank(order["rank"], order["plan"]).serve()

        process.fork(body, log=Path(order["log"]))
        process.reap(lambda pid, status: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
