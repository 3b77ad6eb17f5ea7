"""How a start ended, read from control/outcome.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.record.folder import RunFolder
from seatrial.record.launches import StartOutcome, read_outcome

VALUES = {"generation": 3, "term": 7, "exit_code": 1, "message": "too few nodes", "time": 1.7e9}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    return folder


@pytest.mark.parametrize("failure", [None, {"node": 1, "rank": None, "message": "node 1 is gone"}])
def test_it_is_read_as_it_was_written(folder: RunFolder, failure: dict[str, object] | None) -> None:
    folder.outcome_json.write_text(json.dumps({"schema_version": 1, **VALUES, "failure": failure}))
    expected = StartOutcome(
        generation=3, term=7, exit_code=1, message="too few nodes", time=1.7e9, failure=failure
    )
    assert read_outcome(folder, 3) == expected
    assert read_outcome(folder, 5) is None, "that of another start says nothing"


def test_no_file_is_no_outcome(folder: RunFolder) -> None:
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
