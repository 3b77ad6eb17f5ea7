"""The object store against a real service, and against one that breaks off, is silent, is gone, or takes damaged bytes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from moto_server import Disturbance, Line, MotoServer
from seatrial.base.process import fork
from seatrial.storage import Readable, StorageError, is_remote, open_store
from seatrial.storage.s3 import S3Store
from seatrial.storage.s3_client import Settings
from seatrial.storage.s3_upload import Target, part_size
from store_contract import StoreContract

pytestmark = pytest.mark.cluster

QUICK = Settings(
    connect_timeout_s=1.0, read_timeout_s=2.0, attempts=3, backoff_s=0.01, part_bytes=5 * 2**20, threads=3
)
MIB = 2**20


@pytest.fixture
def store(s3_url: str) -> S3Store:
    return S3Store(s3_url.removeprefix("s3://"), "runs/small", QUICK)


@pytest.fixture
def raw(s3_server: MotoServer) -> Iterator[Any]:
    """boto3's own view of the service."""
    with contextlib.closing(s3_server.client()) as client:
        yield client


@pytest.fixture
def line(s3_server: MotoServer, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """The store reaches the service over this line."""
    made = Line(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[Callable[[int], Readable]]:
    """Makes random bytes in a memfd, after some that are not part of them."""
    made: list[int] = []

    def make(size: int) -> Readable:
        fd = os.memfd_create("source")
        made.append(fd)
        os.write(fd, b"before!")
        done = 0
        while done < size:
            done += os.write(fd, os.urandom(min(size - done, 16 * MIB)))
        return Readable(fd, size, 7)

    yield make
    for fd in made:
        os.close(fd)


def content(source: Readable) -> bytes:
    return os.pread(source.fd, source.size, source.offset)


def refusal(call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value


def uploads(raw: Any, store: S3Store) -> list[str]:
    """Keys of uploads that were begun and neither completed nor aborted."""
    return [item["Key"] for item in raw.list_multipart_uploads(Bucket=store.bucket).get("Uploads", [])]


class TestObjectStore(StoreContract):
    """What every store does."""


def test_an_address_leads_to_the_bucket(s3_url: str, raw: Any) -> None:
    store = open_store(f"{s3_url}/a/b/")
    assert is_remote(store.url)
    assert store.url == f"{s3_url}/a/b"
    store.write("c", b"x")
    bucket = s3_url.removeprefix("s3://")
    assert [item["Key"] for item in raw.list_objects_v2(Bucket=bucket)["Contents"]] == ["a/b/c"]


def test_more_keys_than_one_answer_lists_or_one_request_removes(store: S3Store, raw: Any) -> None:
    n = 1030
    for i in range(n):
        raw.put_object(Bucket=store.bucket, Key=f"runs/small/many/{i:05d}/x", Body=b"")
    raw.put_object(Bucket=store.bucket, Key="runs/smaller/x", Body=b"")
    names = [entry.name for entry in store.names()]
    assert names == [f"many/{i:05d}/x" for i in range(n)]
    assert store.children("many") == [f"{i:05d}" for i in range(n)]
    store.remove(names)
    assert store.names() == []
    left = raw.list_objects_v2(Bucket=store.bucket)["Contents"]
    assert [item["Key"] for item in left] == ["runs/smaller/x"]


def test_a_console_s_folder_marker_is_not_an_object(store: S3Store, raw: Any) -> None:
    for key in ("runs/small/", "runs/small/a/"):
        raw.put_object(Bucket=store.bucket, Key=key, Body=b"")
    store.write("a/b", b"1")
    assert [entry.name for entry in store.names()] == ["a/b"]
    assert store.children() == ["a"]


@pytest.mark.parametrize("size", [0, 1, 5 * MIB, 5 * MIB + 1, 17 * MIB + 3])
def test_uploaded_from_memory_in_parts(
    store: S3Store, raw: Any, memory: Callable[[int], Readable], size: int
) -> None:
    source = memory(size)
    os.lseek(source.fd, 3, os.SEEK_SET)
    seen: list[tuple[int, int]] = []
    store.upload("x", source, progress=lambda done, whole: seen.append((done, whole)))
    assert store.read("x") == content(source)
    assert os.lseek(source.fd, 0, os.SEEK_CUR) == 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (size, size)
    assert len(seen) == max(1, -(-size // (5 * MIB)))
    assert uploads(raw, store) == []


def test_parts_grow_where_there_would_be_too_many() -> None:
    assert part_size(100, 32 * MIB) == 32 * MIB
    for size in (320 * 2**30, 320 * 2**30 + 1, 5 * 2**40):
        part = part_size(size, 32 * MIB)
        assert part % MIB == 0
        assert -(-size // part) <= 10_000


def test_each_part_is_checked_by_the_service_and_sent_again(
    store: S3Store, line: Line, memory: Callable[[int], Readable]
) -> None:
    path = f"PUT /{store.bucket}/runs/small/x".encode()
    line.disturb(*[Disturbance(path, 2 * MIB, up=True, cut=False) for _ in range(2)])
    source = memory(12 * MIB)
    store.upload("x", source)
    assert line.happened == 2
    assert store.read("x") == content(source)


def test_persistent_upload_corruption_is_an_error_and_cleans_up(
    store: S3Store, line: Line, raw: Any, memory: Callable[[int], Readable]
) -> None:
    path = f"PUT /{store.bucket}/runs/small/x".encode()
    line.disturb(*[Disturbance(path, 2 * MIB, up=True, cut=False) for _ in range(9)])
    error = refusal(lambda: store.upload("x", memory(11 * MIB)))
    assert "does not match" in error.cause
    assert store.size("x") is None
    assert uploads(raw, store) == []


def test_a_part_whose_connection_breaks_off_is_sent_again(
    store: S3Store, line: Line, memory: Callable[[int], Readable]
) -> None:
    path = f"PUT /{store.bucket}/runs/small/x".encode()
    line.disturb(Disturbance(path, MIB, up=True), Disturbance(path, 60))
    source = memory(12 * MIB)
    store.upload("x", source)
    assert line.happened == 2
    assert store.read("x") == content(source)


def test_the_answer_to_a_completed_upload_is_lost(
    store: S3Store, line: Line, memory: Callable[[int], Readable]
) -> None:
    line.disturb(Disturbance(f"POST /{store.bucket}/runs/small/x?uploadId=".encode(), 60))
    source = memory(12 * MIB)
    store.upload("x", source)
    assert line.happened == 1
    assert store.read("x") == content(source)


def test_the_answer_to_a_conditional_write_is_lost(store: S3Store, line: Line) -> None:
    line.disturb(Disturbance(f"PUT /{store.bucket}/runs/small/m".encode(), 60))
    store.write("m", b"ours", if_absent=True)
    assert line.happened == 1
    assert store.read("m") == b"ours"


def test_another_writer_was_first_between_head_and_put(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Target.head
    answers: list[object] = []

    def head(target: Target) -> dict[str, Any] | None:
        answers.append(real(target))
        if len(answers) == 1:
            store.write("m", b"theirs")
        return answers[-1]

    monkeypatch.setattr(Target, "head", head)
    assert refusal(lambda: store.write("m", b"ours", if_absent=True)).kind == "exists"
    assert answers[0] is None
    assert store.read("m") == b"theirs"


def test_a_source_that_ends_early_leaves_nothing(
    store: S3Store, raw: Any, memory: Callable[[int], Readable]
) -> None:
    source = memory(12 * MIB)
    os.ftruncate(source.fd, 11 * MIB)
    error = refusal(lambda: store.upload("x", source))
    assert (error.kind, error.operation) == ("short", "write")
    assert store.size("x") is None
    assert uploads(raw, store) == []


def test_an_interrupted_upload_is_aborted(
    store: S3Store, raw: Any, memory: Callable[[int], Readable]
) -> None:
    store.write("x", b"before")

    def interrupt(done: int, whole: int) -> None:
        assert uploads(raw, store) == ["runs/small/x"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.upload("x", memory(30 * MIB), progress=interrupt)
    assert store.read("x") == b"before"
    assert uploads(raw, store) == []


UPLOAD = """
import os, sys
from seatrial.storage import Readable
from seatrial.storage.s3 import S3Store
from seatrial.storage.s3_client import Settings

fd = os.memfd_create("source")
os.truncate(fd, 64 * 2**20)
store = S3Store(sys.argv[1], "runs/small", Settings(part_bytes=5 * 2**20))
store.upload("step-1/x", Readable(fd, 64 * 2**20), progress=lambda done, whole: print(done, flush=True))
"""


def test_killed_upload_is_invisible_and_leftovers_are_removed(store: S3Store, raw: Any) -> None:
    child = subprocess.Popen([sys.executable, "-c", UPLOAD, store.bucket], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline()
        child.kill()
        child.wait()
    assert store.names() == []
    assert store.size("step-1/x") is None
    assert uploads(raw, store) == ["runs/small/step-1/x"]
    other = S3Store(store.bucket, "runs/smal", QUICK)
    assert other.remove_leftovers() == []
    assert store.remove_leftovers("step-2") == []
    removed = store.remove_leftovers()
    assert removed == [f"unfinished upload of s3://{store.bucket}/runs/small/step-1/x"]
    assert uploads(raw, store) == []


def test_an_interrupted_read_is_resumed_at_its_offset(store: S3Store, line: Line) -> None:
    data = os.urandom(6 * MIB)
    store.write("x", data)
    path = f"GET /{store.bucket}/runs/small/x".encode()
    # More often than `attempts`: each time it has got on. 5 x 1.2 MiB of 6 MiB.
    line.disturb(*[Disturbance(path, 5 * MIB // 4) for _ in range(4)])
    buffer = bytearray(len(data) - 5)
    store.read_into("x", buffer, 5)
    assert line.happened == 4
    assert bytes(buffer) == data[5:]


def test_a_read_without_progress_fails(store: S3Store, line: Line) -> None:
    store.write("x", bytes(4 * MIB))
    line.disturb(*[Disturbance(f"GET /{store.bucket}/runs/small/x".encode(), 2000) for _ in range(9)])
    error = refusal(lambda: store.read_into("x", bytearray(4 * MIB), 0))
    assert error.kind == "unreachable"
    assert line.happened == QUICK.attempts


@pytest.mark.parametrize(
    ("request_line", "call", "wanted"),
    [
        ("HEAD /{}/runs/small/a/x", lambda store: store.size("a/x"), 5),
        ("GET /{}/runs/small/a/x", lambda store: store.read("a/x", 1, 3), b"234"),
        ("GET /{}?list-type", lambda store: [entry.name for entry in store.names()], ["a/x"]),
        ("GET /{}?list-type", lambda store: store.children(), ["a"]),
        ("POST /{}?delete", lambda store: store.remove(["a/x"]), None),
        ("PUT /{}/runs/small/a/x", lambda store: store.write("a/x", b"12345"), None),
        ("GET /{}?uploads", lambda store: store.remove_leftovers(), []),
    ],
)
def test_response_truncated_in_its_headers_is_not_trusted(
    store: S3Store, line: Line, request_line: str, call: Callable[[S3Store], object], wanted: object
) -> None:
    """To http.client that is the headers' end: there would be no objects, and no bytes."""
    store.write("a/x", b"12345")
    request = request_line.format(store.bucket).encode()
    # Within a header; after the first line.
    line.disturb(*[Disturbance(request, at) for at in (66, 20)])
    assert call(store) == wanted
    assert line.happened == 2
    line.disturb(*[Disturbance(request, 66) for _ in range(20)])
    assert refusal(lambda: call(store)).kind == "unreachable"


def test_two_versions_are_never_mixed(store: S3Store, line: Line, raw: Any) -> None:
    store.write("x", bytes(4 * MIB))
    line.disturb(Disturbance(f"GET /{store.bucket}/runs/small/x".encode(), 2 * MIB))

    @dataclass(frozen=True)
    class Replacing(Settings):
        def pause(self, failures: int) -> None:
            raw.put_object(Bucket=store.bucket, Key="runs/small/x", Body=b"\1" * (4 * MIB))

    other = S3Store(store.bucket, store.prefix, Replacing())
    error = refusal(lambda: other.read_into("x", bytearray(4 * MIB), 0))
    assert error.kind == "other"
    assert "replaced" in error.cause


def test_fewer_bytes_than_asked_for_are_an_error(store: S3Store) -> None:
    store.write("x", b"12345")
    for call in (
        lambda: store.read_into("x", bytearray(6), 0),
        lambda: store.read_into("x", bytearray(1), 5),
        lambda: store.read("x", 2, 4),
    ):
        error = refusal(call)
        assert (error.kind, error.url) == ("short", f"s3://{store.bucket}/runs/small/x")


def test_a_missing_bucket(s3_url: str, memory: Callable[[int], Readable]) -> None:
    store = S3Store("no-such-bucket", "", QUICK)
    for call in (
        lambda: store.size("x"),
        lambda: store.write("x", b""),
        lambda: store.write("x", b"", if_absent=True),
        lambda: store.upload("x", memory(11 * MIB)),
        lambda: store.names(),
        lambda: store.children(),
        lambda: store.remove(["x"]),
        lambda: store.remove_leftovers(),
    ):
        error = refusal(call)
        assert error.kind == "missing"
        assert "bucket" in error.cause
        assert error.hint is not None


def test_no_credentials(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = refusal(lambda: store.write("x", b""))
    assert error.kind == "denied"
    assert "AWS_ACCESS_KEY_ID" in (error.hint or "")


def test_a_missing_profile(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    error = refusal(lambda: store.read("x"))
    assert (error.kind, "nobody" in error.cause) == ("denied", True)


def test_an_endpoint_that_is_not_an_address(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    assert "AWS_ENDPOINT_URL" in (refusal(lambda: store.names()).hint or "")


def test_an_endpoint_without_listener(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        error = refusal(lambda: store.write("x", b""))
    assert error.kind == "unreachable"
    assert "AWS_ENDPOINT_URL" in (error.hint or "")


def test_a_silent_service_fails_in_time(
    store: S3Store, s3_server: MotoServer, memory: Callable[[int], Readable]
) -> None:
    store.write("x", b"12345")
    store = S3Store(store.bucket, store.prefix, replace(QUICK, read_timeout_s=0.3))
    store.size("x")
    large = memory(11 * MIB)
    s3_server.stop()
    try:
        for call in (
            lambda: store.read("x", 0, 5),
            lambda: store.write("y", b""),
            lambda: store.names(),
            lambda: store.upload("z", large),
        ):
            begin = time.monotonic()
            assert refusal(call).kind == "unreachable"
            assert time.monotonic() - begin < 10
    finally:
        s3_server.go_on()
    assert store.read("x") == b"12345"


def test_a_service_that_dies_and_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = MotoServer()
    try:
        for name, value in first.environment.items():
            monkeypatch.setenv(name, value)
        first.make_bucket("bucket")
        store = S3Store("bucket", "", QUICK)
        store.write("x", b"1")
    finally:
        first.close()
    assert refusal(lambda: store.read("x")).kind == "unreachable"
    second = MotoServer(first.port)
    try:
        second.make_bucket("bucket")
        store.write("x", b"2")
        assert store.read("x") == b"2"
    finally:
        second.close()


def test_a_forked_process_has_connections_of_its_own(store: S3Store, line: Line) -> None:
    data = {name: os.urandom(MIB) for name in "abcdefgh"}
    for name, content in data.items():
        store.write(name, content)
    before = line.connections

    def read_all() -> int:
        for _ in range(5):
            for name, content in data.items():
                if store.read(name) != content:
                    return 1
        return 0

    children = [fork(read_all) for _ in range(3)]
    try:
        assert read_all() == 0
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0, 0, 0]
    # One of each child; the parent goes on with the one it had.
    assert line.connections == before + 3


def test_several_threads_read_and_write(store: S3Store) -> None:
    wrong: list[int] = []

    def work(n: int) -> None:
        data = bytes([n]) * (MIB + n)
        for i in range(4):
            store.write(f"{n}/{i}", data)
            buffer = bytearray(MIB)
            store.read_into(f"{n}/{i}", buffer, n)
            if bytes(buffer) != data[n:] or store.size(f"{n}/{i}") != len(data):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(store.names()) == 24
