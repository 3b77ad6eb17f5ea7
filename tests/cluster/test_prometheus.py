"""A real Prometheus scrapes a live run by the file that the coordinator keeps."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import JOB, Run, write_corpus
from prometheus_server import Prometheus
from seatrial.record.folder import RunFolder
from seatrial.record.series import NODE_SERIES, PREFIX, RUN_SERIES, SERVED_SERIES
from seatrial.record.telemetry import read_latest
from seatrial.watch.grafana.alert_rules import alert_rules, rules_yaml
from seatrial.watch.grafana.panels import boards

pytestmark = pytest.mark.cluster

# Two nodes of one rank each, for as long as the test takes.
LIVE = JOB.replace("gpus_per_node = 2", "gpus_per_node = 1").replace("tensor = 2\npipeline = 2", "shard = 2")
LIVE = LIVE.replace("steps = 12", "steps = 100000").replace("every_steps = 4", "every_steps = 20")
LIVE = LIVE.replace('"corpus"', '"corpus"\nvalidation = "other.py"').replace(
    "[train]", "[train]\nvalidate_every_steps = 20"
)

# What needs GPUs, RDMA ports, a device whose peak is known, a failure, a clock that NTP keeps, or an alert.
NOT_HERE = r"seatrial_(gpu|port)_|run_(mfu_ratio|mtbf_seconds)|node_clock_(offset|max_error)|ALERTS"
if not Path("/proc/pressure").exists():
    NOT_HERE += "|node_pressure"


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, int, Prometheus]]:
    """A run that serves /metrics from a port on, and a Prometheus with Seatrial's rules that scrapes it; for both tests."""
    folder, port = tmp_path_factory.mktemp("live"), free_ports(2)
    write_corpus(folder)
    watch = f"\n[watch]\ntelemetry_every_s = 1\nmetrics_port = {port}\n"
    (folder / "job.toml").write_text(LIVE + watch)
    (folder / "rules.yml").write_text(rules_yaml())
    targets = folder / "runs/small/control/prometheus-targets.json"
    server = Prometheus(folder / "prometheus", targets, f"rule_files: [{folder / 'rules.yml'}]")
    run = Run(folder)
    try:
        yield run, port, server
    finally:
        server.close()
        run.kill_all()
        run.process.communicate()


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


def test_every_panel_and_rule_has_data_from_a_live_run(live: tuple[Run, int, Prometheus]) -> None:
    _, _, prometheus = live
    prometheus.wait('seatrial_run_checkpoint_step{run="small"} >= 20')
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


def test_prometheus_scrapes_a_live_run(live: tuple[Run, int, Prometheus]) -> None:
    run, port, prometheus = live
    assert len(prometheus.wait('up{job="seatrial"} == 1', lambda values: values == [1.0, 1.0])) == 2
    prometheus.wait('seatrial_run_checkpoint_step{run="small"} >= 20')
    # The series of a node have no label of the run; `run_info` joins it.
    joined = prometheus.wait(
        "seatrial_node_cpus * on (instance) group_left (run) seatrial_run_info",
        lambda values: len(values) == 2,
    )
    assert {(each["metric"]["node"], each["metric"]["run"]) for each in joined} == {
        ("0", "small"),
        ("1", "small"),
    }
    for name in NODE_SERIES:
        assert not prometheus.query(f'{PREFIX}{name}{{run!=""}}')
    steps = prometheus.wait("delta(seatrial_run_step[10s]) > 0")
    assert len(steps) == 1, "the coordinator's node alone serves the series of the run"
    prometheus.wait("rate(seatrial_node_tcp_sent_segments_total[10s])", lambda values: len(values) == 2)
    split = prometheus.wait("sum(seatrial_run_step_stage_seconds)")
    assert 0 < float(split[0]["value"][1]) < 10
    assert (
        0 <= float(prometheus.query("time() - seatrial_run_last_step_timestamp_seconds")[0]["value"][1]) < 10
    )
    # Not known: on a CPU, without a failure.
    for name in RUN_SERIES.keys() - {"run_mfu_ratio", "run_mtbf_seconds"}:
        prometheus.wait(PREFIX + name)
    for node in (0, 1):
        address = f"http://127.0.0.1:{port + node}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        assert 20 < sum(not line.startswith("#") for line in lines) < 80
    samples = read_latest(RunFolder(run.folder / "runs/small"))
    assert sorted(samples) == [0, 1]
    assert samples[0].values["node_cpus"] == samples[1].values["node_cpus"]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 75
    run.wait_gone(5.0)
    prometheus.wait('up{job="seatrial"} == 0', lambda values: len(values) == 2)
