"""Predicted time of one training step by part, for the slowest rank; the parts add up to the step time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from seatrial.job.architecture import Architecture
from seatrial.job.schedules import Times, schedule_named
from seatrial.plan.cost import muon
from seatrial.plan.cost.calibration import UNIT_FACTORS, Factors
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.kernels import MEMORY_SHARE
from seatrial.plan.cost.memory import (
    neighbours,
    rank_parameters,
    representative_ranks,
    root_parameters,
    trained_parameters,
)
from seatrial.plan.cost.overlap import OURS
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.cost.unshard import unshards
from seatrial.plan.cost.work import EARLY_STOP, REDONE, Work, tensor_group, work
from seatrial.plan.model.cluster import Group, group
from seatrial.plan.model.recipe import Recipe, layer_kinds

# Weak scaling of a layout slows a step by 0.4 to 0.7 % per doubling beyond what communication explains; MaxText by 2.2 % in total.
SLOWER_BY_DOUBLING = 0.005
SLOWER_SOURCE = (
    "64 to 2,048 H100 with Llama 3 70B 1.8 and 3.4 %, 16 to 2,048 with Nemotron 15B 4.5 and 4.8 % slower than communication "
    "explains (NVIDIA/dgxc-benchmarking, v24.11.1, v25.04.02)"
)


@dataclass(frozen=True)
class Parts:
    """Seconds of a step. Work is the mean over pipeline ranks; the excess of the slowest rank is in `bubble`."""

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
class Sent:
    """Bytes that one GPU sends in a step, by dimension."""

    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float

    @property
    def sent(self) -> float:
        return self.tensor + self.context + self.expert + self.pipeline + self.data


@dataclass(frozen=True)
class Traffic(Sent):
    """`leaving`: the part that leaves the NVLink domain over NICs, as the mean of the domain's GPUs."""

    leaving: Sent


@dataclass(frozen=True)
class DataParallel:
    """Exposed data-parallel communication and the computation it slows, seconds a step."""

    exposed: float
    slowed: float


def slowest(world: int) -> float:
    """Slowdown of the slowest of `world` GPUs relative to a single one; a synchronous step waits for it."""
    return 1 + SLOWER_BY_DOUBLING * math.log2(world)


def shard_group(recipe: Recipe, fabric: Fabric) -> Group:
    return group(fabric.cluster, stride=recipe.layout.tensor, size=recipe.shard_ranks)


def replicate_group(recipe: Recipe, fabric: Fabric) -> Group:
    stride = recipe.layout.tensor * recipe.context * recipe.layout.shard
    return group(fabric.cluster, stride=stride, size=recipe.layout.replicate)


def data_group(recipe: Recipe, fabric: Fabric) -> Group:
    """All ranks with the same weights, whose gradients are reduced, context-parallel ones included."""
    size = recipe.context * recipe.layout.data_parallel
    return group(fabric.cluster, stride=recipe.layout.tensor, size=size)


def step_parts(
    model: Architecture,
    recipe: Recipe,
    fabric: Fabric,
    stack: Stack,
    pace: float,
    factors: Factors = UNIT_FACTORS,
) -> Parts:
    """The parts of one training step. Raises UnknownNetworkError, UnknownSpeedError."""
    w = work(model, recipe, fabric, stack, pace * slowest(recipe.world), factors)
    layout, layers = recipe.layout, model.num_hidden_layers
    counts = layout.layer_counts(layers)
    p2p = exposed_send(model, recipe, fabric, stack, w)
    gathers = gathered_layer(model, recipe, fabric, stack, w)
    times = [_stage(w, counts, s, p2p, gathers) for s in range(layout.stages)]
    schedule = schedule_named(layout.schedule)
    makespan = schedule.span(layout.pipeline, layout.stages_per_rank, recipe.microbatches, times)
    # Means over pipeline ranks: every layer, the embedding and the head count once over all of them.
    each = recipe.microbatches / layout.pipeline
    layer = (w.forward + w.backward).times(layers * each)
    ends = (w.head_forward + w.head_backward + w.embedding).times(each)
    again = w.again.times(layers * each)
    both = layer + ends
    sends = 2 * p2p * each * max(0, layout.stages - 1)
    data_in, slowed_in = (gathers[0] + gathers[1]) * layers * each, gathers[2] * layers * each
    once = data_once(model, recipe, fabric, stack, w)
    redone_communication = again.tensor + again.context + again.slowed
    known = both.total + again.kernels + redone_communication + sends + data_in + slowed_in
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


def exposed_send(model: Architecture, recipe: Recipe, fabric: Fabric, stack: Stack, w: Work) -> float:
    """Exposed seconds of sending one microbatch to the next stage, or its gradient back."""
    if recipe.layout.pipeline == 1:
        return 0.0
    n_bytes = _hidden_bytes(model, recipe)
    borders = range(recipe.layout.stages - 1)
    across = sum(_leaves(recipe, fabric, stage % recipe.layout.pipeline) for stage in borders) / len(borders)
    seconds = fabric.send(n_bytes, across=True) * across if across else 0.0
    seconds += fabric.send(n_bytes, across=False) * (1 - across)
    # A stage's forward or backward pass, their mean, is what a message can overlap with.
    compute = (w.forward + w.backward + w.again).total / 2 * model.num_hidden_layers / recipe.layout.stages
    seconds -= min(seconds, compute) * stack.hide_pipeline
    if not recipe.sequence_parallel:
        seconds += fabric.seconds("all_gather", n_bytes * recipe.layout.tensor, tensor_group(recipe, fabric))
    return seconds


def _leaves(recipe: Recipe, fabric: Fabric, rank: int) -> float:
    """Share of the messages between a pipeline rank and the next (of the last: the first) that leave an NVLink domain."""
    joined, pipeline = fabric.cluster.domain_gpus, recipe.layout.pipeline
    if not fabric.cluster.several_domains:
        return 0.0
    each = recipe.world // pipeline
    if each >= joined or rank == pipeline - 1:
        return 1.0
    here, there = (r * each for r in (rank, rank + 1))
    if joined % each:  # domain boundaries split stages: the average
        return each / joined
    return float(here // joined != there // joined)


def _tied_bytes(model: Architecture, recipe: Recipe, stack: Stack) -> float:
    """Bytes, on one rank, of the gradient of a tied embedding with copies in the first and the last stage."""
    if not model.tie_word_embeddings or recipe.layout.pipeline == 1 or model.lora is not None:
        return 0.0
    cut = recipe.shard_ranks if recipe.sharding in ("full", "gradients") else 1
    return stack.state_bytes[1] * model.embedding_parameters() / recipe.layout.tensor / cut


def _tied(model: Architecture, recipe: Recipe, fabric: Fabric, stack: Stack) -> float:
    """Seconds of the all-reduce of that gradient, once a step."""
    stride = recipe.world // recipe.layout.pipeline * max(1, recipe.layout.pipeline - 1)
    at = group(fabric.cluster, stride=stride, size=2)
    return fabric.seconds("all_reduce", _tied_bytes(model, recipe, stack), at)


def _hidden_bytes(model: Architecture, recipe: Recipe) -> float:
    """Bytes that one rank sends to the next stage: its part of the positions.

    Without sequence parallel all ranks of a tensor group have the whole tensor, so each sends a part, which the receiving
    group all-gathers over NVLink: arXiv:2104.04473 section 4.1; DeepSpeed's PartitionedTensor.
    """
    return 2.0 * recipe.tokens * model.hidden_size / recipe.layout.tensor


def gathered_layer(
    model: Architecture, recipe: Recipe, fabric: Fabric, stack: Stack, w: Work
) -> tuple[float, float, float]:
    """Full sharding, one layer and microbatch: exposed seconds (forward, backward), and seconds of slowed computation.

    The next layer's weights are gathered while this layer computes; the excess over its computation is exposed.
    """
    if recipe.sharding != "full" or recipe.shard_ranks * recipe.layout.replicate == 1:
        return 0.0, 0.0, 0.0
    n = model.layer_parameters() / recipe.layout.tensor
    gather = fabric.seconds("all_gather", 2.0 * n, shard_group(recipe, fabric))
    micro = recipe.microbatches
    before, again = gathers_a_step(recipe)
    forward, backward = gather * before / micro, gather * again / micro
    scatter, copies = _reduction(n, recipe, fabric, stack)
    # In every microbatch, and in the last one only, where it overlaps with that backward pass alone.
    always = scatter * (_reductions(recipe, stack) > 1) + copies * (_sums(recipe, stack) > 1)
    last = scatter + copies - always
    compute_f, compute_b = w.forward.window, (w.backward + w.again).window
    backward += always
    hidden_f = min(forward, compute_f) * stack.hide_data
    hidden_b = (min(backward, compute_b) * (micro - 1) + min(backward + last, compute_b)) / micro
    hidden_b *= stack.hide_data
    exposed_b = backward + last / micro - hidden_b
    return forward - hidden_f, exposed_b, stack.contention * (hidden_f + hidden_b)


def _reduction(parameters: float, recipe: Recipe, fabric: Fabric, stack: Stack) -> tuple[float, float]:
    """Seconds in which full sharding reduces the gradients of whole `parameters` once: (over the shard group, over replicas)."""
    n_bytes = stack.gradient_bytes * parameters
    scatter = fabric.seconds("reduce_scatter", n_bytes, shard_group(recipe, fabric))
    return scatter, fabric.seconds(
        "all_reduce", n_bytes / recipe.shard_ranks, replicate_group(recipe, fabric)
    )


def _reductions(recipe: Recipe, stack: Stack) -> int:
    """How often full sharding reduces a layer's gradients over the shard group in a step."""
    return 1 if stack.reduces_once(recipe) else recipe.microbatches


def _sums(recipe: Recipe, stack: Stack) -> int:
    """How often they are all-reduced over replicas: ours once (`parallel/shard.py`), others in every reduction."""
    return 1 if stack.reduce_once else _reductions(recipe, stack)


def gathers_a_step(recipe: Recipe, rank: int = 0) -> tuple[float, int]:
    """How often full sharding gathers a layer's weights in a step: (before forward passes, before backward passes).

    Without a pipeline, weights are freed after each microbatch's backward pass. Under torch's pipeline only forward
    passes free them, if resharding is on; but of more than three stages only three stay gathered (`unshard.py`; here the
    mean over a rank's stages). Verified by tracing, `seatrial.plan.cost.dryrun`.
    """
    m = recipe.microbatches
    if recipe.layout.pipeline == 1:
        return m, m if recipe.reshard else 0
    each = stage_gathers(recipe, rank)
    return sum(each) / len(each), m if recipe.reshard else 0


def stage_gathers(recipe: Recipe, rank: int) -> tuple[float, ...]:
    """How often each stage of a pipeline rank is gathered in a step (see `unshards`)."""
    at = recipe.layout
    return unshards(at.schedule, at.pipeline, at.stages_per_rank, recipe.microbatches, rank)


def data_once(model: Architecture, recipe: Recipe, fabric: Fabric, stack: Stack, w: Work) -> DataParallel:
    """Data-parallel communication that happens once a step: gradients, and weights after a sharded update."""
    layout = recipe.layout
    if recipe.sharding == "full":
        if recipe.shard_ranks * layout.replicate == 1:
            return DataParallel(0.0, 0.0)
        # The root's own weights, embeddings and head: their communication overlaps with nothing.
        at = shard_group(recipe, fabric)
        each = max(root_parameters(model, recipe, rank) for rank in representative_ranks(layout))
        before = gathers_a_step(recipe)[0]
        seconds = fabric.seconds("all_gather", 2.0 * each, at) * before
        scatter, copies = _reduction(each, recipe, fabric, stack)
        scatter, copies = scatter * _reductions(recipe, stack), copies * _sums(recipe, stack)
        return DataParallel(seconds + scatter + copies, 0.0)
    at = data_group(recipe, fabric)
    if at.size == 1:
        return DataParallel(0.0, 0.0)
    rank_layers = max(sum(layout.rank_layers(r, model.num_hidden_layers)) for r in range(layout.pipeline))
    mine = max(rank_parameters(model, recipe, rank) for rank in representative_ranks(layout))
    grads = stack.gradient_bytes * mine
    whole = recipe.sharding == "none" or stack.reduce == "all_reduce"
    reduce = fabric.seconds("all_reduce" if whole else "reduce_scatter", grads, at)
    spread = 0.0 if recipe.sharding == "none" else fabric.seconds("all_gather", 2.0 * mine, at)
    # Gradients overlap with the last microbatch's backward pass, weights with the first one's forward pass.
    window_b = (w.backward + w.again).window * rank_layers
    window_f = w.forward.window * rank_layers
    hidden_b = min(reduce, window_b) * stack.hide_data
    hidden_f = min(spread, window_f) * stack.hide_data
    exposed = reduce - hidden_b + spread - hidden_f
    return DataParallel(exposed, stack.contention * (hidden_b + hidden_f))


def _optimizer(model: Architecture, recipe: Recipe, fabric: Fabric, stack: Stack) -> float:
    """Seconds of the optimizer update and the gradient norm, both memory-bound; of Muon also what precedes its update."""
    ranks = representative_ranks(recipe.layout)
    n = max(rank_parameters(model, recipe, r) for r in ranks)
    if recipe.sharding != "none":
        n /= recipe.shard_ranks
    seconds = stack.optimizer * n / (fabric.cluster.gpu.hbm_tb_s * 1e12 * MEMORY_SHARE)
    if stack.matrix_saving:
        seconds += max(muon.seconds(model, recipe, fabric, r) for r in ranks)
    return seconds


def traffic(model: Architecture, recipe: Recipe, fabric: Fabric, stack: Stack) -> Traffic:
    """Bytes that a GPU of the busiest pipeline rank sends in a step; a ring sends (n-1)/n of a tensor a round."""
    ranks = (rank_traffic(model, recipe, fabric, stack, r) for r in representative_ranks(recipe.layout))
    return max(ranks, key=lambda t: t.sent)


def rank_traffic(model: Architecture, recipe: Recipe, fabric: Fabric, stack: Stack, rank: int) -> Traffic:
    """As `traffic`, for one pipeline rank. The step's vector of values is negligible."""
    r, layout, m, n = recipe, recipe.layout, recipe.microbatches, recipe.layout.tensor
    layers, sparse = sum(layout.rank_layers(rank, model.num_hidden_layers)), layer_kinds(model, r, rank)[0]
    width = r.width
    hidden = width * r.tokens * model.hidden_size
    # A layer has two all-gathers and two reduce-scatters, forward and backward; embedding and head one collective in each.
    # Ours has two more all-gathers for the weight gradients; what experts gather is kept, or gathered again by selective
    # recomputation.
    rings = r.rings and stack.name in OURS
    again, keys_again = REDONE[r.recompute][3:]
    if rings and r.recompute == "selective":
        keys_again = 0.0  # attention is kept
    if r.recompute == "full" and stack.layer_states == "ours":
        again = EARLY_STOP
    share = r.recomputed_of(layout.rank_layers(rank, model.num_hidden_layers)) / layers
    ends = (rank == 0) + (rank == layout.pipeline - 1)
    messages = layers * (4 * (2 + share * again) + 2.0 * (stack.name in OURS)) + 2 * ends
    if model.num_experts:
        messages += sparse.recomputed * (r.recompute == "selective") - sparse.layers
    if rank == layout.pipeline - 1 > 0 and stack.name in OURS and layout.splits_backward:
        messages += 1  # the head's logits are recomputed for its weight gradient
    adapters = 0.0
    if model.lora is not None:
        # No all-gather for the gradients of frozen weights, nor, before the first adapter, for those of inputs.
        messages -= (
            2 * layers
            - sparse.layers * (model.num_experts > 0)
            + (rank == 0) * (1 + model.first_layer_unneeded()[1])
        )
        each_layer = model.lora.rank * len(model.lora.targets) * (2 + share * (r.recompute != "none"))
        adapters = m * width * r.tokens * layers * each_layer
    tensor = (m * hidden * messages + adapters) * (n - 1) / n
    # Keys and values: gathered, gathered again for the backward pass unless they are kept as by ours, gradients reduced.
    # Around a ring: in each pass, and their gradients one rank further.
    exchanges = (2 if stack.name in OURS and not rings else 3) + share * keys_again
    sent = exchanges * (r.context - 1) + rings
    context = layers * m * sent * width * r.tokens * 2 * model.kv_width / n
    expert = _exchanged(model, r, rank) * (layout.expert - 1) / layout.expert
    message = m * _hidden_bytes(model, r) * width / 2
    per_rank, last = layout.stages_per_rank, layout.pipeline - 1
    tied = _tied_bytes(model, r, stack) if rank in (0, last) else 0.0
    pipe = message * neighbours(layout, rank) + tied  # an all_reduce over two ranks: each sends all of it
    crossing = (per_rank - (rank == 0)) * _leaves(r, fabric, (rank - 1) % layout.pipeline)
    crossing += (per_rank - (rank == last)) * _leaves(r, fabric, rank)
    mine, trained = rank_parameters(model, r, rank), trained_parameters(model, r, rank)
    root = root_parameters(model, r, rank)
    copies = apart = 0.0
    if r.sharding == "full":
        cut = (r.shard_ranks - 1) / r.shard_ranks
        # The root's weights are not freed by forward passes.
        before, after = gathers_a_step(r, rank)
        gathers = width * ((mine - root) * (before + after) + root * before)
        if layout.pipeline > 1:  # the embedding is in the first stage, the head in the last
            each = stage_gathers(r, rank)
            at_root = each[0] if rank == 0 else each[-1]
            gathers += width * root * (at_root - before)
        reduced = stack.gradient_bytes * _reductions(r, stack)
        data = cut * (gathers + reduced * trained)
        if layout.expert > 1:  # a rank gathers and reduces its own experts, over the ranks with the same ones
            experts = sparse.layers * model.num_experts * model.expert_parameters / n
            experts *= (width * (before + after) + (reduced if model.lora is None else 0)) / r.shard_ranks
            apart = experts * (r.shard_ranks / layout.expert - 1)
            data -= experts * (r.shard_ranks - 1)
        copies = (
            stack.gradient_bytes * trained / r.shard_ranks * 2 * (layout.replicate - 1) / layout.replicate
        )
        copies *= _sums(r, stack)
    else:
        ranks = r.context * layout.data_parallel
        whole = r.sharding == "none" or stack.reduce == "all_reduce"
        spread = 0.0 if r.sharding == "none" else width
        data = (2 if whole else 1) * stack.gradient_bytes * trained + spread * mine
        data *= (ranks - 1) / ranks
    in_tensor = exchanged = 0.0
    if stack.matrix_saving:  # over tensor x shard x replicate
        exchanged = muon.sent_bytes(model, r, rank)
        if n == muon.stage_ranks(r):
            in_tensor, exchanged = exchanged, 0.0
    at = shard_group(r, fabric) if r.sharding == "full" else data_group(r, fabric)
    within = group(fabric.cluster, stride=n, size=r.context)
    same = group(fabric.cluster, stride=n * layout.expert, size=r.shard_ranks // layout.expert)
    leaving = Sent(
        _ring_leaves(tensor, tensor_group(r, fabric)) + in_tensor * muon.leaving(r, fabric),
        _ring_leaves(context, within),
        _all_to_all_leaves(expert, group(fabric.cluster, stride=n, size=layout.expert)),
        message * crossing + (tied if fabric.cluster.several_domains else 0.0),
        _ring_leaves(data, at)
        + _ring_leaves(apart, same)
        + _ring_leaves(copies, replicate_group(r, fabric))
        + exchanged * muon.leaving(r, fabric),
    )
    return Traffic(tensor + in_tensor, context, expert, pipe, data + apart + copies + exchanged, leaving)


def _exchanged(model: Architecture, recipe: Recipe, rank: int) -> float:
    """Bytes that expert parallel exchanges in a step, those that stay included, if all experts get the same.

    Of each position and expert its hidden states before and after the expert, its weight in fp32, and the gradients of these;
    of each expert how many it gets. A recomputed layer repeats what is not a gradient.
    """
    sparse = layer_kinds(model, recipe, rank)[0]
    slots = recipe.tokens * model.num_experts_per_tok
    one = slots * (2 * recipe.width * model.hidden_size + 4)
    forward = one + 4 * model.num_experts
    return float(recipe.microbatches * (sparse.layers * (forward + one) + sparse.recomputed * forward))


def _all_to_all_leaves(sent: float, at: Group) -> float:
    """The bytes that leave a domain of those that a GPU sends to all others equally."""
    return sent * (at.size - at.per_domain) / (at.size - 1) if at.domains > 1 else 0.0


def _ring_leaves(sent: float, at: Group) -> float:
    """A GPU's share of the bytes that leave a domain in a ring, whose ranks send `sent` each.

    One link of a ring leaves a domain, and NCCL has as many rings as the group has NICs there, each over another one.
    """
    return sent / at.per_domain if at.domains > 1 else 0.0
