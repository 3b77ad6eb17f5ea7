"""Every row of the table of states, from a run folder; and that all views say the same."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from seatrial.record import events, lock, states
from seatrial.record import view as view_module
from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, write_launch
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.states import TABLE
from seatrial.record.view import read_brief, read_view
from seatrial.ui.out import Out
from seatrial.ui.summary import print_status, summary_json

STOP = {"evidence": {"action": "stop"}}
PREEMPTED = {"preempted": True}
ME = f"process {os.getpid()}"

# What the start has written, whether it holds its lock or a scheduler has it, and what is said of it. One case at least for each row.
Held = bool | str
CASES: list[tuple[str, list[tuple[str, dict[str, Any] | None]], Held, str, str]] = [
    ("submitted", [("run_started", None)], "scheduled", "queued", "slurm 17 has not started"),
    (
        "begun by a scheduler",
        [("run_started", None), ("coordinator_elected", None)],
        "scheduled",
        "running",
        "slurm 17 is starting it",
    ),
    ("starting", [("run_started", None)], True, "running", f"{ME} is starting it"),
    ("in silence", [], True, "running", f"{ME} is starting it"),
    (
        "recovering",
        [("run_started", None), ("recovering", None)],
        True,
        "running",
        f"{ME} is recovering it: of recovering",
    ),
    ("training", [("run_started", None)], True, "running", f"{ME} is training it"),
    (
        "recovered",
        [("run_started", None), ("recovering", None), ("recovered", None)],
        True,
        "running",
        f"{ME} is training it",
    ),
    ("done", [("run_started", None), ("run_finished", None)], False, "finished", "of run_finished"),
    ("done, and still held", [("run_finished", None)], True, "finished", "of run_finished"),
    (
        "diverged",
        [("nonfinite", STOP), ("rank_failed", None), ("run_failed", {})],
        False,
        "failed",
        "it diverged, and no more steps may be skipped: of nonfinite",
    ),
    (
        "a spike once too often",
        [("loss_spike", STOP), ("run_failed", {})],
        True,
        "failed",
        "it diverged, and no more steps may be skipped: of loss_spike",
    ),
    (
        "failed, and its numbers were mended",
        [("nonfinite", {"evidence": {"action": "skip"}}), ("rank_failed", None), ("run_failed", {})],
        False,
        "failed",
        "of run_failed",
    ),
    (
        "preempted",
        [("preempted", None), ("run_interrupted", PREEMPTED)],
        False,
        "preempted",
        "stopped on request: of preempted; the same command resumes",
    ),
    (
        "preempted by torchrun",
        [("run_interrupted", PREEMPTED)],
        True,
        "preempted",
        "stopped on request: of run_interrupted; the same command resumes",
    ),
    (
        "Ctrl-C",
        [("run_started", None), ("run_interrupted", {"preempted": False})],
        True,
        "stopped",
        "of run_interrupted",
    ),
    (
        "done, by ranks that torchrun had started",
        [
            ("run_started", None),
            ("rank_failed", None),
            ("checkpoint_saved", {"step": 20, "folder": "s3://b/x"}),
        ],
        False,
        "finished",
        "all steps are done; no process was left to record the end",
    ),
    (
        "killed after a failure",
        [("run_started", None), ("rank_failed", None)],
        False,
        "failed",
        "it ended without recording an outcome, after: of rank_failed",
    ),
    (
        "killed",
        [("run_started", None)],
        False,
        "stopped",
        "it ended without recording an outcome: killed, or the machine went down",
    ),
    ("never begun", [], False, "not started", "no step was ever started"),
]


@contextmanager
def held(folder: RunFolder, wanted: Held) -> Iterator[None]:
    folder.control.mkdir()
    if wanted == "scheduled":
        write_launch(folder, Launch("slurm", 1, time.time(), "login", scheduled=True, handle="17"))
    fd = lock.acquire(folder.lock)
    if wanted is not True:
        os.close(fd)
    yield
    if wanted is True:
        os.close(fd)


def write(folder: RunFolder, kinds: list[tuple[str, Any]], reason: str) -> None:
    folder.job_toml.write_text("[train]\nsteps = 20\nglobal_batch = 8\n")
    if "is recovering" in reason or "is training" in reason:
        with closing(MetricsWriter(folder)) as writer:
            writer.write(MetricsRecord(1, 8, 5.0, 1.0, 1e-3, 1.0, 0.0, 8.0, 4.0, None, None, time.time(), 1))
    for kind, data in kinds:
        severity: events.Severity = "error" if kind.endswith("failed") else "info"
        events.append(folder, kind, f"of {kind}", severity=severity, generation=1, data=data)


@pytest.mark.parametrize("row", range(len(TABLE) - 1))
def test_every_row_of_the_table_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    monkeypatch.setattr(states, "TABLE", TABLE[:row] + TABLE[row + 1 :])
    wrong = []
    for name, kinds, is_held, state, reason in CASES:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        write(folder, kinds, reason)
        with held(folder, is_held):
            view = read_view(folder)
        wrong += [name] if (view.state, view.state_reason) != (state, reason) else []
    assert wrong


@pytest.mark.parametrize(
    ("kinds", "is_held", "state", "reason"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_every_view_shows_state_and_reason(
    folder: RunFolder, kinds: list[tuple[str, Any]], is_held: Held, state: str, reason: str
) -> None:
    write(folder, kinds, reason)
    with held(folder, is_held):
        view, brief = read_view(folder), read_brief(folder)
        document = json.loads(summary_json(view, time.time()))
    out = io.StringIO()
    print_status(Out(out), view, time.time())
    assert (view.state, view.state_reason) == (state, reason)
    assert (brief.state, brief.state_reason) == (state, reason)
    assert (document["state"], document["state_reason"]) == (state, reason)
    assert document["pid"] == (os.getpid() if state == "running" and is_held is True else None)
    assert out.getvalue().startswith(f"a-run: {state}")
    assert f"\n  why          {reason}\n" in out.getvalue()


def test_brief_view_finds_the_deciding_event_however_far_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "_BRIEF_BYTES", 1)
    for name, kinds, is_held, state, reason in CASES:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        write(folder, kinds, reason)
        for n in range(3):
            events.append(folder, "checkpoint_verified", f"step {n}", generation=1)
        if (
            "is training" in reason
            or "is recovering" in reason
            or any(kind == "checkpoint_saved" for kind, _ in kinds)
        ):
            continue  # they hang on the last step or checkpoint, of which one byte tells nothing
        with held(folder, is_held):
            brief = read_brief(folder)
        assert (brief.state, brief.state_reason) == (state, reason), name
