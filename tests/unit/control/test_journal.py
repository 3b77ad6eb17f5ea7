"""What every coordinator hears, and what is recorded of it: each thing once, whoever dies in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.control.agent.journal import Journal
from seatrial.control.coordinator.recorder import Recorder
from seatrial.control.machine.policy import rule_for
from seatrial.control.net.lease import Lease
from seatrial.record import events
from seatrial.record import messages as msg
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.recent import recorded_marks

STOPPED = msg.Stopped(generation=1, parked=2, offer_port=3)


class Node:
    """A node's journal, and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[msg.Journalled] = []
        self.member: Any = SimpleNamespace(beats_sent=0, beats_returned=0, send=self.sent.append)
        self.journal = Journal(self.member)

    def beat(self) -> None:
        self.member.beats_sent += 1

    def returned(self) -> None:
        """All beats have come back."""
        self.member.beats_returned = self.member.beats_sent

    def again(self) -> list[msg.Journalled]:
        """What the next coordinator hears."""
        self.sent.clear()
        self.journal.resend()
        return list(self.sent)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def signal(text: str) -> msg.HardwareSignal:
    return msg.HardwareSignal("xid:79", None, None, text, {}, 1.0)


# -- who hears what


def test_generation_reports_are_repeated_until_next_generation() -> None:
    node = Node()
    node.journal.send(STOPPED)
    node.beat()
    node.returned()
    assert node.again() == node.again() == [replace(STOPPED, told=f"{node.journal.name}-1")]
    node.journal.forget_generation()
    assert node.again() == []


def test_fault_is_reported_until_acknowledged() -> None:
    node = Node()
    node.beat()
    node.journal.send_once(signal("fell off the bus"))
    node.returned()
    assert len(node.again()) == 1, "the beat had been sent before it"
    node.journal.forget_generation()
    assert len(node.again()) == 1, "a generation that begins has not heard of it"
    node.beat()
    assert len(node.again()) == 1
    node.beat()
    node.returned()
    assert node.again() == []


def test_every_message_has_a_mark_of_its_own() -> None:
    first, second = Node(), Node()
    for node in (first, second):
        node.journal.send_once(signal("a"))
        node.journal.send_once(signal("a"))
        node.journal.send(STOPPED)
    marks = [message.told for node in (first, second) for message in node.sent]
    assert len(set(marks)) == 6


# -- what is recorded


def recorder(folder: RunFolder, term: int = 1) -> Recorder:
    return Recorder(folder, 1, Lease(term, 0, "", 0, 0.0))


def record(recorder: Recorder, signal: msg.Journalled) -> None:
    assert isinstance(signal, msg.HardwareSignal)
    rule = rule_for(signal.signal)
    recorder.finding(signal.signal, signal.message, rule, evidence=None, node=0, told=signal.told)


def test_a_resent_message_is_recorded_once(folder: RunFolder) -> None:
    node = Node()
    node.journal.send_once(signal("a"))
    node.journal.send_once(signal("b"))
    for term in (1, 2, 3):
        for message in node.sent:
            record(recorder(folder, term), message)
    assert [e.message for e in read_events(folder)[0]] == ["a", "b"]


def test_what_an_earlier_coordinator_had_no_time_for_is_not_lost(folder: RunFolder) -> None:
    node = Node()
    node.journal.send_once(signal("a"))
    node.journal.send_once(signal("b"))
    record(recorder(folder), node.sent[0])
    later = recorder(folder, 2)
    for message in node.sent:
        record(later, message)
    assert [e.message for e in read_events(folder)[0]] == ["a", "b"]


def test_what_has_no_mark_is_recorded_each_time(folder: RunFolder) -> None:
    for _ in range(2):
        recorder(folder).event("rank_started", "again", data={"pid": 7, "told": None})
    assert [e.data for e in read_events(folder)[0]] == [{"pid": 7}] * 2


def test_only_marks_are_taken_for_marks(folder: RunFolder) -> None:
    assert recorded_marks(folder) == set()
    text = 'it said "told":"abc-1" and more'
    events.append(folder, "signal", text, generation=1, data={"told": "abc-2", "x": text})
    assert recorded_marks(folder) == {"abc-2"}


def test_a_mark_that_the_launcher_gave_is_kept() -> None:
    node = Node()
    event = msg.Record(1.0, 1, "agent_failed", "warning", "text")
    node.journal.send_once(replace(event, told="launcher-1"))
    node.journal.send_once(event)
    assert [m.told for m in node.again()] == ["launcher-1", f"{node.journal.name}-2"]
