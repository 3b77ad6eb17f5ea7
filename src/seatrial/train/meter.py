"""What a step cost: time, tokens, memory, and from them the metrics record."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from seatrial.hardware.catalogue import find_gpu, peak_flops
from seatrial.hardware.mfu import mfu
from seatrial.job import Job
from seatrial.record.metrics import MetricsRecord

_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_bytes(device: torch.device) -> int:
    """CUDA: the most that torch has allocated at once. CPU: this process's resident memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * _PAGE


class Meter:
    """Turns step times into records. `peak` is None, and MFU unknown, for a device not in the catalogue."""

    def __init__(self, job: Job, device: torch.device, generation: int) -> None:
        self._job = job
        self._generation = generation
        self._tokens_a_step = job.train.global_batch * job.train.sequence_length
        self._flops_per_token = job.architecture.flops_per_token(job.train.sequence_length)
        self._peak = None
        self._device = device.type
        if device.type == "cuda":
            # What runs counts, not what the job file says it should be.
            self._device = torch.cuda.get_device_name(device)
            gpu = find_gpu(self._device)
            self._peak = peak_flops(gpu, job.train.precision) if gpu is not None else None

    def convention(self) -> tuple[str, dict[str, Any]]:
        """What MFU is measured against and how FLOPs are counted, in words and as numbers."""
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
    ) -> MetricsRecord:
        rate = self._tokens_a_step / seconds
        rate_a_gpu = rate / self._job.layout.world_size
        return MetricsRecord(
            step=step,
            tokens=step * self._tokens_a_step,
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
            generation=self._generation,
        )
