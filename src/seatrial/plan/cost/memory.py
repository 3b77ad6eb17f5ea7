"""Memory of training on each GPU: states by sharding, activations by pipeline position, temporary memory.

Activations are what `model/decoder.py` under `parallel/` saves for the backward pass ("ours"; e bytes a value,
t positions of a microbatch, n tensor-parallel ranks, D hidden, N H queries, K H keys, F the MLP):

    two inputs of norms, this rank's positions      e t 2 D / n
    two inputs of GEMMs, this rank's positions      e t 2 D / n                gathered again in the backward pass
    queries, keys (rotated), values, attention out  e t (2 N H + 2 K H) / n    and N H more if `overlap.reorders`
    gate, silu(gate), up and their product          e t 4 F / n
    log-sum-exp of attention, two roots of norms    4 t N / n + 8 t / n

Other trainers that save the same ("ours") save the inputs of GEMMs gathered, e t 2 D. Megatron ("megatron") gathers them
again (arXiv:2205.05198 section 4.2, without dropout and scores); "megatron-2021" is that paper's equation 1 with dropout and
unfused scores, s b h (34 + 5 a s / h).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from seatrial.base.units import GIB, MIB
from seatrial.hardware.catalogue import FLASH, FLASH_HEAD_DIM
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.loss_rows import loss_rows
from seatrial.job.schedules import schedule_named
from seatrial.plan.cost import muon
from seatrial.plan.cost.overlap import OURS, reorders
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.cost.unshard import ACTIVE_STAGES
from seatrial.plan.model.recipe import Recipe, layer_kinds

# Outside torch's allocator, so not in max_memory_allocated: context and libraries, and buffers per NCCL communicator.
GROUP_BYTES = 688 * MIB
RUNTIME_SOURCE = (
    "0.7 GiB for context and libraries (assumption; 1.5 GiB before CUDA loaded kernels lazily: bigscience-workshop/bigscience "
    "chronicles-prequel.md); 688 MiB for each NCCL communicator (4 A100, NVIDIA/nccl issue 964)"
)
# Memory that the caching allocator cannot reuse, as a share of what is allocated.
FRAGMENTATION = 0.04
FRAGMENTATION_SOURCE = (
    "reserved over allocated in 16 published runs: 2.8 to 7.9 %, mean 4.4 % (SimuMax, release v1.2)"
)


FSDP2 = (*OURS, "torchtitan", "torchtitan-compiled")


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a step."""

    parameters: float  # as the optimizer updates them
    gradients: float  # as the optimizer reads them
    optimizer: float
    gathered: float  # unsharded weights
    unsharded_gradients: float  # beyond `gradients`, until they are reduced
    activations: float
    logits: float
    messages: float  # pipeline receive buffers
    runtime: float  # context, libraries, NCCL's buffers
    streams: float = 0.0  # reserved by other streams than the compute stream, beyond what they hold now

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """Peak memory as torch's allocator reports it."""
        held = self.states + self.gathered + self.unsharded_gradients
        return held + self.activations + self.logits + self.messages

    @property
    def reserved(self) -> float:
        """Peak memory of the GPU: the allocator's reserved memory and the runtime's."""
        return self.held + self.runtime

    @property
    def held(self) -> float:
        """Reserved memory as torch's allocator reports it."""
        return self.allocated * (1 + FRAGMENTATION) + self.streams


def _with(memory: Memory, **changed: float) -> Memory:
    """`dataclasses.replace` without its checks, which took a tenth of a search."""
    other = object.__new__(Memory)
    vars(other).update(vars(memory), **changed)
    return other


# Cached: a search first checks whether a layout fits, then predicts it; after `parallel = "auto"` the plan searches again.
@lru_cache(maxsize=1 << 15)
def memory(model: Architecture, recipe: Recipe, stack: Stack) -> Memory:
    """Memory of the pipeline rank that needs the most."""
    ranks = [rank_memory(model, recipe, stack, r) for r in representative_ranks(recipe.layout)]
    return max(ranks, key=lambda m: m.reserved)


def representative_ranks(layout: Layout) -> list[int]:
    """Representative pipeline ranks: the first, one in the middle, the last."""
    return sorted({0, layout.pipeline // 2, layout.pipeline - 1})


def neighbours(layout: Layout, rank: int) -> int:
    """Number of neighbour stages of a pipeline rank's stages."""
    return sum((s > 0) + (s < layout.stages - 1) for s in layout.stage_indices(rank))


def layer_share(model: Architecture, tensor: int) -> float:
    """Parameters of one layer on a tensor-parallel rank: all but norms, the experts' router and a half of each adapter are sharded."""
    own = (model.layer_parameters() - model.layer_replicated) / tensor + model.layer_replicated
    return own + model.adapter_parameters(tensor)


def experts_elsewhere(model: Architecture, recipe: Recipe, layers: int) -> float:
    """Parameters of experts of `layers` that other ranks of an expert group compute, on one tensor-parallel rank."""
    share = 1 - 1 / recipe.layout.expert
    return share * layers * model.num_experts * model.expert_parameters / recipe.layout.tensor


def layer_parameters(model: Architecture, recipe: Recipe, rank: int) -> float:
    """Parameters of a pipeline rank's layers on one tensor-parallel rank, before data parallel shards them."""
    kinds = layer_kinds(model, recipe, rank)
    return sum(kind.layers * layer_share(kind.model, recipe.layout.tensor) for kind in kinds)


def rank_parameters(model: Architecture, recipe: Recipe, rank: int) -> float:
    """Parameters of a pipeline rank on one tensor-parallel rank, before data parallel shards them."""
    layout = recipe.layout
    n = layer_parameters(model, recipe, rank)
    ends = model.embedding_parameters() / layout.tensor
    if rank == 0:
        n += ends + model.hidden_size * model.learned_positions
    if rank == layout.pipeline - 1:
        n += model.hidden_size
        if not (model.tie_word_embeddings and layout.pipeline == 1):
            n += ends
    return n


def trained_parameters(model: Architecture, recipe: Recipe, rank: int) -> float:
    """Those of `rank_parameters` that have gradients and optimizer state: with LoRA only adapters have."""
    if model.lora is None:
        return rank_parameters(model, recipe, rank)
    layers = sum(recipe.layout.rank_layers(rank, model.num_hidden_layers))
    return layers * model.adapter_parameters(recipe.layout.tensor)


def optimizer_bytes(model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> float:
    """Bytes of optimizer state of a pipeline rank on one tensor-parallel rank, before data parallel shards it."""
    state = float(stack.state_bytes[2] * trained_parameters(model, recipe, rank))
    if stack.matrix_saving:
        state -= stack.matrix_saving * muon.matrix_parameters(model, recipe, rank)
    return state


def root_parameters(model: Architecture, recipe: Recipe, rank: int) -> float:
    """As `rank_parameters`, without those of layers: embeddings, last norm, head."""
    return rank_parameters(model, recipe, rank) - layer_parameters(model, recipe, rank)


def rank_memory(model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> Memory:
    """Memory of pipeline rank `rank` at the highest of these points of a step.

    The loss of the last stage (logits, all activations), the start of a backward pass (all activations, one layer's
    gradients being reduced), the end of the last backward pass (gradients, one layer), metrics that read logits after it,
    and the end of a microbatch's backward pass in the first stage of a pipeline (the embedding's gradient).
    """
    n = rank_parameters(model, recipe, rank)
    base = _base(model, recipe, stack, rank, n)
    end = _end(base, model, recipe, stack, rank)
    points = [*_backward(base, model, recipe, stack, rank), end]
    if rank == recipe.layout.pipeline - 1:
        points.append(_loss(base, model, recipe, stack, rank, n))
        if stack.metrics:
            points.append(_metrics(end, model, recipe, stack, rank, n))
    ends = (0, recipe.layout.pipeline - 1) if stack.name in OURS else (0,)
    if rank in ends and recipe.layout.pipeline > 1 and recipe.accumulate == "sharded" and model.lora is None:
        points.append(_embedding(base, model, recipe, rank))
    if stack.matrix_saving:  # while an update is prepared
        points.append(_with(end, activations=muon.temporary_bytes(model, recipe, rank)))
    if model.lora is not None and base.gathered:
        points += _gathering(base, model, recipe, rank)
    highest = max(points, key=lambda m: m.allocated)
    if recipe.sharding != "full" or recipe.shard_ranks * recipe.layout.replicate == 1:
        return highest
    # Weights are gathered and gradients reduced in separate streams, and the allocator does not share memory between
    # streams (docs.pytorch.org, notes/cuda, memory management): the peak of each stays reserved.
    if stack.name in FSDP2:
        return _with(highest, streams=_streams(highest, model, recipe, stack, rank))
    other = ("gathered", "gradients", "unsharded_gradients")
    spare = sum(max(getattr(m, f) for m in points) - getattr(highest, f) for f in other)
    return _with(highest, streams=spare)


def _streams(highest: Memory, model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> float:
    """Bytes that FSDP2's streams keep reserved beyond what they hold at the highest point (bench/null_cuda).

    Weights come in messages: the root's or a layer's, with what this rank sends of it, and the next layer's. Gradients are
    allocated where they are reduced, the root's a second time before they are added or summed over replicas.
    """
    root, ranks = root_parameters(model, recipe, rank), recipe.shard_ranks
    layer = layer_share(model, recipe.layout.tensor) - experts_elsewhere(model, recipe, 1)
    messages = recipe.width * (max(root, layer) * (1 + 1 / ranks) + layer) if ranks > 1 else 0.0
    gradient = stack.state_bytes[1] / ranks
    reduced = gradient * trained_parameters(model, recipe, rank)
    at_once = _reduces_at_once(recipe, stack)
    if at_once:
        reduced -= highest.gradients
    if model.lora is None and (ranks == 1 or (at_once and recipe.microbatches > 1)):
        reduced += gradient * root
    return messages + max(0.0, reduced)


def _loss(base: Memory, model: Architecture, recipe: Recipe, stack: Stack, rank: int, n: float) -> Memory:
    layout = recipe.layout
    columns = model.vocab_size / layout.tensor
    held = _with(base, gathered=_gathered(model, recipe, rank, n, layers=0))
    each = stack.logits[0 if layout.tensor > 1 else 1]
    if stack.name not in OURS:
        if layout.pipeline > 1 and layout.tensor == 1 and stack.layer_states == "ours":
            each += recipe.width  # torch's pipeline keeps the stage's output while its fp32 copy is in use
        return _with(held, logits=each * recipe.tokens * columns)
    # One part (`parallel/loss.py`): its logits in fp32 and in 16 bits; its hidden states of all ranks; their gradient. Also
    # the gradients of this rank's hidden states and of the head's weight.
    part = (each if recipe.width == 2 else each - 2) * columns
    part += recipe.width * model.hidden_size * (2 if layout.tensor > 1 else 1)
    return _with(
        held,
        unsharded_gradients=held.unsharded_gradients
        + (recipe.width * model.hidden_size * columns if model.lora is None else 0.0),
        activations=base.activations + stage_input(model, recipe),
        logits=part * min(recipe.tokens, loss_rows(int(columns), recipe.tokens)),
    )


def _metrics(end: Memory, model: Architecture, recipe: Recipe, stack: Stack, rank: int, n: float) -> Memory:
    """Memory when training metrics read the logits after the backward pass: activations are freed."""
    held = stack.metrics * recipe.tokens * model.vocab_size / recipe.layout.tensor
    return _with(end, gathered=_gathered(model, recipe, rank, n, layers=0), activations=0.0, logits=held)


def _backward(base: Memory, model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> list[Memory]:
    layer = layer_share(model, recipe.layout.tensor) - experts_elsewhere(model, recipe, 1)
    if model.lora is not None:
        layer = model.adapter_parameters(recipe.layout.tensor)
    whole = layer_activations(model, recipe, stack)
    transient = (recipe.width + 4) * layer if _reduces_at_once(recipe, stack) else 0.0
    if model.num_experts and not transient and recipe.sharding == "full":
        # As computed, before it is added to what is accumulated: much with experts.
        transient = recipe.width * layer
    # The stage's last layers, up to the last one that is recomputed: (activations, gradients being reduced). A recomputed
    # layer holds all its activations; otherwise only gradients of activations are added.
    freed, points = 0, []
    if recipe.recompute_every > 1:
        freed = (recipe.layout.rank_layers(rank, model.num_hidden_layers)[-1] - 1) % recipe.recompute_every
    if recipe.recompute not in ("none", "attention"):
        again = whole
        if recipe.recompute == "selective":
            again -= _kept(model, recipe, stack) - stage_input(model, recipe)
        points.append((again - freed * whole, transient))
        if stack.name in OURS:
            # Of its weight gradients only the MLP's last one exists. Its input is already among what is kept, but with offload
            # that of the layer before it has come back too.
            within = again + _within_layer(model, recipe)
            within -= 0.0 if recipe.offloads else stage_input(model, recipe)
            down = recipe.width * model.hidden_size * model.ffn_width / recipe.layout.tensor
            points.append(
                (within - freed * whole, transient - max(0.0, min(transient, recipe.width * layer - down)))
            )
    if not points or freed:
        # A layer whose gradients are being reduced has freed its activations.
        free = whole if recipe.recompute == "none" or freed else 0.0
        if stack.name in OURS:
            points.append((max(0.3 * whole, _within_layer(model, recipe)), max(0.0, transient - free)))
        else:
            points.append((0.3 * whole, transient))
    last = rank == recipe.layout.pipeline - 1 and model.lora is None
    if stack.name in OURS and recipe.sharding == "full" and last:
        # The head's gradient stays in 16 bits until the root is reduced or accumulated, after a backward pass.
        head = recipe.width * model.embedding_parameters() / recipe.layout.tensor
        points = [(working, transient + head) for working, transient in points]
    return [
        _with(
            base,
            unsharded_gradients=base.unsharded_gradients + transient,
            activations=base.activations + working,
        )
        for working, transient in points
    ]


def _within_layer(model: Architecture, recipe: Recipe) -> float:
    """Bytes of gradients within a layer's backward pass beyond the activations that it has freed by then, at the highest (traced).

    Of the product of gate and up and of both its factors, when the product is freed; or, with tensor parallel, of the input of
    gate and up, one from each, and that input gathered, when all four activations of the MLP are freed and two gradients left.
    """
    n, D, F = recipe.layout.tensor, model.hidden_size, model.ffn_width
    values = 2 * F / n
    if n > 1:
        values = max(values, 3 * D + D / n - 2 * F / n)
    if model.num_experts:  # of positions in the order of the experts, on their way from and to other ranks
        values = max(values, (6 if recipe.layout.expert > 1 else 3) * model.num_experts_per_tok * D)
    return recipe.width * recipe.tokens * values


def _gathering(base: Memory, model: Architecture, recipe: Recipe, rank: int) -> list[Memory]:
    """Memory while weights are gathered and the messages that they come in are still held (traced).

    Of the root and the first layer, when a forward pass begins. And of the last layers that a pass needs, when no other weights
    are freed: in a forward pass, or under a pipeline that frees weights in a backward pass. Only without gradients of all
    weights, LoRA, can it be the highest.
    """
    layout, count = recipe.layout, sum(recipe.layout.rank_layers(rank, model.num_hidden_layers))
    width, root, in_flight = recipe.width, root_parameters(model, recipe, rank), _in_flight(recipe, rank)
    layer = layer_share(model, layout.tensor) - experts_elsewhere(model, recipe, 1)
    experts = 0.0  # of a layer that this rank computes: with expert parallel in a message of their own
    if layout.expert > 1:
        experts = model.num_experts * model.expert_parameters / layout.tensor / layout.expert
    begins = _with(base, gathered=2 * width * (root + layer - experts), activations=0.0)
    same = recipe.shard_ranks / layout.expert  # ranks that compute the same ones
    message = layer if layout.expert == 1 else experts if same > 1 else layer - experts
    if recipe.reshard and layout.pipeline > 1:
        gathered, before = base.gathered + width * message, (in_flight - 1) / in_flight
    else:
        gathered = width * (root + layer) if recipe.reshard else base.gathered
        # Also what a rank sends, or the message of another layer.
        gathered += width * message * (2 if layout.expert == 1 else 1 + 1 / same)
        before = max(0, count - (2 if layout.expert == 1 else 1)) / count / in_flight
    return [begins, _with(base, gathered=gathered, activations=base.activations * before)]


def _embedding(base: Memory, model: Architecture, recipe: Recipe, rank: int) -> Memory:
    """Memory when the first or last stage reduces the embedding's or head's gradient, with other microbatches in flight.

    It exists three times: as computed, as accumulated, and in fp32 for the reduction (traced).
    """
    layout = recipe.layout
    at = (layout.pipeline, layout.stages_per_rank, recipe.microbatches, rank)
    held = schedule_named(layout.schedule).in_flight(*at)
    copies = (2 * recipe.width + 4) * model.embedding_parameters() / layout.tensor
    return _with(
        base,
        unsharded_gradients=base.unsharded_gradients + copies,
        activations=base.activations * (held - 1) / held,
    )


def _end(base: Memory, model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> Memory:
    own = stack.state_bytes[1] * trained_parameters(model, recipe, rank) / recipe.shard_ranks
    return _with(
        base,
        gradients=own if recipe.sharding == "full" else base.gradients,
        activations=layer_activations(model, recipe, stack),
    )


def _reduces_at_once(recipe: Recipe, stack: Stack) -> bool:
    """Whether full sharding reduces each layer's gradients in every microbatch instead of accumulating whole ones."""
    once = recipe.microbatches > 1 and stack.reduces_once(recipe)
    return recipe.sharding == "full" and not once


def _base(model: Architecture, recipe: Recipe, stack: Stack, rank: int, n: float) -> Memory:
    """Memory that most points have in common, with `n` parameters on this rank.

    States, buffers, accumulated gradients under full sharding; weights gathered in a pass; activations in flight.
    """
    weight, gradient, _ = stack.state_bytes
    trained, optimizer = trained_parameters(model, recipe, rank), optimizer_bytes(model, recipe, stack, rank)
    unsharded = 0.0
    if recipe.sharding == "full":
        parameters, optimizer = weight * n / recipe.shard_ranks, optimizer / recipe.shard_ranks
        gradients = gradient * trained / recipe.shard_ranks if recipe.microbatches > 1 else 0.0
        if not _reduces_at_once(recipe, stack):
            if model.lora is None:  # adapters have no part of it
                trained -= experts_elsewhere(model, recipe, layer_kinds(model, recipe, rank)[0].layers)
            unsharded = 4 * trained - gradients
    else:
        parameters = float(weight * n)
        gradients = float(gradient * trained)
        if recipe.sharding in ("optimizer", "gradients"):
            optimizer /= recipe.shard_ranks
        if recipe.sharding == "gradients":
            gradients /= recipe.shard_ranks
    parameters += _eight_bit_weights(model, recipe, stack, rank)
    messages = _messages(model, recipe, stack, rank)
    unsharded += stack.bucket_bytes  # DeepSpeed allocates its bucket even on a single rank
    gathered, waiting = _gathered(model, recipe, rank, n, layers=2), _waiting(model, recipe, stack, rank)
    runtime = _runtime(recipe, stack)
    return Memory(parameters, gradients, optimizer, gathered, unsharded, waiting, 0.0, messages, runtime)


def _runtime(recipe: Recipe, stack: Stack) -> float:
    """Bytes of context, libraries, NCCL buffers: communicators of the world, each dimension, each neighbour stage."""
    layout, groups = recipe.layout, 0
    if recipe.world > 1:
        groups = 1 + stack.groups + min(2, layout.pipeline - 1)
        groups += (layout.tensor > 1) + (recipe.context > 1)
        groups += (layout.expert > 1) + (1 < layout.expert < layout.shard)
        full = recipe.sharding == "full"
        groups += (recipe.shard_ranks if full else recipe.context * layout.data_parallel) > 1
        groups += full and layout.replicate > 1
        # Muon's, unless it is one of the others.
        sizes = (layout.tensor, recipe.shard_ranks, layout.replicate)
        groups += stack.matrix_saving > 0 and sum(size > 1 for size in sizes) > 1
    held: float = stack.context_gib * GIB + groups * GROUP_BYTES
    return held


def _gathered(model: Architecture, recipe: Recipe, rank: int, n: float, *, layers: int) -> float:
    """Bytes of weights that full sharding has gathered of `n`: all, or the root's and those of `layers` layers.

    Under a pipeline with at most three stages a rank, torch frees nothing between microbatches, even with
    `reshard_after_forward`.
    """
    wrapped = recipe.shard_ranks * recipe.layout.replicate > 1 or recipe.precision != "fp32"
    if recipe.sharding != "full" or not wrapped:
        return 0.0
    sparse = layer_kinds(model, recipe, rank)[0].layers
    elsewhere = experts_elsewhere(model, recipe, sparse)
    n -= elsewhere
    if not recipe.reshard or recipe.layout.pipeline > 1:
        return recipe.width * (n - _freed(model, recipe, rank))
    layer = layer_share(model, recipe.layout.tensor) - experts_elsewhere(model, recipe, 1)
    all_layers = layer_parameters(model, recipe, rank) - elsewhere
    return recipe.width * (n - all_layers + min(layers, sparse) * layer)


def _freed(model: Architecture, recipe: Recipe, rank: int) -> float:
    """Parameters that are not gathered on a rank with more stages than torch's pipeline keeps gathered (`unshard.py`).

    Those of the smallest stages, less the embedding, which exists twice while its stage is gathered again with all
    activations held (traced, `seatrial.plan.cost.dryrun`).
    """
    if recipe.layout.pipeline == 1 or recipe.layout.stages_per_rank <= ACTIVE_STAGES:
        return 0.0
    layer = layer_share(model, recipe.layout.tensor) - experts_elsewhere(model, recipe, 1)
    stages = [count * layer for count in recipe.layout.rank_layers(rank, model.num_hidden_layers)]
    for dense in layer_kinds(model, recipe, rank)[1:]:
        stages[0] += dense.layers * (layer_share(dense.model, recipe.layout.tensor) - layer)
    root = root_parameters(model, recipe, rank)
    stages[0 if rank == 0 else -1] += root
    twice = root if rank == 0 else 0.0
    return sum(sorted(stages)[:-ACTIVE_STAGES]) - twice


def _waiting(model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> float:
    """Bytes of activations of microbatches in flight, at the schedule's peak."""
    kept_input = stage_input(model, recipe)
    counts = recipe.layout.rank_layers(rank, model.num_hidden_layers)
    layers = 0.0
    for kind in layer_kinds(model, recipe, rank):
        layers += kind.recomputed * _kept(kind.model, recipe, stack) if kind.recomputed else 0.0
        if kind.recomputed < kind.layers:
            layers += (kind.layers - kind.recomputed) * layer_activations(kind.model, recipe, stack)
    waiting = _in_flight(recipe, rank) * (layers / len(counts) + kept_input)
    return waiting - offloaded_inputs(model, recipe, rank) * kept_input + _owed(model, recipe, stack, rank)


def _in_flight(recipe: Recipe, rank: int) -> int:
    """Microbatches in flight at the schedule's peak, each counted once for each of the rank's stages."""
    layout = recipe.layout
    if layout.pipeline == 1:
        return layout.stages_per_rank
    at = (layout.pipeline, layout.stages_per_rank, recipe.microbatches, rank)
    return schedule_named(layout.schedule).in_flight(*at)


def offloaded_inputs(model: Architecture, recipe: Recipe, rank: int) -> float:
    """How many inputs of layers a pipeline rank has in host memory, at the schedule's peak."""
    if not recipe.offloads:
        return 0.0
    counts = recipe.layout.rank_layers(rank, model.num_hidden_layers)
    stays = [1 if stage == 0 else 2 for stage in recipe.layout.stage_indices(rank)]
    away = sum(max(0, recipe.recomputed_of((n,)) - stay) for n, stay in zip(counts, stays, strict=True))
    return _in_flight(recipe, rank) * away / len(counts)


def _kept(model: Architecture, recipe: Recipe, stack: Stack) -> float:
    """Bytes that a recomputed layer keeps of one microbatch until its backward pass."""
    kept_input = stage_input(model, recipe)
    if recipe.recompute == "full":
        return kept_input
    whole = layer_activations(model, recipe, stack)
    if recipe.recompute == "alternate":
        return (whole + kept_input) / 2
    # q, v, outputs of gate and down projection, attention, the layer's input; torchtitan saves every second GEMM.
    wide = 2 * model.query_width + model.kv_width + model.ffn_width
    scale = 0.0
    if recipe.recompute == "selective":
        # q, k, v, attention with its log-sum-exp, outputs of o, gate and up projection, the layer's input.
        wide = 2 * model.query_width + 2 * model.kv_width + model.ffn_in
        wide += model.num_experts * recipe.layout.tensor  # the router's, of all positions on each rank
        scale = 4.0 * recipe.tokens * model.num_attention_heads / recipe.layout.tensor
        if recipe.compiled and model.num_experts:
            scale += kept_input  # the MLP's, see `recompute_in_parts`
    elif recipe.recompute != "operators":
        return whole
    return recipe.width * recipe.tokens * wide / recipe.layout.tensor + scale + 2 * kept_input


def stage_input(model: Architecture, recipe: Recipe) -> float:
    """Bytes of the hidden states of one microbatch on one rank, between layers."""
    own = recipe.tokens / (recipe.layout.tensor if recipe.sequence_parallel else 1)
    return recipe.width * own * model.hidden_size


def _owed(model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> float:
    """Output gradients of GEMMs and norms, kept until weight gradients are computed from them.

    Of every deferred weight pass and the current one; also those of the logits, which our head recomputes instead.
    """
    layout, schedule = recipe.layout, schedule_named(recipe.layout.schedule)
    if layout.pipeline == 1 or not schedule.split_backward:
        return 0.0
    width, n, D = recipe.width, recipe.layout.tensor, model.hidden_size
    counts, layers = layout.rank_layers(rank, model.num_hidden_layers), 0.0
    for kind in layer_kinds(model, recipe, rank):
        own = kind.model
        cut = own.query_width + 2 * own.kv_width + own.ffn_in  # outputs that tensor parallel shards
        layers += kind.layers * width * recipe.tokens * (cut / n + 2 * D + 2 * D / n)
    waiting = schedule.deferred(layout.pipeline, layout.stages_per_rank, recipe.microbatches, rank)
    last = rank == layout.pipeline - 1 and stack.name not in OURS
    logits = width * recipe.tokens * model.vocab_size / n if last else 0.0
    return (waiting + 1) * layers / len(counts) + waiting * logits


def _eight_bit_weights(model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> float:
    """Bytes of the fp8 weights that Megatron keeps in addition, plain and transposed.

    docs.nvidia.com, Transformer Engine, `is_first_microbatch`: cast in a step's first microbatch, used in all.
    """
    if recipe.precision != "fp8" or stack.layer_states != "megatron":
        return 0.0
    held = sum(recipe.layout.rank_layers(rank, model.num_hidden_layers))
    return 2.0 * held * model.layer_matrix_parameters() / recipe.layout.tensor


def layer_activations(model: Architecture, recipe: Recipe, stack: Stack) -> float:
    """Bytes that one layer saves for one microbatch without recomputation."""
    t, n, width = recipe.tokens, recipe.layout.tensor, recipe.width
    D, F, NH, KH = model.hidden_size, model.ffn_width, model.query_width, model.kv_width
    scale = 4.0 * t * model.num_attention_heads / n
    if stack.layer_states == "ours":
        mlp = 4.0 if model.gated else 2.0
        if recipe.compiled and model.gated:
            mlp = 3  # one kernel computes the product of gate and up; silu(gate) is not kept
        heads = (3 if reorders(recipe, stack) else 2) * NH
        keys = 2 * KH
        if stack.name in OURS and not recipe.rings:
            if _repeats_keys(model, recipe):
                keys = 2 * NH
            if recipe.context > 1:
                keys *= recipe.context  # gathered
                heads += NH  # attention's output, of each chunk and joined
        if model.qk_norm:  # their inputs
            heads, keys = heads + NH, keys + KH
        inputs = 2 * D / n if stack.name in OURS else 2 * D
        if model.num_experts:
            if not recipe.compiled:  # also times the experts' weights
                mlp = 4 + model.num_experts_per_tok * model.moe_intermediate_size / F
            scale += _routing(model, recipe)
        kept = 2 * D / n + inputs + (heads + keys + mlp * F) / n + _adapters_keep(model, n)
        return width * t * kept + scale + 8.0 * t / n
    own = n if recipe.sequence_parallel else 1
    if stack.layer_states == "megatron-2021":
        scores = 5.0 * recipe.microbatch * model.num_attention_heads * float(recipe.sequence) ** 2 / n
        if recipe.recompute == "attention":
            scores = 0.0
        return t * D * (10.0 / own + 24.0 / n) + scores
    kept = width * t * (4 * D / own + (2 * NH + 2 * KH + (3 if model.gated else 2) * F) / n) + scale
    if recipe.precision == "fp8":  # GEMM inputs are saved in 8 bits; attention's output in both widths
        kept -= t * (2 * D / own + F / n - NH / n)
    return kept


def _repeats_keys(model: Architecture, recipe: Recipe) -> bool:
    """Whether attention gets keys and values once for each query head: `hardware.accelerator.needs_equal_heads`."""
    flash = recipe.attention in FLASH and recipe.precision != "fp32"
    return not flash or model.head_dim > FLASH_HEAD_DIM


def _routing(model: Architecture, recipe: Recipe) -> float:
    """Bytes that a layer with experts saves besides what their products and activations do; the same on all tensor ranks.

    The positions gathered for the router, and again in the order of the experts; the router's probabilities; of each
    position and expert its index (8 bytes), its place in the order and back (16), its weight in fp32 and as it is applied;
    under expert parallel also its place among those that arrive, and back.
    """
    t, n, width, k = recipe.tokens, recipe.layout.tensor, recipe.width, model.num_experts_per_tok
    gathered = 1 - 1 / n  # instead of this rank's positions
    each = 28 + width + (16 if recipe.layout.expert > 1 else 0)
    return t * (width * model.hidden_size * (gathered + k) + 4 * model.num_experts + each * k)


def _adapters_keep(model: Architecture, n: int) -> float:
    """With LoRA, values a position that a layer saves beyond those of the base model; negative if it saves less.

    Each adapter saves its product with A. An input of products without adapters is not needed for weight gradients, but
    tensor parallel keeps it.
    """
    if model.lora is None:
        return 0.0
    row = len({"o_proj", "down_proj"}.intersection(model.lora.targets))
    more = model.lora.rank * (len(model.lora.targets) - row + row / n)
    inputs = {("q_proj", "k_proj", "v_proj"): model.hidden_size, ("gate_proj", "up_proj"): model.hidden_size}
    inputs |= {("down_proj",): model.intermediate_size}
    if model.num_experts:  # the positions, also in the order of the experts, and inputs of last products
        return more - (1 + model.num_experts_per_tok) * model.hidden_size - model.ffn_width / n
    if n == 1:
        more -= sum(w for names, w in inputs.items() if not set(names).intersection(model.lora.targets))
    return more


def _messages(model: Architecture, recipe: Recipe, stack: Stack, rank: int) -> float:
    """Bytes of pipeline receive buffers: torch has one per microbatch and direction, Megatron one per pass."""
    if recipe.layout.pipeline == 1:
        return 0.0
    each = stage_input(model, recipe)
    if stack.layer_states != "ours":
        return 2 * each
    return each * recipe.microbatches * neighbours(recipe.layout, rank)
