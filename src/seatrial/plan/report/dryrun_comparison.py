"""Compare the closed-form prediction of a rank with a dry run of the trainer's own code on fake tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from seatrial.job.architecture import Architecture
from seatrial.job.job import Job
from seatrial.job.layout import Coordinates
from seatrial.job.schema import ParallelSection
from seatrial.job.settled import settled
from seatrial.plan.cost import muon
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.dryrun import Device, RankStep, dry_run
from seatrial.plan.cost.memory import rank_memory, representative_ranks
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.cost.step import rank_traffic
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe, layer_kinds

# A larger relative difference is an error of one of the two.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Pair:
    """One figure of a rank: predicted in closed form, and counted by the dry run."""

    what: str
    unit: Literal["bytes", "bytes sent", "FLOP"]
    closed: float
    counted: float

    @property
    def off(self) -> float:
        """Closed form over counted, minus 1; 0 if both are 0, infinite if only the counted one is."""
        if self.counted == 0:
            return 0.0 if self.closed == 0 else float("inf")
        return self.closed / self.counted - 1

    @property
    def agrees(self) -> bool:
        return abs(self.off) <= TOLERANCE


@dataclass(frozen=True)
class Rank:
    """One rank, and where in the step its memory peaks."""

    rank: int
    pipeline: int
    pairs: tuple[Pair, ...]
    peak_at: str


@dataclass(frozen=True)
class DryRunComparison:
    """The comparison for one layout. `exact`: fully traced, otherwise extrapolated from few layers and microbatches."""

    recipe: Recipe
    ranks: tuple[Rank, ...]
    exact: bool
    seconds: float  # of processor time, in all
    process_bytes: int
    notes: tuple[str, ...]

    @property
    def differing(self) -> tuple[tuple[int, Pair], ...]:
        """(rank, pair) of everything that differs by more than `TOLERANCE`."""
        return tuple((r.rank, p) for r in self.ranks for p in r.pairs if not p.agrees)


def job_with(job: Job, recipe: Recipe) -> Job:
    """`job` with the layout and settings of a recipe. InputError if a rule refuses them."""
    return settled(job, ParallelSection(**recipe.parallel), recipe.train)


def compare_with_dry_run(
    job: Job,
    recipe: Recipe,
    shape: Cluster,
    *,
    device: Device = "cuda",
    processes: int | None = None,
) -> DryRunComparison:
    """Compare `recipe` of `job` on representative pipeline ranks (`representative_ranks`). Raises what `dry_run` raises."""
    wanted = job_with(job, recipe)
    at = wanted.layout
    numbers = [at.rank(Coordinates(p, 0, 0, 0)) for p in representative_ranks(recipe.layout)]
    ran = dry_run(wanted, device=device, ranks=numbers, processes=processes or os.cpu_count())
    entries = tuple(
        Rank(step.rank, step.at.pipeline, _pairs(job.architecture, recipe, shape, step), step.peak_label)
        for step in ran.ranks
    )
    notes = ran.notes
    if device == "cpu":
        notes += ("the closed form is for GPUs: CPU kernels save other tensors",)
    exact = all(len(step.traced) == 1 for step in ran.ranks)
    return DryRunComparison(
        recipe, entries, exact, sum(s.seconds for s in ran.ranks), ran.process_bytes, notes
    )


def _pairs(model: Architecture, recipe: Recipe, shape: Cluster, step: RankStep) -> tuple[Pair, ...]:
    recipe = replace(recipe, compiled=False)  # as the dry run is
    ours = stack_for(recipe)
    held = rank_memory(model, recipe, ours, step.at.pipeline)
    sent = rank_traffic(model, recipe, Fabric.of(shape, recipe), ours, step.at.pipeline)
    data = sum(step.sent_bytes(d) for d in ("shard", "expert_shard", "replicate", "stage"))
    expected = _products(model, recipe, step.at.pipeline)
    if ours.matrix_saving:
        expected += muon.flops(model, recipe, step.at.pipeline)
    products = sum(n for (_, kind), n in step.flops.items() if kind == "matmul")
    return (
        Pair("weights", "bytes", held.parameters, step.parameter_bytes),
        Pair("optimizer state", "bytes", held.optimizer, step.optimizer_bytes),
        Pair("highest point of memory", "bytes", held.allocated, step.peak_bytes),
        Pair("tensor parallel", "bytes sent", sent.tensor, step.sent_bytes("tensor")),
        Pair("expert parallel", "bytes sent", sent.expert, step.sent_bytes("expert")),
        Pair("context parallel", "bytes sent", sent.context, step.sent_bytes("context")),
        Pair("pipeline", "bytes sent", sent.pipeline, step.sent_bytes("pipeline") + step.sent_bytes("ends")),
        Pair("data parallel", "bytes sent", sent.data, data),
        Pair("GEMMs", "FLOP", expected, products),
    )


def _products(model: Architecture, recipe: Recipe, rank: int) -> float:
    """FLOPs of a rank's matrix products in a step: forward, twice that backward, and recomputation.

    Recomputation stops before the layer's last GEMM (torch.utils.checkpoint), whose output is not needed; but not that of
    experts, after which the order of the positions is kept for the backward pass. Frozen weights have no gradient, so their
    products cost once their forward pass backward.
    """
    tokens = recipe.tokens * recipe.microbatches / recipe.layout.tensor
    each = 6.0 if model.lora is None else 4.0
    layers = 0.0
    for kind in layer_kinds(model, recipe, rank):
        own = kind.model
        one = each * own.layer_matrix_parameters() + 6.0 * own.adapter_parameters()
        last, again = (own.shared_width if own.num_experts else own.ffn_width) * own.hidden_size, 0.0
        if recipe.recompute == "full":
            again = own.layer_matrix_parameters() - last + own.adapter_parameters()
        elif recipe.recompute == "selective" and own.lora is not None:  # see `parallel.recompute`
            widths = [(t, *own.projections()[t]) for t in own.lora.targets]
            again = own.lora.rank * sum(b + (a if t == "down_proj" else 0) for t, a, b in widths)
            again += own.ffn_width * own.hidden_size - last if own.num_experts else 0
        elif recipe.recompute == "selective":
            again = own.ffn_width * own.hidden_size - last
        layers += kind.layers * one + 2.0 * kind.recomputed * again
    head = each * model.embedding_parameters() if rank == recipe.layout.pipeline - 1 else 0.0
    if model.lora is not None and rank == 0:
        head -= 2.0 * model.first_layer_unneeded()[0]
    return tokens * (layers + head)
