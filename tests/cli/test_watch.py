"""`seatrial watch` from the folder alone."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
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
    lines = [line for line in out.splitlines() if "ago" not in line and "run_started" not in line]
    assert lines == [
        "a-run: stopped, generation 1",
        "  why          it ended without saying why: killed, or the machine went down",
        "  loss         4.0000 -> 2.0000  █▅▁",
        "  grad norm    0.50",
        "  tokens       48",
        "  speed        64 tokens/s (median), 32 a GPU, MFU 25.0 %",
        "  memory       1 GiB",
        "  ledger       3 steps, every sample seen once",
        "  folder       runs/a-run",
        "  last events",
    ]
    assert "  step         3 of 4 (75 %), last one " in out
    assert "  checkpoint   step 2, 0 s ago" in out


def test_once_json(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with folder.events.open("ab") as f:
        f.write(b"[]\n")
    fd = lock.acquire(folder.lock)
    assert seatrial_watch("runs/a-run", "--once", "--json") == 0
    os.close(fd)
    out, err = capsys.readouterr()
    assert err == "warning: events.jsonl:2: not an event (a JSON list where an object belongs)\n"
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert (document["state"], document["pid"], document["generation"]) == ("running", os.getpid(), 1)
    assert (document["step"], document["steps"], document["tokens"]) == (3, 4, 48)
    assert (document["loss_first"], document["loss_last"], document["mfu"]) == (4.0, 2.0, 0.25)
    assert (document["memory_bytes"], document["eta_s"]) == (2**30, 0.25)
    assert document["checkpoint"]["step"] == 2
    assert document["checkpoint"]["path"] == "runs/a-run/checkpoints/step-00000002"
    assert document["ledger"] == {"steps": 3, "verdict": "ok", "gaps": []}
    assert [e["kind"] for e in document["events"]] == ["run_started"]
    assert document["problems"] == [
        {"file": "events.jsonl", "line": 2, "message": "not an event (a JSON list where an object belongs)"}
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
        # Steps from before the viewer follows are skipped, so write until it has shown one.
        metrics, shown = MetricsWriter(folder), b""
        for _ in range(100):
            metrics.write(MetricsRecord(4, 64, 1.0, 0.5, 1e-3, 0.25, 0.0, 64.0, 32.0, 0.25, 2**30, 1e9, 1))
            if select.select([viewer.stderr], [], [], 0.3)[0]:
                shown = os.read(viewer.stderr.fileno(), 4096)
                break
        metrics.close()
        events.append(folder, end, "the end", generation=1)
        os.close(fd)
        out, err = viewer.communicate(timeout=30)
        assert viewer.returncode == code
    assert shown.startswith(b"step    4/4  loss 1.0000")
    assert "a-run fi" in err if code == 0 else "a-run failed" in err
    assert json.loads(out)["loss_last"] == 1.0
