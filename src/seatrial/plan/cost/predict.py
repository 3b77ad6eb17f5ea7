"""Prediction of a layout on a cluster: step time with an interval, throughput, MFU, memory, and the waterfall."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property

from seatrial.base.units import GIB
from seatrial.hardware.mfu import mfu
from seatrial.job.architecture import Architecture
from seatrial.job.optimizers import ADAMW, optimizer_named
from seatrial.plan.cost.calibration import Calibration, Pace, Z, shipped
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.kernels import MEMORY_SHARE, MEMORY_SOURCE, PROCESSORS_SOURCE, Kernels
from seatrial.plan.cost.memory import FRAGMENTATION, FRAGMENTATION_SOURCE, RUNTIME_SOURCE, Memory, memory
from seatrial.plan.cost.memory_fit import SURE, MemoryFit, judge, shipped_errors
from seatrial.plan.cost.overlap import OURS
from seatrial.plan.cost.stacks import Stack, stacks
from seatrial.plan.cost.step import SLOWER_BY_DOUBLING, SLOWER_SOURCE, Parts, Traffic, step_parts, traffic
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe


@dataclass(frozen=True)
class Share:
    """One bar of the waterfall: a part of the step and its share of the step time, that is, of its peak FLOPs."""

    name: str
    share: float
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Times in seconds, rates per GPU. `low_s` and `high_s`: the 85 % interval of the measured step."""

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    mfu_full_attention: float | None
    parts: Parts
    waterfall: tuple[Share, ...]
    memory: Memory
    available: float  # bytes available to a process on one GPU
    pace: Pace
    provenance: tuple[str, ...]
    _of: tuple[Architecture, Recipe, Fabric, Stack]

    @property
    def fits(self) -> bool:
        """Whether the predicted memory is available; `verdict` also considers the margin."""
        return self.memory.reserved <= self.available

    @cached_property
    def traffic(self) -> Traffic:
        """Of a step. A search needs that of few layouts."""
        return traffic(*self._of)

    @property
    def verdict(self) -> MemoryFit:
        """Whether it fits, is tight or does not fit."""
        return judge(self.memory.reserved, self.available)


def stack_for(recipe: Recipe, name: str | Stack = "seatrial") -> Stack:
    """The stack of this name, ours compiled if the recipe is, with the recipe's optimizer; a Stack is returned unchanged."""
    if isinstance(name, Stack):
        return name
    if name == "seatrial" and recipe.compiled:
        name = "seatrial-compiled"
    return _stack(name, recipe.optimizer, recipe.accumulate == "sharded" and recipe.microbatches > 1)


@cache
def _stack(name: str, optimizer: str, sharded: bool) -> Stack:
    stack = stacks()[name]
    if sharded:
        # FSDP2 that reduces in every microbatch accumulates shards, which are small.
        stack = replace(stack, accumulate=stacks()["torchtitan"].accumulate)
    if optimizer == ADAMW.name:
        return stack
    # stacks.toml assumes AdamW. Each state is read and written once an update, or more often without a fused kernel.
    known = optimizer_named(optimizer)
    more = known.state_bytes - ADAMW.state_bytes
    weights, gradients, states = stack.state_bytes
    traffic = stack.optimizer + 2 * more + known.unfused_bytes
    return replace(
        stack,
        state_bytes=(weights, gradients, states + more),
        optimizer=traffic,
        matrix_saving=known.matrix_saving,
    )


def predict(
    model: Architecture,
    recipe: Recipe,
    cluster: Cluster,
    *,
    stack: str | Stack = "seatrial",
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict a layout. Raises UnknownNetworkError, UnknownSpeedError for unknown hardware; ValueError if too large."""
    if recipe.world > cluster.gpus:
        raise ValueError(f"the layout has {recipe.world} ranks, the cluster {cluster.gpus} GPUs")
    behaviour = stack_for(recipe, stack)
    pace = (calibration or shipped()).pace(behaviour.name, cluster.gpu, recipe.precision)
    fabric = Fabric.of(cluster, recipe)
    parts = step_parts(model, recipe, fabric, behaviour, pace.value, pace.factors)
    step = parts.total
    gpus = recipe.world
    tokens = recipe.global_batch * recipe.sequence / step / gpus
    peak = Kernels(cluster.gpu, recipe.precision).peak
    held = memory(model, recipe, behaviour)
    factor = math.exp(Z * pace.spread)
    return Prediction(
        step_s=step,
        low_s=step / factor,
        high_s=step * factor,
        tokens_per_s_per_gpu=tokens,
        mfu=mfu(model.flops_per_token(recipe.sequence), tokens, peak),
        mfu_full_attention=mfu(model.flops_per_token(recipe.sequence, full_attention=True), tokens, peak),
        parts=parts,
        waterfall=waterfall(model, recipe, parts, peak),
        memory=held,
        available=capacity(cluster),
        pace=pace,
        provenance=_provenance(cluster, behaviour, pace, recipe),
        _of=(model, recipe, fabric, behaviour),
    )


def capacity(cluster: Cluster) -> float:
    """Bytes available to a process on one GPU.

    Data sheets' "GB" of memory are GiB: nvidia-smi shows 81,559 MiB on an 80 GB H100, 143,771 on a 141 GB H200, 183,359
    on a 180 GB B200. All of these are above 0.99 of the size in GiB.
    """
    return 0.99 * cluster.gpu.hbm_gb * GIB


def waterfall(model: Architecture, recipe: Recipe, parts: Parts, peak: float) -> tuple[Share, ...]:
    """Each part's share of the step, from the peak to the MFU. The shares add up to 1, the first is the MFU."""
    total = parts.total
    tokens = recipe.global_batch * recipe.sequence / recipe.world
    ideal_products = 6.0 * model.matmul_parameters() * tokens / peak
    ideal = model.flops_per_token(recipe.sequence) * tokens / peak
    seconds = {
        "model FLOPs": ideal,
        "GEMMs below peak": parts.products - ideal_products,
        "attention below peak": parts.attention - (ideal - ideal_products),
        "memory-bound operators": parts.operators,
        "recomputation": parts.recomputation,
        "tensor-parallel communication": parts.tensor,
        "context-parallel communication": parts.context,
        "pipeline communication": parts.pipeline,
        "pipeline bubble and uneven stages": parts.bubble,
        "data-parallel communication": parts.data,
        "compute slowed by overlap": parts.contention,
        "optimizer": parts.optimizer,
    }
    return tuple(Share(name, s / total, s) for name, s in seconds.items())


def _provenance(cluster: Cluster, stack: Stack, pace: Pace, recipe: Recipe) -> tuple[str, ...]:
    entries = [
        f"kernels: {cluster.gpu.name}, {cluster.gpu.source}",
        f"pace {pace.value:.2f}, x {pace.factors.operators:.2f} for memory-bound operators, x "
        f"{pace.factors.attention:.2f} for attention ({pace.kind}): {pace.source}",
        f"stack {stack.name}: {stack.source}",
    ]
    if cluster.gpu.best_bf16_tflops is None:
        entries.append("GEMMs: no measurement of this GPU; 0.75 of its peak is assumed")
    if recipe.precision == "fp8" and stack.name in OURS:
        entries.append(
            "FP8 of this trainer: not measured; casts are counted as joined with their neighbours, which they are only "
            "compiled and without tensor parallel"
        )
    entries.append(f"streaming multiprocessors: {PROCESSORS_SOURCE}")
    entries.append(
        f"stragglers: kernels are {SLOWER_BY_DOUBLING:.1%} slower with every doubling of the GPUs, {SLOWER_SOURCE}"
    )
    entries.append(f"memory-bound operators: {MEMORY_SHARE} of the data sheet's bandwidth, {MEMORY_SOURCE}")
    entries.append(
        f"memory outside torch's allocator: {RUNTIME_SOURCE}; {FRAGMENTATION:.0%} for fragmentation, {FRAGMENTATION_SOURCE}"
    )
    entries.append(_memory_text())
    if cluster.network is not None:
        entries.append(f"network {cluster.network.name}: {cluster.network.source}")
        entries.append(
            f"collectives reach {cluster.network.reached:.0%} of line rate: {cluster.network.reached_source}"
        )
        entries.append(f"latency {cluster.network.hop_us:g} us a hop: {cluster.network.hop_source}")
    return tuple(entries)


@cache
def _memory_text() -> str:
    known = shipped_errors()
    return (
        f"memory: fits up to {known.full:.0%} of a GPU's, tight above, where at least {SURE:.0%} of {known.figures} published figures "
        f"exceeded their prediction by that much ({'; '.join(s.name for s in known.sources)})"
    )
