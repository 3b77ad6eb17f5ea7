"""The monitor's process beside the coordinator: its messages are recorded, and the run continues whatever happens to it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wired import Pump

from seatrial.base import process
from seatrial.control.coordinator import monitor as module
from seatrial.control.coordinator.monitor import MonitorProcess
from seatrial.control.coordinator.recorder import Recorder
from seatrial.control.net.lease import Lease
from seatrial.record.alerting import alert_of, open_alerts
from seatrial.record.events import Event, read_events
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import encode

ALERT = {
    "rule": "no_progress",
    "key": "no_progress",
    "state": "firing",
    "severity": "error",
    "message": "no step is finished",
    "since": 1000.0,
    "time": 1300.0,
    "nodes": [3],
    "rank": None,
    "evidence": {"age_s": 300.0},
    "command": "seatrial logs r",
}
SAYS = f"echo '{encode({'alert': ALERT}).decode().strip()}'"


class Harness:
    """A monitor in the test's hands: a shell script instead of the module."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pump = Pump()
        self.folder = RunFolder(tmp_path)
        self.folder.control.mkdir()
        recorder = Recorder(self.folder, 1, Lease(1, 0, "127.0.0.1", 1, 0.0))
        arguments = (tmp_path, self.folder.monitor_log, recorder, self.pump.watch, self.pump.unwatch)
        self.monitor = MonitorProcess(*arguments)
        self.script = "true"
        self.asked: list[tuple[str, ...]] = []
        monkeypatch.setattr(module.process, "python", self._command)
        self.pump.ticks += [lambda: process.reap(self._reaped), lambda: self.monitor.tick(time.monotonic())]

    def _command(self, *what: str) -> list[str]:
        self.asked.append(what)
        return ["/bin/sh", "-c", self.script]

    def _reaped(self, pid: int, status: int) -> None:
        self.monitor.reaped(pid, status)  # False once it was closed

    def start(self, script: str) -> None:
        self.script = script
        self.monitor.generation_started(0.0)
        self.monitor.tick(time.monotonic())

    def events(self, kind: str) -> list[Event]:
        return [e for e in read_events(self.folder)[0] if e.kind == kind]


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    before = process.descendants(os.getpid())
    found = Harness(tmp_path, monkeypatch)
    yield found
    found.monitor.close()
    found.pump.until(lambda: process.descendants(os.getpid()) == before)  # it dies a little later
    process.reap(lambda pid, status: None)


def test_an_alert_is_recorded_and_read_back(harness: Harness) -> None:
    harness.start(f"{SAYS}; sleep 60")
    harness.pump.until(lambda: harness.events("alert"))
    event = harness.events("alert")[0]
    assert (event.severity, event.node, event.message) == ("error", 3, ALERT["message"])
    alert = alert_of(event)
    assert alert is not None
    assert {k: v for k, v in vars(alert).items() if k != "time"} == {
        k: v for k, v in ALERT.items() if k != "time"
    }
    assert open_alerts(harness.events("alert")) == [alert]
    assert harness.asked == [(module.MODULE, str(harness.folder.path))]


def test_it_starts_after_the_first_step(harness: Harness) -> None:
    assert harness.monitor.deadline is None
    harness.monitor.generation_started(100.0)
    assert harness.monitor.deadline == 130.0
    harness.monitor.stepped(110.0)
    assert harness.monitor.deadline == 113.0
    harness.monitor.stepped(112.0)
    harness.monitor.generation_started(112.5)  # a recovery
    assert harness.monitor.deadline == 113.0
    harness.monitor.tick(112.9)
    assert not harness.asked


def test_it_has_the_lowest_priority(harness: Harness) -> None:
    harness.start("nice > nice.txt; sleep 60")
    found = Path("nice.txt")
    try:
        harness.pump.until(lambda: found.exists() and found.read_text())
        assert found.read_text() == "19\n"
    finally:
        found.unlink()


def test_its_deaths_are_warnings_and_end_it(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTARTS_S", (0.0, 0.0))
    harness.start(f"{SAYS}; exit 7")
    harness.pump.until(lambda: len(harness.events("monitor_failed")) == 3)
    harness.pump.settle()
    failed = harness.events("monitor_failed")
    assert len(failed) == len(harness.events("alert")) == len(harness.asked) == 3
    assert all(e.severity == "warning" and e.data and e.data["status"] == 7 for e in failed)
    assert ["not started again" in e.message for e in failed] == [False, False, True]
    harness.monitor.generation_started(0.0)  # the next generation
    assert harness.monitor.deadline is None


@pytest.mark.parametrize("said", ["nonsense", '{"alert": {"rule": "r"}}', '{"start": {}}'])
def test_a_wrong_message_ends_it(harness: Harness, said: str) -> None:
    harness.start(f"echo '{said}'; sleep 60")
    harness.pump.until(lambda: harness.events("monitor_failed"))
    assert not harness.events("alert")


def test_a_flood_ends_it(harness: Harness) -> None:
    harness.start(f"for i in $(seq 1200); do {SAYS}; done; sleep 60")
    harness.pump.until(lambda: harness.events("monitor_failed"))
    assert len(harness.events("alert")) == 1000


def test_at_the_end_it_may_deliver(harness: Harness) -> None:
    harness.start(f'read line; echo "$line" > {harness.folder.path}/line; {SAYS}; exit 0')
    harness.monitor.end()
    harness.monitor.close()
    assert len(harness.events("alert")) == 1
    assert '"end"' in (harness.folder.path / "line").read_text()
    assert not harness.events("monitor_failed")


def test_the_end_waits_for_nothing_that_hangs(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDS_S", 0.1)
    harness.start("sleep 60")
    harness.monitor.end()
    began = time.monotonic()
    harness.monitor.close()
    assert time.monotonic() - began < 5


def test_none_is_started_after_the_end(harness: Harness) -> None:
    harness.monitor.generation_started(0.0)
    harness.monitor.end()
    assert harness.monitor.deadline is None
    harness.monitor.generation_started(0.0)
    assert harness.monitor.deadline is None
