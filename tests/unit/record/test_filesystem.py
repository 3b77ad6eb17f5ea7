"""What a run folder's file system must do is tried on real ones: a good one, a read-only one, a full one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.base.errors import InputError
from seatrial.record.filesystem import check_filesystem, check_token, put_token
from seatrial.record.folder import RunFolder

Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    places: list[Path] = []

    def mounted(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a file system of its own needs the right to mount: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mounted
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def problems(path: Path, least_bytes: int = 1) -> list[str]:
    with pytest.raises(InputError) as caught:
        check_filesystem(path, least_bytes)
    assert all(d.hint for d in caught.value.diagnostics)
    return [d.message for d in caught.value.diagnostics]


def test_a_local_folder_does_all_of_it_and_nothing_stays(tmp_path: Path) -> None:
    check_filesystem(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_the_slowest_rename_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, waits = Path.rename, [0.0, 0.0, 0.2, 0.0, 0.0]

    def slow(source: Path, target: Path) -> Path:
        time.sleep(waits.pop())
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", slow)
    assert 0.2 <= check_filesystem(tmp_path, 1) < 2.0
    assert waits == []


def test_too_little_space(tmp_path: Path) -> None:
    (told,) = problems(tmp_path, 1 << 60)
    assert "GiB free, but the run needs 1" in told


def test_a_read_only_one(mount: Mount) -> None:
    place = mount("size=64k,ro")
    assert problems(place) == [f"{place} cannot be written: Read-only file system"]


def test_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert problems(path) == [f"{path} cannot be written: No such file or directory"]


def test_a_full_one(mount: Mount) -> None:
    place = mount("size=64k")
    fd = os.open(place / "filler", os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(4096))
    os.close(fd)
    told = problems(place, 4096)
    assert told[0] == f"{place} has 0 B free, but the run needs 4.00 KiB"
    assert (
        f"the file system of {place} does not replace a file by another, durably (fsync, rename): No space left on device"
        in told
    )
    assert [p.name for p in place.iterdir()] == ["filler"]


@pytest.mark.parametrize(
    ("operation", "word"), [("link", "(link)"), ("replace", "(fsync, rename)"), ("fsync", "(fsync, rename)")]
)
def test_one_that_lacks_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, word: str
) -> None:
    """No file system on a test machine lacks one: it is taken away."""

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, refuse)
        (told,) = problems(tmp_path)
    assert word in told
    assert told.endswith(": Operation not supported")


def test_one_whose_link_replaces_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.link

    def link(source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        (told,) = problems(tmp_path)
    assert "(link): it behaves differently" in told


def test_a_node_sees_the_token_of_this_start_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    put_token(folder, 4)
    check_token(folder, 4)
    with pytest.raises(InputError) as caught:
        check_token(folder, 5)
    (problem,) = caught.value.diagnostics
    assert problem.message.startswith(
        f"node {socket.gethostname()} does not see the run folder {folder.path}, or cannot write in it: token-000005"
    )
    put_token(folder, 5)
    check_token(folder, 5)
    assert [p.name for p in folder.control.glob("token-*")] == ["token-000005"]


def test_a_node_that_may_not_write_there(mount: Mount) -> None:
    folder = RunFolder(mount("size=1m"))
    folder.control.mkdir()
    put_token(folder, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(folder.path)], check=True)
    with pytest.raises(InputError, match="Read-only file system"):
        check_token(folder, 1)


def test_a_node_waits_for_a_token_that_comes_later(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    looked = threading.Event()
    seen: list[bool] = []

    def look() -> None:
        looked.set()
        check_token(folder, 1, wait_s=30.0)
        seen.append(True)

    thread = threading.Thread(target=look)
    thread.start()
    looked.wait()
    put_token(folder, 1)
    thread.join()
    assert seen == [True]
