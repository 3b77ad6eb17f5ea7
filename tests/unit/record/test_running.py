"""Who runs a run: a process with its lock, or a scheduler whose agents give signs of life."""

from __future__ import annotations

import json
import time

import pytest

from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, StartOutcome, encoded, write_launch
from seatrial.record.running import Running, running


@pytest.fixture
def launch(folder: RunFolder) -> Launch:
    folder.control.mkdir()
    submitted = Launch("slurm", 3, time.time() - 1000, "login", scheduled=True, handle="17")
    write_launch(folder, submitted)
    return submitted


def beat(folder: RunFolder, age_s: float) -> None:
    values = {"term": 2, "node": 0, "address": "10.0.0.1", "port": 4000, "time": time.time() - age_s}
    folder.lease_json.write_text(json.dumps(values))


def outcome(folder: RunFolder, generation: int) -> None:
    folder.outcome_json.write_bytes(encoded(StartOutcome(generation, 1, 75, "", None, time.time())))


def test_a_start_counts_while_it_waits_and_while_its_agents_live(folder: RunFolder, launch: Launch) -> None:
    assert running(folder) == Running(launch=launch)
    beat(folder, 5000)  # of the start before
    assert running(folder) == Running(launch=launch)
    beat(folder, 10)
    assert running(folder) == Running(launch=launch)
    beat(folder, 200)
    assert running(folder) is None


def test_an_outcome_of_this_start_ends_it(folder: RunFolder, launch: Launch) -> None:
    outcome(folder, 1)
    assert running(folder) == Running(launch=launch)
    outcome(folder, 3)
    assert running(folder) is None


def test_a_damaged_record_is_not_a_running_process(folder: RunFolder, launch: Launch) -> None:
    folder.launch_json.write_text("{")
    assert running(folder) is None
