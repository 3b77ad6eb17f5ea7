"""How a start ended, read from control/outcome.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.record.failure import Failure
from seatrial.record.folder import RunFolder
from seatrial.record.launches import StartOutcome, encoded, end_event, read_outcome

VALUES = {"generation": 3, "term": 7, "exit_code": 1, "message": "too few nodes", "time": 1.7e9}
FAILURE = Failure(
    1, 5, "rank 5 on node 1: ValueError: x", "ValueError: x", 1.5e9, 1, "runs/a/rank5.log", "Trace\n", "do"
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    return folder


@pytest.mark.parametrize("failure", [None, FAILURE, Failure(None, None, "too few", "too few", 1.5e9)])
def test_it_is_read_as_it_was_written(folder: RunFolder, failure: Failure | None) -> None:
    told = StartOutcome(
        generation=3, term=7, exit_code=1, message="too few nodes", time=1.7e9, failure=failure
    )
    folder.outcome_json.write_bytes(encoded(told))
    assert read_outcome(folder, 3) == told
    assert read_outcome(folder, 5) is None, "that of another start says nothing"


def test_its_bytes_stay_as_earlier_versions_wrote_them(folder: RunFolder) -> None:
    failure = {"node": 1, "rank": 5, "message": FAILURE.message, "cause": FAILURE.cause, "time": 1.5e9}
    failure |= {"exit_code": 1, "log": "runs/a/rank5.log", "tail": "Trace\n", "hint": "do"}
    first, second = dict(list(VALUES.items())[:4]), {"time": 1.7e9}
    text = json.dumps({"schema_version": 1, **first, "failure": failure, **second}, indent=2) + "\n"
    folder.outcome_json.write_text(text)
    read = read_outcome(folder, 3)
    assert read is not None
    assert read.failure == FAILURE
    assert encoded(read).decode() == text


def test_unknown_fields_of_a_newer_failure_are_ignored(folder: RunFolder) -> None:
    told = {"schema_version": 1, **VALUES, "failure": {**vars(FAILURE), "switch": "leaf-3"}}
    folder.outcome_json.write_text(json.dumps(told))
    read = read_outcome(folder, 3)
    assert read is not None
    assert read.failure == FAILURE


def test_the_event_of_a_failure() -> None:
    event = end_event(1, FAILURE, 10)
    assert (event["kind"], event["message"], event["node"], event["rank"]) == (
        "run_failed", "rank 5 on node 1: ValueError: x", 1, 5
    )  # fmt: skip
    assert list(event["data"].items()) == [
        ("node", 1),
        ("rank", 5),
        ("cause", "ValueError: x"),
        ("time", 1.5e9),
        ("log", "runs/a/rank5.log"),
        ("hint", "do"),
        ("tail", "Trace\n"),
    ]


def test_a_missing_file_is_no_outcome(folder: RunFolder) -> None:
    assert read_outcome(folder, 1) is None
    folder.outcome_json.touch()
    assert read_outcome(folder, 1) is None


@pytest.mark.parametrize("text", ["[]", '{"schema_version": 2}', '{"schema_version": 1, "generation": 1}'])
def test_a_damaged_file_is_complained_of(
    folder: RunFolder, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.outcome_json.write_text(text)
    assert read_outcome(folder, 1) is None
    assert "outcome.json is not used" in capfd.readouterr().err
