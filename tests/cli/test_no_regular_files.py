"""Records in whose place stands a pipe, a folder, a device or a link: one clear error, no wait, nothing overwritten."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from record_fuzz import BATCH, World
from seatrial.base import files
from seatrial.base.errors import InputError
from seatrial.base.files import NotAFile, open_file, read_bytes, read_json
from seatrial.checkpoint.manifest import Damaged, read_manifest
from seatrial.cli.main import main
from seatrial.record import lock
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import LineWriter, Tail, read_numbered
from seatrial.record.recent import recent_ledger, recorded_marks, skipped_steps
from seatrial.record.secret import make_secret, read_secret
from seatrial.storage import StorageError

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster

KINDS = {
    "pipe": "a pipe",
    "folder": "a folder",
    "link": "a link",  # to somebody's file
    "dangling": "a link",
    "zero": "a link",  # to a device that never ends
    "socket": "a socket",
}
RECORDS = ("job_toml", "plan_json", "events", "metrics", "ledger", "interval_json", "lock", "generation_file", "identity_json", "inputs_json", "secret",
           "lease_json", "launch_json", "outcome_json", "follow_up", "coordinator_log")  # fmt: skip
VERBS = (["watch", "RUN", "--once"], ["logs", "RUN"], ["status", "RUN"], ["verify", "RUN"], ["checkpoints", "RUN"], ["export", "RUN", "--out", "hf"],
         ["train", "first-voyage.toml", "--plain"])  # fmt: skip


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """What would wait for ever fails."""

    def over(signum: int, frame: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(kind: str, path: Path, victim: Path) -> None:
    """Something else in the place of a record."""
    import socket

    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(victim)
        case "dangling":
            path.symlink_to("nowhere")
        case "zero":
            path.symlink_to("/dev/zero")
        case _:
            here = os.getcwd()
            os.chdir(path.parent)  # a socket's path may not be long
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
            os.chdir(here)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    (tmp_path / "victim").write_text("mine\n")
    assert main(["init", "--preset", "first-voyage"]) == 0
    return world


@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_names_each_such_record_and_changes_nothing(
    world: World, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, victim = world.run, world.root / "victim"
    for name in RECORDS:
        path: Path = getattr(folder, name)
        kept = path.read_bytes() if path.is_file() else None
        put(kind, path, victim)
        capsys.readouterr()
        for verb in VERBS:
            words = [word.replace("RUN", str(folder.path)) for word in verb]
            assert main(words) == 2, words
            err = capsys.readouterr().err
            assert f"{path} is {KINDS[kind]}, not a regular file" in err or (
                verb[0] == "train"
                and f"runs/first-voyage/{path.relative_to(folder.path)} is {KINDS[kind]}" in err
            ), err
            assert "restore the file, or remove what is in its place" in err
        assert victim.read_text() == "mine\n"
        path.rmdir() if kind == "folder" else path.unlink()
        if kept is not None:
            path.write_bytes(kept)


def test_all_of_them_are_reported_at_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("events", "ledger", "secret"):
        put("pipe", getattr(world.run, name), world.root)
    assert main(["watch", str(world.run.path), "--once"]) == 2
    assert capsys.readouterr().err.endswith("3 problems\n")


@pytest.mark.parametrize("kind", KINDS)
def test_record_replaced_after_the_check_does_not_block(world: World, kind: str) -> None:
    """Between the check and the use: each open has the same check."""
    folder, victim = world.run, world.root / "victim"
    for path in (
        folder.events,
        folder.ledger,
        folder.metrics,
        folder.lock,
        folder.generation_file,
        folder.secret,
    ):
        put(kind, path, victim)
    assert read_numbered(folder.events)[0] == []
    assert [p.message for p in read_numbered(folder.ledger)[1]] == (
        [f"cannot be read (is {KINDS[kind]}, not a regular file)"]
    )
    assert Tail(folder.metrics).poll() == []
    assert (recorded_marks(folder), skipped_steps(folder), recent_ledger(folder, 5)) == (set(), [], [])
    assert folder.last_generation() == 1  # as the log folders say
    with pytest.raises(NotAFile):
        LineWriter(folder.events)
    with pytest.raises(NotAFile):
        lock.acquire(folder.lock)
    assert not lock.is_held(folder.lock)
    assert lock.holder(folder.lock) is None
    with pytest.raises(InputError, match=f"{folder.secret} cannot be used: is {KINDS[kind]}"):
        read_secret(folder)
    assert victim.read_text() == "mine\n"


def test_lock_hard_linked_to_another_file_is_not_overwritten(world: World) -> None:
    world.run.lock.unlink()
    os.link(world.root / "victim", world.run.lock)
    with pytest.raises(OSError, match="is not a lock of Seatrial"):
        lock.acquire(world.run.lock)
    assert (world.root / "victim").read_text() == "mine\n"
    assert main(["train", "first-voyage.toml"]) == 2


def test_a_record_larger_than_any_can_be_is_not_read(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (world.run.plan_json, world.run.lease_json, world.run.generation_file, world.run.job_toml):
        path.unlink()
        path.touch()
        os.truncate(path, 20 << 30)
        with pytest.raises(OSError, match=r"has 20\.00 GiB, more than such a file may have") as caught:
            read_bytes(path)
        assert caught.value.errno == errno.EFBIG
    assert main(["watch", str(world.run.path), "--once"]) == 0
    assert (
        "warning: job.toml:0: cannot be used (has 20.00 GiB, more than such a file may have)"
        in capsys.readouterr().err
    )


def test_a_line_without_end_takes_neither_memory_nor_time(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty gigabytes of zeros: what stands before them counts, and what is wrong is told."""
    for path in (world.run.ledger, world.run.metrics, world.run.events):
        numbered, _ = read_numbered(path)
        os.truncate(path, 20 << 30)
        found, problems = read_numbered(path)
        assert found == numbered
        assert [(p.line, p.message) for p in problems] == [
            (0, "cannot be read (a line exceeds the size of any record; the rest of the file is not read)")
        ]
        tail = Tail(path)
        assert tail.poll_numbered() == numbered
        assert tail.poll_numbered() == []
    assert skipped_steps(world.run) == []
    assert recorded_marks(world.run) == {"a-1"}
    assert recent_ledger(world.run, 5) == []
    assert main(["watch", str(world.run.path), "--once"]) == 0
    assert capsys.readouterr().err.count("a line exceeds the size of any record") == 3


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_secret_that_others_can_read_is_refused(world: World, mode: int) -> None:
    assert len(read_secret(world.run)) == 32
    world.run.secret.chmod(mode)
    with pytest.raises(InputError, match="other users can read it"):
        read_secret(world.run)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
def test_a_secret_of_another_user_is_refused(world: World) -> None:
    os.chown(world.run.secret, 12345, 12345)
    with pytest.raises(InputError, match="it belongs to another user"):
        read_secret(world.run)


def test_secret_is_accepted_under_root_squash(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root squash, or a file system without modes: a new file of ours looks as the secret does."""
    monkeypatch.setattr("seatrial.record.secret._whose", lambda fd: (65534, 0o077))
    assert len(read_secret(world.run)) == 32


def test_a_checkpoint_that_cannot_be_opened_is_not_damaged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of descriptors or permission: what is quarantined for that would be lost for nothing."""
    step = world.run.checkpoints / "step-00000008"

    for number, name in ((errno.EMFILE, "Too many open files"), (errno.EACCES, "Permission denied")):

        def refuse(path: Path, *args: object, number: int = number, **more: object) -> int:
            raise OSError(number, os.strerror(number), str(path))

        with monkeypatch.context() as patched:
            patched.setattr(files, "open_file", refuse)
            with pytest.raises(StorageError, match=name):
                read_manifest(step)
    put("pipe", step / "manifest.json", world.root)
    with pytest.raises(Damaged, match="is a pipe, not a regular file"):
        read_manifest(step)


def test_links_are_followed_where_the_user_made_them(world: World) -> None:
    """Data and weights are the user's, and what a checkpoint holds is verified by its hashes."""
    elsewhere = world.root / "elsewhere"
    elsewhere.mkdir()
    for file in [*(world.root / "store").iterdir(), *(world.root / "hf").iterdir()]:
        moved = elsewhere / f"{file.parent.name}-{file.name}"
        file.rename(moved)
        file.symlink_to(moved)
    part = world.run.checkpoints / "step-00000008" / "rank-00000.safetensors"
    part.rename(elsewhere / part.name)
    part.symlink_to(elsewhere / part.name)
    assert main(["data", "verify", "store"]) == 0
    assert main(["plan", "hf.toml", "--own"]) == 0
    assert main(["verify", str(world.run.path)]) == 0


def test_a_pipe_is_opened_neither_for_reading_nor_for_writing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_APPEND):
        for links in (False, True):
            with pytest.raises(NotAFile, match="is a pipe, not a regular file"):
                open_file(tmp_path / "pipe", flags, links=links)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "missing")
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "deep")


def test_the_batch_of_the_world_is_its_jobs(world: World) -> None:
    assert world.job.train.global_batch == BATCH
    assert RunFolder.open(world.run.path).is_run()
    make_secret(world.run)
    assert world.run.secret.stat().st_mode & 0o777 == 0o600
