"""`seatrial ls` over folders of runs, healthy, damaged and old."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.cli.main import main
from seatrial.record import events, lock
from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, write_launch
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsRecord, MetricsWriter

NOW = time.time()
List = Callable[..., Any]


def make(name: str, steps: int = 0, age_s: float = 0.0, skipped: int = 0, loss: float = 2.5) -> RunFolder:
    """The folder of a run of 40 steps; its last record is `age_s` old."""
    folder = RunFolder(Path(name))
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text("[train]\nsteps = 40\nglobal_batch = 2\nsequence_length = 8\n")
    folder.identity_json.write_text("{}")
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
    for n in range(1, steps + 1):
        when = NOW - age_s - (steps - n)
        metrics.write(
            MetricsRecord(n, n * 16, loss, 0.5, 1e-3, 1.0, 0.0, 1000.0 + n, 500.0, None, None, when, 1)
        )
        ledger.write(LedgerRecord(n, n * 2 - 2, n * 2, 1))
    for n in range(steps + 1, steps + skipped + 1):
        ledger.write(LedgerRecord(n, n * 2 - 2, n * 2, 1, skipped=True))
    metrics.close()
    ledger.close()
    return folder


@pytest.fixture
def ls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> List:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: NOW)

    def run(*arguments: str, code: int = 0) -> Any:
        """The document, or with --plain stdout and stderr."""
        assert main(["ls", *arguments]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if "--json" in arguments else (out, err)

    return run


def test_nothing_there(ls: List) -> None:
    assert ls() == ("no runs in runs\n", "")
    assert ls("--json") == {"schema_version": 1, "folder": "runs", "runs": []}


def test_runs_newest_first(ls: List) -> None:
    make("runs/older", steps=12, age_s=3700, skipped=2)
    events.append(make("runs/done", steps=40, age_s=500), "run_started", "1 rank", generation=1)
    make("runs/begun")
    make("runs/diverging", steps=3, age_s=7300, loss=float("nan"))
    alive = make("runs/alive", steps=7, age_s=90)
    write_launch(alive, Launch("slurm", 1, NOW, "login7", scheduled=True, handle="4711"))
    other = make("runs/other", steps=1, age_s=9000)
    write_launch(other, Launch("local", 1, NOW, "login7", scheduled=False))
    fd = lock.acquire(alive.lock)
    out, err = ls("--plain")
    os.close(fd)
    assert err == ""
    lines = [line.split("  ") for line in out.splitlines()]
    table = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert table[0] == ["name", "state", "step", "loss", "tokens/s", "age", "where"]
    ages = [row.pop(5) for row in table[1:]]
    assert table[1:] == [
        ["done", "stopped", "40/40", "2.5000", "1,030", "this machine"],
        ["alive", "running", "7/40", "2.5000", "1,004", "slurm 4711"],
        ["older", "stopped", "14/40", "2.5000", "1,006", "this machine"],
        ["diverging", "stopped", "3/40", "nan", "1,002", "this machine"],
        ["other", "stopped", "1/40", "2.5000", "1,001", "login7"],
        ["begun", "not started", "0/40", "-", "-", "this machine"],
    ]
    assert ages[1].startswith("1 min 3")
    assert ages[2].startswith("1 h 1 min")
    assert ages[5] == "-"


def test_json(ls: List) -> None:
    make("elsewhere/a", steps=5, age_s=100, loss=float("inf"))
    for arguments in (["elsewhere"], ["--runs", "elsewhere"]):
        document = ls(*arguments, "--json")
        assert (document["schema_version"], document["folder"]) == (1, "elsewhere")
        (run,) = document["runs"]
        assert 100 <= run.pop("age_s") < 200
        assert run == {
            "name": "a",
            "path": "elsewhere/a",
            "state": "stopped",
            "why": "it ended without recording an outcome: killed, or the machine went down",
            "step": 5,
            "steps": 40,
            "loss": "Infinity",
            "tokens_per_s": 1003.0,
            "time": NOW - 100,
            "generation": 1,
            "launcher": None,
            "handle": None,
            "host": None,
            "problems": [],
        }


def test_damaged_folders_are_shown_with_what_is_wrong(ls: List) -> None:
    make("runs/well", steps=1)
    torn = make("runs/torn", steps=3)
    with torn.metrics.open("ab") as f:
        f.write(b"\xff\xff\n")
    torn.job_toml.write_text("= 3")
    (torn.control / "launch.json").write_text("{")
    pipe = make("runs/pipe", steps=3)
    pipe.events.unlink(missing_ok=True)
    os.mkfifo(pipe.events)
    gutted = make("runs/gutted", steps=3)
    for path in (gutted.metrics, gutted.identity_json):
        path.unlink()
    Path("runs/notes").mkdir()
    Path("runs/.data").mkdir()
    Path("runs/file").write_text("no folder")
    runs = {run["name"]: run for run in ls("--json")["runs"]}
    assert set(runs) == {"well", "torn", "pipe", "gutted"}
    assert runs["well"]["problems"] == []
    assert (runs["torn"]["state"], runs["torn"]["step"], runs["torn"]["steps"]) == ("stopped", 3, None)
    assert [problem.split(" (")[0] for problem in runs["torn"]["problems"]] == [
        "metrics.jsonl:4: not a metrics record",
        "job.toml:0: cannot be used",
        "control/launch.json cannot be used",
    ]
    assert (runs["pipe"]["state"], runs["pipe"]["problems"]) == (
        "unusable",
        ["runs/pipe/events.jsonl is a pipe, not a regular file"],
    )
    assert (runs["gutted"]["state"], runs["gutted"]["problems"]) == (
        "unusable",
        ["runs/gutted is not a run folder"],
    )
    out, err = ls()
    assert "unusable" in out
    assert "warning: pipe: runs/pipe/events.jsonl is a pipe, not a regular file\n" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read(ls: List) -> None:
    folder = make("runs/closed", steps=1)
    folder.path.chmod(0)
    (run,) = ls("--json")["runs"]
    folder.path.chmod(0o755)
    assert (run["state"], run["problems"]) == ("unusable", ["it cannot be read: permission denied"])


def test_old_runs_and_drills_only_with_all(ls: List) -> None:
    for name in ("a", "a.old-1", "a.older", ".drill/a-20260101-0900/kill_rank"):
        make(f"runs/{name}", steps=1)
    assert [run["name"] for run in ls("--json")["runs"]] == ["a", "a.older"]
    assert {run["name"] for run in ls("--json", "--all")["runs"]} == {
        "a",
        "a.old-1",
        "a.older",
        ".drill/a-20260101-0900/kill_rank",
    }


def test_what_cannot_be_listed(ls: List) -> None:
    make("runs/a", steps=1)
    assert "error: runs/a is one run\n  hint: see `seatrial watch runs/a --once`" in ls("runs/a", code=2)[1]
    assert "error: none is not a folder" in ls("none", code=2)[1]
    assert "not allowed with argument" in ls("runs", "--runs", "runs", code=2)[1]


def test_ls_reads_only_the_end_of_records_of_100_long_runs(ls: List, monkeypatch: pytest.MonkeyPatch) -> None:
    long = make("runs/run-00", steps=4000)
    for n in range(1, 100):
        folder = RunFolder(Path(f"runs/run-{n:02d}"))
        folder.control.mkdir(parents=True)
        for name in ("job.toml", "metrics.jsonl", "ledger.jsonl"):
            os.link(long.path / name, folder.path / name)
    begin = time.process_time()
    runs = ls("--json")["runs"]
    assert time.process_time() - begin < 5  # 0.8 s; all of the records take 10
    assert [run["step"] for run in runs] == [4000] * 100
