"""The measured rates as JSON for the planner: each with unit, direction, algorithm, size and count. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from seatrial.check.blame.localise import Report
from seatrial.check.blame.nodes import RATES, NodeStage
from seatrial.check.judging.measured import rate
from seatrial.check.live import ib_pair
from seatrial.check.live.live_ranks import Outcome


def measured(
    stage: NodeStage | None, report: Report, outcomes: Sequence[Outcome], backend: str, rdma: bool
) -> dict[str, Any]:
    """What was measured of "gpu" (by quantity), "send_recv", "all_reduce" (by nodes and size), "rail" (RDMA)."""
    found: dict[str, Any] = {}
    if stage is not None and (gpu := _gpu(stage)):
        found["gpu"] = {"kind": stage.gpu, **gpu}
    if (flows := _flows(outcomes)) is not None:
        values, size = flows
        found["send_recv"] = rate(values, "Gb/s", f"{backend} send and receive", "one direction", size)
    if rdma and report.case is not None:
        state = report.case.state
        ports = (state.share * state.rate)[report.case.layout.usable & ~np.isnan(state.share)]
        if ports.size:
            values = [float(v) for v in ports]
            found["rail"] = rate(values, "Gb/s", ib_pair.TOOL, "one direction", ib_pair.MESSAGE_BYTES)
    if sums := _sums(outcomes, backend):
        found["all_reduce"] = sums
    return found


def _gpu(stage: NodeStage) -> dict[str, Any]:
    found = {}
    for quantity in RATES:
        if quantity.name not in stage.rates:
            continue
        values = stage.level(quantity.name)
        known = [float(v) for v in values[~np.isnan(values)]]
        if known:
            found[quantity.name] = rate(known, quantity.unit, quantity.algorithm, quantity.direction, None)
    return found


def _flows(outcomes: Sequence[Outcome]) -> tuple[list[float], int] | None:
    """The best pair of each node, in its slower direction: what a node can send and receive."""
    best: dict[int, float] = {}
    size = 0
    for result in outcomes:
        if len(result.group.members) != 2 or result.group.hca is not None:
            continue
        rates = [
            sum(f.gbit_s for f in result.direction(direction))
            for direction in (0, 1)
            if result.direction(direction)
        ]
        if len(rates) == 2:
            size = max(size, *(f.message_bytes for f in result.flows))
            for node in result.group.members:
                best[node] = max(best.get(node, 0.0), min(rates))
    return (list(best.values()), size) if best else None


def _sums(outcomes: Sequence[Outcome], backend: str) -> list[dict[str, Any]]:
    values: dict[tuple[int, int, int], list[float]] = {}
    for result in outcomes:
        for one in result.sums:
            key = (len(result.group.members), result.group.size, one.size_bytes)
            values.setdefault(key, []).append(one.busbw(result.group.size))
    return [
        {
            "what": f"{nodes} node{'s' * (nodes > 1)}",
            "nodes": nodes,
            "ranks": ranks,
            **rate(found, "GB/s", f"{backend} all-reduce, busbw", "one direction", size),
        }
        for (nodes, ranks, size), found in sorted(values.items())
    ]
