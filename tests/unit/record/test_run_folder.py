"""Starting, resuming and refusing runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seatrial.base.errors import InputError, RunFailed
from seatrial.job import Job
from seatrial.record import lock
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.run import open_run
from seatrial.record.secret import read_secret

MakeJob = Callable[..., Job]


def snapshot(path: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def test_paths() -> None:
    folder = RunFolder(Path("runs/x"))
    assert folder.rank_log(7, 1, 3) == Path("runs/x/logs/000007/node1/rank3.log")
    assert folder.rank_error(7, 1, 3) == Path("runs/x/logs/000007/node1/rank3.error.json")
    names = {k: str(v.relative_to(folder.path)) for k, v in vars(folder).items() if k != "path"}
    assert names == {
        "job_toml": "job.toml",
        "plan_json": "plan.json",
        "events": "events.jsonl",
        "metrics": "metrics.jsonl",
        "ledger": "ledger.jsonl",
        "interval_json": "interval.json",
        "control": "control",
        "checkpoints": "checkpoints",
        "logs": "logs",
        "reports": "reports",
        "ranks": "ranks",
        "telemetry": "telemetry",
    }


def test_first_start(tmp_path: Path, make_job: MakeJob) -> None:
    job = make_job()
    with open_run(job, tmp_path / "deep" / "runs") as run:
        folder = run.folder
        assert folder.path == tmp_path / "deep" / "runs" / "first-voyage"
        assert (run.generation, run.notes) == (1, [])
        assert folder.job_toml.read_text() == job.to_toml()
        plan = json.loads(folder.plan_json.read_text())
        assert plan == {
            "schema_version": 1,
            "layout": job.layout.as_dict(),
            "architecture": job.architecture.as_dict(),
            "parameters": job.architecture.parameters(),
            "stages": [[0, 1], [2, 3]],
            "microbatches": job.microbatches,
        }
        assert lock.holder(folder.lock) == os.getpid()
    assert lock.holder(folder.lock) is None
    assert RunFolder.open(folder.path).path == folder.path


def test_each_start_has_a_secret_of_its_own(tmp_path: Path, make_job: MakeJob) -> None:
    seen = set()
    for _ in (1, 2):
        with open_run(make_job(), tmp_path) as run:
            assert run.folder.secret.stat().st_mode & 0o777 == 0o600
            seen.add(read_secret(run.folder))
    assert {len(s) for s in seen} == {32}
    assert len(seen) == 2
    assert sorted(p.name for p in run.folder.control.iterdir()) == [
        "generation",
        "identity.json",
        "lock",
        "secret",
    ]
    everything = b"".join(
        p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p != run.folder.secret
    )
    assert not any(s.hex().encode() in everything for s in seen)


@pytest.mark.parametrize("damage", [None, "", "ab\n", "zz" * 32])
def test_a_secret_that_cannot_be_used(tmp_path: Path, damage: str | None) -> None:
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    if damage is not None:
        folder.secret.write_text(damage)
    with pytest.raises(InputError, match="control/secret"):
        read_secret(folder)


def test_generation_grows(tmp_path: Path, make_job: MakeJob) -> None:
    for expected in (1, 2, 3):
        with open_run(make_job(), tmp_path) as run:
            assert run.generation == expected
            assert run.notes == []
    # A damaged file must not make a generation come twice: the logs know better.
    run.folder.generation_file.write_bytes(b"\xff")
    (run.folder.logs / "000009").mkdir(parents=True)
    with open_run(make_job(), tmp_path) as run:
        assert run.generation == 10


@pytest.mark.cluster  # slow
def test_second_start_reports_which_process_holds_the_run(tmp_path: Path, make_job: MakeJob) -> None:
    with open_run(make_job(), tmp_path) as run:
        before = snapshot(run.folder.path)
        for fresh in (False, True):
            with pytest.raises(RunFailed, match=f"by process {os.getpid()}") as caught:
                open_run(make_job(), tmp_path, fresh=fresh)
            assert caught.value.hint
        assert snapshot(tmp_path / "first-voyage") == before


def test_killed_holder_leaves_no_lock(tmp_path: Path, make_job: MakeJob) -> None:
    """The child holds the lock until the kernel ends it; its death is the event waited for."""
    with open_run(make_job(), tmp_path) as run:
        path = run.folder.lock
    code = (
        "import sys; from pathlib import Path; from seatrial.record import lock\n"
        "fd = lock.acquire(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert lock.holder(path) == child.pid
        with pytest.raises(RunFailed, match=f"process {child.pid}"):
            open_run(make_job(), tmp_path)
        child.kill()
        child.wait()
    with open_run(make_job(), tmp_path) as run:
        assert run.generation == 2


def test_other_job_is_refused_with_every_difference(tmp_path: Path, make_job: MakeJob) -> None:
    with open_run(make_job(), tmp_path) as run:
        before = snapshot(run.folder.path)
    with pytest.raises(InputError) as caught:
        open_run(make_job("train.seed=99", "optimizer.lr=0.5", "train.steps=70"), tmp_path)
    text = caught.value.render()
    assert "2 keys differ" in text
    assert "train.seed: 1234 there, 99 here" in text
    assert "optimizer.lr: 0.003 there, 0.5 here" in text
    assert "train.steps" not in text
    assert "--fresh" in text
    assert snapshot(run.folder.path) == before
    with open_run(make_job(), tmp_path) as run:  # and nothing is lost
        assert run.generation == 2


def test_allowed_changes_are_reported(tmp_path: Path, make_job: MakeJob) -> None:
    with open_run(make_job(), tmp_path):
        pass
    with open_run(make_job("train.steps=70", "checkpoint.keep=9"), tmp_path) as run:
        assert run.notes == [
            "the job changed since the last start: train.steps 200 -> 70, checkpoint.keep 3 -> 9"
        ]
        event = read_events(run.folder)[0][-1]
        assert (event.kind, event.generation) == ("job_changed", 2)
        assert event.data == {"train.steps": [200, 70], "checkpoint.keep": [3, 9]}
        assert tomllib.loads(run.folder.job_toml.read_text())["train"]["steps"] == 70


def test_fresh_moves_aside_and_never_deletes(tmp_path: Path, make_job: MakeJob) -> None:
    with open_run(make_job(), tmp_path, fresh=True) as run:
        assert run.notes == []  # there was nothing to move
        run.folder.metrics.write_text("kept\n")
    for number in (1, 2):
        with open_run(make_job(f"train.seed={number}"), tmp_path, fresh=True) as run:
            old = tmp_path / f"first-voyage.old-{number}"
            assert (run.generation, len(run.notes)) == (1, 1)
            assert str(old) in run.notes[0]
            assert not run.folder.metrics.exists()
            assert lock.holder(run.folder.lock) == os.getpid()
    assert (tmp_path / "first-voyage.old-1" / "metrics.jsonl").read_text() == "kept\n"
    with open_run(make_job("train.seed=2"), tmp_path) as run:
        assert run.generation == 2


def test_fresh_does_not_take_a_name_that_exists(tmp_path: Path, make_job: MakeJob) -> None:
    with open_run(make_job(), tmp_path):
        pass
    (tmp_path / "first-voyage.old-1").mkdir()
    with open_run(make_job(), tmp_path, fresh=True):
        pass
    assert list((tmp_path / "first-voyage.old-1").iterdir()) == []
    assert RunFolder(tmp_path / "first-voyage.old-2").is_run()


@pytest.mark.parametrize("fresh", [False, True])
def test_foreign_folder_is_not_touched(tmp_path: Path, make_job: MakeJob, fresh: bool) -> None:
    path = tmp_path / "first-voyage"
    path.mkdir()
    (path / "thesis.tex").write_text("precious")
    (path / "job.toml").write_text("name = 'x'")
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="not empty and is not a run folder") as caught:
        open_run(make_job(), tmp_path, fresh=fresh)
    assert "name" in caught.value.render()
    assert snapshot(tmp_path) == before


def test_a_file_or_a_dead_link_in_its_place(tmp_path: Path, make_job: MakeJob) -> None:
    path = tmp_path / "first-voyage"
    path.write_text("a file")
    with pytest.raises(InputError, match="is a file"):
        open_run(make_job(), tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="dangling link"):
        open_run(make_job(), tmp_path)


def test_empty_folder_and_first_start_that_was_killed(tmp_path: Path, make_job: MakeJob) -> None:
    (tmp_path / "first-voyage" / "control").mkdir(parents=True)
    with open_run(make_job(), tmp_path) as run:
        assert run.generation == 1
    # Killed after the folders were made and before its identity was written.
    for path in (run.folder.identity_json, run.folder.job_toml, run.folder.plan_json):
        path.unlink()
    with open_run(make_job("train.seed=5"), tmp_path) as run:
        assert run.generation == 2


@pytest.mark.parametrize("content", [None, b"{", b"\xff\x00", b"[]"])
def test_damaged_identity_is_refused(tmp_path: Path, make_job: MakeJob, content: bytes | None) -> None:
    with open_run(make_job(), tmp_path) as run:
        (run.folder.checkpoints / "step-00000050").mkdir(parents=True)
    if content is None:
        run.folder.identity_json.unlink()
    else:
        run.folder.identity_json.write_bytes(content)
    with pytest.raises(InputError, match=r"identity\.json") as caught:
        open_run(make_job(), tmp_path)
    assert "--fresh" in caught.value.render()
    with open_run(make_job(), tmp_path, fresh=True) as run:
        assert run.generation == 1


@contextlib.contextmanager
def nobody() -> Iterator[Path]:
    """A folder that this process may not write, also where the tests run as root."""
    path = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    try:
        path.chmod(0o555)
        if root:
            os.seteuid(65534)
        yield path
    finally:
        if root:
            os.seteuid(0)
        path.chmod(0o755)
        shutil.rmtree(path)


def test_read_only_root(make_job: MakeJob) -> None:
    job = make_job()
    with nobody() as root:
        with pytest.raises(InputError, match="cannot be written: Permission denied") as caught:
            open_run(job, root)
        with pytest.raises(InputError, match="cannot be written"):
            open_run(job, root / "deeper")
    assert "nothing was started" in caught.value.render()


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.ENOLCK])
def test_file_system_that_refuses(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    with open_run(make_job(), tmp_path):
        pass
    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock" if code == errno.ENOLCK else "os.replace", refuse)
        with pytest.raises(InputError, match=os.strerror(code)):
            open_run(make_job(), tmp_path)
    assert len(os.listdir("/proc/self/fd")) == open_files
    with open_run(make_job(), tmp_path) as run:  # the lock was let go, nothing is lost
        assert run.generation == 2


def test_readers_are_helped_to_the_run_they_meant(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_run(make_job()):
        pass
    assert RunFolder.find("first-voyage").path == Path("runs/first-voyage")
    assert RunFolder.find("runs/first-voyage").path == Path("runs/first-voyage")
    for name, hint in [
        ("runs/first-voyag", "did you mean runs/first-voyage?"),
        ("fist-voyage", "did you mean runs/first-voyage?"),
        ("runs/zzz", "run folders beside it: runs/first-voyage"),
        ("runs", "run folders in it: runs/first-voyage"),
        (".", "run folders in it: runs/first-voyage"),
        ("elsewhere/zzz", "give the path of a run folder"),
    ]:
        with pytest.raises(InputError) as caught:
            RunFolder.find(name)
        assert hint in caught.value.render()


def test_other_tokens_are_another_run_wherever_they_lie(tmp_path: Path, make_job: MakeJob) -> None:
    root = tmp_path / "runs"
    open_run(make_job(), root, data={"data.tokens_sha256": "a" * 64}).close()
    # The same tokens at another path: the project was moved.
    open_run(make_job("data.train=elsewhere"), root, data={"data.tokens_sha256": "a" * 64}).close()
    with pytest.raises(InputError, match=r"data\.tokens_sha256"):
        open_run(make_job(), root, data={"data.tokens_sha256": "b" * 64})
