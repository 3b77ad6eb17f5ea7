"""The collectives of one training step by hand, from the job alone: what the dry run must count.

    n tensor (p parts), S shard, R replicate, P pipeline ranks; M microbatches of B sequences; q layers on this rank; T positions
    of a context-parallel rank; e expert-parallel ranks

Sizes are those of whole tensors: of an all-gather the output, of a reduce-scatter the input, of an all-to-all what is sent.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod

from seatrial.job.job import Job
from seatrial.job.loss_rows import loss_rows
from seatrial.job.parts import parts
from seatrial.job.schedules import schedule_named

Derived = dict[tuple[str, str, str], tuple[int, int]]  # (kind, dimension, dtype) -> calls, bytes


def derived(job: Job, rank: int, device: str) -> Derived:
    """Without reshard_after_forward in a pipeline: what torch does there is not written down here."""
    arch, layout, train = job.architecture, job.layout, job.train
    n, S, R, P = layout.tensor, layout.shard, layout.replicate, layout.pipeline
    B, T, M, D = train.microbatch, train.sequence_length // layout.context, job.microbatches, arch.hidden_size
    assert P == 1 or not job.parallel.reshards
    at = layout.coordinates(rank)
    stages = layout.stage_indices(at.pipeline)
    layers = sum(len(layout.stage_layers(s, arch.num_hidden_layers)) for s in stages)
    first, last = 0 in stages, layout.stages - 1 in stages
    dtype, width = ("bfloat16", 2) if train.precision != "fp32" else ("float32", 4)
    out: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])

    def add(kind: str, dimension: str, calls: int, n_bytes: int, of: str = dtype) -> None:
        if calls:
            out[kind, dimension, of][0] += calls
            out[kind, dimension, of][1] += calls * n_bytes

    dense = arch.first_k_dense_replace * first
    redone = 0
    if train.activation_checkpointing != "none":
        sizes = (len(layout.stage_layers(s, arch.num_hidden_layers)) for s in stages)
        redone = sum(-(-size // train.recompute_every_layers) for size in sizes)

    # Tensor parallel with sequence parallel: attention and MLP each gather before and scatter after; the backward pass
    # does the opposite of each. The embedding has one of the two.
    if n > 1:
        hidden = B * T * D * width
        gathers, scatters = 6 * layers, 4 * layers  # two gathers are repeated for the weights' gradients
        if arch.num_experts:  # what is gathered for them is kept, or recomputed
            gathers += (redone - dense) * (train.activation_checkpointing == "selective") - (layers - dense)
        if train.activation_checkpointing == "full":
            gathers += 2 * redone
            scatters += redone  # the last scatter of a layer gives nothing that the backward pass wants
        # Asynchronous tensor parallel sends each of those of the layers in p parts.
        p = parts(B, T // n) if job.parallel.async_tensor else 1
        for kind, calls in (("all-gather", gathers), ("reduce-scatter", scatters)):
            add(kind, "tensor", M * first, hidden)
            add(kind, "tensor", M * calls * p, hidden // p)
        # The loss over a split vocabulary, part by part: gathered positions, largest logit, two sums, scattered gradients.
        # A pass for the weight's gradient alone scatters nothing.
        passes = 2 if schedule_named(layout.schedule).split_backward and P > 1 else 1
        each = max(1, loss_rows(arch.vocab_size // n, B * T) // n)
        for begin in range(0, last * B * T // n, each):
            rows = n * min(each, B * T // n - begin)
            add("all-gather", "tensor", M * passes, rows * D * width)
            add("all-reduce", "tensor", M * passes, rows * 4, "float32")
            add("all-reduce", "tensor", M * passes, 2 * rows * 4, "float32")
            add("reduce-scatter", "tensor", M, rows * D * width)

    # Context parallel: keys and values of the whole sequence, and the sum of their gradients.
    if layout.context > 1:
        both = B * train.sequence_length * 2 * arch.num_key_value_heads * arch.head_dim // n * width
        own, further = both // layout.context, layout.context - 1
        if job.parallel.ring_attention:  # a step further in each pass, and their gradients once more
            passes = 2 * layers + redone * (train.activation_checkpointing == "full")
            for kind in ("send", "receive"):
                add(kind, "context", M * (passes * further + layers * layout.context), own)
        else:
            add("all-gather", "context", M * (layers + redone), both)
            add("reduce-scatter", "context", M * layers, both)
        if arch.num_experts:  # for the balance loss
            add("all-reduce", "context", M * last, 2 * arch.num_experts * 4, "float32")

    # Expert parallel: how many go where; hidden states and weights there, and hidden states back; gradients of these.
    e = layout.expert
    if e > 1:
        rows = B * T * arch.num_experts_per_tok
        add("all-to-all", "expert", M * (layers + redone), arch.num_experts * 4, "int32")
        add("all-to-all", "expert", M * (2 * layers + redone), rows * 4, "float32")
        add("all-to-all", "expert", M * 2 * (2 * layers + redone), rows * D * width)

    # Sharded data parallel: each layer is a group, and the rest of each stage is one. Expert parallel makes another one of
    # the experts of each layer, over the ranks with the same ones.
    groups = [(_layer(job, dense=True), "shard", S) for _ in range(dense)]
    groups += [(_layer(job), "shard", S) for _ in range(layers - dense)]
    if e > 1:
        assert not dense
        groups = [(_layer(job)[: -len(_experts(job))], "shard", S) for _ in range(layers)]
        own = [(rows // e, rest) for rows, rest in _experts(job)]
        groups += [(own, "expert_shard", S // e) for _ in range(layers)]
    inner = len(groups)
    groups += [(g, "shard", S) for s in stages if (g := _rest(job, s))]
    sharded = S * R > 1 or train.precision != "fp32"
    for index, (group, dimension, ranks) in enumerate(groups):
        padded = sum(-(-rows // ranks) * ranks * rest for rows, rest in group)
        if ranks > 1:
            times = 1
            if P == 1:  # weights are freed after each backward pass; a layer's after each forward pass too
                times = M * (2 if index < inner and job.parallel.reshards else 1)
            add("all-gather", dimension, times, padded * width)
            sums = M if train.accumulate == "sharded" else 1
            add("reduce-scatter", dimension, sums, padded * 4, "float32")
        if R > 1:
            add("all-reduce", "replicate", 1, padded // ranks * 4, "float32")

    # Norms see part of the positions: one sum of their gradients a step.
    mine = S if sharded else 1
    if n > 1:
        norms = 2 * layers * [D] + [D] * last + (2 * layers * [arch.head_dim] if arch.qk_norm else [])
        routers = (layers - dense) * _chunk(arch.num_experts, mine, at.shard) * D
        of_norms = sum(_chunk(size, mine, at.shard) for size in norms)
        add("all-reduce", "tensor", 1, 4 * (of_norms + routers), "float32")
    if arch.tie_word_embeddings and P > 1 and (first or last):
        rows = _chunk(arch.vocab_size // n, mine, at.shard)
        add("all-reduce", "pipeline" if P == 2 else "ends", 1, rows * D * 4, "float32")

    # Between stages: hidden states forward, their gradients backward.
    message = B * (T // n) * D * width
    ahead, back = len(stages) - last, len(stages) - first
    add("send", "pipeline", M * (ahead + back), message)
    add("receive", "pipeline", M * (ahead + back), message)
    if arch.num_experts:  # beside them the experts' counts and probabilities, and their gradients
        add("send", "pipeline", M * (ahead + back), 2 * arch.num_experts * 4, "float32")
        add("receive", "pipeline", M * (ahead + back), 2 * arch.num_experts * 4, "float32")

    # The one vector of a step, and before it how many positions were sent to each expert.
    world = layout.world_size
    for size in (14 + 5 * world, arch.num_hidden_layers * arch.num_experts):
        if device == "cuda":
            add("all-reduce", "world", int(world > 1 and size > 0), 8 * size, "float64")
        else:
            for dimension in ("tensor", "shard", "replicate", "pipeline"):
                calls = int(getattr(layout, dimension) > 1 and size > 0)
                add("all-reduce", dimension, calls, 8 * size, "float64")
    return {key: (calls, n_bytes) for key, (calls, n_bytes) in out.items()}


def _chunk(size: int, parts: int, index: int) -> int:
    """torch.chunk's sizes: equal ones, and what is left."""
    each = -(-size // parts)
    return max(0, min(each, size - index * each))


Group = list[tuple[int, int]]  # rows and the rest of each parameter, as a tensor-parallel rank holds it


def _layer(job: Job, *, dense: bool = False) -> Group:
    a, n = job.architecture, job.layout.tensor
    D, H, width = a.hidden_size, a.head_dim, a.intermediate_size
    q, kv = a.num_attention_heads * H, a.num_key_value_heads * H
    group = [(q // n, D), (kv // n, D), (kv // n, D), (D, q // n), (D, 1), (D, 1)]
    if a.qkv_bias:
        group += [(q // n, 1), (kv // n, 1), (kv // n, 1)]
    if a.qk_norm:
        group += [(H, 1), (H, 1)]
    if a.num_experts and not dense:
        shared = a.n_shared_experts * a.moe_intermediate_size // n
        group += [(shared, D), (shared, D), (D, shared)] if shared else []
        return [*group, (a.num_experts, D), *_experts(job)]
    return [*group, (width // n, D), (width // n, D), (D, width // n)]


def _experts(job: Job) -> Group:
    a = job.architecture
    return 3 * [(a.num_experts, a.moe_intermediate_size // job.layout.tensor * a.hidden_size)]


def _rest(job: Job, stage: int) -> Group:
    """Embedding, last norm and head, where this stage has them."""
    a, layout = job.architecture, job.layout
    first, last = stage == 0, stage == layout.stages - 1
    table = (a.vocab_size // layout.tensor, a.hidden_size)
    group = [table] * first + [(a.hidden_size, 1)] * last
    return group + [table] * (last and not (a.tie_word_embeddings and first))


def held(job: Job, rank: int) -> int:
    """Parameters of `rank`, in elements."""
    layout = job.layout
    at = layout.coordinates(rank)
    sparse, dense = _layers(job, rank)
    groups = [_layer(job)] * sparse + [_layer(job, dense=True)] * dense
    groups += [_rest(job, s) for s in layout.stage_indices(at.pipeline)]
    return held_biases(job, rank) + sum(
        _chunk(shape[0], layout.shard, at.shard) * prod(shape[1:]) for group in groups for shape in group
    )


def held_biases(job: Job, rank: int) -> int:
    """Elements of its routers' biases, which have no gradient."""
    arch = job.architecture
    return _layers(job, rank)[0] * (arch.num_experts if arch.sigmoid_router else 0)


def _layers(job: Job, rank: int) -> tuple[int, int]:
    """Those with experts, if the model has any, and those of its first ones without."""
    stages = job.layout.stage_indices(job.layout.coordinates(rank).pipeline)
    layers = sum(len(job.layout.stage_layers(s, job.architecture.num_hidden_layers)) for s in stages)
    dense = job.architecture.first_k_dense_replace * (0 in stages)
    return layers - dense, dense
