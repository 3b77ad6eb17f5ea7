"""Whether every panel of the dashboards, and every rule, works on a Prometheus that scrapes a live run named `small`."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_server import Prometheus
from seatrial.record.series import NODE_SERIES, PREFIX, RUN_SERIES, SERVED_SERIES
from seatrial.watch.grafana.alert_rules import alert_rules
from seatrial.watch.grafana.panels import boards

# What needs GPUs, RDMA ports, a device whose peak is known, validation data, experts, a failure, a clock that NTP keeps, or an
# alert.
NOT_HERE = (
    r"seatrial_(gpu|port)_|run_(mfu_ratio|validation_loss|mtbf_seconds|expert_|idle_|router_)"
    r"|node_clock_(offset|max_error)|ALERTS"
)
if not Path("/proc/pressure").exists():
    NOT_HERE += "|node_pressure"


def in_dashboards() -> dict[str, str]:
    """Title of dashboard and panel, legend -> PromQL as Grafana would send it for this run."""
    values = {"$run": "small", "$node": "0|1", "$__rate_interval": "10s", "$__range": "1h"}
    found = {}
    for board in boards():
        for _, row in board.rows:
            for panel in row:
                for promql, legend in panel.queries:
                    for name, value in values.items():
                        promql = promql.replace(name, value)
                    assert "$" not in promql
                    found[f"{board.title}: {panel.title}: {legend}"] = promql
    return found


def assert_all_have_data(prometheus: Prometheus) -> None:
    """Each panel has data, or needs what is not here; each rule has been evaluated. Waits for both."""
    known = {PREFIX + name for name in (*NODE_SERIES, *RUN_SERIES, *SERVED_SERIES)}
    here = set()
    for name, promql in in_dashboards().items():
        used = set(re.findall(rf"\b{PREFIX}\w+", promql))
        assert used <= known, name
        if re.search(NOT_HERE, promql):
            prometheus.query(promql)  # fails if the expression is not valid
        else:
            assert prometheus.wait(promql), name
            here |= used
    assert len(here) > 30
    recorded = prometheus.wait("seatrial:run_tokens_per_second_per_rank > 0")
    assert [each["metric"]["run"] for each in recorded] == ["small"]
    # A rule whose expression fails, as for labels that match twice, is not "ok".
    health = prometheus.wait_rules()
    assert health == {each.name: "ok" for each in alert_rules()} | {
        "seatrial:run_tokens_per_second_per_rank": "ok"
    }
