"""A failure as its event records it, and the error that a rank wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.record.events import Event
from seatrial.record.failure import Failure, RankError, read_rank_error

FAILURE = Failure(1, 5, "rank 5 on node 1: x", "x", 1.5e9, log="a/rank5.log", tail="Trace", hint="do")
ERROR = RankError(1e9, 5, 1, "ValueError", "x", None, consequence=True, exit_code=2, hint=None)


def event(data: dict[str, Any] | None, node: int | None = None, rank: int | None = None) -> Event:
    return Event(1.6e9, 3, "run_failed", "error", "rank 5 on node 1: x", node, rank, data)


def test_an_event_holds_all_of_it() -> None:
    assert Failure.from_event(event(FAILURE.event_data())) == FAILURE


def test_the_failed_rank_goes_before_the_events_writer() -> None:
    found = Failure.from_event(event({"node": 1, "rank": 5, "cause": ""}, node=0, rank=0))
    assert found == Failure(1, 5, "rank 5 on node 1: x", "rank 5 on node 1: x", 1.6e9)
    assert Failure.from_event(event({"node": None, "pid": 4}, node=2)).node == 2


@pytest.mark.parametrize("data", [None, {}, {"node": "one", "hint": "do"}, {"time": -1.0}])
def test_without_usable_data_its_message_is_the_cause(data: dict[str, Any] | None) -> None:
    message = "rank 5 on node 1: x"
    assert Failure.from_event(event(data, node=1, rank=5)) == Failure(1, 5, message, message, 1.6e9)


def test_a_ranks_error(tmp_path: Path) -> None:
    path = tmp_path / "rank5.error.json"
    assert read_rank_error(path) is None
    path.write_text(json.dumps(vars(ERROR)))
    assert read_rank_error(path) == ERROR


@pytest.mark.parametrize("text", ["{torn", "[]", "{}", json.dumps({**vars(ERROR), "time": "noon"})])
def test_a_damaged_error_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank5.error.json"
    path.write_text(text)
    assert read_rank_error(path) is None
