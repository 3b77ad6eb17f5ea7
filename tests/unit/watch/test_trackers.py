"""What is pushed to trackers, read back with their own readers and compared with the run's records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import EVENTS, RECORDS, record, wandb_records, write

from seatrial.base.errors import InputError, RunFailed
from seatrial.cli.main import main
from seatrial.job.trackers import TRACKERS
from seatrial.record import lock
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord
from seatrial.record.states import State
from seatrial.watch.trackers import feed as feed_module
from seatrial.watch.trackers.feed import feed
from seatrial.watch.trackers.progress import read_progress
from seatrial.watch.trackers.tracker import TrackedRun, values_of

# Of each step the record that counts.
FINAL = {r.step: r for r in RECORDS}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    write(tmp_path / "run", RECORDS, EVENTS)
    return RunFolder(tmp_path / "run")


def push_in_parts(tmp_path: Path, name: str) -> RunFolder:
    """As a run that is pushed by two processes, one after the other."""
    path = tmp_path / "run"
    for records, events in ((RECORDS[:7], EVENTS[:4]), (RECORDS[7:], EVENTS[4:])):
        write(path, records, events)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "seatrial.watch.trackers", str(path), "--to", name],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return RunFolder(path)


# -- the three


@pytest.mark.cluster  # imports the real package
def test_tensorboard_has_the_last_value_of_each_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path / "run", RECORDS[:7], EVENTS[:4])
    feed(RunFolder(tmp_path / "run"), "tensorboard", report=lambda text: None)
    write(tmp_path / "run", RECORDS[7:], EVENTS[4:])
    pushed = feed(RunFolder(tmp_path / "run"), "tensorboard", report=lambda text: None)
    assert (pushed.steps, pushed.events) == (3, 1)
    found = EventAccumulator(str(tmp_path / "run/tensorboard"))
    found.Reload()
    for name in values_of(FINAL[8]):
        wanted = {step: v[name] for step, r in FINAL.items() if name in (v := values_of(r))}
        scalars = found.Scalars(name)
        assert [(s.step, s.value) for s in scalars] == [(n, pytest.approx(v)) for n, v in wanted.items()]
        assert [s.wall_time for s in scalars] == [FINAL[step].time for step in wanted]
    assert found.Scalars("metrics/per plexity!") == [], "step 6 was redone without it"
    texts = EventAccumulator(str(tmp_path / "run/tensorboard/events"))
    texts.Reload()
    (failed,) = texts.Tensors("events/rank_failed")
    assert (failed.step, failed.tensor_proto.string_val[0].decode()) == (6, "error: rank 3 was killed")
    assert texts.Tensors("events/recovered")
    assert "events/agent_started" not in texts.Tags()["tensors"]
    assert "train.steps" in texts.Tensors("job")[0].tensor_proto.string_val[0].decode()


@pytest.mark.ci
@pytest.mark.cluster
def test_wandb_offline_has_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "run"))
    folder = push_in_parts(tmp_path, "wandb")
    rows: list[dict[str, Any]] = []
    codes, ids, config = [], set(), {}
    for each in wandb_records(folder.path):
        kind = each.WhichOneof("record_type")
        if kind == "history":
            items = each.history.item
            rows.append({(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items})
        elif kind == "run":
            ids.add(each.run.run_id)
            config |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in each.run.config.update}
        elif kind == "exit":
            codes.append(each.exit.exit_code)
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == len(RECORDS)
    for row, wanted in zip(steps, RECORDS, strict=True):
        assert row["step"] == wanted.step
        assert row["_timestamp"] == wanted.time
        assert {n: row[n] for n in values_of(wanted)} == values_of(wanted)
    pushed = [(row["event"], row["step"]) for row in rows if "event" in row]
    assert pushed == [("run_started", 0), ("rank_failed", 6), ("recovered", 6), ("run_finished", 8)]
    assert ids == {read_progress(folder, "wandb").id}, "one run"
    assert config["train.steps"] == 8
    assert codes == [1, 0], "it had finished only the second time"


@pytest.mark.ci
@pytest.mark.cluster
def test_mlflow_has_every_value_and_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = push_in_parts(tmp_path, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient((folder.path / "mlruns").as_uri())
    name = client.get_experiment_by_name("seatrial")
    assert name is not None
    (run,) = client.search_runs([name.experiment_id])
    assert run.info.run_id == read_progress(folder, "mlflow").id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["train.steps"] == "8"
    assert run.data.tags["event.rank_failed"] == "after step 6: rank 3 was killed"
    for metric in values_of(FINAL[8]):
        wanted = [(r.step, v[metric], int(r.time * 1000)) for r in RECORDS if metric in (v := values_of(r))]
        history = client.get_metric_history(run.info.run_id, metric)
        assert [(m.step, m.value, m.timestamp) for m in history] == wanted
    assert client.get_metric_history(run.info.run_id, "metrics/per plexity_")[0].value == 7.5
    assert run.data.metrics["train/loss"] == FINAL[8].loss
    assert run.data.metrics["events/rank_failed"] == 1


# -- whatever the tracker

pushed: list[Any] = []


class Memory:
    """A tracker that fails where a test says."""

    fail_at: int | None = None

    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or "first"
        pushed.append(("begin", run.id, run.step, run.config))

    def log_step(self, record: MetricsRecord, values: dict[str, float]) -> None:
        if record.step == Memory.fail_at:
            raise ConnectionError("no route to host")
        pushed.append(record.step)

    def log_event(self, event: Event, step: int, count: int) -> None:
        pushed.append((event.kind, step, count))

    def flush(self) -> None:
        pushed.append("flush")

    def end(self, state: State) -> None:
        pushed.append(("end", state))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    pushed.clear()
    Memory.fail_at = None
    monkeypatch.setattr(feed_module, "_class_of", lambda name: Memory)
    return pushed


def quiet(text: str) -> None:
    pass


def test_events_are_pushed_in_order_with_steps(folder: RunFolder, memory: list[Any]) -> None:
    feed(folder, "memory", report=quiet)
    config = {"name": "run", "train.steps": 8, "train.global_batch": 4, "optimizer.lr": 0.001}
    assert memory == [
        ("begin", None, 0, config), ("run_started", 0, 1), 1, 2, 3, 4, 5, 6,
        ("rank_failed", 6, 1), ("recovered", 6, 1), 5, 6, 7, 8, "flush", ("run_finished", 8, 1), "flush",
        ("end", "finished"),
    ]  # fmt: skip


def test_nothing_is_pushed_twice(folder: RunFolder, memory: list[Any]) -> None:
    feed(folder, "memory", report=quiet)
    memory.clear()
    assert feed(folder, "memory", report=quiet).steps == 0
    assert memory == [], "the tracker is not even asked"
    write(folder.path, [record(9, 2)], [Event(1050.0, 2, "rank_failed", "error", "again")])
    feed(folder, "memory", report=quiet)
    assert memory == [
        ("begin", "first", 8, memory[0][3]), 9, "flush", ("rank_failed", 9, 2), "flush", ("end", "finished"),
    ]  # fmt: skip


def test_a_live_run_is_followed_to_its_end(
    tmp_path: Path, memory: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    write(path, RECORDS[:3], [])
    folder = RunFolder(path)
    fd = lock.acquire(folder.lock)
    rest = [(RECORDS[3:6], EVENTS[:3]), (RECORDS[6:], EVENTS[3:])]

    def sleep(seconds: float) -> None:
        if rest:
            write(path, *rest.pop(0))
        else:
            open(fd, "rb").close()

    monkeypatch.setattr(feed_module.time, "sleep", sleep)
    assert feed(folder, "memory", report=quiet).steps == len(RECORDS)
    assert [each for each in memory if isinstance(each, int)] == [r.step for r in RECORDS]


def test_after_a_failure_pushing_resumes(
    tmp_path: Path, memory: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "run", RECORDS[:4], EVENTS[:1])
    folder = RunFolder(tmp_path / "run")
    feed(folder, "memory", report=quiet)
    write(tmp_path / "run", RECORDS[4:6], [])
    Memory.fail_at = 6
    with pytest.raises(ConnectionError):
        feed(folder, "memory", report=quiet)
    memory.clear()
    Memory.fail_at = None
    feed(folder, "memory", report=quiet)
    assert [each for each in memory if isinstance(each, int)] == [5, 6], "the part that was not acknowledged"


def test_only_one_process_pushes(folder: RunFolder, memory: list[Any]) -> None:
    folder.trackers.mkdir()
    with open(lock.acquire(folder.trackers / "memory.lock"), "rb"), pytest.raises(RunFailed, match="already"):
        feed(folder, "memory", report=quiet)


def test_damaged_progress_is_refused(folder: RunFolder, memory: list[Any]) -> None:
    feed(folder, "memory", report=quiet)
    (folder.trackers / "memory.json").write_text("{")
    with pytest.raises(InputError, match="unknown what was already pushed"):
        feed(folder, "memory", report=quiet)


# -- the command and the job file


def test_watch_to_pushes_a_run(
    folder: RunFolder, memory: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(folder.path), "--to", "memory"]) == 0
    said = capsys.readouterr()
    assert said.out == "pushed 10 steps and 4 events to memory as first\n"
    assert main(["watch", str(folder.path), "--to", "memory", "--once"]) == 2
    write(folder.path, [record(9, 2)], [])
    Memory.fail_at = 9
    assert main(["watch", str(folder.path), "--to", "memory"]) == 1
    assert "memory failed: ConnectionError: no route to host" in capsys.readouterr().err


def test_an_unknown_tracker(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(folder.path), "--to", "wandbb"]) == 2
    assert 'there is no tracker "wandbb"' in capsys.readouterr().err


def test_a_missing_package_is_named(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "seatrial.watch.trackers.wandb", raising=False)
    with pytest.raises(InputError) as caught:
        feed(folder, "wandb", report=quiet)
    assert caught.value.hint == 'pip install "seatrial[wandb]"'
    assert not (folder.trackers / "wandb.json").exists()


def test_extras_match_the_trackers() -> None:
    assert list(TRACKERS.own) == ["tensorboard", "wandb", "mlflow"]
