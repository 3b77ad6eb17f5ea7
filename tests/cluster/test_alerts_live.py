"""A live run, a real Prometheus that scrapes it, a real Alertmanager: alerts arrive at a webhook, dashboards have data."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_prometheus import free_ports

from alertmanager_server import Alertmanager, Receiver
from conftest import JOB, Run, records, seatrial
from installed import install
from prometheus_server import Prometheus

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

JOB_FILE = (
    JOB.replace("gpus_per_node = 2", "gpus_per_node = 1")
    .replace("tensor = 2\npipeline = 2", "shard = 2")
    .replace("steps = 12", 'steps = 100000\ncallbacks = ["brake"]')
    .replace("every_steps = 4", "every_steps = 20")
)
WATCH = """
[watch]
telemetry_every_s = 1
metrics_port = {port}
alertmanager = "{alertmanager}"
alerts = {{ throughput_drop = {{ limit = 0.5, clear = 0.6, steps = 5, before = 20, for_s = 0, clear_s = 0 }} }}
"""
BRAKE = """
import time

class Brake:
    def __init__(self, run_folder):
        self._pulled = run_folder / "brake"

    def __call__(self, record):
        if self._pulled.exists():
            time.sleep(0.5)
"""
# A panel that needs one of these shows nothing on this machine.
ABSENT = {"gpu", "nvlink", "fabric", "validation", "peak"}


@dataclass
class Live:
    """Everything at work."""

    run: Run
    prometheus: Prometheus
    alertmanager: Alertmanager
    brake: Path

    @property
    def alerts(self) -> list[dict[str, object]]:
        events = records(self.run.folder / "runs/small/events.jsonl")
        return [e for e in events if e["kind"] == "alert" and e["data"]["rule"] == "throughput_drop"]


@pytest.fixture
def live(folder: Path, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """The rules are those that `--grafana` writes, with seconds instead of minutes."""
    site = folder / "site"
    install({"seatrial.callbacks": {"brake": "brake:Brake"}}, site, monkeypatch)
    (site / "brake.py").write_text(BRAKE)
    wrote = seatrial(folder, "watch", "--grafana", "grafana")
    assert wrote.returncode == 0, wrote.stderr
    rules = folder / "grafana/seatrial-rules.yml"
    fast = {
        "for: 60s": "for: 1s",
        "[2m:15s]": "[3s:500ms]",
        "[1h:15s]": "[15s:500ms]",
        "offset 2m": "offset 3s",
    }
    text = rules.read_text()
    for slow, quick in fast.items():
        assert slow in text
        text = text.replace(slow, quick)
    (folder / "fast-rules.yml").write_text(text)
    receiver, port = Receiver(), free_ports(2)
    alertmanager = prometheus = None
    try:
        alertmanager = Alertmanager(folder / "alertmanager", receiver)
        (folder / "job.toml").write_text(
            JOB_FILE + WATCH.format(port=port, alertmanager=alertmanager.address)
        )
        more = f"rule_files: [{folder / 'fast-rules.yml'}]\nalerting:\n  alertmanagers:\n"
        more += f"    - static_configs: [{{targets: ['127.0.0.1:{alertmanager.port}']}}]\n"
        targets = folder / "runs/small/control/prometheus-targets.json"
        prometheus = Prometheus(folder / "prometheus", targets, more)
        run = start()
        yield Live(run, prometheus, alertmanager, folder / "runs/small/brake")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait()[0] == 75
    finally:
        for each in (prometheus, alertmanager, receiver):
            if each is not None:
                each.close()


def expressions(folder: Path) -> Iterator[tuple[str, str]]:
    """(what it needs, PromQL) of every query of every panel."""
    from seatrial.watch.grafana.dashboards import dashboards

    needs = {query: p.needs for d in dashboards() for _, row in d.rows for p in row for query, _ in p.queries}
    for file in sorted((folder / "grafana").glob("*.json")):
        dashboard = json.loads(file.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expression = re.sub(r"\$(run|node)\b", ".*", target["expr"]).replace("$__rate_interval", "5s")
                yield needs[target["expr"]] or "", expression


def test_a_throughput_drop_reaches_a_webhook(live: Live) -> None:
    """By our delivery and, of the same drop, by Prometheus' own rule; and every panel has data."""
    live.prometheus.wait("seatrial_run_checkpoint_step >= 20")
    live.prometheus.wait("rate(seatrial_node_tcp_sent_segments_total[5s])", lambda values: len(values) == 2)
    empty = []
    for needs, expression in expressions(live.run.folder):
        found = live.prometheus.query(expression)
        if not found and needs not in ABSENT | {"pressure", "synchronised"}:
            empty.append(expression)
        assert not (found and needs in ABSENT), f"{expression} has data here"
    assert not empty
    live.brake.touch()
    ours = live.alertmanager.wait(lambda alert: alert["labels"].get("source") == "seatrial")
    assert ours["labels"]["alertname"] == "SeatrialThroughputDrop"
    assert ours["annotations"]["summary"].startswith("tokens/s have dropped: by ")
    assert seatrial(live.run.folder, *ours["annotations"]["command"].split()[1:]).returncode == 0
    (event,) = live.alerts
    assert event["data"]["state"] == "firing"  # type: ignore[index]
    theirs = live.alertmanager.wait(
        lambda alert: (
            alert["labels"]["alertname"] == "SeatrialThroughputDrop" and "source" not in alert["labels"]
        )
    )
    assert theirs["labels"]["run"] == "small"
    live.brake.unlink()
    live.alertmanager.wait(
        lambda alert: alert["labels"].get("source") == "seatrial" and alert["status"] == "resolved"
    )
    assert [e["data"]["state"] for e in live.alerts] == ["firing", "resolved"]  # type: ignore[index]


def test_promtool_accepts_the_rules(folder: Path) -> None:
    import shutil

    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    assert seatrial(folder, "watch", "--grafana", "grafana").returncode == 0
    rules = folder / "grafana/seatrial-rules.yml"
    checked = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", rules], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS: 10 rules found" in checked.stdout
