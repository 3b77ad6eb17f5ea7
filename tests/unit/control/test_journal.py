"""What every coordinator hears, and what is recorded of it: each thing once, whoever dies in between."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.control.journal import Journal
from seatrial.control.lease import Lease
from seatrial.control.policy import rule_for
from seatrial.control.recorder import Recorder
from seatrial.record import events
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.recent import told_marks

Message = dict[str, Any]


class Node:
    """A node's journal, and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.member: Any = SimpleNamespace(beats_sent=0, beats_returned=0, send=self.sent.append)
        self.journal = Journal(self.member)

    def beat(self) -> None:
        self.member.beats_sent += 1

    def returned(self) -> None:
        """All beats have come back."""
        self.member.beats_returned = self.member.beats_sent

    def again(self) -> list[Message]:
        """What the next coordinator hears."""
        self.sent.clear()
        self.journal.tell_again()
        return list(self.sent)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def signals(*texts: str) -> Message:
    return {"signals": [{"signal": "xid:79", "message": text, "gpu": None} for text in texts]}


# -- who hears what


def test_what_counts_in_a_generation_is_told_to_everybody_until_the_next() -> None:
    node = Node()
    node.journal.tell({"worker": {"kind": "exited"}})
    node.beat()
    node.returned()
    assert node.again() == node.again() == [{"worker": {"kind": "exited", "told": f"{node.journal.name}-1"}}]
    node.journal.forget_generation()
    assert node.again() == []


def test_a_fault_is_told_until_somebody_has_heard_it_and_not_after() -> None:
    node = Node()
    node.beat()
    node.journal.tell_once(signals("fell off the bus"))
    node.returned()
    assert len(node.again()) == 1, "the beat had been sent before it"
    node.journal.forget_generation()
    assert len(node.again()) == 1, "a generation that begins has not heard of it"
    node.beat()
    assert len(node.again()) == 1
    node.beat()
    node.returned()
    assert node.again() == []


def test_every_signal_of_a_message_has_a_mark_of_its_own() -> None:
    first, second = Node(), Node()
    for node in (first, second):
        node.journal.tell_once(signals("a", "b"))
        node.journal.tell({"worker": {}})
    marks = [one["told"] for node in (first, second) for one in node.sent[0]["signals"]]
    marks += [node.sent[1]["worker"]["told"] for node in (first, second)]
    assert len(set(marks)) == 6


# -- what is recorded


def recorder(folder: RunFolder, term: int = 1) -> Recorder:
    return Recorder(folder, 1, Lease(term, 0, "", 0, 0.0))


def test_what_is_told_again_is_recorded_once(folder: RunFolder) -> None:
    node = Node()
    node.journal.tell_once(signals("a", "b"))
    (message,) = node.sent
    for term in (1, 2, 3):
        for values in message["signals"]:
            recorder(folder, term).finding(values, 0, rule_for("xid:79"))
    assert [e.message for e in read_events(folder)[0]] == ["a", "b"]


def test_what_an_earlier_coordinator_had_no_time_for_is_not_lost(folder: RunFolder) -> None:
    node = Node()
    node.journal.tell_once(signals("a", "b"))
    (message,) = node.sent
    recorder(folder).finding(message["signals"][0], 0, rule_for("xid:79"))
    later = recorder(folder, 2)
    for values in message["signals"]:
        later.finding(values, 0, rule_for("xid:79"))
    assert [e.message for e in read_events(folder)[0]] == ["a", "b"]


def test_what_has_no_mark_is_recorded_each_time(folder: RunFolder) -> None:
    for _ in range(2):
        recorder(folder).event("rank_started", "again", data={"pid": 7, "told": None})
    assert [e.data for e in read_events(folder)[0]] == [{"pid": 7}] * 2


def test_only_marks_are_taken_for_marks(folder: RunFolder) -> None:
    assert told_marks(folder) == set()
    text = 'it said "told":"abc-1" and more'
    events.append(folder, "signal", text, generation=1, data={"told": "abc-2", "x": text})
    assert told_marks(folder) == {"abc-2"}
