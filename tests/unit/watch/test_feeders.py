"""The processes that push a live run: one that fails or hangs is reported once, restarted, and harms nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tracked_runs import EVENTS, RECORDS, record, write

from installed import install, install_examples
from seatrial.base import process
from seatrial.cli.main import main
from seatrial.record import lock
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, StartOutcome, encoded, write_launch
from seatrial.watch.trackers.feeders import Feeders
from seatrial.watch.trackers.progress import read_progress

pytestmark = pytest.mark.cluster

BROKEN = """
import os, sys, time
from seatrial.job.trackers import TrackerEntry

RAISES = TrackerEntry("broken_trackers:Raises", "os", "nothing")
HANGS = TrackerEntry("broken_trackers:Hangs", "os", "nothing")

class Raises:
    def __init__(self, run):
        self.id = "raises"
    def log_event(self, event, step, count):
        pass
    def log_step(self, record, values):
        flag = os.environ["TRACKER_FLAG"]
        if record.step == 3 and not os.path.exists(flag):
            open(flag, "w").close()
            raise ConnectionError("the tracker's server is gone")
    def flush(self):
        pass
    def end(self, state):
        pass

class Hangs(Raises):
    def log_step(self, record, values):
        if os.fork() == 0:
            time.sleep(1000)  # trackers have processes of their own
        time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A live run."""
    site = tmp_path / "site"
    install_examples(site, monkeypatch)
    points = {name: f"broken_trackers:{name.upper()}" for name in ("raises", "hangs")}
    install({"seatrial.trackers": points}, site, monkeypatch)
    (site / "broken_trackers.py").write_text(BROKEN)
    monkeypatch.setenv("TRACKER_FLAG", str(tmp_path / "flag"))
    write(tmp_path / "run", RECORDS, EVENTS)
    (tmp_path / "run" / "reports").mkdir()
    return RunFolder(tmp_path / "run")


def until(feeders: Feeders, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        before = time.monotonic()
        feeders.poll(0.0)
        assert time.monotonic() - before < 5.0, "it never waits for a tracker"
        time.sleep(0.05)


@pytest.mark.timed
def test_trackers_have_separate_independent_processes(folder: RunFolder) -> None:
    sent: list[msg.MonitorFailed] = []
    feeders = Feeders(
        folder,
        ["hangs", "raises", "lines"],
        sent.append,  # type: ignore[arg-type]
        silent_s=6.0,
        again_s=0.1,
    )
    with open(lock.acquire(folder.lock), "rb"):
        until(
            feeders,
            lambda: (
                read_progress(folder, "lines").step == read_progress(folder, "raises").step == 8
                and any(t.data["tracker"] == "hangs" for t in sent)
            ),
        )
        hung = next(f for f in feeders._feeders if f.name == "hangs")
        assert read_progress(folder, "hangs").step == 0
    # The run has ended.
    until(feeders, lambda: all(f.done for f in feeders._feeders if f is not hung))
    feeders.close(time.monotonic() + 0.1)
    assert sorted(t.data["tracker"] for t in sent) == ["hangs", "raises"], "once each"
    assert {t.kind for t in sent} == {"tracker_failed"}
    why = {t.data["tracker"]: t.message.partition(" failed: ")[2] for t in sent}
    assert why["raises"].startswith("ConnectionError: the tracker's server is gone; restarting in ")
    assert why["hangs"].startswith("it hangs: no heartbeat for 6 s")
    assert f"seatrial watch {folder.path} --to hangs" in why["hangs"]
    lines = (folder.reports / "lines.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == [
        f"step {r.step}" for r in RECORDS
    ]
    assert lines[-1] == "run finished"


def test_the_rest_is_pushed_while_the_run_is_still_locked(folder: RunFolder) -> None:
    folder.events.unlink()
    write(folder.path, [], EVENTS[:-1])
    launch = Launch("local", 2, 1000.0, "here", False)
    write_launch(folder, launch)
    feeders = Feeders(folder, ["lines"], lambda failed: None)
    with open(lock.acquire(folder.lock), "rb"):
        until(feeders, lambda: read_progress(folder, "lines").step == 8)
        write(folder.path, [record(9, 2)], [])
        outcome = StartOutcome(2, 1, 75, "preempted", None, 1040.0)
        folder.outcome_json.write_bytes(encoded(outcome))
        feeders.close(time.monotonic() + 20.0)
    lines = (folder.reports / "lines.txt").read_text().splitlines()
    assert lines[-2:] == [f"step 9: loss {record(9, 2).loss:.4f}", "run preempted"]
    assert read_progress(folder, "lines").ended


def test_child_processes_of_a_tracker_are_killed(folder: RunFolder) -> None:
    feeders = Feeders(folder, ["hangs"], lambda failed: None)
    with open(lock.acquire(folder.lock), "rb"):
        until(feeders, lambda: read_progress(folder, "hangs").id is not None)
        group = feeders._feeders[0].process
        assert group is not None
        feeders.close(time.monotonic())
    gone = [pid for pid in process.descendants(group.pid) | {group.pid} if pid in process.living()]
    assert gone == []


def test_the_job_file_names_them(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--preset", "first-voyage"]) == 0
    assert main(["validate", "first-voyage.toml", "--set", 'watch.trackers=["lines", "raises"]']) == 0
    capsys.readouterr()
    assert main(["validate", "first-voyage.toml", "--set", 'watch.trackers=["linse"]']) == 2
    assert '"tensorboard", "wandb", "mlflow", "hangs", "lines" or "raises"' in capsys.readouterr().err
    monkeypatch.setattr("seatrial.launch.preflight.find_spec", lambda name: None)
    assert main(["validate", "first-voyage.toml", "--set", 'watch.trackers=["lines", "wandb"]']) == 2
    assert "needs the package wandb, which is not installed" in capsys.readouterr().err
