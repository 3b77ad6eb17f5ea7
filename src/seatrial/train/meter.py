"""Time, tokens and memory of a step, and the metrics record of them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from seatrial.hardware import accelerator
from seatrial.hardware.catalogue import find_gpu, peak_flops
from seatrial.hardware.mfu import mfu
from seatrial.job import Job
from seatrial.model.decoder import MLP, Attention, SparseMLP
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.overlap_grad import RowParallelLinear
from seatrial.record.metrics import MetricsRecord

_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_bytes(device: torch.device) -> int:
    """On a GPU: peak of torch's allocations. On a CPU: this process's current resident memory."""
    if accelerator.is_accelerator(device):
        return accelerator.peak_memory(device)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * _PAGE


class OwnWorkTimer:
    """Adds up this rank's own work: data loading, computation and update, without communication. It tells a slow rank from its peers.

    On a GPU it is device time, between events; a span counts once the device has completed it, so `read` lags by a
    step or two.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_accelerator = accelerator.is_accelerator(device)
        self._seconds = 0.0
        self._start: float | torch.Event | None = None
        self._paused = False
        self._pending: deque[tuple[torch.Event, torch.Event]] = deque()
        self._handles: list[RemovableHandle] = []
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        if self._paused:
            return
        self._start = accelerator.record(timing=True) if self._on_accelerator else time.perf_counter()

    def stop(self) -> None:
        """End the span begun by `start`, if there is one."""
        start, self._start = self._start, None
        if isinstance(start, float):
            self._seconds += time.perf_counter() - start
        elif start is not None:
            self._pending.append((start, accelerator.record(timing=True)))

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def read(self) -> float:
        """Seconds counted since the last call."""
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self._seconds += start.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def watch(self, model: ParallelModel) -> None:
        """Time the forward passes of attention, MLP and output head: communication is between them, not inside.

        One block of each stage represents all. A compiled block cannot be hooked inside: then no forward pass of a block counts.
        Tensor parallel communicates within the projections: then the work between them counts.
        """
        for stage in model.stages:
            for block in [] if model.settings.compile else stage.blocks[:1]:
                parts: list[Attention | MLP] = [block.self_attn]
                if isinstance(block.mlp, SparseMLP):
                    for own in filter(None, (block.mlp.experts, block.mlp.shared_experts)):
                        self._span(own, own)
                else:
                    parts.append(block.mlp)
                for part in parts:
                    last = part.o_proj if isinstance(part, Attention) else part.down_proj
                    if isinstance(last, RowParallelLinear):
                        self._span_between(part, last)
                    else:
                        self._span(part, last)
            if stage.lm_head is not None:
                self._span(stage.lm_head, stage.lm_head)

    def unwatch(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _span(self, first: nn.Module, last: nn.Module) -> None:
        # Registered after tensor parallel's hooks: its gathers before `first` are done, its scatters after `last` follow.
        self._handles.append(first.register_forward_pre_hook(lambda *_: self.start()))
        self._handles.append(last.register_forward_hook(lambda *_: self.stop(), prepend=True))

    def _span_between(self, module: Attention | MLP, last: RowParallelLinear) -> None:
        project = module.project

        def projected(x_BtD: Tensor, *linears: nn.Module) -> Sequence[Tensor]:
            out = project(x_BtD, *linears)
            self.start()
            return out

        def restore() -> None:
            module.project = project

        module.project = projected
        self._undo.append(restore)
        self._handles.append(last.register_forward_pre_hook(lambda *_: self.stop()))


class Meter:
    """Makes metrics records from step times. MFU is unknown for a device that is not in the catalogue."""

    def __init__(self, job: Job, device: torch.device, generation: int) -> None:
        self._job = job
        self._generation = generation
        self._batches, self._sequence = job.train.batches, job.train.sequence_length
        self._flops_per_token = job.architecture.flops_per_token(job.train.sequence_length)
        self._peak = None
        self._device = device.type
        if accelerator.is_accelerator(device):
            # The actual device, not the one in the job file.
            self._device = accelerator.name(device)
            gpu = find_gpu(self._device)
            self._peak = peak_flops(gpu, job.train.precision) if gpu is not None else None

    def convention(self) -> tuple[str, dict[str, Any]]:
        """The peak that MFU refers to and the FLOP count, as text and as numbers."""
        length, arch = self._job.train.sequence_length, self._job.architecture
        full = arch.flops_per_token(length, full_attention=True)
        data = {
            "device": self._device,
            "peak_flops": self._peak,
            "flops_per_token": self._flops_per_token,
            "flops_per_token_full_attention": full,
        }
        if self._peak is None:
            return f"{self._device}: its {self._job.train.precision} peak is unknown, and so is MFU", data
        return (
            f"{self._device}: MFU is of {self._peak / 1e12:,.0f} TFLOP/s (dense {self._job.train.precision}), "
            f"attention counted as causal; with full attention it is {full / self._flops_per_token:.3f} times that",
            data,
        )

    def record(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        seconds: float,
        data_wait: float,
        memory: int,
        generation: int | None = None,
    ) -> MetricsRecord:
        """Make a step's record; `generation`: the one that did the step, if it was not the meter's own."""
        rate = self._batches.size(step) * self._sequence / seconds
        rate_a_gpu = rate / self._job.layout.world_size
        return MetricsRecord(
            step=step,
            tokens=self._batches.total(step) * self._sequence,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            step_time_s=seconds,
            data_wait_s=data_wait,
            tokens_per_s=rate,
            tokens_per_s_per_gpu=rate_a_gpu,
            mfu=mfu(self._flops_per_token, rate_a_gpu, self._peak),
            memory_bytes=memory,
            time=time.time(),
            generation=self._generation if generation is None else generation,
        )
