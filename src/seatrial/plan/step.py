"""One training step in seconds, part by part, for the rank that others wait for; the parts add up to the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from seatrial.plan.calibration import EVEN, Factors
from seatrial.plan.cluster import Group, group
from seatrial.plan.collectives import Fabric
from seatrial.plan.kernels import MEMORY_SHARE
from seatrial.plan.memory import rank_parameters
from seatrial.plan.model import Model
from seatrial.plan.recipe import Recipe
from seatrial.plan.schedule import Times, span
from seatrial.plan.stacks import Stack
from seatrial.plan.unshard import unshards
from seatrial.plan.work import EARLY_STOP, REDONE, Work, tensor_group, work

# Weak scaling of the same layout grows a step by 0.4 to 0.7 % with every doubling, beyond what communication explains: 64 to 2,048
# H100, Llama 3 70B, 1.8 and 3.4 %; 16 to 2,048, Nemotron 15B, 4.5 and 4.8 %; MaxText 2.2 % (NVIDIA/dgxc-benchmarking, v24.11.1, v25.04.02).
SLOWER_BY_DOUBLING = 0.005


@dataclass(frozen=True)
class Parts:
    """Seconds of a step. Work is the mean over pipeline ranks; what the slowest does beyond that is in `bubble`."""

    products: float
    attention: float
    operators: float
    recomputation: float
    tensor: float
    context: float
    pipeline: float
    bubble: float
    data: float
    contention: float
    optimizer: float

    @property
    def total(self) -> float:
        whole: float = sum(getattr(self, f.name) for f in fields(self))
        return whole


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step, by dimension; and those of them that leave its node."""

    tensor: float
    context: float
    pipeline: float
    data: float
    between_nodes: float

    @property
    def sent(self) -> float:
        return self.tensor + self.context + self.pipeline + self.data


@dataclass(frozen=True)
class _Data:
    """Exposed data-parallel communication and the computation it slows, seconds a step."""

    exposed: float
    slowed: float


def slowest(world: int) -> float:
    """How much longer the slowest of so many GPUs takes than one: a synchronous step waits for it."""
    return 1 + SLOWER_BY_DOUBLING * math.log2(world)


def shard_group(recipe: Recipe, fabric: Fabric) -> Group:
    return group(fabric.cluster, stride=recipe.tensor, size=recipe.cut)


def replicate_group(recipe: Recipe, fabric: Fabric) -> Group:
    stride = recipe.tensor * recipe.context * recipe.shard
    return group(fabric.cluster, stride=stride, size=recipe.replicate)


def data_group(recipe: Recipe, fabric: Fabric) -> Group:
    """All ranks that hold the same weights: context parallel ones too, whose gradients are summed as well."""
    size = recipe.context * recipe.data_parallel
    return group(fabric.cluster, stride=recipe.tensor, size=size)


def step_parts(
    model: Model, recipe: Recipe, fabric: Fabric, stack: Stack, pace: float, factors: Factors = EVEN
) -> Parts:
    """Raises UnknownNetworkError, UnknownSpeedError."""
    w = work(model, recipe, fabric, stack, pace * slowest(recipe.world), factors)
    counts = recipe.stage_layers(model.layers)
    p2p = _send(model, recipe, fabric, stack)
    gathers = _gathered_layer(model, recipe, fabric, stack, w)
    times = [_stage(w, counts, s, p2p, gathers) for s in range(recipe.stages)]
    makespan = span(recipe.schedule, recipe.pipeline, recipe.stages_per_rank, recipe.microbatches, times)
    # Means over ranks: every layer and end counts once over all pipeline ranks.
    each = recipe.microbatches / recipe.pipeline
    layer = (w.forward + w.backward).times(model.layers * each)
    ends = (w.head_forward + w.head_backward + w.embedding).times(each)
    again = w.again.times(model.layers * each)
    both = layer + ends
    sends = 2 * p2p * each * max(0, recipe.stages - 1)
    data_in, slowed_in = (gathers[0] + gathers[1]) * model.layers * each, gathers[2] * model.layers * each
    once = _once(model, recipe, fabric, stack, w, counts)
    redone_beside = again.tensor + again.context + again.slowed
    known = both.total + again.kernels + redone_beside + sends + data_in + slowed_in
    return Parts(
        products=both.products,
        attention=both.attention,
        operators=both.operators,
        recomputation=again.kernels,
        tensor=both.tensor + again.tensor,
        context=both.context + again.context,
        pipeline=sends + _tied(model, recipe, fabric, stack),
        bubble=max(0.0, makespan - known),
        data=data_in + once.exposed,
        contention=slowed_in + once.slowed + both.slowed + again.slowed,
        optimizer=_optimizer(model, recipe, fabric, stack),
    )


def _stage(
    w: Work, counts: tuple[int, ...], stage: int, p2p: float, gathers: tuple[float, float, float]
) -> Times:
    n = counts[stage]
    forward, backward = w.forward.times(n), (w.backward + w.again).times(n)
    f, b = forward.total + gathers[0] * n, backward.total + (gathers[1] + gathers[2]) * n
    if stage == 0:
        f, b = f + w.embedding.total / 2, b + w.embedding.total / 2
    else:
        f += p2p
    if stage == len(counts) - 1:
        f, b = f + w.head_forward.total, b + w.head_backward.total
    else:
        b += p2p
    return Times(f, b)


def _send(model: Model, recipe: Recipe, fabric: Fabric, stack: Stack) -> float:
    """Exposed seconds of handing one microbatch to the next stage."""
    if recipe.pipeline == 1:
        return 0.0
    n_bytes = _hidden_bytes(model, recipe)
    across = recipe.world // recipe.pipeline >= fabric.cluster.gpus_per_node
    seconds = fabric.send(n_bytes, across=across) * (1 - stack.hide_pipeline)
    if not recipe.sequence_parallel:
        seconds += fabric.seconds("all_gather", n_bytes * recipe.tensor, tensor_group(recipe, fabric))
    return seconds


def _tied_bytes(model: Model, recipe: Recipe, stack: Stack) -> float:
    """Gradient of a tied embedding whose copies stand in the first and the last stage, on one rank."""
    if not model.tied or recipe.pipeline == 1:
        return 0.0
    cut = recipe.cut if recipe.sharding in ("full", "gradients") else 1
    return stack.state_bytes[1] * model.embedding_parameters() / recipe.tensor / cut


def _tied(model: Model, recipe: Recipe, fabric: Fabric, stack: Stack) -> float:
    """Seconds of summing that gradient, once a step."""
    stride = recipe.world // recipe.pipeline * max(1, recipe.pipeline - 1)
    at = group(fabric.cluster, stride=stride, size=2)
    return fabric.seconds("all_reduce", _tied_bytes(model, recipe, stack), at)


def _hidden_bytes(model: Model, recipe: Recipe) -> float:
    """What one rank hands to the next stage: its part of the positions.

    Without sequence parallel all ranks of a tensor group have the whole, so each sends a part, which the receiving group gathers
    over NVLink: arXiv:2104.04473 section 4.1; DeepSpeed's PartitionedTensor.
    """
    return 2.0 * recipe.tokens * model.hidden / recipe.tensor


def _gathered_layer(
    model: Model, recipe: Recipe, fabric: Fabric, stack: Stack, w: Work
) -> tuple[float, float, float]:
    """Full sharding, one layer and microbatch: exposed (forward, backward), and what it slows in computation.

    Weights of the next layer are gathered while this one computes, so what exceeds a layer's computation is exposed.
    """
    if recipe.sharding != "full" or recipe.cut == 1:
        return 0.0, 0.0, 0.0
    at = shard_group(recipe, fabric)
    n = model.layer_parameters() / recipe.tensor
    gather = fabric.seconds("all_gather", 2.0 * n, at)
    micro = recipe.microbatches
    before, again = gathers_a_step(recipe)
    forward, backward = gather * before / micro, gather * again / micro
    reduce = fabric.seconds("reduce_scatter", float(stack.gradient_bytes) * n, at)
    if recipe.replicate > 1:
        part = stack.gradient_bytes * n / recipe.cut
        reduce += fabric.seconds("all_reduce", part, replicate_group(recipe, fabric))
    backward += reduce / micro if stack.reduces_once(recipe.pipeline) else reduce
    compute_f, compute_b = w.forward.total, (w.backward + w.again).total
    hidden_f = min(forward, compute_f) * stack.hide_data
    hidden_b = min(backward, compute_b) * stack.hide_data
    return forward - hidden_f, backward - hidden_b, stack.contention * (hidden_f + hidden_b)


def gathers_a_step(recipe: Recipe, rank: int = 0) -> tuple[float, int]:
    """How often full sharding gathers a layer's weights in a step: (before forward passes, before backward passes).

    Without a pipeline weights are freed after each microbatch's backward pass. Under torch's pipeline they stay from then on,
    and only a forward pass frees them, if it is to; but of more than three stages only three stay (`unshard.py`, here the mean
    over a rank's stages). Traced, `seatrial.plan.dryrun`.
    """
    m = recipe.microbatches
    if recipe.pipeline == 1:
        return m, m if recipe.reshard else 0
    each = stage_gathers(recipe, rank)
    return sum(each) / len(each), m if recipe.reshard else 0


def stage_gathers(recipe: Recipe, rank: int) -> tuple[float, ...]:
    """Gathers of each stage of a pipeline rank before its passes."""
    r = recipe
    return unshards(r.schedule, r.pipeline, r.stages_per_rank, r.microbatches, rank)


def _once(
    model: Model, recipe: Recipe, fabric: Fabric, stack: Stack, w: Work, counts: tuple[int, ...]
) -> _Data:
    """Data-parallel communication that happens once a step: gradients, and weights after a sharded update."""
    ends = model.embedding_parameters() / recipe.tensor
    if recipe.sharding == "full":
        if recipe.cut * recipe.replicate == 1:
            return _Data(0.0, 0.0)
        # The root's own weights: embedding and head, gathered in time to be used, reduced when nothing is left to hide.
        at = shard_group(recipe, fabric)
        each = ends if recipe.pipeline > 1 else ends * (1 if model.tied else 2)
        before = gathers_a_step(recipe)[0]
        seconds = fabric.seconds("all_gather", 2.0 * each, at) * before
        seconds += fabric.seconds("reduce_scatter", float(stack.gradient_bytes) * each, at)
        return _Data(seconds, 0.0)
    at = data_group(recipe, fabric)
    if at.size == 1:
        return _Data(0.0, 0.0)
    rank_layers = max(sum(counts[r :: recipe.pipeline]) for r in range(recipe.pipeline))
    mine = rank_layers * model.layer_parameters() / recipe.tensor + ends * (1 if recipe.pipeline > 1 else 2)
    grads = stack.gradient_bytes * mine
    whole = recipe.sharding == "none" or stack.reduce == "all_reduce"
    reduce = fabric.seconds("all_reduce" if whole else "reduce_scatter", grads, at)
    spread = 0.0 if recipe.sharding == "none" else fabric.seconds("all_gather", 2.0 * mine, at)
    # Gradients go behind the last microbatch's backward pass, weights before the first one's forward pass.
    window_b = (w.backward + w.again).total * rank_layers
    window_f = w.forward.total * rank_layers
    hidden_b = min(reduce, window_b) * stack.hide_data
    hidden_f = min(spread, window_f) * stack.hide_data
    exposed = reduce - hidden_b + spread - hidden_f
    return _Data(exposed, stack.contention * (hidden_b + hidden_f))


def _optimizer(model: Model, recipe: Recipe, fabric: Fabric, stack: Stack) -> float:
    """Seconds of the update and the gradient norm: bound by memory."""
    n = max(rank_parameters(model, recipe, r) for r in {0, recipe.pipeline // 2, recipe.pipeline - 1})
    if recipe.sharding != "none":
        n /= recipe.cut
    return stack.optimizer * n / (fabric.cluster.gpu.hbm_tb_s * 1e12 * MEMORY_SHARE)


def traffic(model: Model, recipe: Recipe, fabric: Fabric, stack: Stack) -> Traffic:
    """Bytes that a GPU of the busiest pipeline rank sends in a step; rings count as (n-1)/n of a tensor a round."""
    ranks = sorted({0, recipe.pipeline // 2, recipe.pipeline - 1})
    return max((rank_traffic(model, recipe, fabric, stack, r) for r in ranks), key=lambda t: t.sent)


def rank_traffic(model: Model, recipe: Recipe, fabric: Fabric, stack: Stack, rank: int) -> Traffic:
    """As `traffic`, of one pipeline rank. What all ranks exchange once a step beside gradients is too small to count."""
    r, m, n = recipe, recipe.microbatches, recipe.tensor
    stages = range(rank, r.stages, r.pipeline)
    layers = sum(r.stage_layers(model.layers)[s] for s in stages)
    width = 4.0 if r.precision == "fp32" else 2.0
    hidden = width * r.tokens * model.hidden
    # Each layer gathers twice and scatters twice, each way; embedding and head communicate once, each way.
    again = REDONE[r.recompute][3]
    if r.recompute == "full" and stack.layer_states == "ours":
        again = EARLY_STOP
    ends = (rank == 0) + (rank == r.pipeline - 1)
    tensor = m * hidden * (n - 1) / n * (layers * 4 * (2 + again) + 2 * ends)
    context = layers * m * (3 + again) * width * r.tokens * 2 * model.kv_width / n * (r.context - 1)
    ways = sum((s > 0) + (s < r.stages - 1) for s in stages)
    pipe = m * ways * _hidden_bytes(model, r) * width / 2
    if rank in (0, r.pipeline - 1):
        pipe += _tied_bytes(model, r, stack)  # an all_reduce over two ranks: each sends its whole
    mine = rank_parameters(model, r, rank)
    root = mine - layers * model.layer_share(n)
    copies = 0.0
    if r.sharding == "full":
        cut = (r.cut - 1) / r.cut
        # The root's weights are not freed by forward passes.
        before, after = gathers_a_step(r, rank)
        gathers = width * ((mine - root) * (before + after) + root * before)
        if r.pipeline > 1:  # the embedding is in the first stage, the head in the last
            each = stage_gathers(r, rank)
            at_root = each[0] if rank == 0 else each[-1]
            gathers += width * root * (at_root - before)
        sums = 1 if stack.reduces_once(r.pipeline) else m
        data = cut * (gathers + stack.gradient_bytes * mine * sums)
        copies = stack.gradient_bytes * mine / r.cut * 2 * (r.replicate - 1) / r.replicate * sums
    else:
        ranks = r.context * r.data_parallel
        whole = r.sharding == "none" or stack.reduce == "all_reduce"
        spread = 0.0 if r.sharding == "none" else width
        data = ((2 if whole else 1) * stack.gradient_bytes + spread) * mine * (ranks - 1) / ranks
    at = shard_group(r, fabric) if r.sharding == "full" else data_group(r, fabric)
    between = (data if at.nodes > 1 else 0.0) + (tensor if tensor_group(r, fabric).nodes > 1 else 0.0)
    if r.data_parallel * r.context * n > fabric.cluster.gpus_per_node:
        between += copies
    if r.pipeline > 1 and r.world // r.pipeline >= fabric.cluster.gpus_per_node:
        between += pipe
    return Traffic(tensor, context, pipe, data + copies, between)
