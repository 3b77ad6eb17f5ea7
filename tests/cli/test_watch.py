"""`seatrial watch` from the folder alone."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from seatrial.base.errors import InputError
from seatrial.cli import watch
from seatrial.record import events, lock
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsRecord, MetricsWriter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/a-run"))
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text("[train]\nsteps = 4\nglobal_batch = 2\nsequence_length = 8\n")
    events.append(folder, "run_started", "2 ranks", generation=1)
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
    for n in (1, 2, 3):
        metrics.write(
            MetricsRecord(n, n * 16, 5.0 - n, 0.5, 1e-3, 0.25, 0.0, 64.0, 32.0, 0.25, 2**30, 1e9, 1)
        )
        ledger.write(LedgerRecord(n, n * 2 - 2, n * 2, 1))
    metrics.close()
    ledger.close()
    checkpoint = folder.checkpoints / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    return folder


def seatrial_watch(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    return watch.run(parser.parse_args(arguments))


def test_once(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with folder.metrics.open("ab") as f:
        f.write(b"\xff\xff\n")
    assert seatrial_watch("a-run", "--once") == 0
    out, err = capsys.readouterr()
    assert err == "warning: metrics.jsonl:4: not a metrics record (not UTF-8 text)\n"
    lines = [line for line in out.splitlines() if not re.search("ago|run_started|  goodput", line)]
    assert lines == [
        "a-run: stopped, generation 1",
        "  why          it ended without recording an outcome: killed, or the machine went down",
        "  loss         4.0000 -> 2.0000  █▅▁",
        "  grad norm    0.50",
        "  tokens       48",
        "  speed        64 tokens/s (median), 32 a rank, MFU 25.0 %",
        "  memory       1 GiB (highest of any rank)",
        "  ledger       3 steps, every sample seen once",
        "  folder       runs/a-run",
        "  last events",
    ]
    assert "  step         3 of 4 (75 %), last one " in out
    assert "  checkpoint   step 2, " in out
    assert "  goodput      ETTR " in out


def test_once_json(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with folder.events.open("ab") as f:
        f.write(b"[]\n")
    fd = lock.acquire(folder.lock)
    assert seatrial_watch("runs/a-run", "--once", "--json") == 0
    os.close(fd)
    out, err = capsys.readouterr()
    assert err == "warning: events.jsonl:2: not an event (a JSON list where an object is expected)\n"
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert (document["state"], document["pid"], document["generation"]) == ("running", os.getpid(), 1)
    assert (document["step"], document["steps"], document["tokens"]) == (3, 4, 48)
    assert (document["loss_first"], document["loss_last"], document["mfu"]) == (4.0, 2.0, 0.25)
    assert (document["memory_bytes"], document["eta_s"]) == (2**30, 0.25)
    assert document["checkpoint"]["step"] == 2
    assert document["checkpoint"]["path"] == "runs/a-run/checkpoints/step-00000002"
    assert document["ledger"] == {
        "steps": 3,
        "verdict": "ok",
        "gaps": [],
        "skipped_steps": [],
        "skipped_samples": 0,
    }
    assert sum(document["goodput"]["seconds"].values()) == pytest.approx(document["goodput"]["wall_s"])
    assert [e["kind"] for e in document["events"]] == ["run_started"]
    assert document["problems"] == [
        {
            "file": "events.jsonl",
            "line": 2,
            "message": "not an event (a JSON list where an object is expected)",
        }
    ]


def test_no_such_run(folder: RunFolder) -> None:
    with pytest.raises(InputError) as caught:
        seatrial_watch("a-ru", "--once")
    assert "did you mean runs/a-run?" in caught.value.render()


def test_a_run_that_is_over_is_not_followed(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    events.append(folder, "run_finished", "done", generation=1)
    assert seatrial_watch("a-run") == 0
    assert capsys.readouterr().out.startswith("a-run: finished, generation 1\n")


@pytest.mark.parametrize(("end", "code"), [("run_finished", 0), ("run_failed", 1)])
def test_follow_to_the_end(folder: RunFolder, end: str, code: int) -> None:
    """The viewer is another process; it sees the end when the lock is let go."""
    fd = lock.acquire(folder.lock)
    program = (
        "import argparse, sys; from seatrial.cli import watch\n"
        "p = argparse.ArgumentParser(); watch.add_arguments(p)\n"
        "print('watching', file=sys.stderr, flush=True)\n"
        "sys.exit(watch.run(p.parse_args()))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "a-run", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as viewer:
        assert viewer.stderr is not None
        assert viewer.stderr.readline() == "watching\n"
        # It says how the run stands; from then on it follows.
        assert viewer.stderr.readline().startswith("a-run: running by process ")
        assert viewer.stderr.readline() == "  last events\n"
        assert viewer.stderr.readline().endswith("run_started         2 ranks\n")
        metrics = MetricsWriter(folder)
        metrics.write(MetricsRecord(4, 64, 1.0, 0.5, 1e-3, 0.25, 0.0, 64.0, 32.0, 0.25, 2**30, 1e9, 1))
        metrics.close()
        shown = viewer.stderr.readline()
        events.append(folder, end, "the end", generation=1)
        os.close(fd)
        out, err = viewer.communicate(timeout=30)
        assert viewer.returncode == code
    assert shown.startswith("step    4/4  loss 1.0000")
    assert "a-run fi" in err if code == 0 else "a-run failed" in err
    assert json.loads(out)["loss_last"] == 1.0


# -- another process, on a terminal of its own

PROGRAM = "import sys; from seatrial.cli.main import main; sys.exit(main(sys.argv[1:]))"
SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"


class OnTerminal:
    """`seatrial watch` on a terminal of 80 by 24."""

    def __init__(self, *arguments: str) -> None:
        self.terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "watch", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm-256color", "NO_COLOR": ""},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(inner)
        self.shown = b""

    def wait_for(self, wanted: bytes) -> None:
        """Until it has shown it; with b"" until its end."""
        end = time.monotonic() + 60
        while not wanted or wanted not in self.shown:
            assert select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))[0], self.shown
            try:
                self.shown += os.read(self.terminal, 1 << 16)
            except OSError:  # EIO: nobody holds its other end any more
                assert not wanted, self.shown
                return

    def end(self) -> int:
        """Its exit code."""
        self.wait_for(b"")
        return self.process.wait(timeout=30)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.mark.parametrize(("how", "code", "told"), [("ctrl-c", 130, b"interrupted"), ("SIGTERM", 143, b"")])
def test_the_terminal_is_given_back(folder: RunFolder, how: str, code: int, told: bytes) -> None:
    fd = lock.acquire(folder.lock)
    with OnTerminal("a-run") as watch:
        watch.wait_for(b"ledger")
        if how == "ctrl-c":
            os.write(watch.terminal, b"\x03")
        else:
            watch.process.terminate()
        assert watch.end() == code
        assert watch.shown.rindex(SHOW_CURSOR) > watch.shown.rindex(HIDE_CURSOR)
        assert told in watch.shown
        assert b"Traceback" not in watch.shown
    os.close(fd)


@pytest.mark.cluster  # slow
def test_a_narrower_terminal_and_damage_meanwhile(folder: RunFolder) -> None:
    fd = lock.acquire(folder.lock)
    with OnTerminal("a-run") as watch:
        watch.wait_for(b"ledger")
        fcntl.ioctl(watch.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 20, 0, 0))
        folder.job_toml.write_bytes(b"\xff")
        with folder.metrics.open("ab") as f:
            f.write(b"damaged\n")
        watch.wait_for(b"damaged")
        events.append(folder, "run_finished", "all is done", generation=1)
        os.close(fd)
        assert watch.end() == 0
        assert b"a-run finished: step 3" in watch.shown
        assert b"metrics.jsonl:4" in watch.shown[watch.shown.index(b"a-run finished") :]


def test_a_key_chooses_the_view_and_q_leaves(folder: RunFolder) -> None:
    fd = lock.acquire(folder.lock)
    with OnTerminal("a-run") as watch:
        watch.wait_for(b"ledger")
        os.write(watch.terminal, b"4")
        watch.wait_for(b"\x1b[7m 4 events")
        os.write(watch.terminal, b"q")
        assert watch.end() == 0
        assert b"a-run finished" not in watch.shown
        attributes = termios.tcgetattr(watch.terminal)
        assert attributes[3] & termios.ICANON
        assert attributes[3] & termios.ECHO
    os.close(fd)


def test_a_folder_that_goes_away_is_not_called_not_started(folder: RunFolder) -> None:
    fd = lock.acquire(folder.lock)
    with OnTerminal("a-run") as watch:
        watch.wait_for(b"ledger")
        folder.path.rename(folder.path.with_name("elsewhere"))
        assert watch.end() == 1
        assert b"runs/a-run no longer exists: it was moved or removed" in watch.shown
    os.close(fd)


@pytest.mark.cluster  # slow
def test_waiting_for_a_run_that_has_not_begun(folder: RunFolder) -> None:
    later = folder.path.rename(folder.path.with_name("later"))
    with OnTerminal("a-run", "--wait", "--plain") as watch:
        watch.wait_for(b"waiting for a-run to begin")
        later.rename(folder.path)
        fd = lock.acquire(folder.lock)
        watch.wait_for(b"a-run: running by process")
        events.append(folder, "run_finished", "all is done", generation=1)
        os.close(fd)
        assert watch.end() == 0
        assert b"all is done" in watch.shown
        assert b"\x1b" not in watch.shown


def test_now_or_later_but_not_both(folder: RunFolder) -> None:
    with pytest.raises(InputError):
        seatrial_watch("a-run", "--once", "--wait")


def test_a_preempted_run_is_shown_as_preempted(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"preempted": True}
    events.append(folder, "preempted", "the state is saved", generation=1)
    events.append(folder, "run_interrupted", "goes on", severity="warning", generation=1, data=data)
    reason = "stopped on request: the state is saved; the same command resumes"
    fd = lock.acquire(folder.lock)  # by a start that has ended, and still prints its summary
    assert seatrial_watch("a-run", "--once", "--json") == 0
    os.close(fd)
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["state_reason"], document["pid"]) == ("preempted", reason, None)
    assert seatrial_watch("a-run", "--once") == 0
    assert f"a-run: preempted, generation 1\n  why          {reason}\n" in capsys.readouterr().out
