"""A folder as a store: whole or absent, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.base.errors import InputError
from seatrial.base.process import fork
from seatrial.storage import Kind, StorageError, is_remote, join, open_store
from seatrial.storage.errors import from_os_error
from seatrial.storage.local import LocalStore
from seatrial.storage.s3 import S3Store
from store_contract import StoreContract

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "store").mkdir()
    return LocalStore(tmp_path / "store")


def refusal(call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value


def files(store: LocalStore) -> list[str]:
    """Everything there is, also what the store does not show."""
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*"))


class TestLocalStore(StoreContract):
    """What every store does."""


# --- addresses


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("x").url == str(tmp_path / "x")
    assert open_store(f"file://{tmp_path}/x").url == str(tmp_path / "x")
    store = open_store("s3://bucket/a/b/")
    assert isinstance(store, S3Store)
    assert (store.url, store.bucket, store.prefix) == ("s3://bucket/a/b", "bucket", "a/b")
    assert open_store("s3://bucket").url == "s3://bucket"
    assert [is_remote(url) for url in ("s3://b", "gs://b", "/a", "a", "file:///a")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert join("s3://b/p/", "x", "y") == "s3://b/p/x/y"
    assert join("s3://b", "x") == "s3://b/x"
    assert join("/a", "x", "y") == "/a/x/y"


@pytest.mark.parametrize(
    "url",
    ["", "file://", "gs://bucket/x", "http://host/bucket", "s3://", "s3:///x", "s3://Bucket/x", "s3://b",
     "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket//"],
)  # fmt: skip
def test_an_invalid_address_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(InputError) as caught:
        open_store(url)
    assert caught.value.diagnostics[0].hint


def test_object_store_without_its_library_names_the_package() -> None:
    code = """
import sys
sys.modules["boto3"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "boto3" else real(name, package)
from seatrial.base.errors import InputError
from seatrial.storage import open_store
open_store("/tmp")
try:
    open_store("s3://bucket")
except InputError as error:
    print(error.render())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'seatrial[s3]'" in done.stdout


def test_an_object_store_is_opened_without_loading_its_library() -> None:
    code = "import sys; from seatrial.storage import open_store; open_store('s3://bucket'); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "boto" not in done.stdout


# --- durability


def test_a_reader_never_sees_half_of_an_object(store: LocalStore) -> None:
    """Two processes replace it all the time, each by bytes of one kind and length."""
    store.write("a/x", b"a" * 100_000)

    def replace(letter: bytes, size: int) -> Callable[[], int]:
        def body() -> int:
            for _ in range(60):
                store.write("a/x", letter * size)
            return 0

        return body

    children = [fork(replace(b"a", 100_000)), fork(replace(b"b", 200_000))]
    seen = set()
    while children:
        data = store.read("a/x")
        seen.add((len(data), data[:1]))
        assert data == data[:1] * len(data)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.remove(pid)
            assert status == 0
    assert seen <= {(100_000, b"a"), (200_000, b"b")}
    assert files(store) == ["a", "a/x"]


def test_of_concurrent_conditional_writes_one_succeeds(store: LocalStore) -> None:
    rounds, n = 30, 6

    def contend(mine: int) -> Callable[[], int]:
        def body() -> int:
            won = 0
            for i in range(rounds):
                try:
                    store.write(f"{i}/m", bytes([mine]), if_absent=True)
                    won += 1
                except StorageError as error:
                    if error.kind != "exists":
                        raise
            return won

        return body

    children = [fork(contend(mine)) for mine in range(n)]
    wins = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert sum(wins) == rounds
    assert [store.read(f"{i}/m")[0] in range(n) for i in range(rounds)] == [True] * rounds
    assert len(store.names()) == rounds


def test_writing_while_another_process_removes_empty_folders(store: LocalStore) -> None:
    def remove() -> int:
        for i in range(400):
            store.remove([f"a/b/{i}"])
        return 0

    child = fork(remove)
    try:
        for i in range(100):
            store.write("a/b/x", b"1")
            store.remove(["a/b/x"])
            assert i >= 0
    finally:
        assert os.waitpid(child, 0)[1] == 0
    assert files(store) == []


def test_everything_is_made_durable_in_the_right_order(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def name(path: str) -> str:
        short = os.path.relpath(path, store.root)
        return "TEMPORARY" if ".partial-" in short else short

    def fsync(fd: int) -> None:
        told.append(f"fsync {name(os.readlink(f'/proc/self/fd/{fd}'))}")
        real_fsync(fd)

    def replace(source: Path, target: Path) -> None:
        told.append(f"rename {name(str(source))} {name(str(target))}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    store.write("a/b/x", b"1")
    assert told == ["fsync .", "fsync a", "fsync TEMPORARY", "rename TEMPORARY a/b/x", "fsync a/b"]


def test_killed_in_an_upload_leaves_rubbish_that_is_removed(store: LocalStore) -> None:
    code = f"""
import os
from seatrial.storage import Readable, open_store

fd = os.memfd_create("source")
os.truncate(fd, 200 * 2**20)
open_store({store.url!r}).upload("a/x", Readable(fd, 200 * 2**20), progress=lambda *_: os.kill(os.getpid(), 9))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert store.names() == []
    assert store.children("a") == []
    assert store.size("a/x") is None
    left = [name for name in files(store) if ".partial-" in name]
    assert len(left) == 1
    assert store.remove_leftovers("b") == []
    assert store.remove_leftovers() == [str(store.root / left[0])]
    assert files(store) == []


# --- what can go wrong


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOENT, "missing"), (errno.EACCES, "denied"), (errno.EROFS, "denied"), (errno.ENOSPC, "full"),
     (errno.EDQUOT, "full"), (errno.ESTALE, "unreachable"), (errno.EIO, "unreachable"), (errno.ENOTCONN, "unreachable"),
     (errno.EEXIST, "exists"), (errno.EMFILE, "other")],
)  # fmt: skip
def test_the_kernels_number_gives_the_kind(number: int, kind: Kind) -> None:
    error = from_os_error("write", "/a/x", OSError(number, os.strerror(number)))
    assert (error.kind, error.errno) == (kind, number)
    assert error.render().startswith(
        f"error: cannot write /a/x: {os.strerror(number)} ({errno.errorcode[number]})"
    )


def test_storage_error_survives_pickling() -> None:
    error = StorageError("full", "write", "/a", "no space", hint="free some", errno=28)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (copy.render(), copy.kind, copy.errno) == (error.render(), "full", 28)


@pytest.mark.parametrize("step", ["write", "fsync", "close", "replace"])
def test_what_fails_half_way_leaves_what_was_there(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store.write("a/x", b"before")
    real = getattr(os, step)

    def fail(*arguments: object) -> None:
        if step == "close":  # NFS tells of a full disk here; the descriptor is closed all the same
            real(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        error = refusal(lambda: store.write("a/x", b"after"))
    assert (error.kind, error.url) == ("full", f"{store.url}/a/x")
    assert store.read("a/x") == b"before"
    assert files(store) == ["a", "a/x"]


def test_a_folder_is_no_object_and_an_object_no_folder(store: LocalStore) -> None:
    store.write("a/x", b"1")
    assert refusal(lambda: store.write("a", b"")).errno == errno.EISDIR
    for name in ("a/x/y", "a/x/y/z"):
        assert refusal(lambda name=name: store.write(name, b"", if_absent=True)).errno == errno.ENOTDIR
    assert refusal(lambda: store.read("a")).errno == errno.EISDIR
    assert files(store) == ["a", "a/x"]


def test_a_file_system_without_hard_links_is_named(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    error = refusal(lambda: store.write("x", b"", if_absent=True))
    assert (error.kind, "hard links" in error.cause) == ("other", True)
    assert files(store) == []


def test_a_link_whose_answer_was_lost_counts(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the server did it, the client asked again."""
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    store.write("x", b"1", if_absent=True)
    assert store.read("x") == b"1"
    assert files(store) == ["x"]


def test_a_folder_that_never_was(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "b")
    calls: list[Callable[[], object]] = [
        lambda: store.size("x"),
        lambda: store.read("x"),
        lambda: store.write("x", b""),
        lambda: store.names(),
        lambda: store.children(),
        lambda: store.remove(["x"]),
        lambda: store.remove_leftovers(),
    ]
    for call in calls:
        error = refusal(call)
        assert (error.kind, str(store.root) in error.cause) == ("missing", True)
    assert not (tmp_path / "a").exists()
    made = LocalStore(tmp_path / "a" / "b", create=True)
    made.write("x", b"1")
    assert store.read("x") == b"1"


def test_a_folder_that_vanished_does_not_come_back(store: LocalStore) -> None:
    store.write("a/x", b"1")
    os.rename(store.root, store.root.with_name("gone"))
    for call in (
        lambda: store.size("a/x"),
        lambda: store.read("a/x"),
        lambda: store.write("a/x", b""),
        lambda: store.names(),
    ):
        error = refusal(call)
        assert (error.kind, "vanished" in error.cause) == ("unreachable", True)
    assert not store.root.exists()
    os.rename(store.root.with_name("gone"), store.root)
    assert store.read("a/x") == b"1"


def test_no_permission(store: LocalStore) -> None:
    store.write("a/x", b"1")
    os.chmod(store.root / "a", 0o500)
    os.chmod(store.root, 0o755)
    for parent in store.root.parents:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            with contextlib.suppress(PermissionError):
                parent.chmod(parent.stat().st_mode | 0o055)

    def write_as_nobody() -> int:
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            store.write("a/x", b"2")
        except StorageError as error:
            return 7 if (error.kind, error.errno) == ("denied", errno.EACCES) else 8
        return 9

    assert os.waitstatus_to_exitcode(os.waitpid(fork(write_as_nobody), 0)[1]) == 7
    assert store.read("a/x") == b"1"


MOUNTED = """
import os, subprocess, sys
from seatrial.storage import Readable, StorageError
from seatrial.storage.local import LocalStore

root = sys.argv[1]
mount = lambda *a: subprocess.run(["mount", *a], check=True)
mount("--make-rprivate", "/")
mount("-t", "tmpfs", "-o", "size=8m", "none", root)
store = LocalStore(root)
fd = os.memfd_create("source")
os.truncate(fd, 64 * 2**20)
def told(call):
    try:
        call()
    except StorageError as error:
        print(error.kind, error.errno, sorted(os.listdir(root)), error.cause)
    else:
        print("done")
told(lambda: store.write("x", b"1"))
told(lambda: store.write("y", bytes(9 * 2**20)))
told(lambda: store.upload("x", Readable(fd, 9 * 2**20)))
told(lambda: print(store.read("x")))
mount("-o", "remount,ro", root)
told(lambda: store.write("x", b"2"))
subprocess.run(["umount", root], check=True)
told(lambda: store.write("x", b"2"))
told(lambda: store.size("x"))
told(lambda: store.names())
told(lambda: store.read("x"))
mount("-t", "tmpfs", "none", root)
told(lambda: store.write("x", b"3"))
"""


@AS_ROOT
def test_a_full_a_read_only_and_a_vanished_mount(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", MOUNTED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.returncode == 0, done.stderr
    gone = f"unreachable None [] nothing is mounted at {tmp_path} any more"
    assert done.stdout.splitlines() == [
        "done",
        f"full {errno.ENOSPC} ['x'] No space left on device (ENOSPC)",
        f"full {errno.ENOSPC} ['x'] No space left on device (ENOSPC)",
        "b'1'",
        "done",
        f"denied {errno.EROFS} ['x'] Read-only file system (EROFS)",
        gone, gone, gone, gone,
        "done",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
