"""What `seatrial train` offers after a run has ended: commands that help."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from seatrial.cli import train
from seatrial.cli.main import VERBS
from seatrial.launch.session import Session
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.view import read_view


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/a-run"))
    folder.path.mkdir(parents=True)
    folder.job_toml.write_text("[train]\nsteps = 20\nglobal_batch = 4\n")
    ledger = LedgerWriter(folder)
    for n in range(1, 11):
        ledger.write(LedgerRecord(n, n * 4 - 4, n * 4, 1, skipped=n in (7, 9, 10)))
    ledger.close()
    events.append(folder, "run_started", "8 ranks", generation=1)
    return folder


def diverge(folder: RunFolder, rank: int | None = None) -> None:
    node = None if rank is None else 0
    data = {"evidence": {"action": "stop"}, "step": 11}
    events.append(
        folder, "nonfinite", "nan", severity="warning", generation=1, node=node, rank=rank, data=data
    )
    events.append(folder, "run_failed", "RunFailed", severity="error", generation=1, data={})


def checkpoint(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        path = folder.checkpoints / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")


def offered(folder: RunFolder, code: int, *arguments: str) -> list[str]:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(["job.toml", *arguments])
    job = SimpleNamespace(optimizer=SimpleNamespace(lr=3e-3), resilience=SimpleNamespace(max_skipped_steps=3))
    view: Any = read_view(folder)
    session = SimpleNamespace(
        opened=SimpleNamespace(folder=folder),
        job=job,
        resume_step=view.latest.step if view.latest else None,
    )
    commands = train._next(args, cast(Session, session), code, view)
    for command in commands:  # each can be given as it stands
        words = shlex.split(command, comments=True)
        assert words[0] == "seatrial"
        assert words[1] in VERBS
    return commands


def test_a_run_that_diverged_is_not_offered_the_same_again(folder: RunFolder) -> None:
    checkpoint(folder, 5, 8, 9)
    diverge(folder)
    given = ["--set", "optimizer.lr = 3e-3", "--set", "train.steps=20", "--runs", "a b"]
    commands = offered(folder, EXIT_FAILED, *given)
    assert [c.partition("   # ")[0] for c in commands] == [
        "seatrial train job.toml --set train.steps=20 --set optimizer.lr=0.001 --runs 'a b' --fresh",
        "seatrial export runs/a-run --step 8 --out a-run-8-hf",
        "seatrial train job.toml --set 'optimizer.lr = 3e-3' --set train.steps=20 --runs 'a b' "
        "--set resilience.max_skipped_steps=6",
        "seatrial watch runs/a-run --once",
    ]
    same = shlex.join(["seatrial", "train", "job.toml", *given])
    assert same not in [c.partition("   # ")[0] for c in commands]
    assert commands[1].endswith("another name and learning rate; there are also 5, 9")
    assert "resumes after step 9, and may skip 6 steps in all" in commands[2]


def test_without_a_checkpoint_there_is_only_another_start(folder: RunFolder) -> None:
    diverge(folder)
    commands = [c.partition("   # ")[0] for c in offered(folder, EXIT_FAILED)]
    assert commands == [
        "seatrial train job.toml --set optimizer.lr=0.001 --fresh",
        "seatrial watch runs/a-run --once",
    ]


def test_what_only_one_rank_computed_may_be_its_hardware(folder: RunFolder) -> None:
    diverge(folder, rank=1)
    assert offered(folder, EXIT_FAILED)[1] == (
        "seatrial check job.toml   # only rank 1 on node 0 computed it: is its hardware faulty?"
    )


@pytest.mark.parametrize("code", [EXIT_FAILED, EXIT_PREEMPTED])
def test_any_other_end_is_followed_by_the_same_command(folder: RunFolder, code: int) -> None:
    events.append(folder, "run_failed", "a rank was killed", severity="error", generation=1, data={})
    assert offered(folder, code)[0] == "seatrial train job.toml   # starts over: there is no checkpoint yet"
    checkpoint(folder, 5)
    assert offered(folder, code)[0] == "seatrial train job.toml   # resumes after step 5"


def test_a_problem_of_an_earlier_start_is_not_repeated(folder: RunFolder) -> None:
    diverge(folder)
    events.append(folder, "run_started", "8 ranks", generation=2)
    events.append(folder, "run_failed", "a rank was killed", severity="error", generation=2, data={})
    assert offered(folder, EXIT_FAILED)[0].startswith("seatrial train job.toml   # starts over")


def test_a_run_that_is_done_is_exported(folder: RunFolder) -> None:
    events.append(folder, "run_finished", "done", generation=1)
    assert offered(folder, EXIT_DONE)[0] == "seatrial export runs/a-run --out a-run-hf"
