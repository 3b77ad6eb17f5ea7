"""Rules between the layout of ranks, the model and the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from seatrial.hardware.catalogue import FLASH_HEAD_DIM, find_gpu
from seatrial.job.architecture import Architecture
from seatrial.job.finding import Facts, RuleViolation
from seatrial.job.layout import Layout
from seatrial.job.numbers import divisors, either, near_multiples, next_multiple
from seatrial.job.partial import UnreadableError
from seatrial.job.schedules import schedule_named
from seatrial.job.schema import Fp8Scaling, JobFile, ParallelSection, joined_gpus

# What the dimensions of FP8 products must be multiples of: on NVIDIA GPUs; the values that have a scale.
_FP8_UNITS: dict[Fp8Scaling, int] = {"rowwise": 16, "tensorwise": 16, "mxfp8": 32}
_OTHER_FP8 = {"CDNA 3"}  # "fnuz" formats, without negative zero
_MXFP8 = {"Blackwell"}  # CDNA 4 has such products too, but reads scales in another order


def _parallel(facts: Facts) -> ParallelSection:
    parallel = facts.job.parallel
    if isinstance(parallel, str):
        raise UnreadableError("parallel")
    return parallel


def _tensor_model(facts: Facts) -> Iterator[RuleViolation]:
    tensor = _parallel(facts).tensor
    if tensor == 1:
        return
    keys = ("parallel.tensor",)
    a = facts.architecture
    heads, kv_heads = a.num_attention_heads, a.num_key_value_heads
    widths = ["moe_intermediate_size"] if a.num_experts else ["intermediate_size"]
    if a.first_k_dense_replace:
        widths.append("intermediate_size")
    intermediates = {width: getattr(a, width) for width in widths}
    fits = [
        t
        for t in divisors(math.gcd(heads, kv_heads, *intermediates.values()))
        if t <= joined_gpus(facts.job.cluster)
    ]
    hint = f"use tensor = {either(fits)}"
    for name, size in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if size % tensor:
            yield RuleViolation(
                keys, f"{name} {size} is not divisible by tensor {tensor}: a head cannot be split", hint
            )
    for width, size in intermediates.items():
        if size % tensor:
            yield RuleViolation(keys, f"{width} {size} is not divisible by tensor {tensor}", hint)


def _tensor_vocabulary(facts: Facts) -> Iterator[RuleViolation]:
    tensor, vocabulary = _parallel(facts).tensor, facts.architecture.vocab_size
    if vocabulary % tensor:
        yield RuleViolation(
            ("parallel.tensor",),
            f"vocab_size {vocabulary} is not divisible by tensor {tensor}",
            f"pad the vocabulary: model.vocab_size = {next_multiple(vocabulary, tensor)}",
        )


def _tensor_domain(facts: Facts) -> Iterator[RuleViolation]:
    tensor, gpus = _parallel(facts).tensor, facts.job.cluster.gpus_per_node
    domain = joined_gpus(facts.job.cluster)
    # Within a node, or whole nodes of a domain.
    if not (gpus % tensor and (tensor % gpus or tensor > domain)):
        return
    fits = [t for t in divisors(max(domain, gpus)) if not (gpus % t and t % gpus)]
    wants, within = f"divide gpus_per_node {gpus}", "one node"
    if domain > gpus:
        wants, within = f"{wants} or fill nodes of the {domain} GPUs that NVLink joins", "one NVLink domain"
    more = "" if domain > gpus or tensor % gpus else "; if NVLink joins nodes, set cluster.nvlink_domain"
    yield RuleViolation(
        ("parallel.tensor", "cluster.gpus_per_node"),
        f"tensor {tensor} does not {wants}: a tensor-parallel group must stay within {within}",
        f"use tensor = {either(fits)}{more}",
    )


def _domain(facts: Facts) -> Iterator[RuleViolation]:
    domain, gpus = joined_gpus(facts.job.cluster), facts.job.cluster.gpus_per_node
    if domain % gpus:
        yield RuleViolation(
            ("cluster.nvlink_domain", "cluster.gpus_per_node"),
            f"nvlink_domain {domain} is not a multiple of gpus_per_node {gpus}: NVLink joins whole nodes",
            f"use nvlink_domain = {either(near_multiples(domain, gpus))}",
        )


def _sequence(facts: Facts) -> Iterator[RuleViolation]:
    tensor, context = _parallel(facts).tensor, _parallel(facts).context
    length, unit = facts.job.train.sequence_length, 2 * context * tensor
    if unit > 2 and length % unit:
        product = " x ".join(
            [
                "2",
                *([f"context {context}"] if context > 1 else []),
                *([f"tensor {tensor}"] if tensor > 1 else []),
            ]
        )
        yield RuleViolation(
            ("train.sequence_length", "parallel.context" if context > 1 else "parallel.tensor"),
            f"sequence_length {length} is not divisible by {product} = {unit}: an uneven sequence-parallel shard "
            "aborts the process",
            f"use sequence_length = {either(near_multiples(length, unit))}",
        )


def _profile(facts: Facts) -> Iterator[RuleViolation]:
    train = facts.job.train
    ranks = train.profile_ranks
    if ranks is None:
        return
    if max(ranks) >= facts.layout.world_size:
        yield RuleViolation(
            ("train.profile_ranks",),
            f"rank {max(ranks)} cannot be profiled: the job has {facts.layout.world_size} ranks",
            f"use ranks from 0 to {facts.layout.world_size - 1}",
        )
    if train.profile_first_step + train.profile_steps - 1 > train.steps:
        yield RuleViolation(
            ("train.profile_first_step", "train.profile_steps", "train.profile_ranks"),
            f"the trace needs steps {train.profile_first_step} to {train.profile_first_step + train.profile_steps - 1}, "
            f"and the job has {train.steps}",
            "use an earlier profile_first_step",
        )


def _async_tensor(facts: Facts) -> Iterator[RuleViolation]:
    # There is always something to split: `_sequence` requires an even number of positions on each rank.
    parallel = _parallel(facts)
    if parallel.async_tensor and parallel.tensor == 1:
        yield RuleViolation(
            ("parallel.async_tensor",),
            "async_tensor = true has no effect: tensor is 1",
            "remove it, or set tensor = 2 or more",
        )


def _stages(facts: Facts) -> Iterator[RuleViolation]:
    layers, stages = facts.architecture.num_hidden_layers, facts.layout.stages
    if layers < stages:
        per_rank = facts.layout.stages_per_rank
        product = f"pipeline {facts.layout.pipeline}" + (
            f" x stages_per_rank {per_rank}" if per_rank > 1 else ""
        )
        yield RuleViolation(
            ("parallel.pipeline", "parallel.stages_per_rank"),
            f"{product} = {stages} stages, but the model has only {layers} layers"
            if per_rank > 1
            else f"{product} needs {stages} layers, but the model has only {layers}",
            f"use at most {layers} stages",
        )
    dense = facts.architecture.first_k_dense_replace
    if 0 < dense < layers and 0 < len(facts.layout.stage_layers(0, layers)) <= dense:
        yield RuleViolation(
            ("parallel.pipeline", "parallel.stages_per_rank"),
            f"the first of {stages} stages has only layers without experts, of which the model has {dense}: every stage passes on "
            "what its experts got",
            f"use at most {max(1, layers // (dense + 1))} stages",
        )


def _schedule(facts: Facts) -> Iterator[RuleViolation]:
    parallel = _parallel(facts)
    schedule, per_rank, pipeline = parallel.schedule, parallel.stages_per_rank, parallel.pipeline
    entry = schedule_named(schedule)
    if not entry.torch_class:
        yield RuleViolation(
            ("parallel.schedule",),
            f'the schedule "{schedule}" is not supported in this version',
            'use "1f1b", "interleaved-1f1b" or "zero-bubble"',
        )
    elif pipeline == 1:
        if schedule != "1f1b":
            yield RuleViolation(
                ("parallel.schedule",),
                f'schedule "{schedule}" has no effect: pipeline is 1',
                "remove it, or set pipeline = 2 or more",
            )
        if per_rank != 1:
            yield RuleViolation(
                ("parallel.stages_per_rank",),
                f"stages_per_rank {per_rank} has no effect: pipeline is 1",
                "remove it, or set pipeline = 2 or more",
            )
    elif entry.several_stages and per_rank < 2:
        yield RuleViolation(
            ("parallel.stages_per_rank", "parallel.schedule"),
            f'schedule "{schedule}" needs 2 or more stages on each rank, not {per_rank}',
            'use stages_per_rank = 2, or schedule = "1f1b"',
        )
    elif not entry.several_stages and per_rank > 1:
        yield RuleViolation(
            ("parallel.stages_per_rank",),
            f'schedule "{schedule}" allows one stage on each rank, not {per_rank}',
            'remove stages_per_rank, or set schedule = "interleaved-1f1b"',
        )


def _splits_backward(parallel: ParallelSection) -> bool:
    return parallel.pipeline > 1 and schedule_named(parallel.schedule).split_backward


def _split_backward_sharded(facts: Facts) -> Iterator[RuleViolation]:
    # Measured on torch 2.13: loss off by 0.08 to 0.58 with reshard_after_forward, correct without.
    parallel = _parallel(facts)
    if _splits_backward(parallel) and parallel.reshards:
        layout: Layout = facts.layout
        # bf16 goes through FSDP also in a group of one.
        if layout.replicate * layout.shard > 1 or facts.job.train.precision != "fp32":
            yield RuleViolation(
                ("parallel.reshard_after_forward", "parallel.schedule"),
                f'schedule "{parallel.schedule}" with FSDP (data parallel, or bf16) and reshard_after_forward = true silently '
                "drops gradients: weight gradients are computed after the weights were freed",
                "set reshard_after_forward = false (needs more memory)",
            )


def _split_backward_compiled(facts: Facts) -> Iterator[RuleViolation]:
    parallel = _parallel(facts)
    if _splits_backward(parallel) and facts.job.train.compile:
        yield RuleViolation(
            ("train.compile", "parallel.schedule"),
            f'schedule "{parallel.schedule}" with compile = true gives wrong gradients: torch.compile cannot split '
            "the backward pass into input and weight gradients",
            'set compile = false, or schedule = "1f1b"',
        )


def _split_backward_selective(facts: Facts) -> Iterator[RuleViolation]:
    parallel = _parallel(facts)
    if facts.job.train.activation_checkpointing == "selective" and _splits_backward(parallel):
        yield RuleViolation(
            ("train.activation_checkpointing", "parallel.schedule"),
            f'activation_checkpointing = "selective" with schedule "{parallel.schedule}": its backward pass has two parts, for '
            "inputs and for weights, each of which recomputes, and what was kept is gone after the first",
            'set activation_checkpointing = "full", or schedule = "interleaved-1f1b"',
        )


def _split_backward_offload(facts: Facts) -> Iterator[RuleViolation]:
    parallel = _parallel(facts)
    if facts.job.train.offload_activations and _splits_backward(parallel):
        yield RuleViolation(
            ("train.offload_activations", "parallel.schedule"),
            f'offload_activations with schedule "{parallel.schedule}": its backward pass has two parts, which recompute a layer '
            "several times, and would copy its input from the host as often",
            'set offload_activations = false, or schedule = "interleaved-1f1b"',
        )


def _split_backward_accumulate(facts: Facts) -> Iterator[RuleViolation]:
    parallel = _parallel(facts)
    if facts.job.train.accumulate == "sharded" and _splits_backward(parallel):
        yield RuleViolation(
            ("train.accumulate", "parallel.schedule"),
            f'accumulate = "sharded" with schedule "{parallel.schedule}": it computes the weight gradients of a whole stage in '
            "a pass of their own, outside of the hooks by which FSDP reduces them layer by layer",
            'set accumulate = "whole" (needs more memory), or schedule = "interleaved-1f1b"',
        )


def _batch(facts: Facts) -> Iterator[RuleViolation]:
    yield from _divided(facts, facts.job.train.global_batch, "train.global_batch")
    for number, phase in enumerate(facts.job.train.batch_ramp):
        key = f"train.batch_ramp.{number}.global_batch"
        yield from _divided(facts, phase.global_batch, key, f"phase {number + 1} of batch_ramp: ")


def _divided(facts: Facts, batch: int, key: str, where: str = "") -> Iterator[RuleViolation]:
    layout, micro = facts.layout, facts.job.train.microbatch
    replicas = layout.data_parallel
    unit = replicas * micro
    if batch % unit:
        yield RuleViolation(
            (key,),
            f"{where}global_batch {batch} is not divisible by data-parallel size {replicas} x microbatch {micro} = {unit}",
            f"use global_batch = {either(near_multiples(batch, unit))}",
        )
        return
    pipeline, microbatches = layout.pipeline, batch // unit
    if pipeline == 1:
        return
    count = f"{where}global_batch {batch} / data-parallel size {replicas} / microbatch {micro} = {microbatches} microbatches"
    if microbatches < pipeline:
        yield RuleViolation(
            (key, "parallel.pipeline"),
            f"{count}, fewer than the {pipeline} pipeline ranks: some ranks would always be idle",
            f"use global_batch = {unit * pipeline}" + _smaller_microbatch(batch, replicas, pipeline),
        )
    elif schedule_named(layout.schedule).several_stages and microbatches % pipeline:
        fits = near_multiples(microbatches, pipeline)
        yield RuleViolation(
            (key, "parallel.pipeline"),
            f'{count}, but schedule "{layout.schedule}" needs a multiple of pipeline {pipeline}',
            f"use global_batch = {either(unit * m for m in fits)}",
        )


def _smaller_microbatch(batch: int, replicas: int, pipeline: int) -> str:
    micro = batch // (replicas * pipeline)
    return f", or microbatch = {micro}" if micro and batch % (replicas * pipeline * micro) == 0 else ""


def _expert(facts: Facts) -> Iterator[RuleViolation]:
    expert, shard = _parallel(facts).expert, facts.layout.shard
    if expert == 1:
        return
    if not facts.architecture.num_experts:
        yield RuleViolation(
            ("parallel.expert",),
            f"expert {expert} has no effect: the model has no experts",
            "remove `expert`",
        )
    elif shard % expert:
        fits = f"use expert = {either(divisors(shard)[-3:])}" if shard > 1 else "remove `expert`"
        yield RuleViolation(
            ("parallel.expert", "parallel.shard"),
            f"expert {expert} does not divide shard {shard}: the experts of a layer are divided among neighbours of a shard group",
            f"{fits}, or shard = {expert} x another number",
        )


EXPERT_UNIT = 8  # values in 16 bytes of bf16, to which a grouped matrix product wants rows aligned


def _experts_width(facts: Facts) -> Iterator[RuleViolation]:
    a, tensor = facts.architecture, _parallel(facts).tensor
    if not a.num_experts:
        return
    unit = EXPERT_UNIT * tensor
    for name, size, whole in (
        ("hidden_size", a.hidden_size, EXPERT_UNIT),
        ("moe_intermediate_size", a.moe_intermediate_size, unit),
    ):
        if size % whole:
            more = f" x tensor {tensor}" if whole > EXPERT_UNIT else ""
            yield RuleViolation(
                (f"model.{name}", "parallel.tensor", "model"),
                f"{name} {size} is not divisible by {EXPERT_UNIT}{more}: the grouped matrix products of experts need rows of "
                "whole 16 bytes",
                f"use {name} = {either(near_multiples(size, whole))}",
            )


def _experts_sharded(facts: Facts) -> Iterator[RuleViolation]:
    experts, shard = facts.architecture.num_experts, facts.layout.shard
    if experts and experts % shard:
        fits = [s for s in divisors(experts) if s <= shard]
        yield RuleViolation(
            ("parallel.shard",),
            f"num_experts {experts} is not divisible by shard {shard}: each rank's shard of a layer is whole experts, and "
            "some ranks would have more than others, or none",
            f"use shard = {either(fits[-3:])}, and replicate for more ranks",
        )


def ring_obstacles(job: JobFile, arch: Architecture) -> Iterator[tuple[str, str]]:
    """What `parallel.ring_attention` cannot be combined with: (key, why)."""
    if not job.data.attend_across_documents:
        yield "data.attend_across_documents", "attention within documents gathers keys and values"
    if job.cluster.device == "cpu":
        return
    if job.train.precision == "fp32":
        yield "train.precision", "its kernels take 16-bit values, and precision is fp32"
    if job.train.attention == "efficient":
        yield "train.attention", 'it takes flash or cuDNN attention, and attention is "efficient"'
    if not arch.flash_heads:
        yield "model.head_dim", f"its kernels take heads of up to {FLASH_HEAD_DIM}, in multiples of 8"


def _ring_attention(facts: Facts) -> Iterator[RuleViolation]:
    parallel = _parallel(facts)
    if not parallel.ring_attention:
        return
    if parallel.context == 1:
        yield RuleViolation(
            ("parallel.ring_attention",),
            "ring_attention = true has no effect: context is 1",
            "remove it, or set context = 2 or more",
        )
    for key, why in ring_obstacles(facts.job, facts.architecture):
        of_gpus = facts.job.cluster.device == "auto" and not key.startswith("data.")
        yield RuleViolation(
            ("parallel.ring_attention", key),
            f"ring_attention = true cannot be used: {why}",
            'remove it, or set cluster.device = "cpu" if there are no GPUs' if of_gpus else "remove it",
        )


def _attention(facts: Facts) -> Iterator[RuleViolation]:
    """Only what keeps the kernel from being used at all: otherwise torch says at the first step that there is none."""
    job, kernel = facts.job, facts.job.train.attention
    if kernel == "auto":
        return
    documents = not job.data.attend_across_documents
    gathers = facts.layout.context > 1 and not _parallel(facts).ring_attention
    refused = (
        ("cluster.device", job.cluster.device == "cpu", {"flash", "cudnn", "efficient"}, "CPU ranks have one kernel"),
        ("train.precision", job.train.precision == "fp32", {"flash", "cudnn"}, "it takes 16-bit values, and precision is fp32"),
        ("train.deterministic", job.train.deterministic, {"cudnn", "efficient"}, "its gradients may differ from run to run"),
        ("parallel.context", gathers, {"cudnn"}, "torch does not give it the masks of context parallel without a ring"),
        ("data.attend_across_documents", documents, {"cudnn"}, "documents need a mask for it, which was not tried"),
        ("model.head_dim", facts.architecture.head_dim > FLASH_HEAD_DIM, {"flash"}, f"it takes heads of up to {FLASH_HEAD_DIM}"),
    )  # fmt: skip
    for key, wrong, kernels, why in refused:
        if wrong and kernel in kernels:
            yield RuleViolation(
                ("train.attention", key),
                f'attention = "{kernel}" cannot be used: {why}',
                'use attention = "auto"',
            )


def _fp8(facts: Facts) -> Iterator[RuleViolation]:
    train, arch = facts.job.train, facts.architecture
    keys, hint = ("train.precision",), 'use precision = "bf16"'
    if train.precision != "fp8":
        if train.fp8_scaling != "rowwise":
            yield RuleViolation(
                ("train.fp8_scaling", *keys),
                f'fp8_scaling has no effect: precision is "{train.precision}"',
                'remove it, or set precision = "fp8"',
            )
        return
    if arch.num_experts:
        yield RuleViolation(
            keys,
            'precision = "fp8" with experts is not supported in this version: only dense layers are cast',
            hint,
        )
    gpu = None if facts.job.cluster.gpu is None else find_gpu(facts.job.cluster.gpu)
    if gpu is not None and (gpu.fp8_tflops is None or gpu.architecture in _OTHER_FP8):
        why = (
            "has no FP8 matrix products"
            if gpu.fp8_tflops is None
            else "has other FP8 formats than torch's default ones"
        )
        yield RuleViolation(("cluster.gpu", *keys), f"{gpu.name} {why}", hint)
    elif gpu is not None and train.fp8_scaling == "mxfp8" and gpu.architecture not in _MXFP8:
        yield RuleViolation(
            ("cluster.gpu", "train.fp8_scaling"),
            f'fp8_scaling = "mxfp8" needs a Blackwell GPU, and cluster.gpu is {gpu.name}',
            'use fp8_scaling = "rowwise"',
        )


def _fp8_widths(facts: Facts) -> Iterator[RuleViolation]:
    train, arch, layout = facts.job.train, facts.architecture, facts.layout
    if train.precision != "fp8":
        return
    rows, unit = train.microbatch * train.sequence_length, _FP8_UNITS[train.fp8_scaling]
    for name, width, ranks in (
        ("hidden_size", arch.hidden_size, 1),
        ("width of the queries", arch.query_width, layout.tensor),
        ("width of the keys", arch.kv_width, layout.tensor),
        ("intermediate_size", arch.intermediate_size, layout.tensor),
        ("microbatch x sequence_length", rows, layout.context),
    ):
        if width % (unit * ranks):
            part = f" on each of {ranks} ranks" if ranks > 1 else ""
            yield RuleViolation(
                ("train.precision",),
                f'precision = "fp8" needs widths in multiples of {unit}, and the {name} is {width / ranks:g}{part}',
                'use precision = "bf16", or other sizes',
            )


LAYOUT_RULES: tuple[Callable[[Facts], Iterator[RuleViolation]], ...] = (
    _tensor_model,
    _tensor_vocabulary,
    _domain,
    _tensor_domain,
    _sequence,
    _profile,
    _async_tensor,
    _ring_attention,
    _stages,
    _schedule,
    _split_backward_sharded,
    _split_backward_compiled,
    _split_backward_selective,
    _split_backward_offload,
    _split_backward_accumulate,
    _batch,
    _expert,
    _experts_width,
    _experts_sharded,
    _attention,
    _fp8,
    _fp8_widths,
)
