"""A real Prometheus scrapes a live run by the file that the coordinator keeps."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import JOB, Run
from grafana_panels import assert_all_have_data
from prometheus_server import Prometheus
from seatrial.base.process import living
from seatrial.record.folder import RunFolder
from seatrial.record.series import NODE_SERIES, PREFIX, RUN_SERIES
from seatrial.record.telemetry import read_latest
from seatrial.watch.grafana.alert_rules import rules_yaml

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

# Two nodes of one rank each, for as long as the test takes.
LIVE = JOB.replace("gpus_per_node = 2", "gpus_per_node = 1").replace("tensor = 2\npipeline = 2", "shard = 2")
LIVE = LIVE.replace("steps = 12", "steps = 100000").replace("every_steps = 4", "every_steps = 50")


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


@pytest.fixture
def live(request: pytest.FixtureRequest, folder: Path, start: Callable[..., Run]) -> tuple[Run, int]:
    """A run that serves /metrics from a port on; the parameter has its further arguments."""
    port = free_ports(3)  # one for a spare
    watch = f"\n[watch]\ntelemetry_every_s = 1\nmetrics_port = {port}\n"
    (folder / "job.toml").write_text(LIVE + watch)
    return start(*getattr(request, "param", ())), port


@pytest.fixture
def prometheus(folder: Path) -> Iterator[Prometheus]:
    """With the rules that `seatrial watch --grafana` writes."""
    (folder / "rules.yml").write_text(rules_yaml())
    targets = folder / "runs/small/control/prometheus-targets.json"
    server = Prometheus(folder / "prometheus", targets, f"rule_files: [{folder / 'rules.yml'}]")
    yield server
    server.close()


def test_prometheus_scrapes_a_live_run(live: tuple[Run, int], prometheus: Prometheus) -> None:
    run, port = live
    assert len(prometheus.wait('up{job="seatrial"} == 1', lambda values: values == [1.0, 1.0])) == 2
    prometheus.wait('seatrial_run_checkpoint_step{run="small"} >= 50')
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
    # Not known: on a CPU, without a failure, without validation data, without experts.
    unknown = {"run_mfu_ratio", "run_mtbf_seconds", "run_validation_loss"}
    unknown |= {name for name in RUN_SERIES if "expert" in name or "router" in name}
    for name in RUN_SERIES.keys() - unknown:
        prometheus.wait(PREFIX + name)
    assert_all_have_data(prometheus)
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


@pytest.mark.long
@pytest.mark.parametrize("live", [("--set", "cluster.spares=1")], indirect=True)
def test_the_next_coordinator_serves_the_run(live: tuple[Run, int], prometheus: Prometheus) -> None:
    run, port = live
    lease = run.folder / "runs/small/control/lease.json"
    prometheus.wait("seatrial_run_spare_nodes == 1")
    before = json.loads(lease.read_text())["node"]
    os.kill(agent(run, before), signal.SIGKILL)
    found = prometheus.wait("seatrial_run_generation >= 2")
    after = json.loads(lease.read_text())["node"]
    assert after != before
    assert [each["metric"]["instance"] for each in found] == [f"127.0.0.1:{port + after}"]
    prometheus.wait("seatrial_run_spare_nodes == 0")
    prometheus.wait("delta(seatrial_run_step[5s]) > 0")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 75


def agent(run: Run, node: int) -> int:
    """The process of one node's agent, not one that it has forked."""
    found = {pid for pid in run.processes() if f"--node\0{node}\0".encode() in command_of(pid)}
    parents = living()
    return next(pid for pid in found if parents[pid] not in found)


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
