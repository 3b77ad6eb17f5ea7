"""A run is understood from its folder, whatever state it is in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from seatrial.base.batches import BatchSizes
from seatrial.record import events, lock
from seatrial.record.failure import RankError
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.view import read_view

JOB = "[train]\nsteps = 200\nglobal_batch = 8\nsequence_length = 16\n"


def steps(folder: RunFolder, *numbers: int, generation: int = 1, in_ledger: bool = True) -> None:
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
    for n in numbers:
        metrics.write(
            MetricsRecord(
                n, n * 128, 5.0 / n, 1.0, 1e-3, 1.0, 0.0, 128.0, 64.0, None, None, 100.0 + n, generation
            )
        )
        if in_ledger:
            ledger.write(LedgerRecord(n, (n - 1) * 8, n * 8, generation))
    metrics.close()
    ledger.close()


def test_a_batch_ramp_is_followed(folder: RunFolder) -> None:
    folder.job_toml.write_text(JOB + "[[train.batch_ramp]]\nsteps = 4\nglobal_batch = 2\n")
    batches = BatchSizes.of(8, [(4, 2)])
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
    for n in range(1, 8):
        first, end = batches.samples(n)
        ledger.write(LedgerRecord(n, first, end, 1, skipped=n in (2, 6)))
        if n not in (2, 6):
            metrics.write(MetricsRecord(n, end * 16, 5.0, 1.0, 1e-3, 2.0, 0.0, 8.0, 8.0, None, None, n, 1))
        if n == 4:
            early = read_view(folder).eta_s
    view = read_view(folder)
    assert (view.job.batches, view.ledger_gaps, view.skipped_steps) == (batches, [], [2, 6])
    assert (view.skipped_samples, view.tokens) == (10, (4 * 2 + 3 * 8 - 10) * 16)
    assert early == pytest.approx(196 * 4 * 2.0)  # each has four times the samples
    assert view.eta_s == pytest.approx(193 * 8 * (2 / 2 + 2 / 2 + 2 / 8 + 2 / 8) / 4)
    ledger.write(LedgerRecord(8, *batches.samples(5), 1))
    assert len(read_view(folder).ledger_gaps) == 1


def checkpoint(folder: RunFolder, step: int, *, complete: bool = True) -> None:
    path = folder.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True)
    if complete:
        (path / "manifest.json").write_text("{}")
        (folder.checkpoints / "latest").write_text(path.name + "\n")


def happened(folder: RunFolder, kind: str, generation: int = 1, **rest: Any) -> None:
    events.append(folder, kind, f"{kind} it was", generation=generation, **rest)


def failure(folder: RunFolder) -> tuple[Any, ...]:
    found = read_view(folder).failure
    assert found is not None
    return found.cause, found.node, found.rank, found.tail, found.log, found.hint


def test_an_empty_folder_is_a_run_not_started(folder: RunFolder) -> None:
    view = read_view(folder)
    assert (view.state, view.generation, view.last, view.latest) == ("not started", 0, None, None)
    assert [str(p) for p in view.problems] == ["job.toml:0: cannot be used (No such file or directory)"]
    folder.job_toml.write_text(JOB)
    assert read_view(folder).problems == []


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        (["run_started"], "stopped"),
        (["run_started", "run_interrupted"], "stopped"),
        (["run_started", "run_finished"], "finished"),
        (["run_started", "rank_failed", "run_failed"], "failed"),
        (["run_started", "rank_failed"], "failed"),
        (["run_started", "sample", "run_finished", "checkpoint_removed"], "finished"),
    ],
)
def test_state(folder: RunFolder, kinds: list[str], state: str) -> None:
    folder.job_toml.write_text(JOB)
    for kind in kinds:
        happened(folder, kind, severity="error" if kind.endswith("failed") else "info")
    assert read_view(folder).state == state
    # A later start that died at once says nothing of how the earlier one ended.
    happened(folder, "run_started", generation=2)
    assert read_view(folder).state == "stopped"
    folder.control.mkdir()
    fd = lock.acquire(folder.lock)
    view = read_view(folder)
    assert (view.state, view.pid) == ("running", os.getpid())
    os.close(fd)


@pytest.mark.parametrize("changed", [False, True])
def test_a_start_that_had_nothing_to_do_changes_nothing(folder: RunFolder, changed: bool) -> None:
    steps(folder, 1)
    happened(folder, "run_finished")
    folder.control.mkdir()
    folder.generation_file.write_text("2\n")
    if changed:
        happened(folder, "job_changed", generation=2)
    view = read_view(folder)
    assert (view.state, view.generation) == ("finished", 1)


def test_a_killed_rank_as_recorded_by_the_launcher(folder: RunFolder) -> None:
    data = {
        "node": 0,
        "rank": 3,
        "cause": "was killed",
        "tail": "line 9",
        "log": "a/b.log",
        "hint": "memory?",
    }
    happened(folder, "run_failed", severity="error", data=data)
    assert failure(folder) == ("was killed", 0, 3, "line 9", "a/b.log", "memory?")


def test_resumed_run(folder: RunFolder) -> None:
    folder.job_toml.write_text(JOB)
    steps(folder, 1, 2, 3, 4, 5)
    steps(folder, 3, 4, generation=2)
    view = read_view(folder)
    history = view.history
    assert (history.steps, history.generations) == ([1, 2, 3, 4], [1, 1, 2, 2])
    assert (view.generation, view.ledger_gaps, view.ledger_steps, view.job.steps) == (2, [], 4, 200)
    assert list(history.column("time", view.first_generation)) == [103.0, 104.0]


def test_ledger_that_lags_counts_only_when_the_run_is_over(folder: RunFolder) -> None:
    folder.job_toml.write_text(JOB)
    steps(folder, 1, 2)
    steps(folder, 3, in_ledger=False)
    assert read_view(folder).ledger_gaps == ["step 3 of metrics.jsonl is not in the ledger"]
    folder.control.mkdir()
    fd = lock.acquire(folder.lock)
    assert read_view(folder).ledger_gaps == []
    os.close(fd)


def test_checkpoints(folder: RunFolder) -> None:
    checkpoint(folder, 50)
    checkpoint(folder, 100)
    checkpoint(folder, 150, complete=False)
    (folder.checkpoints / "step-00000200.tmp-3").mkdir()
    (folder.checkpoints / "step-00000200.tmp-3" / "manifest.json").write_text("{}")
    view = read_view(folder)
    assert [c.step for c in view.checkpoints] == [50, 100]
    assert view.latest is not None
    assert view.latest.step == 100
    # `latest` names the newest verified one; without it, or with nonsense in it, the newest complete one.
    for content, step in ((b"step-00000050", 50), (b"step-00000150", 100), (b"\xff", 100), (b"", 100)):
        (folder.checkpoints / "latest").write_bytes(content)
        latest = read_view(folder).latest
        assert latest is not None
        assert latest.step == step


def test_remote_checkpoints_are_known_from_recorded_events(folder: RunFolder) -> None:
    def saved(step: int, where: str) -> None:
        happened(folder, "checkpoint_saved", data={"step": step, "folder": where})

    checkpoint(folder, 50)
    saved(50, "/moved/since/checkpoints/step-00000050")
    saved(60, "/moved/since/checkpoints/step-00000060")
    view = read_view(folder)
    assert view.latest is not None
    assert (view.latest.step, view.latest.where) == (50, str(folder.checkpoints / "step-00000050"))
    for step in (40, 70, 80):
        saved(step, f"s3://bucket/trial/step-{step:08d}")
    happened(folder, "checkpoint_set_aside", data={"step": 80})
    view = read_view(folder)
    assert [c.step for c in view.checkpoints] == [50, 70]
    assert view.latest is not None
    assert view.latest.where == "s3://bucket/trial/step-00000070"
    saved(90, "/mnt/spare/trial/step-00000090")
    latest = read_view(folder).latest
    assert latest is not None
    assert latest.where == "/mnt/spare/trial/step-00000090"


def test_failure_is_completed_from_what_the_rank_wrote(folder: RunFolder) -> None:
    happened(folder, "run_started")
    happened(folder, "rank_failed", severity="error", node=0, rank=2)
    happened(folder, "run_failed", severity="error", data={"node": 1, "rank": 5, "cause": "ValueError: x"})
    assert failure(folder) == ("ValueError: x", 1, 5, "", "", "")
    error = folder.rank_error(1, 1, 5)
    error.parent.mkdir(parents=True)
    log = folder.rank_log(1, 1, 5)
    log.touch()
    error.write_bytes(b"{torn")
    assert failure(folder) == ("ValueError: x", 1, 5, "", str(log), "")
    written = RankError(1e9, 5, 1, "ValueError", "x", "Trace", consequence=False, exit_code=1, hint="do")
    error.write_text(json.dumps(vars(written)))
    assert failure(folder) == ("ValueError: x", 1, 5, "Trace", str(log), "do")


def test_first_failed_rank_if_no_outcome_was_recorded(folder: RunFolder) -> None:
    happened(folder, "rank_failed", severity="error", node=1, rank=4)
    happened(folder, "rank_failed", severity="error", node=0, rank=0)
    assert failure(folder) == ("rank_failed it was", 1, 4, "", "", "")


@pytest.mark.parametrize(
    "content", [b"\xff", b"[train", b"train = 3", b'[train]\nsteps = "many"', b"[train]\nsteps=true"]
)
def test_damaged_job_toml(folder: RunFolder, content: bytes) -> None:
    folder.job_toml.write_bytes(content)
    steps(folder, 1)
    view = read_view(folder)
    assert view.job.steps is None
    assert view.history.steps == [1]


def test_everything_damaged_at_once(folder: RunFolder) -> None:
    for path in (folder.events, folder.metrics, folder.ledger, folder.job_toml):
        path.write_bytes(bytes(range(256)) * 3)
    folder.checkpoints.write_text("a file where a folder belongs")
    view = read_view(folder)
    assert view.state == "not started"
    assert {p.file for p in view.problems} == {"events.jsonl", "metrics.jsonl", "ledger.jsonl", "job.toml"}


def test_unreadable_file_is_a_problem(folder: RunFolder) -> None:
    folder.metrics.mkdir()
    folder.job_toml.write_text(JOB)
    assert [p.message for p in read_view(folder).problems] == [
        "cannot be read (is a folder, not a regular file)"
    ]


def test_reading_needs_no_torch_and_no_pydantic(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; import seatrial.cli.watch, seatrial.hardware.catalogue\n"
        "print([m for m in ('torch', 'pydantic', 'rich', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_recoveries_belong_to_their_start(folder: RunFolder) -> None:
    """A recovery is a generation that a coordinator started; any other one is a start of its own."""

    def start(generation: int) -> None:
        events.append(folder, "run_started", "s", generation=generation)
        events.append(folder, "generation_started", "g", generation=generation)

    start(1)
    events.append(folder, "run_finished", "the first start's", generation=1)
    start(2)
    events.append(folder, "rank_failed", "recovered from", severity="error", generation=2)
    for generation in (3, 4):
        events.append(folder, "generation_started", "g", generation=generation)
    view = read_view(folder)
    assert (view.first_generation, view.generation) == (2, 4)
    assert (view.state, view.failure) == ("stopped", None)
    events.append(folder, "rank_failed", "the last one", severity="error", generation=4)
    view = read_view(folder)
    assert view.state == "failed"
    assert view.failure is not None
    assert view.failure.cause == "the last one"
    # Nobody coordinates ranks that were started by torchrun.
    events.append(folder, "resumed", "r", generation=5)
    assert (read_view(folder).first_generation, read_view(folder).state) == (5, "not started")
