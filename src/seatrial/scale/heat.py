"""Deviation of each rank's own work from its peers by stage, for a heat map. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seatrial.record.stages import OWN, STAGES
from seatrial.scale.observed import Observed

MOST_ROWS = 64


@dataclass(frozen=True)
class Heat:
    """`values`: rows x stages, mean seconds per step minus the median of the peers (same pipeline rank)."""

    unit: str  # of a row: "rank" or "node"
    rows: tuple[int, ...]
    stages: tuple[str, ...]
    values: NDArray[np.float64]
    left_out: int  # rows left out because they deviate less


def heat(observed: Observed) -> Heat | None:
    """The map of one size; None if no rank has a peer.

    With more than MOST_ROWS ranks a row is a node, with the value of its most deviating rank: a mean would hide one
    slow GPU. With more nodes than that, the most deviating ones.
    """
    pipeline = observed.layout.pipeline
    mean = observed.seconds[:, :, :OWN].mean(axis=0)
    by_stage = mean.reshape(pipeline, -1, OWN)
    if by_stage.shape[1] < 2:
        return None
    values = (by_stage - np.median(by_stage, axis=1, keepdims=True)).reshape(-1, OWN)
    unit = "rank"
    if len(values) > MOST_ROWS:
        unit, each = "node", values.reshape(-1, observed.gpus_per_node, OWN)
        worst = np.abs(each).argmax(axis=1)[:, None]
        values = np.take_along_axis(each, worst, axis=1)[:, 0]
    largest = np.argsort(-np.abs(values).max(axis=1), kind="stable")[:MOST_ROWS]
    rows = np.sort(largest)
    taken = np.flatnonzero(mean.max(axis=0) > 0)
    return Heat(
        unit,
        tuple(int(r) for r in rows),
        tuple(STAGES[i] for i in taken),
        values[np.ix_(rows, taken)],
        len(values) - len(rows),
    )
