"""Steps of one rank under the runtime that does nothing; see run.py, which starts it. JSON on stdin and stdout."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from null_runtime import clear, records_since, runtime, waits_noted
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from seatrial.base.batches import BatchSizes
from seatrial.base.box import Box
from seatrial.data.loader import Batch
from seatrial.hardware import accelerator
from seatrial.job import Job, job_from_text
from seatrial.parallel import expert
from seatrial.record.folder import RunFolder
from seatrial.train.checkpointing.snapshot import Snapshots
from seatrial.train.dryrun.kernels import _balanced
from seatrial.train.dryrun.trace import _no_first_exchange
from seatrial.train.loop import Loop
from seatrial.train.rank import RankEnvironment, build, init_distributed
from seatrial.train.records import into_file

LOOKED_AT = 5  # the step that is reported
BOUNDARY = 6  # the step after which the state is verified and copied

cudnn = torch.library.Library("aten", "IMPL")  # whose kernels are found by asking the driver


def _cudnn_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    runtime.null_kernel(b"cudnn_attention", torch.cuda.current_stream().cuda_stream)
    rows = query.new_empty(*query.shape[:3], 1, dtype=torch.float32)
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return torch.empty_like(query), rows, None, None, query.shape[2], key.shape[2], seed, offset, None


def _cudnn_attention_backward(_grad: Tensor, *inputs: Any, **__: Any) -> tuple[Tensor, ...]:
    runtime.null_kernel(b"cudnn_attention_backward", torch.cuda.current_stream().cuda_stream)
    return tuple(torch.empty_like(x) for x in inputs[:3])


cudnn.impl("_scaled_dot_product_cudnn_attention", _cudnn_attention, "CUDA")
cudnn.impl("_scaled_dot_product_cudnn_attention_backward", _cudnn_attention_backward, "CUDA")


class OtherRanks(dist.Store):
    """A store in which every other rank has already said what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values.get(key, bytes(128))  # NCCL's unique id

    def add(self, key: str, amount: int) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1 << 20

    def check(self, keys: list[str]) -> bool:
        return False  # nobody asks for a dump

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        pass

    def set_timeout(self, timeout: Any) -> None:
        pass


class NoWeights:
    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        return torch.zeros(box.sizes, dtype=dtype)


class Batches:
    masked = False

    def __init__(self, job: Job) -> None:
        self._job, self.batches = job, BatchSizes.of(job.train.global_batch)

    def samples(self, step: int) -> tuple[int, int]:
        return self.batches.samples(step)

    def batch(self, step: int, first: int, count: int) -> Batch:
        length = self._job.train.sequence_length
        ids_BT = torch.zeros(count, length, dtype=torch.int64)
        documents = None if self._job.data.attend_across_documents else (torch.arange(length) // 48).int()
        return Batch(ids_BT, ids_BT.clone(), documents if documents is None else documents.repeat(count, 1))


class Watcher:
    """A supervisor that wants nothing."""

    def leave_request(self) -> None:
        return None

    def beat(self, *_: Any) -> None:
        pass

    def finding(self, signal: str, step: int, message: str, *_: Any) -> None:
        raise AssertionError(f"{signal} at step {step}: {message}")


def expert_sizes(sent: Tensor, received: Tensor, rows: int, *, read: Any = expert.split_sizes) -> Any:
    """Read them, as in training; then as many positions to each rank, since memory of the device holds zeros."""
    read(sent, received, rows)
    return _balanced(sent, received, rows)


def main() -> None:
    request = json.load(sys.stdin)
    job = job_from_text(request["job"], name="job", base_folder=Path(), overrides=request["overrides"])
    rank, world, local = request["rank"], job.layout.world_size, job.cluster.gpus_per_node
    expert.split_sizes = expert_sizes
    if request["without"]:  # a wait, which must be missed
        module, _, name = request["without"].rpartition(".")
        setattr(importlib.import_module(module), name, lambda *_: None)
    store = OtherRanks()  # referenced only by C++ otherwise
    mesh = init_distributed(job, RankEnvironment(rank, rank % local, world, rank // local, "cuda"), store)
    model, optimizer = build(job, mesh, NoWeights())
    if model._pipeline is not None:
        _no_first_exchange(model._pipeline.schedule(job.microbatches))
    waits: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, ExitStack() as checks:
        folder = RunFolder(Path(name))
        folder.checkpoints.mkdir(parents=True)
        folder.control.mkdir()
        folder.generation_file.write_text("1")
        records = into_file(folder, 1, rank)
        every = job.resilience.snapshot_every_steps
        fds = os.memfd_create("a"), os.memfd_create("b")
        loop = Loop(
            job,
            folder,
            records,
            model,
            optimizer,
            Batches(job),  # type: ignore[arg-type]
            supervisor=Watcher(),  # type: ignore[arg-type]
            snapshots=Snapshots(fds, model, optimizer, records=records, every=every, report=lambda _: None)
            if every
            else None,
        )
        loop._begin(1)
        for step in range(1, BOUNDARY + 1):
            if step == LOOKED_AT:
                if request["sanitize"]:
                    from sanitizer import Sanitizer

                    sanitizer = checks.enter_context(Sanitizer())
                    # Recomputation ends early by an exception, which the callbacks would replace.
                    checks.enter_context(set_checkpoint_early_stop(False))
                clear()
                torch.cuda.reset_peak_memory_stats()
            with waits_noted(waits) if step == LOOKED_AT else nullcontext():
                loop._start(step)
                loop._read_results(leave=0 if step == BOUNDARY else loop._max_in_flight)
            if step == LOOKED_AT:
                rows, peak = records_since(), accelerator.peak_memory(mesh.device)
        loop._end_step(BOUNDARY, saves=False)
        loop._start(BOUNDARY + 1)  # which uses again what is being copied
    print(
        json.dumps(
            {
                "races": sanitizer.races if request["sanitize"] else None,
                "records": [[kind, name, n] for (kind, name), n in Counter(row[:2] for row in rows).items()],
                "streams": len({row[2] for row in rows if row[0] in "KBN"}),
                "waits": waits,
                "peak": peak,
                "reserved": torch.cuda.max_memory_reserved(),
            }
        )
    )
    sys.stdout.flush()
    os._exit(0)  # nothing of what torch and NCCL do at an end


if __name__ == "__main__":
    main()
