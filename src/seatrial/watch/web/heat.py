"""The heat map: one cell per rank or device of each node, for any metric of ranks or telemetry. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from seatrial.record.folder import RunFolder
from seatrial.record.frontier import excess_over_peers
from seatrial.record.jsonl import Problem
from seatrial.record.series import NODE_SERIES, is_counter, parse_series
from seatrial.record.stages import STAGES
from seatrial.record.telemetry import read_names, read_series
from seatrial.watch.web.blocks import chart
from seatrial.watch.web.polled_run import PolledRun, Ranks

OWN_WORK = "own-work"
_DAY_S, _POINTS, _MOST_LINES = 86400.0, 600, 16  # of a chart over time
_UNITS = {
    "ratio": "%",
    "hertz": "Hz",
    "watts": "W",
    "celsius": "°C",
    "bytes": "B",
    "seconds": "s",
    "bytes_per_second": "B/s",
}


def metrics(polled: PolledRun) -> list[dict[str, str]]:
    """The metrics that can be selected: id, name and group."""
    found = [{"id": OWN_WORK, "name": "own work against stage peers", "group": "ranks"}]
    if polled.ranks.seconds is not None:
        there = [bool(column.any()) for column in polled.ranks.seconds.T]
        found += [
            {"id": f"stage:{name}", "name": f"{name.replace('_', ' ')} against stage peers", "group": "ranks"}
            for name, known in zip(STAGES, there, strict=True)
            if known
        ]
    keys = sorted({_kind(key) for sample in polled.telemetry.values() for key in sample.values})
    keys = [key for key in keys if not _labels(key)[0].endswith("_info")]
    found += [{"id": f"telemetry:{key}", "name": _label(key), "group": "telemetry"} for key in keys]
    return found


def heat(polled: PolledRun, metric: str) -> dict[str, Any]:
    """One row per node with a value per column, null if not recorded. `why`: the reason, if there is no data at all."""
    kind, _, name = metric.partition(":")
    if metric == OWN_WORK or (kind == "stage" and name in STAGES):
        return {"metric": metric, **_of_ranks(polled.ranks, name)}
    if kind == "telemetry":
        return {"metric": metric, **_of_telemetry(polled, name)}
    return {"metric": metric, **_nothing("unknown metric")}


def over_time(folder: RunFolder, node: int, metric: str, now: float) -> dict[str, Any]:
    """A chart of the last day of one telemetry metric on one node, one line per device."""
    kind = metric.removeprefix("telemetry:")
    keys = [key for key in read_names(folder, node) if _kind(key) == kind][:_MOST_LINES]
    problems: list[Problem] = []
    found = read_series(folder, node, keys, since=now - _DAY_S, points=_POINTS, problems=problems)
    missing = [str(problem) for problem in problems[:5]]
    times = np.unique(np.concatenate([np.zeros(0), *(points.times for points in found.values())]))
    if not times.size:
        return {
            "blocks": [],
            "missing": [*missing, f"node {node} did not record it in the last 24 hours"],
        }
    unit, factor = _unit(kind)
    lines = []
    for key, points in found.items():
        values: list[float | None] = [None] * times.size
        for place, value in zip(np.searchsorted(times, points.times), points.mean.tolist(), strict=True):
            values[place] = _scaled(value, factor)
        lines.append((_column(key, kind) or "node", values))
    title = f"{_label(kind)}, node {node}, last 24 hours"
    unit += "/s" if is_counter(kind) else ""
    return {
        "blocks": [chart(title, times.tolist(), lines, unit=unit, time=True, gaps=False)],
        "missing": missing,
    }


def _nothing(why: str) -> dict[str, Any]:
    return {"why": why, "nodes": [], "columns": [], "values": []}


def _of_ranks(ranks: Ranks, stage: str) -> dict[str, Any]:
    if ranks.account is None or ranks.seconds is None:
        return _nothing("not available: not all ranks have recorded steps of this generation yet")
    step_s = ranks.account.split.step_s
    seconds = ranks.seconds[:, STAGES.index(stage)] if stage else ranks.own_s
    share = 100 * excess_over_peers(seconds, ranks.pipeline) / step_s
    slots = len(ranks.nodes) or 1
    rows = share.reshape(slots, -1)
    return {
        "unit": "% of a step",
        "centred": True,
        "rank": True,
        "nodes": list(ranks.nodes) or ["?"],
        "columns": list(range(rows.shape[1])),
        "values": np.round(rows, 2).tolist(),
        "seconds": np.round(seconds.reshape(slots, -1), 6).tolist(),
        "steps": [ranks.account.first_step, ranks.account.last_step],
        "step_s": step_s,
    }


def _of_telemetry(polled: PolledRun, kind: str) -> dict[str, Any]:
    """The latest values of `kind`; for a counter its rate per second."""
    rate = is_counter(kind)
    rows: dict[int, dict[str, float]] = {}
    for node, sample in sorted(polled.telemetry.items()):
        values = sample.rates if rate else sample.values
        rows[node] = {
            column: value for key, value in values.items() if (column := _column(key, kind)) is not None
        }
    columns = sorted({c for row in rows.values() for c in row}, key=lambda c: (len(c), c))
    if not columns:
        return _nothing("not recorded: no node has recorded this series")
    unit, factor = _unit(kind)
    return {
        "unit": unit + ("/s" if rate else ""),
        "centred": False,
        "rank": False,
        "nodes": list(rows),
        "columns": columns,
        "values": [[_scaled(row.get(column), factor) for column in columns] for row in rows.values()],
        "times": [polled.telemetry[node].time for node in rows],
    }


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else float(f"{value * factor:.6g}")


def _labels(key: str) -> tuple[str, dict[str, str]]:
    try:
        return parse_series(key)
    except ValueError:  # recorded by another version
        return key, {}


def _kind(key: str) -> str:
    """The series without the device label, such as `gpu_throttle_ratio{reason="power_cap"}`."""
    name, labels = _labels(key)
    rest = ",".join(f'{label}="{value}"' for label, value in labels.items() if label not in ("gpu", "port"))
    return f"{name}{{{rest}}}" if rest else name


def _column(key: str, kind: str) -> str | None:
    """The device of a series of this kind; "" for the whole node; None if it is of another kind."""
    if _kind(key) != kind:
        return None
    labels = _labels(key)[1]
    return labels.get("gpu", labels.get("port", "node"))


def _label(kind: str) -> str:
    name, labels = _labels(kind)
    return " ".join([name.removesuffix("_total").replace("_", " "), *labels.values()])


def _unit(kind: str) -> tuple[str, float]:
    """(display unit, factor to it)."""
    known = NODE_SERIES.get(_labels(kind)[0])
    unit = "" if known is None else known.unit
    return _UNITS.get(unit, ""), 100.0 if unit == "ratio" else 1.0


def worst(polled: PolledRun, most: int) -> Iterator[tuple[int, int | str, float, float]]:
    """The ranks that deviate most: (rank, node, seconds of own work, deviation from peers in percent of a step)."""
    ranks = polled.ranks
    if ranks.account is None:
        return
    share = 100 * excess_over_peers(ranks.own_s, ranks.pipeline) / ranks.account.split.step_s
    each = ranks.account.ranks // (len(ranks.nodes) or 1)
    for rank in np.argsort(-np.abs(share), kind="stable")[:most].tolist():
        node = ranks.nodes[rank // each] if ranks.nodes else "?"
        yield rank, node, float(ranks.own_s[rank]), float(share[rank])
