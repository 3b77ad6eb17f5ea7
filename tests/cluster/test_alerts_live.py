"""A live run, a real Prometheus that scrapes it, a real Alertmanager: alerts arrive at a webhook."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_prometheus import free_ports

from alertmanager_server import Alertmanager, Receiver
from conftest import JOB, Run, records, seatrial
from installed import install
from prometheus_server import Prometheus
from seatrial.watch.grafana.panels import boards

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

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
alerts = {{ throughput_drop = {{ limit = 0.2, clear = 0.4, steps = 15, before = 60, for_s = 0, clear_s = 0 }} }}
"""
BRAKE = """
import time

class Brake:
    def __init__(self, run_folder):
        self._pulled = run_folder / "brake"

    def __call__(self, record):
        if self._pulled.exists():
            time.sleep(1)
"""


@dataclass
class Live:
    """Everything at work."""

    run: Run
    prometheus: Prometheus
    alertmanager: Alertmanager
    brake: Path

    def states(self) -> list[str]:
        """Of the alert for a throughput drop, as recorded by the run."""
        events = records(self.run.folder / "runs/small/events.jsonl")
        alerts = [e["data"] for e in events if e["kind"] == "alert"]
        return [alert["state"] for alert in alerts if alert["rule"] == "throughput_drop"]

    def stop_monitor(self) -> set[str]:
        """Stop its process by a signal; returns the events about it, which two processes report.

        It runs on the coordinator's node, either of the two.
        """
        until = time.monotonic() + 60
        pids: list[int] = []
        while not pids and time.monotonic() < until:
            time.sleep(0.1)  # it starts 3 s after the first step
            for pid in self.run.processes():
                with contextlib.suppress(OSError):  # it has ended
                    if b"seatrial.watch.monitor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        pids.append(pid)
        (pid,) = pids
        os.kill(pid, signal.SIGSTOP)
        kinds = ("process_stopped", "monitor_failed")
        path = self.run.folder / "runs/small/events.jsonl"
        found: list[str] = []
        while len(found) < 2 and time.monotonic() < until:
            time.sleep(0.1)  # a file that is appended to wakes nobody
            found = [f"{e['kind']}: {e['message']}" for e in records(path) if e["kind"] in kinds]
        node = next(e["node"] for e in records(path) if e["kind"] == "coordinator_elected")
        return {text.replace(str(pid), "PID").replace(f": node {node}:", ": its node:") for text in found}


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
        "rank[5m]": "rank[3s]",
        "rank[6h] offset 5m": "rank[15s] offset 3s",
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


def test_a_throughput_drop_reaches_a_webhook(live: Live) -> None:
    """By our delivery and, of the same drop, by Prometheus' own rule."""
    live.prometheus.wait("seatrial_run_checkpoint_step >= 20")
    assert live.stop_monitor() == {
        "process_stopped: its node: the monitor (process PID) has been stopped by a signal for 5 s: killed",
        "monitor_failed: the monitor's process was killed by SIGKILL; it is started again; the run continues",
    }
    assert live.states() == []  # a busy machine does not slow the median of 15 steps to a fifth
    live.brake.touch()
    ours = live.alertmanager.wait(
        lambda alert: (
            alert["labels"]["alertname"] == "SeatrialThroughputDrop"
            and alert["labels"].get("source") == "seatrial"
        )
    )
    assert ours["annotations"]["summary"].startswith("tokens/s have dropped: by ")
    assert seatrial(live.run.folder, *ours["annotations"]["command"].split()[1:]).returncode == 0
    assert live.states() == ["firing"]
    theirs = live.alertmanager.wait(
        lambda alert: (
            alert["labels"]["alertname"] == "SeatrialThroughputDrop" and "source" not in alert["labels"]
        )
    )
    assert theirs["labels"]["run"] == "small"
    assert theirs["labels"]["severity"] == "warning"
    assert theirs["annotations"]["summary"] == "small: tokens/s have dropped"
    assert theirs["annotations"]["command"] == ours["annotations"]["command"].replace(
        str(live.run.folder / "runs/small"), "small"
    )
    # Nothing but an alert makes the panel of alerts show anything.
    panel = next(p for b in boards() for _, row in b.rows for p in row if p.title == "Alerts")
    assert live.prometheus.query(panel.queries[0][0].replace("$run", "small"))
    live.brake.unlink()
    live.alertmanager.wait(
        lambda alert: (
            alert["labels"]["alertname"] == "SeatrialThroughputDrop"
            and alert["labels"].get("source") == "seatrial"
            and alert["status"] == "resolved"
        )
    )
    assert live.states() == ["firing", "resolved"]
