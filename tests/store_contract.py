"""What every store does: the same tests for a folder and for an object store, each with its fixture `store`."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from seatrial.storage import Readable, StorageError, Store

BAD_NAMES = [
    "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", ".", "./a", "a/./b", "a//b", "a/", "a\0b", "a\nb",
    "x" * 901, "\udcff", ".partial-1", "a/.partial-1/b",
]  # fmt: skip


def _refusal(call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value


class StoreContract:
    """Inherited by a class of tests."""

    def test_written_and_read(self, store: Store) -> None:
        data = os.urandom(3000)
        store.write("a/b/c", data)
        assert store.size("a/b/c") == 3000
        assert store.read("a/b/c") == data
        assert store.read("a/b/c", 7) == data[7:]
        assert store.read("a/b/c", 7, 20) == data[7:27]
        assert store.read("a/b/c", 3000) == b""
        assert store.read("a/b/c", 7, 0) == b""
        assert store.read("a/b/c", 9999, 0) == b""  # nothing is missing
        array = np.zeros(500, np.uint32)
        store.read_into("a/b/c", array, 8)
        assert array.tobytes() == data[8:2008]
        buffer = bytearray(10)
        store.read_into("a/b/c", memoryview(buffer)[2:5], 1)
        assert bytes(buffer) == b"\0\0" + data[1:4] + b"\0" * 5

    def test_any_buffer_can_be_written(self, store: Store) -> None:
        store.write("x", np.arange(4, dtype=np.uint16))
        assert store.read("x") == b"\0\0\1\0\2\0\3\0"
        store.write("x", memoryview(b"12345")[1:3])
        assert store.read("x") == b"23"
        store.write("x", b"")
        assert (store.size("x"), store.read("x")) == (0, b"")

    def test_names_of_other_alphabets(self, store: Store) -> None:
        names = sorted(["ü/ß", "a b", "a+b%20", "日本/x=1&y", "'\"", "a.b"])
        for name in names:
            store.write(name, name.encode())
        assert [entry.name for entry in store.names()] == names
        for name in names:
            assert store.read(name) == name.encode()
        store.remove(names)
        assert store.names() == []

    def test_written_again(self, store: Store) -> None:
        store.write("x", b"the first")
        store.write("x", b"2")
        assert store.read("x") == b"2"

    def test_only_if_absent(self, store: Store) -> None:
        store.write("x", b"1", if_absent=True)
        error = _refusal(lambda: store.write("x", b"2", if_absent=True))
        assert (error.kind, error.operation) == ("exists", "write")
        assert store.read("x") == b"1"
        assert [entry.name for entry in store.names()] == ["x"]
        store.remove(["x"])
        store.write("x", b"3", if_absent=True)
        assert store.read("x") == b"3"

    def test_what_is_not_there(self, store: Store) -> None:
        store.write("a/b", b"1")
        assert store.size("x") is None
        assert store.size("a") is None
        assert store.size("a/b/c") is None
        for call in (
            lambda: store.read("x"),
            lambda: store.read("x", 0, 3),
            lambda: store.read_into("x", bytearray(3), 0),
            lambda: store.read_into("x", bytearray(0), 0),
        ):
            error = _refusal(call)
            assert (error.kind, error.operation, error.url) == ("missing", "read", f"{store.url}/x")
        assert store.names("x") == []
        assert store.names("a/b") == []
        assert store.children("x") == []

    @pytest.mark.parametrize(("offset", "length"), [(0, 6), (3, 3), (5, 1), (9, 1), (9, None)])
    def test_short_is_never_silent(self, store: Store, offset: int, length: int | None) -> None:
        store.write("x", b"12345")
        assert _refusal(lambda: store.read("x", offset, length)).kind == "short"
        if length:
            assert _refusal(lambda: store.read_into("x", bytearray(length), offset)).kind == "short"

    def test_listed(self, store: Store) -> None:
        for name in ("a/b/c", "a/b/d/e", "a/bb/x", "a/b.x", "ab", "a/b-"):
            store.write(name, b"12")
        assert [e.name for e in store.names()] == ["a/b-", "a/b.x", "a/b/c", "a/b/d/e", "a/bb/x", "ab"]
        assert [e.name for e in store.names("a/b")] == ["a/b/c", "a/b/d/e"]
        assert store.names("a/b/") == store.names("a/b")
        assert all(e.bytes == 2 for e in store.names())
        assert store.children() == ["a", "ab"]
        assert store.children("a") == ["b", "b-", "b.x", "bb"]
        assert store.children("a/b/") == ["c", "d"]

    def test_removed(self, store: Store) -> None:
        for name in ("a/b/c", "a/b/d", "a/x", "y"):
            store.write(name, b"1")
        store.remove(["a/b/c", "never/there", "a/b/d", "a/b/c"])
        assert [e.name for e in store.names()] == ["a/x", "y"]
        assert store.children("a") == ["x"]
        store.remove([])
        store.remove(entry.name for entry in store.names())
        assert store.children() == []
        store.write("a/b/c", b"1")

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_no_name_leads_out_of_the_store(self, store: Store, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.size(name),
            lambda: store.read(name),
            lambda: store.read_into(name, bytearray(1), 0),
            lambda: store.write(name, b""),
            lambda: store.write(name, b"", if_absent=True),
            lambda: store.upload(name, Readable(0, 0)),
            lambda: store.remove([name]),
            lambda: store.names(name + "/"),
            lambda: store.children(name + "/"),
            lambda: store.remove_leftovers(name + "/"),
        ]
        for call in calls:
            error = _refusal(call)
            assert error.kind == "other"
            assert "name" in error.operation
        assert store.names() == []

    def test_uploaded(self, store: Store) -> None:
        data = os.urandom(100_000)
        fd = os.memfd_create("source")
        try:
            os.write(fd, data)
            seen: list[tuple[int, int]] = []
            store.upload("a/x", Readable(fd, 90_000, 10), progress=lambda *done: seen.append(done))
            assert store.read("a/x") == data[10:90_010]
            assert seen[-1] == (90_000, 90_000)
            store.upload("a/x", Readable(fd, 0))
            assert store.read("a/x") == b""
            store.write("a/x", b"before")
            error = _refusal(lambda: store.upload("a/x", Readable(fd, 100_000, 1)))
            assert (error.kind, error.operation) == ("short", "write")
            assert store.read("a/x") == b"before"
            assert [entry.name for entry in store.names()] == ["a/x"]
        finally:
            os.close(fd)
        error = _refusal(lambda: store.upload("a/x", Readable(fd, 10)))
        assert error.errno is not None
        assert store.remove_leftovers() == []
