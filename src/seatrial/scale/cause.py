"""Why a size is slower than the base: which part of a step grew, in which rank or node, and what to try. Pure.

The split of a step (`record.frontier`) is additive, so the growth of a step is the sum of the growth of its stages. Own
work comes first in it: what a slow rank makes others wait for is charged to that rank's stage, and a collective has only
what remains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from seatrial.base import units
from seatrial.record.stages import (
    BACKWARD,
    DATA,
    FORWARD,
    HOST,
    OPTIMIZER,
    PIPELINE,
    REPLICATE,
    SAVE,
    SHARD,
    STAGES,
    STEP_SUM,
    TENSOR,
)
from seatrial.scale.steps import Steps

Kind = Literal["data", "host", "straggler", "computation", "network", "bubble", "save", "imbalance"]

_GROUPS: tuple[tuple[int, ...], ...] = (
    *((DATA,), (HOST,), (FORWARD, BACKWARD, OPTIMIZER), (SAVE,)),
    *((TENSOR,), (SHARD,), (REPLICATE,), (PIPELINE,), (STEP_SUM,)),
)
_LEAST = 0.02  # of the step: less is noise
_LEAST_PART = 0.1  # of what is lost
_MOST_OF_IT = 0.5  # a rank, or a link, is blamed if it explains this much of a growth

_TRY: dict[Kind, str] = {
    "data": "faster storage, a copy of the data near the nodes, or a larger cache (data.cache_gb)",
    "host": "more CPU cores for the ranks, nothing else on them; larger microbatches",
    "straggler": "`seatrial check` on that node, or measure without it",
    "computation": "`seatrial check`: clocks, power and memory bandwidth of the nodes",
    "network": "`seatrial check` between the nodes; larger microbatches or less communication on this dimension: `seatrial plan`",
    "bubble": "more microbatches a replica (train.global_batch, a smaller train.microbatch), or fewer pipeline stages",
    "save": "less frequent snapshots (resilience.snapshot_every_steps)",
    "imbalance": "ranks with unequal work: see the ranks of this size in the report",
}


@dataclass(frozen=True)
class Cause:
    """One reason for the loss of a size. `seconds` of a step; `share` of the whole loss."""

    kind: Kind
    stages: tuple[str, ...]
    seconds: float
    share: float
    rank: int | None  # that it is due to, where one is
    nodes: tuple[int, ...]  # likewise; without one of them the loss would be smaller by `seconds`
    evidence: str

    @property
    def advice(self) -> str:
        """What to try."""
        return _TRY[self.kind]


def causes(base: Steps, size: Steps) -> list[Cause]:
    """The causes for which `size` takes longer for a step than `base` scaled to it, the largest first; none if it does not.

    Weak scaling should keep the step time; strong scaling should divide it by the growth in ranks.
    """
    ideal = _ideal(base, size)
    growth = size.account.split.seconds - ideal * base.account.split.seconds
    lost = float(growth.sum())
    if lost < _LEAST * size.account.split.step_s:
        return []
    found = []
    for group in _GROUPS:
        seconds = float(sum(growth[stage] for stage in group))
        if seconds >= max(_LEAST * size.account.split.step_s, _LEAST_PART * lost):
            found.append(_cause(group, seconds, lost, ideal, base, size))
    return sorted(found, key=lambda cause: -cause.seconds)


def _ideal(base: Steps, size: Steps) -> float:
    """What a step of the base should become: its work per rank, relative."""
    return (size.size.tokens_per_step / size.size.gpus) / (base.size.tokens_per_step / base.size.gpus)


def _cause(
    group: tuple[int, ...], seconds: float, lost: float, ideal: float, base: Steps, size: Steps
) -> Cause:
    names = tuple(STAGES[stage] for stage in group)
    rank: int | None = None
    nodes: tuple[int, ...] = ()
    grown = f"{' + '.join(names)} takes {units.duration(seconds)} a step more"
    kind: Kind
    if group[0] in (DATA, HOST, SAVE, FORWARD):
        rank, ahead = _ahead(group, size)
        alone = ahead >= _MOST_OF_IT * seconds and size.size.gpus > 1
        kind = {DATA: "data", HOST: "host", SAVE: "save"}.get(group[0]) or (  # type: ignore[assignment]
            "straggler" if alone else "computation"
        )
        if alone:
            nodes = (size.node_of(rank),)
            evidence = f"{grown}, in rank {rank} {units.duration(ahead)} above the median of the ranks"
        else:
            rank, evidence = None, f"{grown}, in all ranks"
    elif group[0] == PIPELINE and _microbatches(size) < _microbatches(base):
        kind, evidence = (
            "bubble",
            f"{grown}: {_microbatches(size)} microbatches for {size.size.job.layout.stages} stages, {_microbatches(base)} before",
        )
    elif group[0] == STEP_SUM:
        kind, evidence = "imbalance", f"{grown}: ranks end their steps at different times"
    else:
        kind, evidence = "network", f"{grown} in the dimension {names[0]}"
        link = size.slow_link
        if (
            link is not None
            and link.excess_s / size.training_s * size.account.split.step_s >= _MOST_OF_IT * seconds
        ):
            nodes = link.nodes
            where = f"of node {nodes[0]}" if link.peer is None else f"between nodes {nodes[0]} and {nodes[1]}"
            evidence += (
                f"; connections {where} carry at most {_rate(link.bytes_per_s)} while they have data to send, "
                f"all others at least {_rate(link.others)}"
            )
    return Cause(kind, names, seconds, seconds / lost, rank, nodes, evidence)


def _ahead(group: Sequence[int], size: Steps) -> tuple[int, float]:
    """The rank that spends most time in these stages, and by how much more than the median."""
    seconds = size.account.by_rank[:, list(group)].sum(axis=1)
    rank = int(seconds.argmax())
    return rank, float(seconds[rank] - np.median(seconds))


def _microbatches(steps: Steps) -> int:
    return steps.size.job.microbatches


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"


def lines(found: Sequence[Cause]) -> Iterator[tuple[str, str]]:
    """(label, text) of each cause."""
    for cause in found:
        where = ""
        if cause.rank is not None and cause.nodes:
            where = f", rank {cause.rank} on node {cause.nodes[0]}"
        elif cause.nodes:
            where = f", node{'s' * (len(cause.nodes) > 1)} {' and '.join(map(str, cause.nodes))}"
        yield (
            cause.kind + where,
            f"{cause.share * 100:.0f} % of the loss: {cause.evidence}. Try: {cause.advice}",
        )
