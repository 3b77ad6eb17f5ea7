"""What the rules look at, read from a run folder; and the monitor's part for alerts on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alert_cases import NOW, alert, steps

from presets import preset_job
from seatrial.job import Job
from seatrial.record import events
from seatrial.record import messages as msg
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsWriter
from seatrial.record.nodes import Nodes
from seatrial.record.telemetry import Sample
from seatrial.record.telemetry_writer import TelemetryWriter
from seatrial.watch.alerts.alerting import Alerting
from seatrial.watch.alerts.situation_reader import CounterGrowth, SituationReader, idle, untested

REPLAYS = 'gpu_pcie_replays_total{gpu="0"}'
HOT = 'gpu_temperature_celsius{gpu="0"}'


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def job(folder: RunFolder) -> Job:
    return preset_job(
        "first-voyage",
        "cluster.spares=1",
        "checkpoint.every_steps=50",
        "train.steps=1000",
        folder=folder.path,
    )


@pytest.fixture
def write(folder: RunFolder) -> Callable[..., None]:
    """Record events of generation 1, or another."""

    def of(kind: str, node: int | None = None, generation: int = 1, ago: float = 100.0, **data: Any) -> None:
        events.write(folder, Event(NOW - ago, generation, kind, "info", kind, node, None, data or None))

    return of


def begin(write: Callable[..., None]) -> None:
    write("run_started")
    for node in (0, 1, 2):
        write("node_joined", node)
    write("generation_started", slots={"0": 0, "1": 1})


def metrics(folder: RunFolder, count: int) -> None:
    writer = MetricsWriter(folder)
    for record in steps(count):
        writer.write(record)
    writer.close()


def test_a_live_run_is_read(folder: RunFolder, job: Job, write: Callable[..., None]) -> None:
    begin(write)
    metrics(folder, 300)
    TelemetryWriter(folder, 1, 10.0).add(NOW - 5, {HOT: 71.0})
    s = SituationReader(folder, job).look(NOW)
    assert (s.training, s.spares, s.idle, s.untested) == ([0, 1], [2], {}, [])
    assert (s.wanted_nodes, s.wanted_spares, s.checkpoint_steps, s.total_steps) == (2, 1, 50, 1000)
    assert s.samples[1].values == {HOT: 71.0}
    assert s.steps[-1].step == 300
    assert s.started == NOW - 100


def test_new_and_redone_steps_are_followed(folder: RunFolder, job: Job, write: Callable[..., None]) -> None:
    begin(write)
    metrics(folder, 10)
    follower = SituationReader(folder, job)
    assert len(follower.look(NOW).steps) == 10
    writer = MetricsWriter(folder)
    writer.write(replace(steps(10)[7], generation=2))
    writer.close()
    assert [each.step for each in follower.look(NOW + 1).steps] == list(range(1, 9))


def test_nodes_of_a_large_run_are_known_however_old_their_events(
    folder: RunFolder, job: Job, write: Callable[..., None]
) -> None:
    write("run_started")
    for node in range(130):
        write("node_joined", node)
    write("generation_started", slots={str(n): n for n in range(128)})
    for _ in range(400):
        write("checkpoint_late", step=1)
    s = SituationReader(folder, job).look(NOW)
    assert (len(s.training), s.spares) == (128, [128, 129])


def event(kind: str, node: int | None = None, **data: Any) -> Event:
    return Event(NOW, 1, kind, "info", kind, node, None, data or None)


def test_idle_nodes() -> None:
    began = [event("node_joined", n) for n in (0, 1, 2)] + [
        event("generation_started", slots={"0": 0, "1": 1})
    ]
    excluded = [*began, event("node_evicted", 1)]
    assert list(idle(excluded, Nodes(excluded))) == [1]
    gone = [*excluded, event("node_lost", 1)]
    assert idle(gone, Nodes(gone)) == {}
    waits = [*began, event("node_lost", 0), event("waiting_for_nodes")]
    assert list(idle(waits, Nodes(waits))) == [1, 2]
    goes_on = [*waits, event("generation_started", slots={"0": 2, "1": 1})]
    assert idle(goes_on, Nodes(goes_on)) == {}


def test_untested_nodes() -> None:
    began = [event("node_joined", n) for n in (0, 1)] + [event("generation_started", slots={"0": 0, "1": 1})]
    lost = [*began, event("node_lost", 1)]
    assert untested(lost, Nodes(lost)) == []
    back = [*lost, event("node_joined", 1)]
    assert untested(back, Nodes(back)) == [1]
    failed = [*back, event("node_requalified", 1, ok=False)]
    assert untested(failed, Nodes(failed)) == [1]
    passed = [*failed, event("node_requalified", 1, ok=True)]
    assert untested(passed, Nodes(passed)) == []
    for done, expected in ((True, [0]), (False, [])):
        reset = [*began, event("gpu_reset", 0, done=done)]
        assert untested(reset, Nodes(reset)) == expected


def test_growth_of_counters_in_ten_minutes() -> None:
    growth = CounterGrowth()
    for at, value in ((0, 5.0), (100, 7.0), (200, 1.0), (200, 99.0), (300, 4.0)):  # reset at 200
        growth.take({0: Sample(NOW + at, 10.0, {REPLAYS: value, HOT: 70.0}, {})})
    assert growth.by_node == {0: {REPLAYS: 5.0}}
    growth.take({0: Sample(NOW + 850, 10.0, {REPLAYS: 4.0}, {})})
    assert growth.by_node == {0: {REPLAYS: 0.0}}


def test_alerts_are_sent_once_even_after_a_restart(
    folder: RunFolder, job: Job, write: Callable[..., None]
) -> None:
    begin(write)
    write("loss_spike", ago=50, signal="loss_spike")
    metrics(folder, 60)
    events.write(
        folder, Event(NOW - 200, 1, "alert", "warning", "m", data=alert("gpu_hot", nodes=[7]).event_data())
    )
    sent: list[Any] = []
    alerting = Alerting(folder, job, sent.append)
    for second in range(5):
        alerting.poll(NOW + second)
    (spike,) = sent
    assert isinstance(spike, msg.MonitorAlert)
    assert (spike.rule, spike.state) == ("loss_spike", "firing")
    events.write(folder, Event(NOW, 1, "alert", "warning", spike.message, data=spike.event_data()))
    sent.clear()
    again = Alerting(folder, job, sent.append)
    for second in range(400):
        again.poll(NOW + 5 + second)
    assert [(a.rule, a.state) for a in sent if a.rule in ("loss_spike", "gpu_hot")] == [
        ("gpu_hot", "resolved")
    ]


def test_damaged_records_do_not_end_the_monitor(
    folder: RunFolder, job: Job, write: Callable[..., None]
) -> None:
    begin(write)
    with folder.events.open("a") as file:
        file.write('{"kind": "alert"}\nnonsense\n')
    write("alert", rule=3, key=[], state="firing")
    write("signal", signal=["x"], evidence=7)
    write("generation_started", slots=[1])
    folder.metrics.write_text("nonsense\n")
    (folder.telemetry / "node0").mkdir(parents=True)
    (folder.telemetry / "node0" / "1").write_bytes(b"\0")
    sent: list[Any] = []
    Alerting(folder, job, sent.append).poll(NOW)
    assert sent == []
