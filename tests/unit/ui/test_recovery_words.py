"""Recoveries in words, from events alone."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from seatrial.record import lock
from seatrial.record.events import Event, append
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord
from seatrial.record.nodes import Nodes
from seatrial.record.view import read_view
from seatrial.ui.console import TrainConsole
from seatrial.ui.live import pane
from seatrial.ui.out import Out
from seatrial.ui.recovery import Recoveries, message_of
from seatrial.ui.summary import print_status, summary_json


def event(kind: str, message: str = "", when: float = 0.0, **data: Any) -> Event:
    return Event(when, 1, kind, "info", message, data=data)


def started(**slots: int) -> Event:
    return event("generation_started", slots={name[1:]: node for name, node in slots.items()})


def test_a_lost_node_and_the_spare_that_takes_its_place() -> None:
    recoveries = Recoveries()
    story = [
        event("coordinator_elected", "node 0 coordinates (term 1)", term=1),
        event("node_joined", "node 2 joined", spare=True),
        started(s0=0, s1=1),
        event("node_lost", "node 1 is lost: its agent exited", 10.0),
        event("recovering", "node 1 is lost; a spare takes over", 10.2, signal="node_lost"),
        started(s0=0, s1=2),
        event("recovered", "resuming after step 6 (from a live replica)", 12.6, redone=0),
        event("node_joined", "node 1 joined", spare=False),
    ]
    lines = [line.text for e in story if (line := recoveries.take(e)) is not None]
    assert lines == [
        "node 1 is lost: its agent exited",
        "recovering: node 1 is lost; a spare takes over",
        "node 2 (a spare) replaces node 1",
        "recovered after 2.4 s: resuming after step 6 (from a live replica)",
        "node 1 joined",
    ]
    assert recoveries.underway(99.0) is None
    assert recoveries.total == "1, in 2.4 s, no step redone"


def test_a_failure_during_a_recovery_is_part_of_it() -> None:
    recoveries = Recoveries(
        [
            event("recovering", "first", 10.0),
            event("recovering", "recovering again: second", 11.0),
            event("recovered", "r", 14.0, redone=3),
            event("recovering", "third", 20.0),
            event("recovered", "r", 21.0, redone=4),
            event("recovering", "fourth", 30.0),
        ]
    )
    assert recoveries.seconds == [4.0, 1.0]
    assert recoveries.total == "2, the longest 4.0 s, 7 steps redone"
    assert recoveries.underway(35.4) == "recovering for 5 s: fourth"
    assert recoveries.underway(29.0) == "recovering for 0 s: fourth", "another machine's clock may be ahead"


def test_other_events_are_not_its_business() -> None:
    recoveries = Recoveries()
    for kind in ("rank_failed", "checkpoint_saved", "rank_started", "signal"):
        assert recoveries.take(event(kind)) is None
    assert recoveries.take(Event(0.0, 1, "generation_started", "info", "damaged", data=None)) is None
    line = recoveries.take(event("recovered", "resuming after step 6"))
    assert line is not None
    assert line.text == "recovered: resuming after step 6", "the viewer came later than the failure"
    assert recoveries.total is None


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a-run")
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text("[train]\nsteps = 200\nglobal_batch = 32\nsequence_length = 256\n")
    append(folder, "run_started", "4 ranks", generation=1)
    append(folder, "generation_started", "g", generation=1, data={"slots": {"0": 0, "1": 1}})
    append(folder, "recovering", "rank 3 on node 1 was killed", severity="warning", generation=1)
    append(folder, "generation_started", "g", generation=2, data={"slots": {"0": 0, "1": 1}})
    return folder


def test_console_reports_recoveries_without_the_word_warning(folder: RunFolder) -> None:
    out = io.StringIO()
    view = TrainConsole(folder, total_steps=200, generation=1, stream=out)
    append(folder, "recovered", "resuming after step 7", generation=2, data={"redone": 2})
    append(folder, "shrunk", "shrunk to 1 replica on 1 node", severity="warning", generation=3)
    view.poll()
    lines = out.getvalue().splitlines()
    assert lines[0] == "recovering: rank 3 on node 1 was killed"
    assert lines[1].startswith("recovered after ")
    assert lines[1].endswith(" ms: resuming after step 7")
    assert lines[2:] == ["shrunk to 1 replica on 1 node"]


def test_the_live_lines_show_what_is_being_recovered_from() -> None:
    from rich.console import Console, Group

    last = MetricsRecord(50, 0, 2.4, 0.8, 3e-3, 0.48, 0.01, 9120.4, 1140.05, None, None, 1.7e9, 1)
    for record in (None, last):
        out = io.StringIO()
        lines_of = pane(record, 200, 72.0, 0.0, "recovering for 3 s: \x1b[2J" + "n" * 90)
        Console(file=out, width=80).print(Group(*lines_of))
        lines = out.getvalue().splitlines()
        assert all(len(line) <= 80 for line in lines)
        assert lines[-1].startswith("recovering for 3 s: \N{REPLACEMENT CHARACTER}[2Jnnn")


def test_status_while_it_recovers_and_afterwards(folder: RunFolder) -> None:
    out = io.StringIO()
    fd = lock.acquire(folder.lock)
    try:
        print_status(Out(out), read_view(folder), time.time())
        document = json.loads(summary_json(read_view(folder), time.time()))
    finally:
        os.close(fd)
    assert "now          recovering for 0 s: rank 3 on node 1 was killed" in out.getvalue()
    assert document["recoveries"] == {
        "count": 0,
        "seconds": [],
        "steps_done_again": 0,
        "underway": "recovering for 0 s: rank 3 on node 1 was killed",
    }
    append(folder, "recovered", "resuming after step 7", generation=2, data={"redone": 2})
    append(folder, "run_interrupted", "saved", generation=2, data={"preempted": True})
    out = io.StringIO()
    view = read_view(folder)
    assert (view.state, view.first_generation, view.generation) == ("preempted", 1, 2)
    print_status(Out(out), view, time.time())
    assert "a-run: preempted, generation 2\n  why          stopped on request" in out.getvalue()
    assert "2 steps redone" in out.getvalue()


def test_which_nodes_have_ranks_and_which_are_gone() -> None:
    def node(kind: str, number: int) -> Event:
        return Event(0.0, 1, kind, "info", "", node=number)

    story = [node("node_joined", n) for n in range(4)]
    assert Nodes(story).text is None, "no generation has begun"
    story.append(started(s0=0, s1=1))
    assert Nodes(story).text == "2 with ranks; spare: 2, 3"
    story += [node("node_lost", 1), started(s0=0, s1=2)]
    assert Nodes(story).text == "2 with ranks; spare: 3; lost: 1"
    story += [node("node_evicted", 3), node("node_joined", 1), node("node_lost", 2)]
    assert Nodes(story).text == "1 with ranks; spare: 1; lost: 2; evicted: 3"
    many = [started(**{f"s{n}": n for n in range(2)}), *(node("node_joined", n) for n in range(100))]
    assert Nodes(many).text == "2 with ranks; spare: 2, 3, 4, 5, 6, 7, 8, 9 and 90 more"
    damaged = Event(0.0, 1, "generation_started", "info", "", data={"slots": {"0": "x", "1": True, "2": 5}})
    assert Nodes([damaged]).training == [5]


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("nonfinite", {"evidence": {"action": "redo"}}, "m: redoing it"),
        ("nonfinite", {"evidence": {"action": "stop"}}, "m: no more steps may be skipped"),
        ("loss_spike", {"evidence": {"action": "warn"}}, "m"),
        ("nonfinite", {"evidence": "damaged"}, "m"),
        ("nonfinite", None, "m"),
        ("corruption", {"evidence": {"action": "redo"}}, "m"),
    ],
)
def test_what_follows_a_step_that_went_wrong(kind: str, data: Any, text: str) -> None:
    assert message_of(Event(0.0, 1, kind, "warning", "m", data=data)) == text
