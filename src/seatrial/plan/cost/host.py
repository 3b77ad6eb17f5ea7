"""Host memory that a job needs, whether it is available, and on how many nodes the state is kept in memory.

A rank's state is its fp32 weights and both moments, 12 bytes a parameter (`Stack.state_bytes`), of a
frozen one 4. Host memory holds:

    processes    Python with torch: a fork server and an agent per node, and the private memory of each rank
    CPU ranks    the GPU memory of `memory.py`, in host memory. An in-place recovery holds the state twice, without
                 gradients and activations
    offload      inputs of layers, see `parallel/offload.py`; torch pins memory in powers of two
    staging      one state per saving rank (those of the first replica) while a checkpoint is written
    copies       per rank one being written and two files, 3 states; with copies on the next node two more files: 5
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from seatrial.base import units
from seatrial.base.errors import InputError
from seatrial.hardware.devices import Device
from seatrial.hardware.host_memory import HostMemory
from seatrial.job.finding import Facts
from seatrial.job.job import Job
from seatrial.job.models import model_presets
from seatrial.job.rules import check
from seatrial.job.settled import settled
from seatrial.plan.cost.memory import (
    memory,
    offloaded_inputs,
    optimizer_bytes,
    rank_memory,
    rank_parameters,
    stage_input,
)
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.model.recipe import Recipe

_MIB = 1024.0**2
# Measured on CPU ranks (bench/host_memory.py, torch 2.13.0): anonymous memory per process; shared library pages per
# host.
LAUNCHER_BYTES, AGENT_BYTES, FORK_SERVER_BYTES, LIBRARIES_BYTES = 50 * _MIB, 30 * _MIB, 140 * _MIB, 100 * _MIB
CPU_RANK_BYTES, WRITER_BYTES = 200 * _MIB, 15 * _MIB
# A CUDA rank imports torch itself, and CUDA and NCCL have host buffers. An assumption.
CUDA_RANK_BYTES = 2048 * _MIB
# glibc heap over torch's allocations: fragmentation by short-lived tensors between lasting ones (measured).
HEAP = 2.2
_GRAIN = 2 * _MIB  # granularity of staging memory


@dataclass(frozen=True)
class HostNeed:
    """Bytes on the host that needs the most."""

    processes: float
    ranks: float  # CPU ranks; 0 if they compute on GPUs
    offloaded: float  # activations
    staging: float
    state: float  # one state per rank
    nodes: int

    def copies(self, n: int) -> float:
        """Bytes of the copies of the state on `n` nodes; a single node has no other node to copy to."""
        return self.state * (0, 3, 3 if self.nodes == 1 else 5)[n]

    def parts(self, copies: int) -> dict[str, float]:
        """Bytes by name, without zero entries."""
        named = {
            "CPU ranks": self.ranks,
            "offloaded activations": self.offloaded,
            "copies of the state": self.copies(copies),
            "checkpoint staging": self.staging,
            "processes": self.processes,
        }
        return {name: n for name, n in named.items() if n}

    def total(self, copies: int) -> float:
        return sum(self.parts(copies).values())


def host_need(job: Job, device: Device) -> HostNeed:
    """Need of a settled job. A virtual cluster has all nodes and spares on one host; else the largest node counts."""
    cluster, layout = job.cluster, job.layout
    model, recipe = job.architecture, Recipe.of(job)
    stack = stack_for(recipe)
    here = cluster.launcher == "local"
    nodes, extra = (cluster.nodes, cluster.spares) if here else (1, 0)
    state = ranks = staging = offloaded = 0.0
    each = stage_input(model, recipe)
    if device != "cpu":
        each = 2.0 ** math.ceil(math.log2(each))
    # Ranks of one pipeline stage need the same; on other launchers assume a node with ranks of the heaviest stage only.
    for stage in range(layout.pipeline):
        own = stack.state_bytes[0] * rank_parameters(model, recipe, stage)
        own += optimizer_bytes(model, recipe, stack, stage)
        own /= recipe.shard_ranks
        here_of_it = layout.world_size // layout.pipeline if here else cluster.gpus_per_node
        saving = here_of_it // layout.replicate if here else here_of_it
        held = rank_memory(model, recipe, stack, stage)
        step = held.states + held.logits + HEAP * (held.allocated - held.states - held.logits)
        found = (
            here_of_it * own,
            here_of_it * max(step, 2 * own),
            saving * math.ceil(own / _GRAIN) * _GRAIN,
            here_of_it * offloaded_inputs(model, recipe, stage) * each,
        )
        now = (state, ranks, staging, offloaded)
        state, ranks, staging, offloaded = [
            a + b if here else max(a, b) for a, b in zip(now, found, strict=True)
        ]
    world = nodes * cluster.gpus_per_node
    processes = LAUNCHER_BYTES + LIBRARIES_BYTES + (nodes + extra) * AGENT_BYTES + world * WRITER_BYTES
    if device == "cpu":
        processes += (nodes + extra) * FORK_SERVER_BYTES + world * CPU_RANK_BYTES
    else:
        processes, ranks = processes + world * CUDA_RANK_BYTES, 0.0
    return HostNeed(processes, ranks, offloaded, staging, state, cluster.nodes)


@dataclass(frozen=True)
class Account:
    """Memory that a job needs on its host and on each GPU, and the memory available. `available` is None if unknown."""

    job: Job
    device: Device
    device_reason: str
    host: HostNeed
    available: HostMemory | None
    gpu_available: float | None
    why_accumulate: str = ""  # why gradients accumulate as they do

    @cached_property
    def gpu(self) -> float:
        """Bytes on the GPU that needs the most; 0 if ranks compute on the CPU."""
        if self.device == "cpu":
            return 0.0
        recipe = Recipe.of(self.job)
        return memory(self.job.architecture, recipe, stack_for(recipe)).reserved

    @property
    def gpu_fits(self) -> bool:
        return self.gpu_available is None or self.gpu <= self.gpu_available

    def host_fits(self, copies: int) -> bool:
        return self.available is None or self.host.total(copies) <= self.available.bytes

    @cached_property
    def copies(self) -> tuple[int, str]:
        """On how many nodes the state is kept in memory, and why."""
        asked = self.job.resilience
        if not asked.snapshot_every_steps:
            return 0, "snapshot_every_steps is 0"
        if asked.snapshot_copies != "auto":
            return asked.snapshot_copies, "as the job says"
        if self.available is None:
            return 2, "the available memory is unknown"
        n = next((n for n in (2, 1) if self.host_fits(n)), 0)
        if n == 2:
            return n, f"{units.memory(self.host.copies(n))}, which fits"
        left = units.memory(max(0.0, self.available.bytes - self.host.total(0)))
        more = f"{n + 1} would take {units.memory(self.host.copies(n + 1))}, and {left} are left"
        return n, f"{more}; {self._price(n)}"

    def _price(self, copies: int) -> str:
        """Where a run resumes with fewer copies."""
        layout, asked = self.job.layout, self.job.resilience
        if copies and layout.survives_a_node(self.job.cluster.gpus_per_node):
            return "a replica on another node holds the same state"
        if copies:
            return "a run that loses a node resumes from its last checkpoint"
        if self.device == "cpu" and asked.in_place and layout.replicate > 1:
            return "a replica's process holds the same state"
        return "a run that fails resumes from its last checkpoint"

    def host_text(self) -> str:
        """Host memory needed and available, as text."""
        n, _ = self.copies
        parts = ", ".join(f"{name} {units.memory(b)}" for name, b in self.host.parts(n).items())
        there = "the available amount is unknown" if self.available is None else self.available.source
        return f"{units.memory(self.host.total(n))} ({parts}); {there}"

    def settled(self) -> Job:
        """The job with the chosen number of copies."""
        resilience = self.job.resilience.model_copy(update={"snapshot_copies": self.copies[0]})
        return replace(self.job, file=self.job.file.model_copy(update={"resilience": resilience}))

    def document(self) -> dict[str, Any]:
        """For JSON and the run's events."""
        n, reason = self.copies
        return {
            "device": self.device,
            "device_reason": self.device_reason,
            "host_bytes": round(self.host.total(n)),
            "host_parts": {name: round(part) for name, part in self.host.parts(n).items()},
            "host_room_bytes": None if self.available is None else self.available.bytes,
            "host_room_source": None if self.available is None else self.available.source,
            "gpu_bytes": round(self.gpu) or None,
            "gpu_room_bytes": None if self.gpu_available is None else round(self.gpu_available),
            "accumulate": self.job.train.accumulate,
            "accumulate_reason": self.why_accumulate,
            "snapshot_copies": n,
            "snapshot_copies_reason": reason,
        }


def would_fit(account: Account) -> str:
    """A change of the job that would fit, as text; empty if none is found."""

    def fits(job: Job) -> bool:
        other = replace(account, job=job, host=host_need(job, account.device))
        return other.gpu_fits and other.host_fits(0)

    for train in (
        {"accumulate": "sharded"},
        {"microbatch": 1},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "offload_activations": True},
        {"microbatch": 1, "activation_checkpointing": "full"},
        {"microbatch": 1, "activation_checkpointing": "full", "offload_activations": True},
    ):
        with contextlib.suppress(InputError):
            if fits(settled(account.job, account.job.parallel, train)):
                changed = " and ".join(f"train.{key} = {json.dumps(value)}" for key, value in train.items())
                return f"{changed} would fit"
    for name, architecture in sorted(model_presets().items(), key=lambda entry: -entry[1].parameters()):
        job = replace(account.job, architecture=architecture)
        if not check(Facts(job.file, architecture, job.layout)) and fits(job):
            return f"of the built-in models {name} is the largest that would fit"
    return ""


def in_words(account: Account) -> Iterator[tuple[str, str]]:
    """(label, text) of memory needed and available, for printing."""
    yield "host memory", account.host_text()
    if account.device == "cuda":
        of = "" if account.gpu_available is None else f" of {units.memory(account.gpu_available)}"
        unknown = "; the GPU's memory here is unknown" if account.gpu_available is None else ""
        yield "GPU memory", f"{units.memory(account.gpu)}{of} a GPU{unknown}"
    if account.job.microbatches > 1:
        how = "whole" if account.job.train.accumulate == "whole" else "sharded"
        yield (
            "gradients",
            f"of {account.job.microbatches} microbatches accumulate {how} ({account.why_accumulate})",
        )
    n, reason = account.copies
    beyond = " and the next" if n > 1 and account.host.nodes > 1 else ""
    where = f"on each rank's own node{beyond}" if n else "none"
    yield "copies", f"of the state in memory: {where} ({reason})"
