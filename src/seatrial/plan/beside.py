"""The closed form beside the dry run: what was predicted of a rank, and what the trainer's own code did with fake tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from seatrial.job.job import Job
from seatrial.job.layout import Coordinates
from seatrial.job.schema import ParallelSection
from seatrial.job.settled import settled
from seatrial.plan.advice import layout_of
from seatrial.plan.cluster import Cluster
from seatrial.plan.collectives import Fabric
from seatrial.plan.dryrun import Device, RankStep, dry_run
from seatrial.plan.memory import rank_memory
from seatrial.plan.model import Model
from seatrial.plan.predict import stack_for
from seatrial.plan.recipe import Recipe
from seatrial.plan.step import rank_traffic

# More than this is a fault of one of the two.
TOLD = 0.05


@dataclass(frozen=True)
class Pair:
    """One figure of a rank: in closed form, and counted."""

    what: str
    unit: Literal["bytes", "bytes sent", "FLOP"]
    closed: float
    counted: float

    @property
    def off(self) -> float:
        """Closed form over counted, minus 1; 0 where both are nothing, infinite where only one is."""
        if self.counted == 0:
            return 0.0 if self.closed == 0 else float("inf")
        return self.closed / self.counted - 1

    @property
    def agrees(self) -> bool:
        return abs(self.off) <= TOLD


@dataclass(frozen=True)
class Rank:
    """One rank, with where in the step it needs most memory."""

    rank: int
    pipeline: int
    pairs: tuple[Pair, ...]
    peak_at: str


@dataclass(frozen=True)
class Beside:
    """One layout. `exact`: everything was traced; otherwise whole numbers carried over from few layers and microbatches."""

    recipe: Recipe
    ranks: tuple[Rank, ...]
    exact: bool
    seconds: float  # of processor time, in all
    process_bytes: int
    notes: tuple[str, ...]

    @property
    def apart(self) -> tuple[tuple[int, Pair], ...]:
        """(rank, pair) of everything that differs by more than `TOLD`."""
        return tuple((r.rank, p) for r in self.ranks for p in r.pairs if not p.agrees)


def job_with(job: Job, recipe: Recipe) -> Job:
    """`job` with the layout and settings of a recipe, as if they stood in its file. InputError where a rule refuses them."""
    r = recipe
    sizes = {k: v for k, v in layout_of(r).as_dict().items() if k != "world_size"}
    parallel = ParallelSection(**sizes, reshard_after_forward=r.reshard, async_tensor=r.async_tensor)
    again = "full" if r.recompute == "full" else "none"
    return settled(job, parallel, {"microbatch": r.microbatch, "activation_checkpointing": again})


def ranks_of(recipe: Recipe) -> list[int]:
    """Pipeline ranks that differ most: the first, one in the middle, the last."""
    return sorted({0, recipe.pipeline // 2, recipe.pipeline - 1})


def beside(
    job: Job,
    recipe: Recipe,
    shape: Cluster,
    *,
    device: Device = "cuda",
    ranks: Sequence[int] | None = None,
    processes: int | None = None,
) -> Beside:
    """`recipe` of `job`, on pipeline ranks `ranks` (`ranks_of` if None). Raises what `dry_run` raises."""
    wanted = job_with(job, recipe)
    at = wanted.layout
    pipeline = ranks_of(recipe) if ranks is None else list(ranks)
    numbers = [at.rank(Coordinates(p, 0, 0, 0)) for p in pipeline]
    ran = dry_run(wanted, device=device, ranks=numbers, processes=processes or os.cpu_count())
    model = Model.of(job.architecture)
    told = tuple(
        Rank(step.rank, step.at.pipeline, _pairs(model, recipe, shape, step), step.peak_label)
        for step in ran.ranks
    )
    notes = ran.notes
    if device == "cpu":
        notes += ("the closed form is of a GPU: on CPU other kernels keep other things",)
    exact = all(len(step.traced) == 1 for step in ran.ranks)
    return Beside(recipe, told, exact, sum(s.seconds for s in ran.ranks), ran.process_bytes, notes)


def _pairs(model: Model, recipe: Recipe, shape: Cluster, step: RankStep) -> tuple[Pair, ...]:
    recipe = replace(recipe, compiled=False)  # as the dry run is
    ours = stack_for(recipe)
    held = rank_memory(model, recipe, ours, step.at.pipeline)
    sent = rank_traffic(model, recipe, Fabric(shape), ours, step.at.pipeline)
    data = step.sent_bytes("shard") + step.sent_bytes("replicate")
    products = sum(n for (_, kind), n in step.flops.items() if kind == "matmul")
    return (
        Pair("weights", "bytes", held.parameters, step.parameter_bytes),
        Pair("optimizer state", "bytes", held.optimizer, step.optimizer_bytes),
        Pair("highest point of memory", "bytes", held.allocated, step.peak_bytes),
        Pair("tensor parallel", "bytes sent", sent.tensor, step.sent_bytes("tensor")),
        Pair("pipeline", "bytes sent", sent.pipeline, step.sent_bytes("pipeline") + step.sent_bytes("ends")),
        Pair("data parallel", "bytes sent", sent.data, data),
        Pair("matrix products", "FLOP", _products(model, recipe, step.at.pipeline), products),
    )


def _products(model: Model, recipe: Recipe, rank: int) -> float:
    """FLOPs of a rank's matrix products in a step: forward, twice that backward, and what is computed again.

    Recomputation stops before the layer's last product (torch.utils.checkpoint), whose output nobody needs.
    """
    tokens = recipe.tokens * recipe.microbatches / recipe.tensor
    layers = sum(recipe.stage_layers(model.layers)[rank :: recipe.pipeline])
    one = 6.0 * model.layer_matrix_parameters()
    if recipe.recompute == "full":
        one += 2.0 * (model.layer_matrix_parameters() - model.ffn * model.hidden)
    head = 6.0 * model.embedding_parameters() if rank == recipe.pipeline - 1 else 0.0
    return tokens * (layers * one + head)
