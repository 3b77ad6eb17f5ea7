"""Grafana dashboards from panels.toml, as the JSON that Grafana imports or provisions."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_SCHEMA_VERSION = 38  # of Grafana 10; later ones migrate it
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT = 24, 7
_WIDTHS = {"stat": 6, "timeseries": 8}
# What a variable offers.
_VALUES = {"run": "label_values(seatrial_run_step, run)", "node": "label_values(seatrial_run_info, node)"}


@dataclass(frozen=True)
class Panel:
    """One panel; panels.toml describes the fields."""

    title: str
    queries: list[tuple[str, str]]  # PromQL, legend
    unit: str = "short"
    kind: str = "timeseries"
    needs: str | None = None
    stack: bool = False


@dataclass(frozen=True)
class Dashboard:
    """One dashboard."""

    name: str
    title: str
    variables: list[str]
    rows: list[tuple[str, list[Panel]]]

    def as_json(self) -> dict[str, Any]:
        """As Grafana imports it."""
        placed: list[dict[str, Any]] = []
        y = 0
        for title, row in self.rows:
            placed.append(_header(len(placed) + 1, title, y))
            x, y = 0, y + 1
            for panel in row:
                width = _WIDTHS[panel.kind]
                if x + width > _COLUMNS:
                    x, y = 0, y + _HEIGHT
                placed.append(_placed(panel, len(placed) + 1, x, y, width))
                x += width
            y += _HEIGHT
        return {
            "uid": f"seatrial-{self.name}",
            "title": self.title,
            "tags": ["seatrial"],
            "schemaVersion": _SCHEMA_VERSION,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": [_data_source(), *map(_variable, self.variables)]},
            "panels": placed,
        }


@cache
def dashboards() -> list[Dashboard]:
    """panels.toml."""
    text = files("seatrial.watch.grafana").joinpath("panels.toml").read_text(encoding="utf-8")
    found = []
    for name, table in tomllib.loads(text).items():
        rows = [(row["title"], [_panel(entry) for entry in row["panels"]]) for row in table["rows"]]
        found.append(Dashboard(name, table["title"], table["variables"], rows))
    return found


def _panel(entry: dict[str, Any]) -> Panel:
    queries = [(expression, legend) for expression, legend in entry["queries"]]
    return Panel(**{**entry, "queries": queries})


def _header(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}


def _placed(panel: Panel, number: int, x: int, y: int, width: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(panel.queries)
    ]
    own: dict[str, Any] = {}
    if panel.stack:
        own = {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 30}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, **own}, "overrides": []},
        "gridPos": {"x": x, "y": y, "w": width, "h": _HEIGHT},
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": _VALUES[name], "refId": name},
        "refresh": 2,  # when the time range changes
        "sort": 3,  # by number
        "multi": False,
        "includeAll": False,
    }
