"""Bytes that training keeps on each GPU: states by sharding, activations by schedule position, working space.

Activations follow what the backward pass of `model/decoder.py` under `parallel/` saves ("ours"; e bytes a value, t positions of a
microbatch, n tensor-parallel ranks, D hidden, N H queries, K H keys, F the MLP):

    two inputs of norms, this rank's positions      e t 2 D / n
    two gathered inputs of products, all positions  e t 2 D          a gather's output is kept, so this part does not shrink with n
    queries, keys (turned), values, attention out   e t (2 N H + 2 K H) / n        and N H more, where `overlap.reorders`
    gate, silu(gate), up and their product          e t 4 F / n
    log-sum-exp of attention, two roots of norms    4 t N / n + 8 t / n

Megatron ("megatron") keeps its own positions of the gathered inputs and gathers again (arXiv:2205.05198 section 4.2, without
dropout and scores); "megatron-2021" is that paper's equation 1 with dropout and unfused scores, s b h (34 + 5 a s / h).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from seatrial.plan.model import Model
from seatrial.plan.overlap import reorders
from seatrial.plan.recipe import Recipe
from seatrial.plan.schedule import in_flight
from seatrial.plan.stacks import Stack
from seatrial.plan.unshard import ACTIVE_STAGES

GIB = 1024**3
# Outside torch's allocator, so max_memory_allocated has none of it: context and libraries, and NCCL's buffers for each group.
RUNTIME_BYTES = 0.7 * GIB
GROUP_BYTES = 688.0 * 1024**2
RUNTIME_SOURCE = (
    "0.7 GiB for context and libraries (assumption; 1.5 GiB before CUDA loaded kernels lazily: bigscience-workshop/bigscience "
    "chronicles-prequel.md); 688 MiB for each of NCCL's groups (4 A100, NVIDIA/nccl issue 964)"
)
# What the caching allocator cannot hand out again.
FRAGMENTATION = 0.04
FRAGMENTATION_SOURCE = (
    "reserved over allocated in 16 published runs: 2.8 to 7.9 %, in the mean 4.4 % (SimuMax, release v1.2)"
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the highest point of a step."""

    parameters: float  # what the optimizer updates
    gradients: float  # as the update finds them
    optimizer: float
    gathered: float  # whole weights of sharded layers
    unsharded_gradients: float  # what accumulates beyond `gradients` until it is reduced
    activations: float
    logits: float
    messages: float  # buffers of what comes from other stages
    runtime: float = RUNTIME_BYTES  # context, libraries, NCCL's buffers
    streams: float = 0.0  # what other streams than that of computing keep reserved at this point

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """What torch's allocator reports as the peak."""
        whole: float = sum(getattr(self, f.name) for f in fields(self))
        return whole - self.runtime - self.streams

    @property
    def reserved(self) -> float:
        """What the GPU must have."""
        return self.held + self.runtime

    @property
    def held(self) -> float:
        """What torch's allocator reports as reserved."""
        return self.allocated * (1 + FRAGMENTATION) + self.streams


# A search asks whether a layout fits, and then predicts it, which asks again.
@lru_cache(maxsize=1)
def memory(model: Model, recipe: Recipe, stack: Stack) -> Memory:
    """Of the pipeline rank that needs most."""
    ranks = [
        rank_memory(model, recipe, stack, r) for r in sorted({0, recipe.pipeline // 2, recipe.pipeline - 1})
    ]
    return max(ranks, key=lambda m: m.allocated)


def rank_parameters(model: Model, recipe: Recipe, rank: int) -> float:
    """Parameters of a pipeline rank on one tensor-parallel rank, before data parallel cuts them."""
    n = sum(recipe.stage_layers(model.layers)[rank :: recipe.pipeline]) * model.layer_share(recipe.tensor)
    ends = model.embedding_parameters() / recipe.tensor
    if rank == 0:
        n += ends + model.hidden * model.positions
    if rank == recipe.pipeline - 1:
        n += model.hidden
        if not (model.tied and recipe.pipeline == 1):
            n += ends
    return n


def rank_memory(model: Model, recipe: Recipe, stack: Stack, rank: int) -> Memory:
    """Of pipeline rank `rank`: the highest of a step's points.

    The loss of the last stage (logits, all activations), the beginning of a backward pass (all activations, one layer's
    gradients on their way), the end of the step's last one (gradients, one layer), and what looks at logits after it.
    """
    points = [_backward(model, recipe, stack, rank), _end(model, recipe, stack, rank)]
    if rank == recipe.pipeline - 1:
        points.append(_loss(model, recipe, stack, rank))
        if stack.metrics:
            points.append(_metrics(model, recipe, stack, rank))
    highest = max(points, key=lambda m: m.allocated)
    if recipe.sharding != "full" or recipe.cut * recipe.replicate == 1:
        return highest
    # Weights are gathered and gradients reduced in streams of their own, and the allocator gives a stream's memory to no other
    # (docs.pytorch.org, notes/cuda, memory management): what these held at their own highest points stays reserved.
    other = ("gathered", "gradients", "unsharded_gradients")
    spare = sum(max(getattr(m, f) for m in points) - getattr(highest, f) for f in other)
    return replace(highest, streams=spare)


def _loss(model: Model, recipe: Recipe, stack: Stack, rank: int) -> Memory:
    base = _base(model, recipe, stack, rank)
    values = recipe.tokens * model.vocab / recipe.tensor
    each = stack.logits[0 if recipe.tensor > 1 else 1]
    if recipe.pipeline > 1 and recipe.tensor == 1 and stack.layer_states == "ours":
        each += _width(
            recipe
        )  # torch's pipeline holds on to the stage's output, while its fp32 copy is worked on
    return replace(
        base,
        gathered=_gathered(model, recipe, rank, layers=0),
        activations=_waiting(model, recipe, stack, rank),
        logits=each * values,
    )


def _metrics(model: Model, recipe: Recipe, stack: Stack, rank: int) -> Memory:
    """After the backward pass, when metrics of training look at the logits once more: activations are gone."""
    held = stack.metrics * recipe.tokens * model.vocab / recipe.tensor
    end = _end(model, recipe, stack, rank)
    return replace(end, gathered=_gathered(model, recipe, rank, layers=0), activations=0.0, logits=held)


def _backward(model: Model, recipe: Recipe, stack: Stack, rank: int) -> Memory:
    base = _base(model, recipe, stack, rank)
    layer = model.layer_share(recipe.tensor)
    whole = layer_activations(model, recipe, stack, _width(recipe))
    # A layer that is computed again is held whole; else only gradients on their way through it come on top.
    working = whole * (0.3 if recipe.recompute in ("none", "attention") else 1.0)
    transient = (_width(recipe) + 4) * layer if _reduces_at_once(recipe, stack) else 0.0
    return replace(
        base,
        gathered=_gathered(model, recipe, rank, layers=2),
        unsharded_gradients=base.unsharded_gradients + transient,
        activations=_waiting(model, recipe, stack, rank) + working,
    )


def _end(model: Model, recipe: Recipe, stack: Stack, rank: int) -> Memory:
    base = _base(model, recipe, stack, rank)
    own = stack.state_bytes[1] * rank_parameters(model, recipe, rank) / recipe.cut
    return replace(
        base,
        gradients=own if recipe.sharding == "full" else base.gradients,
        gathered=_gathered(model, recipe, rank, layers=2),
        activations=layer_activations(model, recipe, stack, _width(recipe)),
    )


def _width(recipe: Recipe) -> int:
    return 4 if recipe.precision == "fp32" else 2


def _reduces_at_once(recipe: Recipe, stack: Stack) -> bool:
    """Full sharding without accumulating whole gradients: each layer's are reduced as they come."""
    return recipe.sharding == "full" and (recipe.microbatches == 1 or not stack.reduces_once(recipe.pipeline))


def _base(model: Model, recipe: Recipe, stack: Stack, rank: int) -> Memory:
    """What is there all along: states and buffers. Under full sharding gradients only as they accumulate."""
    n = rank_parameters(model, recipe, rank)
    weight, gradient, state = stack.state_bytes
    unsharded = 0.0
    if recipe.sharding == "full":
        parameters, optimizer = weight * n / recipe.cut, state * n / recipe.cut
        gradients = gradient * n / recipe.cut if recipe.microbatches > 1 else 0.0
        if not _reduces_at_once(recipe, stack):
            unsharded = 4 * n - gradients
    else:
        parameters, gradients, optimizer = float(weight * n), float(gradient * n), float(state * n)
        if recipe.sharding in ("optimizer", "gradients"):
            optimizer /= recipe.cut
        if recipe.sharding == "gradients":
            gradients /= recipe.cut
    parameters += _eight_bit_weights(model, recipe, stack, rank)
    messages = _messages(model, recipe, stack, rank)
    unsharded += stack.bucket_bytes  # DeepSpeed makes its buffer even where there is nobody to reduce with
    return Memory(
        parameters, gradients, optimizer, 0.0, unsharded, 0.0, 0.0, messages, _runtime(recipe, stack)
    )


def _runtime(recipe: Recipe, stack: Stack) -> float:
    """Context, libraries, and buffers of NCCL: one group for all ranks, one for each dimension, and one for each neighbour stage."""
    groups = 0
    if recipe.world > 1:
        groups = 1 + stack.groups + min(2, recipe.pipeline - 1)
        groups += (recipe.tensor > 1) + (recipe.context > 1)
        full = recipe.sharding == "full"
        groups += (recipe.cut if full else recipe.context * recipe.data_parallel) > 1
        groups += full and recipe.replicate > 1
    held: float = stack.context_gib * GIB + groups * GROUP_BYTES
    return held


def _gathered(model: Model, recipe: Recipe, rank: int, *, layers: int) -> float:
    """Whole weights that full sharding has gathered: all, or the root's and those of `layers` layers.

    Under a pipeline torch frees nothing between microbatches, whatever `reshard_after_forward` says, while a rank has no more
    than three stages.
    """
    wrapped = recipe.cut * recipe.replicate > 1 or recipe.precision != "fp32"
    if recipe.sharding != "full" or not wrapped:
        return 0.0
    n = rank_parameters(model, recipe, rank)
    if not recipe.reshard or recipe.pipeline > 1:
        return _width(recipe) * (n - _freed(model, recipe, rank))
    held = sum(recipe.stage_layers(model.layers)[rank :: recipe.pipeline])
    layer = model.layer_share(recipe.tensor)
    return _width(recipe) * (n - (held - min(layers, held)) * layer)


def _freed(model: Model, recipe: Recipe, rank: int) -> float:
    """Parameters that are not whole of a rank with more stages than torch's pipeline keeps whole (`unshard.py`).

    The smallest stages; less the embedding, which is there twice while its stage is gathered again beside all activations
    (traced, `seatrial.plan.dryrun`).
    """
    if recipe.pipeline == 1 or recipe.stages_per_rank <= ACTIVE_STAGES:
        return 0.0
    layer = model.layer_share(recipe.tensor)
    stages = [count * layer for count in recipe.stage_layers(model.layers)[rank :: recipe.pipeline]]
    root = rank_parameters(model, recipe, rank) - sum(stages)
    stages[0 if rank == 0 else -1] += root
    twice = root if rank == 0 else 0.0
    return sum(sorted(stages)[:-ACTIVE_STAGES]) - twice


def _waiting(model: Model, recipe: Recipe, stack: Stack, rank: int) -> float:
    """Activations that wait for their backward pass, at the schedule's highest point."""
    width = _width(recipe)
    whole = layer_activations(model, recipe, stack, width)
    own = recipe.tokens / (recipe.tensor if recipe.sequence_parallel else 1)
    kept_input = width * own * model.hidden
    kept = {
        "none": whole,
        "attention": whole,
        # q, v, the gate's and the last product's output, attention, the layer's input; torchtitan keeps every second product.
        "operators": width
        * recipe.tokens
        * (2 * model.query_width + model.kv_width + model.ffn)
        / recipe.tensor
        + 2 * kept_input,
        "alternate": (whole + kept_input) / 2,
        "full": kept_input,
    }[recipe.recompute]
    counts = recipe.stage_layers(model.layers)[rank :: recipe.pipeline]
    held = in_flight(recipe.schedule, recipe.pipeline, recipe.stages_per_rank, recipe.microbatches, rank)
    return held * (sum(counts) / len(counts) * kept + kept_input) + _owed(model, recipe, rank)


def _owed(model: Model, recipe: Recipe, rank: int) -> float:
    """Gradients of products' and norms' outputs, which zero-bubble keeps until it makes the weights' gradients of them.

    Of every stage that waits and of the one at work; beside them of the logits, whose weights are the largest.
    """
    if recipe.schedule != "zero-bubble" or recipe.pipeline == 1:
        return 0.0
    width, n, D = _width(recipe), recipe.tensor, model.hidden
    cut = model.query_width + 2 * model.kv_width + model.ffn_in  # outputs that tensor parallel cuts
    layer = width * recipe.tokens * (cut / n + 2 * D + 2 * D / n)
    counts = recipe.stage_layers(model.layers)[rank :: recipe.pipeline]
    waiting = min(rank, recipe.microbatches * recipe.stages_per_rank)
    logits = width * recipe.tokens * model.vocab / n if rank == recipe.pipeline - 1 else 0.0
    return (waiting + 1) * sum(counts) / len(counts) * layer + waiting * logits


def _eight_bit_weights(model: Model, recipe: Recipe, stack: Stack, rank: int) -> float:
    """Megatron's fp8 products keep their weights in 8 bits as well, once as they are and once transposed.

    docs.nvidia.com, Transformer Engine, `is_first_microbatch`: cast in a step's first microbatch, used in all.
    """
    if recipe.precision != "fp8" or stack.layer_states != "megatron":
        return 0.0
    held = sum(recipe.stage_layers(model.layers)[rank :: recipe.pipeline])
    return 2.0 * held * model.layer_matrix_parameters() / recipe.tensor


def layer_activations(model: Model, recipe: Recipe, stack: Stack, width: int = 2) -> float:
    """Bytes that one layer keeps of one microbatch without recomputation."""
    t, n = recipe.tokens, recipe.tensor
    D, F, NH, KH = model.hidden, model.ffn, model.query_width, model.kv_width
    scale = 4.0 * t * model.heads / n
    if stack.layer_states == "ours":
        mlp = 4 if model.gated else 2
        if recipe.compiled and model.gated:
            mlp = 3  # one kernel makes the product of gate and up; silu(gate) is not kept
        heads = (3 if reorders(recipe, stack) else 2) * NH
        return width * t * (2 * D / n + 2 * D + (heads + 2 * KH + mlp * F) / n) + scale + 8.0 * t / n
    own = n if recipe.sequence_parallel else 1
    if stack.layer_states == "megatron-2021":
        scores = 5.0 * recipe.microbatch * model.heads * float(recipe.sequence) ** 2 / n
        if recipe.recompute == "attention":
            scores = 0.0
        return t * D * (10.0 / own + 24.0 / n) + scores
    kept = width * t * (4 * D / own + (2 * NH + 2 * KH + (3 if model.gated else 2) * F) / n) + scale
    if recipe.precision == "fp8":  # what goes into products is kept in 8 bits; attention's output in both
        kept -= t * (2 * D / own + F / n - NH / n)
    return kept


def _messages(model: Model, recipe: Recipe, stack: Stack, rank: int) -> float:
    """torch's pipeline stages have a buffer for every microbatch, each way; Megatron has one for each pass."""
    if recipe.pipeline == 1:
        return 0.0
    own = recipe.tokens / (recipe.tensor if recipe.sequence_parallel else 1)
    each = _width(recipe) * own * model.hidden
    if stack.layer_states != "ours":
        return 2 * each
    stages = range(rank, recipe.stages, recipe.pipeline)
    ways = sum((s > 0) + (s < recipe.stages - 1) for s in stages)
    return each * recipe.microbatches * ways
