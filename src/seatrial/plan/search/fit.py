"""Memory requirements of a model, by kind and precision, and the smallest clusters that meet them.

"A 70B needs 140 GB" counts bf16 weights once. Training also has gradients, fp32 weights and two moments of each (16 bytes
a parameter however a stack splits them), and the temporary memory of a step: gathered weights, activations, logits. More
GPUs shard only the states; temporary memory depends on layout and microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from seatrial.base.units import GIB
from seatrial.hardware.catalogue import Gpu, gpus
from seatrial.hardware.networks import Network, reference_node
from seatrial.job.architecture import Architecture
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.numbers import divisors
from seatrial.job.optimizers import ADAMW, optimizer_named
from seatrial.plan.cost.accumulate import accumulate_options
from seatrial.plan.cost.calibration import Calibration
from seatrial.plan.cost.kernels import UnknownSpeedError
from seatrial.plan.cost.memory import FRAGMENTATION, Memory, memory, rank_memory
from seatrial.plan.cost.memory_fit import MemoryFit, judge
from seatrial.plan.cost.predict import Prediction, capacity, predict, stack_for
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe, Recompute
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import MICROBATCHES, tensors

# Bytes of one weight.
WIDTHS = {"fp32": 4, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Line:
    """One kind of memory. `per_parameter` and `once` (one copy of the whole model) are None if the layout decides."""

    name: str
    per_parameter: float | None
    once: float | None
    gpu: float | None  # peak of the GPU that needs most; None without a layout
    cluster: float | None  # on all GPUs, each at its own peak
    note: str


@dataclass(frozen=True)
class Account:
    """Memory of training by kind, bytes. `weights` are the parameters alone, by precision."""

    parameters: int
    weights: tuple[tuple[str, int], ...]
    lines: tuple[Line, ...]
    gpus: int | None
    gpu_bytes: float | None  # that a GPU must have, with allocator overhead and runtime
    cluster_bytes: float | None

    @property
    def states(self) -> float:
        """One copy of weights, gradients and optimizer state."""
        return sum(line.once for line in self.lines if line.once is not None)

    @property
    def headline(self) -> str:
        """The account in one sentence, decimal GB."""
        bf16 = dict(self.weights)["bf16"]
        text = (
            f"{self.parameters / 1e9:.3g}B parameters: {_gb(bf16)} of weights in bf16, "
            f"{_gb(self.states)} of states to train them ({self.states / self.parameters:g} bytes a parameter)"
        )
        if self.cluster_bytes is not None and self.gpus is not None:
            text += f", {_gb(self.cluster_bytes)} in all on {self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        return text


def account(
    architecture: Architecture, recipe: Recipe | None = None, *, stack: str | Stack = "seatrial"
) -> Account:
    """The memory of a model, and with a `recipe` each kind's on a GPU and on all of them."""
    n = architecture.parameters()
    behaviour = stack_for(recipe, stack) if recipe is not None else stack_for(Recipe(1, 1), stack)
    optimizer = ADAMW if recipe is None else optimizer_named(recipe.optimizer)
    ranks = () if recipe is None else _ranks(architecture, recipe, behaviour)
    most = max(ranks, key=lambda m: m.reserved) if ranks else None
    each = 0 if recipe is None else recipe.world // recipe.layout.pipeline
    weight, gradient, with_masters = behaviour.state_bytes
    # A stack's optimizer state beyond the optimizer's own are fp32 master weights.
    masters = with_masters - optimizer.state_bytes
    own: float = optimizer.state_bytes
    if optimizer.matrix_saving:
        own = optimizer.bytes_of(architecture) / architecture.trained_parameters()
    state = masters + own

    def line(
        name: str, of: Callable[[Memory], float], note: str, width: float | None = None, *, count: int = n
    ) -> Line:
        gpu = None if most is None else of(most)
        cluster = None if most is None else each * sum(map(of, ranks))
        per = width if width is None or count == n else width * count / n
        return Line(name, per, None if width is None else float(width * count), gpu, cluster, note)

    trained = architecture.trained_parameters()

    lines = [
        line("weights", lambda m: m.parameters, _weights_note(weight, masters), weight),
        line(
            "gradients",
            lambda m: m.gradients,
            "held from the backward pass to the update",
            gradient,
            count=trained,
        ),
    ]
    if masters:
        note = "fp32 copies that the optimizer updates"
        lines.append(
            line("master weights", lambda m: m.optimizer * masters / state, note, masters, count=trained)
        )
    if own:
        note = f"{', '.join(optimizer.states)}: {optimizer.state_precision}"
        if optimizer.matrix_states is not None:
            note += f"; of matrices in layers {', '.join(optimizer.matrix_states)}"
        lines.append(line("moments", lambda m: m.optimizer * own / state, note, own, count=trained))
    if most is not None:
        lines += [
            line("gathered weights", lambda m: m.gathered, "unsharded layers, in the precision of GEMMs"),
            line("whole gradients", lambda m: m.unsharded_gradients, "before the reduce-scatter"),
            line("activations", lambda m: m.activations, "kept for the backward pass"),
            line("logits", lambda m: m.logits, "at the loss"),
            line("stage messages", lambda m: m.messages, "between pipeline stages"),
            line(
                "allocator",
                lambda m: m.allocated * FRAGMENTATION,
                f"{FRAGMENTATION * 100:g} %, fragmentation",
            ),
            line("other streams", lambda m: m.streams, "reserved by streams, not reusable by others"),
            line("runtime", lambda m: m.runtime, "CUDA context, libraries, NCCL's buffers"),
        ]
    return Account(
        parameters=n,
        weights=tuple((name, width * n) for name, width in WIDTHS.items()),
        lines=tuple(lines),
        gpus=None if recipe is None else recipe.world,
        gpu_bytes=None if most is None else most.reserved,
        cluster_bytes=None if most is None else each * sum(m.reserved for m in ranks),
    )


def _ranks(model: Architecture, recipe: Recipe, stack: Stack) -> tuple[Memory, ...]:
    """Memory of every pipeline rank; all ranks of a stage need the same."""
    return tuple(rank_memory(model, recipe, stack, r) for r in range(recipe.layout.pipeline))


def _weights_note(width: int, masters: int) -> str:
    return "16-bit, for GEMMs" if masters else f"{8 * width}-bit, updated by the optimizer"


def _gb(n_bytes: float) -> str:
    """140 GB, 1.16 TB, 980 MB; decimal, as in "a 70B needs 140 GB"."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB")):
        if n_bytes >= limit * 0.9995:
            return (
                f"{n_bytes / limit:,.3g} {unit}"
                if n_bytes < 999.5 * limit
                else f"{n_bytes / limit:,.0f} {unit}"
            )
    return f"{n_bytes / 1e6:,.3g} MB"


@dataclass(frozen=True)
class Fit:
    """The fewest GPUs of one kind on which a legal layout fits; `recipe` is None if none fits at any size tried.

    The layout is the fastest of those tried (see `smallest`) that fit with margin, or, if speeds are unknown, the one with
    the least memory; then `prediction` is None and `why_unknown` says why. If none fits with margin, it is the one with
    the least memory, `verdict` is tight, and `safe` has the fewest GPUs on which one fits with margin.
    """

    cluster: Cluster
    recipe: Recipe | None
    needs: float  # bytes a GPU; of the smallest layout tried if none fits (inf: none is legal)
    available: float  # bytes available on a GPU
    prediction: Prediction | None
    why_unknown: str | None
    safe: Fit | None = None  # also None if none of the sizes tried is large enough

    @property
    def gpu(self) -> Gpu:
        return self.cluster.gpu

    @property
    def verdict(self) -> MemoryFit:
        """`needs` judged against `available`."""
        return judge(self.needs, self.available)

    @property
    def gpus(self) -> int:
        return self.cluster.gpus

    @property
    def sold(self) -> int | None:
        """GPUs of the node that the GPU is sold in; None if that is not known, and was assumed."""
        node = reference_node(self.gpu.name)
        return None if node is None else node.gpus_per_node


def smallest(
    job: Job,
    *,
    gpus_per_node: int = 8,
    most_nodes: int = 128,
    network_of: Callable[[Gpu], Network | None] = lambda _: None,
    calibration: Calibration | None = None,
    stack: str | Stack = "seatrial",
) -> tuple[Fit, ...]:
    """For every GPU of the catalogue, the fewest GPUs that can train this job: parts of one node, then whole nodes.

    Nodes are those that the GPU is sold in, else of `gpus_per_node`; of nodes in an NVLink rack only whole ones.

    The search varies tensor, pipeline, microbatch, resharding and recomputation, with one shard group and plain 1F1B:
    other schedules and replicas need more memory, so if these do not fit, nothing does. Sorted by GPUs, those without a
    fit last. `network_of` gives the network for a GPU; None leaves speeds unknown.
    """
    kinds: dict[tuple[int, int | None], list[Gpu]] = {}
    for gpu in gpus():
        sold = reference_node(gpu.name)
        each = gpus_per_node if sold is None else sold.gpus_per_node
        kinds.setdefault((each, gpu.nvlink_domain), []).append(gpu)
    found = [
        fit
        for (each, domain), alike in kinds.items()
        for fit in _smallest(
            job, Cluster(alike[0], most_nodes, each, None, domain), alike, network_of, calibration, stack
        )
    ]
    return tuple(sorted(found, key=lambda f: (f.recipe is None, f.gpus, f.gpu.hbm_gb)))


def _smallest(
    job: Job,
    largest: Cluster,
    alike: Sequence[Gpu],
    network_of: Callable[[Gpu], Network | None],
    calibration: Calibration | None,
    stack: str | Stack,
) -> Iterator[Fit]:
    """`smallest` for GPUs in nodes like those of `largest`, up to its size."""
    model = job.architecture
    waiting = list(alike)
    tight: dict[str, Fit] = {}  # fits, but not with margin, by GPU
    least = math.inf
    legal = False
    for at in _sizes(largest):
        if not waiting:
            break
        # The states alone, evenly sharded, are a lower bound: sizes that cannot fit are skipped.
        available = max(capacity(replace(at, gpu=gpu)) for gpu in waiting)
        if _floor(model, at.gpus, stack_for(Recipe.of(job), stack)) > available:
            continue
        tried = [(r, memory(model, r, stack_for(r, stack)).reserved) for r in _lean(job, at, stack)]
        leanest = min((needs for _, needs in tried), default=math.inf)
        least, legal = min(least, leanest), legal or bool(tried)
        for gpu in tuple(waiting):
            cluster = replace(at, gpu=gpu, network=network_of(gpu))
            if leanest > capacity(cluster):
                continue
            sure = judge(leanest, capacity(cluster)).sure
            if not sure and gpu.name in tight:
                continue
            at_best = _fastest(model, cluster, tried, calibration, stack)
            if not sure:
                tight[gpu.name] = at_best
                continue
            waiting.remove(gpu)
            smaller = tight.pop(gpu.name, None)
            yield at_best if smaller is None else replace(smaller, safe=at_best)
    yield from tight.values()
    for gpu in waiting:
        if gpu.name in tight:
            continue
        at = replace(largest, gpu=gpu)
        floor = _floor(model, at.gpus, stack_for(Recipe.of(job), stack))
        enough = floor <= capacity(at)
        why = f"does not fit on up to {largest.nodes} nodes"
        if enough and not legal:
            why = f"no layout is legal on up to {largest.nodes} nodes"
        yield Fit(at, None, least if enough else floor, capacity(at), None, why)


def _sizes(largest: Cluster) -> Iterator[Cluster]:
    """Parts of a node, a node, then more nodes."""
    if largest.domain is None:
        for each in divisors(largest.gpus_per_node)[:-1]:
            yield replace(largest, nodes=1, gpus_per_node=each)
    for nodes in range(1, largest.nodes + 1):
        yield replace(largest, nodes=nodes)


def _floor(model: Architecture, ranks: int, stack: Stack) -> float:
    """Lower bound of the bytes on the average GPU: its shard of the states."""
    weight, gradient, state = stack.state_bytes
    states = weight * model.parameters() + (gradient + state) * model.trained_parameters()
    if stack.matrix_saving:
        states -= stack.matrix_saving * model.hidden_matrix_parameters()
    return states / ranks * (1 + FRAGMENTATION) + stack.context_gib * GIB


_RECOMPUTES: tuple[Recompute, ...] = ("none", "full")  # what lies between does not decide what fits


def _lean(job: Job, cluster: Cluster, stack: str | Stack = "seatrial") -> Iterator[Recipe]:
    """Legal layouts with one shard group and plain 1F1B; see `smallest`."""
    base = replace(Recipe.of(job), context=1, recompute_every=1)
    for tensor in tensors(job, cluster):
        # More stages than layers are refused; no need to ask for each.
        for pipeline in divisors(cluster.gpus // tensor, most=job.architecture.num_hidden_layers):
            layout = Layout(pipeline=pipeline, shard=cluster.gpus // tensor // pipeline, tensor=tensor)
            for micro in MICROBATCHES:
                # Under a pipeline weights stay gathered either way; resharding would only gather them again.
                recipe = replace(base, layout=layout, microbatch=micro, reshard=pipeline == 1)
                # async_tensor has no effect if tensor is 1: it must not exclude such layouts.
                if refusal(job, cluster, replace(recipe, async_tensor=False)) is not None:
                    continue
                for reshard, recompute in product((True, False) if pipeline == 1 else (False,), _RECOMPUTES):
                    yield from accumulate_options(
                        job, replace(recipe, reshard=reshard, recompute=recompute), stack
                    )


def _fastest(
    model: Architecture,
    cluster: Cluster,
    tried: list[tuple[Recipe, float]],
    calibration: Calibration | None,
    stack: str | Stack,
) -> Fit:
    available = capacity(cluster)
    fitting = [(r, needs) for r, needs in tried if judge(needs, available).sure]
    if not fitting:  # then memory alone decides
        fitting = [min(tried, key=lambda pair: pair[1])]
    best: tuple[Recipe, float, Prediction] | None = None
    # Without a network, layouts that do not use one are not predicted either: others might be faster.
    alone = cluster.network is None and cluster.several_domains
    why = "the network between the nodes is unknown"
    for recipe, needs in () if alone else fitting:
        try:
            at = predict(model, recipe, cluster, stack=stack, calibration=calibration)
        except UnknownSpeedError as error:
            why = str(error)
            break
        else:
            if best is None or at.step_s < best[2].step_s:
                best = recipe, needs, at
    if best is None:
        recipe, needs = min(fitting, key=lambda pair: pair[1])
        return Fit(cluster, recipe, needs, available, None, why)
    recipe, needs, at = best
    return Fit(cluster, recipe, needs, available, at, None)
