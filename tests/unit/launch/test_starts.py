"""Starts of a scheduled run: submitted, refused, begun by the next job, stopped; what each leaves in the run folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial import launch
from seatrial.base import process
from seatrial.base.errors import InputError, RunFailed
from seatrial.cli.main import main
from seatrial.job.loading import load_job
from seatrial.launch import begin
from seatrial.launch.base import LEAVE, NO_OUTCOME, Identity, Status
from seatrial.launch.begin import current_start
from seatrial.launch.slurm import SCRIPT, SlurmLauncher
from seatrial.record import lock
from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, StartOutcome, encoded, known_launch, read_outcome, write_launch
from seatrial.record.view import read_view

pytestmark = pytest.mark.cluster  # slow

TRAIN = ("train", "first-voyage.toml", "--set", "cluster.launcher=queue")


class Queue:
    """A scheduler that keeps its jobs in a dict."""

    name = "queue"
    restarts = False
    jobs: dict[str, str]  # handle -> "queued" or "running"
    refuses: str
    on_signal: Callable[[str, str], None]

    def check(self, job: Any) -> None:
        pass

    def render(self, job: Any, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        return {"job.txt": "agents"}

    def identity(self, environment: Any) -> Identity:
        raise InputError("not asked")

    def submit(self, files: Any) -> str:
        if self.refuses:
            raise RunFailed(self.refuses)
        self.jobs["1"] = "queued"
        return "1"

    def status(self, handle: str) -> Status:
        state: Any = self.jobs.get(handle, "gone")
        return Status(state, state.upper())

    def signal(self, handle: str, how: str) -> None:
        type(self).on_signal(handle, how)
        self.jobs.pop(handle, None)

    def warnings(self, grace_s: float) -> list[str]:
        return []

    def logs(self, handle: str) -> list[str]:
        return []


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Queue]:
    Queue.jobs, Queue.refuses, Queue.on_signal = {}, "", staticmethod(lambda handle, how: None)
    monkeypatch.setitem(launch.LAUNCHERS.own, "queue", Queue)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--preset", "first-voyage"]) == 0
    return Queue


@pytest.fixture
def folder(queue: type[Queue]) -> RunFolder:
    """Of a run that waits in the queue as job 1."""
    assert main([*TRAIN, "--detach"]) == 0
    return RunFolder(Path("runs/first-voyage"))


def preempted(folder: RunFolder, generation: int, exit_code: int = 75) -> None:
    outcome = StartOutcome(generation, 1, exit_code, "the state is saved", None, time.time())
    folder.outcome_json.write_bytes(encoded(outcome))


def test_a_refused_submission_is_a_failed_run(queue: type[Queue], capsys: pytest.CaptureFixture[str]) -> None:
    queue.refuses = "no such partition"
    assert main([*TRAIN]) == 1
    folder = RunFolder(Path("runs/first-voyage"))
    view = read_view(folder)
    assert view.state == "failed"
    assert "no such partition" in view.state_reason
    assert begin.main(["--run", str(folder.path), "--attempt", "17"]) == LEAVE, (
        "if it came to the queue anyway"
    )
    assert main(["attach", "first-voyage"]) == 1
    queue.refuses = ""
    assert main([*TRAIN, "--detach"]) == 0
    assert read_view(folder).state == "queued"


def test_a_stopped_job_that_had_not_begun_is_not_shown_as_queued(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "first-voyage"]) == 0
    assert read_view(folder).state == "stopped"
    assert "has ended, stopped" in capsys.readouterr().out
    assert main(["attach", "first-voyage"]) == 130


def test_a_job_of_an_earlier_submission_leaves(queue: type[Queue], folder: RunFolder) -> None:
    run = ["--run", str(folder.path), "--attempt"]
    assert begin.main([*run, "1", "--submitted", "1"]) == 0
    preempted(folder, 1)
    queue.jobs = {}
    assert main([*TRAIN, "--detach"]) == 0
    submitted = known_launch(folder)
    assert submitted is not None
    assert (submitted.generation, submitted.submitted) == (2, 2)
    assert begin.main([*run, "1", "--submitted", "1"]) == LEAVE, "also before it is over"
    assert known_launch(folder) == submitted
    preempted(folder, 2)
    assert begin.main([*run, "1", "--submitted", "1"]) == LEAVE
    assert begin.main([*run, "9", "--submitted", "2"]) == 0
    following = known_launch(folder)
    assert following is not None
    assert (following.generation, following.submitted, following.handle) == (3, 2, "9")


def test_follow_up_job_resumes_after_preemption_not_after_stop(queue: type[Queue], folder: RunFolder) -> None:
    assert isinstance(current_start(folder, "1"), Launch)
    preempted(folder, 1)
    begun = current_start(folder, "2")
    assert isinstance(begun, Launch)
    assert (begun.generation, begun.handle) == (2, "2")
    assert known_launch(folder) == begun

    queue.jobs = {"2": "running"}
    queue.on_signal = staticmethod(lambda handle, how: preempted(folder, 2))
    assert (
        main(["stop", "first-voyage"]) == 0
    )  # job 3 waits, and the script has not written its number down yet
    left = current_start(folder, "3")
    assert isinstance(left, StartOutcome)
    assert left.exit_code == 75
    assert known_launch(folder) == begun


def test_stop_cancels_follow_up_jobs_that_start_meanwhile(queue: type[Queue], folder: RunFolder) -> None:
    folder.follow_up.write_text("2\n")
    queue.jobs = {"2": "running"}

    def on_signal(handle: str, how: str) -> None:
        if handle == "2" and "3" not in queue.jobs and not folder.stopped(2).exists():
            assert isinstance(current_start(folder, "2"), Launch)
            folder.follow_up.write_text("3\n")
            queue.jobs["3"] = "queued"

    queue.on_signal = staticmethod(on_signal)
    assert main(["stop", "first-voyage"]) == 0
    assert queue.jobs == {}
    assert isinstance(current_start(folder, "3"), StartOutcome)


def test_damaged_launch_record_blocks_train_stop_and_attach(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.launch_json.write_text("{")
    for words in (TRAIN, ("stop", "first-voyage"), ("attach", "first-voyage")):
        assert main([*words]) == 2
        assert (
            "launch.json cannot be used, so it is unknown which process runs the run"
            in capsys.readouterr().err
        )
    assert folder.last_generation() == 1


def test_attach_ends_with_the_exit_code_of_the_run(folder: RunFolder) -> None:
    preempted(folder, 1, exit_code=2)
    assert main(["attach", "first-voyage"]) == 2


def test_attended_run_has_no_follow_up_start(folder: RunFolder) -> None:
    write_launch(folder, Launch("local", 1, time.time(), "here", scheduled=False))
    preempted(folder, 1)
    assert isinstance(current_start(folder, ""), StartOutcome)


def test_the_number_in_the_lock_may_be_of_another_host(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.launch_json.unlink()
    with subprocess.Popen(["sleep", "600"]) as other, open(folder.lock, "r+b") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            held.write(f"{other.pid}\n".encode())
            held.flush()
            assert main(["stop", "first-voyage"]) == 1
            assert "of another host or user" in capsys.readouterr().err
            assert other.poll() is None
        finally:
            other.kill()


def test_stop_ends_the_process_that_holds_the_run(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.launch_json.unlink()
    code = (
        "import sys; from pathlib import Path; from seatrial.record import lock; "
        "print(lock.acquire(Path(sys.argv[1])), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert lock.holder(folder.lock) == holder.pid
        assert main(["stop", "first-voyage"]) == 0
        assert holder.wait() < 0


class Unreachable:
    name = "local"

    def render(self, job: Any, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        return {}

    def launch(self, *given: Any, **more: Any) -> Any:
        raise InputError("host n3 does not see the run folder")


def test_a_refused_launch_is_recorded_in_the_run_folder(
    queue: type[Queue], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("seatrial.launch.session.launcher_for", lambda job: Unreachable())
    monkeypatch.setattr(Unreachable, "check", lambda self, job: None, raising=False)
    assert main(["train", "first-voyage.toml", "--plain"]) == 2
    view = read_view(RunFolder(Path("runs/first-voyage")))
    assert view.state == "failed"
    assert "host n3 does not see the run folder" in view.state_reason


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it outlives its Popen
def test_detached_fresh_start_is_recognised_as_a_new_launch(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --fresh both starts have generation 1."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from seatrial.record.folder import RunFolder\n"
        "from seatrial.record.launches import Launch, write_launch\n"
        f"write_launch(RunFolder(Path({str(folder.path)!r})), Launch('local', 1, time.time(), 'here', False))\n"
        f"print(open({str(tmp_path / 'fifo')!r}).read())\n"
    )
    os.mkfifo(tmp_path / "fifo")
    preempted(folder, 1, exit_code=0)
    monkeypatch.setattr(process, "python", lambda *words, **more: [sys.executable, str(script)])
    assert main(["train", "first-voyage.toml", "--fresh", "--detach"]) == 0
    told = re.search(r"process (\d+) runs the job", capsys.readouterr().out)
    (tmp_path / "fifo").write_text("end")
    assert told is not None
    assert os.waitpid(int(told[1]), 0)[1] == 0


def test_a_queue_that_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = SlurmLauncher().status("17")
    assert found.state == "unknown"
    assert "squeue" in found.words


@pytest.fixture
def script(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs Slurm's job script with commands that end as they are told; gives its exit code and what it cancelled."""
    commands = tmp_path / "bin"
    commands.mkdir()

    def command(name: str, text: str) -> None:
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)

    command("sbatch", "echo 18")
    command("scancel", f'echo "$1" >> {tmp_path}/cancelled')
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")

    def run(form: str, agents: int, outcome: int, **environment: str) -> tuple[int, str]:
        command("srun", f"exit {agents}")
        command("python", f'case "$*" in *--outcome*) exit {outcome};; *) exit 0;; esac')
        job = load_job(
            Path("first-voyage.toml"),
            [
                "cluster.launcher=slurm",
                f"slurm.form={json.dumps(form)}",
                f"cluster.python={json.dumps(str(commands / 'python'))}",
            ],
        )
        path = tmp_path / SCRIPT
        path.write_text(SlurmLauncher().render(job, folder)[SCRIPT])
        (tmp_path / "cancelled").write_text("")
        done = subprocess.run(
            ["bash", str(path)], env={**os.environ, "SLURM_JOB_ID": "17", **environment}, check=False
        )
        return done.returncode, (tmp_path / "cancelled").read_text().strip()

    return run


@pytest.mark.parametrize(
    ("agents", "outcome", "code", "cancelled"),
    [
        (0, 0, 0, "18"),
        (1, 1, 1, "18"),
        (75, 75, 75, ""),
        (137, NO_OUTCOME, NO_OUTCOME, ""),  # the coordinator's node was lost: the next job goes on
        (2, NO_OUTCOME, 2, "18"),  # no agent could begin: nor could those of the next job
    ],
)
def test_the_follow_up_job_is_kept_where_the_run_can_go_on(
    script: Any, agents: int, outcome: int, code: int, cancelled: str
) -> None:
    assert script("allocation", agents, outcome) == (code, cancelled)


@pytest.mark.parametrize(
    ("agents", "outcome", "cancelled"),
    [(0, 0, "18"), (0, NO_OUTCOME, ""), (137, NO_OUTCOME, ""), (1, 1, "18"), (75, 75, "")],
)
def test_only_array_task_0_may_cancel_the_follow_up_job(
    script: Any, agents: int, outcome: int, cancelled: str
) -> None:
    first = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0"}
    assert script("array", agents, outcome, **first) == (agents, cancelled)
    assert script("array", agents, outcome, **{**first, "SLURM_ARRAY_TASK_ID": "1"}) == (agents, "")


def test_the_end_of_a_queued_start_is_recorded_once(folder: RunFolder) -> None:
    assert main(["stop", "first-voyage", "--now"]) == 0
    found = read_outcome(folder, 1)
    assert found is not None
    assert main(["stop", "first-voyage", "--now"]) == 0
    assert read_outcome(folder, 1) == found
