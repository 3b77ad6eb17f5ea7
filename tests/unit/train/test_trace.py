"""The profiler trace that a job requests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from loop_cases import Run, same

from seatrial.train import trace

PROFILED = ("train.profile_ranks=[0]", "train.profile_first_step=3", "train.profile_steps=2")

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster


def test_the_trace_has_the_requested_steps(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain")
    assert plain.loop.run(1) == "done"
    run = Run(tmp_path / "profiled", *PROFILED)
    assert run.loop.run(1) == "done"
    assert same(run.state(), plain.state())
    with gzip.open(run.folder.trace(1, 0), "rt") as file:
        events = json.load(file)["traceEvents"]
    steps = [e["name"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("step ")]
    assert steps == ["step 3", "step 4"]
    assert any(e["name"] == "aten::mm" for e in events)
    assert not plain.folder.trace(1, 0).exists()


def test_a_trace_that_is_too_large_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace, "MOST_EVENTS", 10)
    run = Run(tmp_path / "profiled", *PROFILED)
    assert run.loop.run(1) == "done"
    assert not run.folder.trace(1, 0).exists()
    assert "more than 10: it is not written" in capfd.readouterr().err


def test_a_run_that_ends_early_writes_its_trace(tmp_path: Path) -> None:
    run = Run(tmp_path / "left", *PROFILED[:2], "train.profile_steps=6", leave={3: "drain"})
    run.loop.run(1)
    assert run.folder.trace(1, 0).exists()
