"""Grafana dashboard JSON from the table of panels."""

from __future__ import annotations

from typing import Any

from seatrial.watch.grafana.panels import Board, Panel
from seatrial.watch.grafana.queries import INFO

_SCHEMA = 39  # Grafana 10.3; later versions migrate it on load
_WIDTH, _HEIGHTS = 24, {"stat": 4, "timeseries": 8, "bargauge": 8, "table": 8}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(board: Board) -> dict[str, Any]:
    """One dashboard, for import or provisioning. Deterministic."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in board.rows:
        panels.append(
            {
                "type": "row",
                "title": heading,
                "collapsed": False,
                "panels": [],
                "gridPos": _at(0, y, _WIDTH, 1),
            }
        )
        x, y, tallest = 0, y + 1, 0
        for panel in row:
            height = _HEIGHTS[panel.kind]
            if x + panel.width > _WIDTH:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(panel) | {"gridPos": _at(x, y, panel.width, height)})
            x, tallest = x + panel.width, max(tallest, height)
        y += tallest
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["seatrial"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # shared crosshair
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Seatrial",
                "tags": ["seatrial"],
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {"list": _variables(board)},
        "panels": [{"id": n} | panel for n, panel in enumerate(panels, start=1)],
    }


def _at(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _variables(board: Board) -> list[dict[str, Any]]:
    source = {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"}
    found = [source, _variable("run", f"label_values({INFO}, run)", board.several, board.several)]
    if board.of_nodes:
        found.append(_variable("node", f'label_values({INFO}{{run=~"$run"}}, node)', True, False))
    return found


def _variable(name: str, query: str, several: bool, all_of_them: bool) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": name,
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # refresh when the time range changes
        "sort": 3,  # numerically
        "multi": several,
        "includeAll": all_of_them,  # no "All" for nodes: a browser cannot draw a thousand
    }


def _panel(panel: Panel) -> dict[str, Any]:
    over_time = panel.kind == "timeseries"
    targets = [
        {
            "refId": chr(ord("A") + n),
            "datasource": _SOURCE,
            "expr": expression,
            "legendFormat": legend,
            "instant": not over_time,
            "range": over_time,
            "format": "table" if panel.kind == "table" else "time_series",
        }
        for n, (expression, legend) in enumerate(panel.queries)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.unit == "percentunit" and panel.kind == "timeseries":
        defaults |= {"min": 0}
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if over_time:
        defaults["custom"] = {
            "fillOpacity": 60 if panel.stacked else 0,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.limit is None else "line"},
        }
    found = {
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
    }
    if panel.kind == "table":
        hidden = dict.fromkeys(("Time", "Value", "__name__", "job", "instance"), True)
        found["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return found


_LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}}
_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {**_LAST, "textMode": "value_and_name", "colorMode": "value", "graphMode": "none"},
    "bargauge": {**_LAST, "orientation": "horizontal", "displayMode": "basic"},
    "table": {"showHeader": True},
}
