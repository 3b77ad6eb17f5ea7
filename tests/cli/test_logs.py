"""`seatrial logs`: what ranks and agents have written, of a run that is over and of one that goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from seatrial.cli.main import main
from seatrial.record import events, lock
from seatrial.record.folder import RunFolder

Show = Callable[..., tuple[str, str]]


def write(folder: RunFolder, name: str, text: str) -> Path:
    path = folder.logs / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(text)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Two nodes of two ranks, in their second generation, which has lost rank 3."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/a-run"))
    folder.control.mkdir(parents=True)
    folder.identity_json.write_text("{}")
    folder.job_toml.write_text("[train]\nsteps = 4\n")
    for node in (0, 1):
        write(folder, f"000001/node{node}/agent.log", "")
        write(folder, f"000001/node{node}/nursery.log", "imports\n" if node else "")
    for rank in range(4):
        write(folder, f"000001/node{rank // 2}/rank{rank}.log", f"first of {rank}\n")
    for rank in range(3):
        lines = "".join(f"line {n} of {rank}\n" for n in range(1, 31))
        write(folder, f"000002/node{rank // 2}/rank{rank}.log", lines if rank < 2 else "")
    return folder


@pytest.fixture
def show(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> Show:
    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert main(["logs", "a-run", *arguments]) == code
        out, err = capsys.readouterr()
        return out, err

    return run


def test_the_last_lines_of_every_rank(show: Show) -> None:
    out, err = show()
    blocks = out.split("==> ")[1:]
    assert [block.splitlines()[0] for block in blocks] == [
        "node 0, rank 0: runs/a-run/logs/000002/node0/rank0.log",
        "node 0, rank 1: runs/a-run/logs/000002/node0/rank1.log",
        "node 1, rank 2: runs/a-run/logs/000002/node1/rank2.log (empty)",
        "node 1, nursery: runs/a-run/logs/000001/node1/nursery.log",
    ]
    assert blocks[1].splitlines()[1:] == [f"line {n} of 1" for n in range(11, 31)]
    assert blocks[3].splitlines()[1:] == ["imports"]
    assert err == ""
    assert "line 29 of 1\n" not in show("--lines", "1")[0]


def test_one_rank_whole_and_nothing_else_on_stdout(show: Show, folder: RunFolder) -> None:
    write(folder, "000002/node0/rank1.log", "no end\x1b[2J")
    out, err = show("--rank", "1")
    assert out == "".join(f"line {n} of 1\n" for n in range(1, 31)) + "no end\x1b[2J\n"
    assert err == "==> node 0, rank 1: runs/a-run/logs/000002/node0/rank1.log\n"
    assert show("--rank", "1", "--lines", "2")[0] == "line 30 of 1\nno end\x1b[2J\n"
    assert show("--rank", "3", "--generation", "1")[0] == "first of 3\n"


def test_all_of_a_node(show: Show) -> None:
    out, _ = show("--node", "1")
    assert [line.split(":")[0] for line in out.splitlines()] == [
        "==> node 1, rank 2",
        "==> node 1, agent",
        "==> node 1, nursery",
        "imports",
    ]
    assert show("--node", "1", "--generation", "1", "--rank", "2")[0] == "first of 2\n"


def test_json(show: Show) -> None:
    out, err = show("--json", "--lines", "1")
    told = [json.loads(text) for text in out.splitlines()]
    assert told[1] == {
        "node": 0,
        "rank": 1,
        "generation": 2,
        "log": "runs/a-run/logs/000002/node0/rank1.log",
        "line": "line 30 of 1",
    }
    assert [(entry["rank"], entry["generation"]) for entry in told] == [(0, 2), (1, 2), (None, 1)]
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--rank", "3"],
            "error: generation 2 of runs/a-run has no log of rank 3\n  hint: rank 3 is in generation 1\n",
        ),
        (
            ["--rank", "9"],
            "error: generation 2 of runs/a-run has no log of rank 9\n  hint: there: ranks 0-2\n",
        ),
        (
            ["--rank", "1", "--node", "1"],
            "error: generation 2 of runs/a-run has no log of rank 1 on node 1\n  hint: rank 1 is on node 0\n",
        ),
        (
            ["--node", "5"],
            "error: generation 2 of runs/a-run has no log of node 5\n  hint: there: nodes 0-1\n",
        ),
        (
            ["--generation", "4"],
            "error: runs/a-run has no logs of generation 4\n  hint: there: generations 1-2\n",
        ),
        (["--lines", "-1"], "error: --lines -1 is not a number of lines\n  hint: use 0 or more\n"),
        (
            ["--follow", "--generation", "1"],
            "error: --follow continues into later generations\n  hint: remove --generation, or --follow\n",
        ),
        (
            ["--rank", "9", "--follow"],
            "error: generation 2 of runs/a-run has no log of rank 9\n  hint: there: ranks 0-2\n",
        ),
    ],
)
def test_what_is_not_there(show: Show, arguments: list[str], error: str) -> None:
    assert show(*arguments, code=2) == ("", error)


def test_nothing_logged_yet(show: Show, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.logs.rename(folder.path / "gone")
    assert show(code=2)[1].startswith("error: nothing has been logged in runs/a-run yet\n")
    assert show("--follow", code=2)[1].startswith("error: nothing has been logged in runs/a-run yet\n")
    assert main(["logs", "a-rum"]) == 2
    assert "did you mean runs/a-run?" in capsys.readouterr().err


def test_a_log_that_is_not_a_file(show: Show, folder: RunFolder) -> None:
    path = folder.logs / "000002/node0/rank0.log"
    path.unlink()
    os.mkfifo(path)
    out, err = show("--lines", "1")
    assert "line 30 of 1" in out
    assert err == f"warning: {path} cannot be read: is a pipe, not a regular file\n"


@contextmanager
def following(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`seatrial logs a-run --follow` as a process of its own."""
    command = [sys.executable, "-m", "seatrial", "logs", "a-run", "--follow", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.cluster  # slow
@pytest.mark.parametrize(("end", "code"), [("run_finished", 0), ("run_failed", 1)])
def test_follow_into_later_generations_and_to_the_end(folder: RunFolder, end: str, code: int) -> None:
    fd = lock.acquire(folder.lock)
    with following("--rank", "1", "--lines", "1") as process:
        assert line(process) == "line 30 of 1\n"
        write(folder, "000002/node0/rank1.log", "one\ntwo")
        assert line(process) == "one\n"
        write(folder, "000002/node0/rank1.log", " halves\n")
        assert line(process) == "two halves\n"
        # A recovery: the old process had not finished its line, and a spare does the rank from now on.
        write(folder, "000002/node0/rank1.log", "killed in the mid")
        write(folder, "000003/node2/rank1.log", "goes on\n")
        assert line(process) == "killed in the mid\n"
        assert line(process) == "goes on\n"
        write(folder, "000003/node2/rank0.log", "of another\n")
        write(folder, "000003/node2/rank1.log", "the end")
        events.append(folder, end, "over", generation=3)
        os.close(fd)
        assert process.wait(timeout=60) == code
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == "the end\n"
        assert [text.split(":")[0] for text in process.stderr.read().splitlines()] == [
            "==> node 0, rank 1",
            "==> node 2, rank 1",
        ]


@pytest.mark.cluster  # slow
def test_follow_all_from_before_there_are_logs(folder: RunFolder) -> None:
    logs = folder.logs.rename(folder.path / "later")
    fd = lock.acquire(folder.lock)
    with following("--json") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting for logs of runs/a-run; Ctrl-C ends it\n"
        folder.logs.mkdir()
        (logs / "000002").rename(folder.logs / "000002")
        shown: list[dict[str, Any]] = [json.loads(line(process)) for _ in range(60)]
        write(folder, "000002/node1/agent.log", "an agent complains\n")
        shown.append(json.loads(line(process)))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    os.close(fd)
    assert {(entry["node"], entry["rank"]) for entry in shown[:60]} == {(0, 0), (0, 1)}
    assert shown[60] == {
        "node": 1,
        "rank": None,
        "generation": 2,
        "log": "runs/a-run/logs/000002/node1/agent.log",
        "line": "an agent complains",
    }


def test_following_a_run_that_is_moved(folder: RunFolder) -> None:
    fd = lock.acquire(folder.lock)
    with following("--rank", "0", "--lines", "1") as process:
        assert line(process) == "line 30 of 0\n"
        folder.path.rename(folder.path.with_name("elsewhere"))
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None
        assert "runs/a-run no longer exists: it was moved or removed" in process.stderr.read()
    os.close(fd)


def test_a_run_that_is_over_is_shown_and_not_waited_for(folder: RunFolder, show: Show) -> None:
    events.append(folder, "run_failed", "rank 1 was killed", severity="error", generation=2)
    assert show("--follow", "--rank", "0", "--lines", "2")[0] == "line 29 of 0\nline 30 of 0\n"
