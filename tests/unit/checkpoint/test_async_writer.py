"""Saving beside training: what was staged is what is saved, whatever becomes of the state, the process or the disk."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_manifest, names, rows, state

from seatrial.base import process, stalled
from seatrial.base.box import Box
from seatrial.base.lines import Channel
from seatrial.checkpoint import staging_memory, writer_process
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.staging import AsyncWriter, Outcome
from seatrial.checkpoint.write import Piece
from seatrial.checkpoint.writer import Writer
from seatrial.record.folder import RunFolder

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process and no open file stays behind."""
    files, children = set(os.listdir("/proc/self/fd")), process.descendants(os.getpid())
    yield
    assert process.descendants(os.getpid()) == children
    assert set(os.listdir("/proc/self/fd")) <= files


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    for path in (run.path, run.checkpoints, run.control):
        path.mkdir()
    run.generation_file.write_text("3\n")
    return run


class Ranks:
    """The writers of all ranks of a run, in one process."""

    def __init__(self, run: RunFolder, n: int = 2) -> None:
        self.run, self.url, self.n = run, str(run.checkpoints), n
        self.writers = [AsyncWriter(rank=r, world_size=n, device=torch.device("cpu")) for r in range(n)]
        self.attempt = 0

    def stage(self, tensors: dict[str, torch.Tensor]) -> None:
        for rank, writer in enumerate(self.writers):
            writer.stage(rows(tensors, rank, self.n))

    def parts(self, step: int, *, url: str | None = None, read_back: bool = True) -> list[Outcome]:
        self.attempt += 1
        for writer in self.writers:
            writer.order_part(self.attempt, url or self.url, step, 3, read_back)
        return [outcome(writer) for writer in self.writers]

    def commit(self, step: int, *, keep: int = 3, url: str | None = None) -> list[Outcome]:
        manifest = make_manifest(step)
        self.writers[0].order_commit(self.attempt, url or self.url, manifest, self.run.path, keep, 0)
        return self.writers[0].wait_removed(WAIT_S)

    def save(self, step: int, tensors: dict[str, torch.Tensor], **options: Any) -> list[Outcome]:
        self.stage(tensors)
        assert [part.ok for part in self.parts(step)] == [True] * self.n
        return self.commit(step, **options)


def outcome(writer: AsyncWriter) -> Outcome:
    """The next one."""
    until = time.monotonic() + WAIT_S
    while not (told := writer.poll()):
        assert time.monotonic() < until, "no outcome"
        writer.wait(WAIT_S)
    (one,) = told
    return one


@pytest.fixture
def ranks(run: RunFolder) -> Iterator[Ranks]:
    ranks = Ranks(run)
    yield ranks
    for writer in ranks.writers:
        writer.close()


def loaded(place: LocalPlace, step: int) -> dict[str, torch.Tensor]:
    weights = place.open(step)
    try:
        found = {}
        for key, entry in weights.manifest.tensors.items():
            kind, _, name = key.partition("/")
            if kind != "rng":
                found[key] = weights.read_kind(kind, name, Box.whole(entry.shape), weights._dtype(key, entry))
        return found
    finally:
        weights.close()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


# -- what is saved


def test_what_was_staged_is_saved_whatever_becomes_of_the_state(ranks: Ranks, run: RunFolder) -> None:
    tensors = state(1)
    kept = {key: value.clone() for key, value in tensors.items()}
    ranks.stage(tensors)
    for value in tensors.values():
        value.fill_(99)
    parts = ranks.parts(5)
    assert [(p.what, p.ok, p.problem, p.kind) for p in parts] == [("part", True, None, "")] * 2
    folder = run.checkpoints / "step-00000005.tmp-3"
    assert [p.bytes for p in parts] == [
        (folder / f"rank-{rank:05d}.safetensors").stat().st_size for rank in range(2)
    ]
    assert LocalPlace(run.checkpoints).steps() == []
    commit, removed = ranks.commit(5)
    assert (commit.what, commit.ok, commit.names) == ("commit", True, ["step-00000005"])
    assert commit.bytes == sum(p.bytes for p in parts)
    assert (removed.what, removed.ok, removed.names) == ("removed", True, [])
    place = LocalPlace(run.checkpoints)
    assert same(loaded(place, 5), kept)
    assert place.manifest(5).read_back
    assert all(not writer.busy for writer in ranks.writers)


def test_one_after_the_other_with_retention(ranks: Ranks, run: RunFolder) -> None:
    for step in range(1, 6):
        *_, removed = ranks.save(step, state(step), keep=2)
        assert removed.names == ([f"step-{step - 2:08d}"] if step > 2 else [])
    place = LocalPlace(run.checkpoints)
    assert place.steps() == [5, 4]
    assert same(loaded(place, 4), state(4))
    assert same(loaded(place, 5), state(5))


def test_another_state_of_another_size_in_the_same_process(run: RunFolder) -> None:
    """As after a change of layout: larger, smaller, and what stands still in memory behind it does not matter."""
    writer = AsyncWriter(rank=0, world_size=1, device=torch.device("cpu"))
    pids = set()
    try:
        for step, n in enumerate((10, 3_000_000, 5), start=1):
            weight = torch.arange(float(n))
            writer.stage([Piece("model/w", weight, Box.whole((n,)), (n,))])
            pids.add(writer.pid)
            writer.order_part(step, str(run.checkpoints), step, 3, True)
            assert outcome(writer).ok
            writer.order_commit(step, str(run.checkpoints), make_manifest(step), run.path, 9, 0)
            assert all(o.ok for o in writer.wait_removed(WAIT_S))
            assert torch.equal(loaded(LocalPlace(run.checkpoints), step)["model/w"], weight)
    finally:
        writer.close()
    assert len(pids) == 1


def test_memory_is_there_before_it_is_needed(run: RunFolder) -> None:
    writer = AsyncWriter(rank=0, world_size=1, device=torch.device("cpu"))
    assert writer.pid is None
    weight = torch.arange(1_000_000.0)
    pieces = [Piece("model/w", weight, Box.whole((1_000_000,)), (1_000_000,))]
    try:
        writer.prepare(pieces)
        memory, pid = writer._memory._bytes.data_ptr(), writer.pid
        assert pid is not None
        writer.stage(pieces)
        assert (writer._memory._bytes.data_ptr(), writer.pid) == (memory, pid)
        writer.order_part(1, str(run.checkpoints), 1, 3, True)
        assert outcome(writer).ok
    finally:
        writer.close()


def test_tensors_that_lie_scattered_and_have_no_values(run: RunFolder) -> None:
    wide = torch.randn(8, 6)
    pieces = [
        Piece("model/turned", wide.t(), Box.whole((6, 8)), (6, 8)),
        Piece("model/cut", wide[::2, 1:5], Box.whole((4, 4)), (4, 4)),
        Piece("rng/cpu/0", torch.arange(7, dtype=torch.uint8), Box.whole((7,)), (7,)),
        Piece("model/scalar", torch.tensor(2.5), Box.whole(()), ()),
        Piece("model/double", torch.randn(3, dtype=torch.float64), Box.whole((3,)), (3,)),
    ]
    writer = AsyncWriter(rank=0, world_size=1, device=torch.device("cpu"))
    try:
        writer.stage(pieces)
        writer.order_part(1, str(run.checkpoints), 1, 3, False)
        assert outcome(writer).ok
        writer.order_commit(1, str(run.checkpoints), make_manifest(1), run.path, 1, 0)
        assert all(o.ok for o in writer.wait_removed(WAIT_S))
    finally:
        writer.close()
    found = loaded(LocalPlace(run.checkpoints), 1)
    assert all(torch.equal(found[p.key], p.tensor) for p in pieces if not p.key.startswith("rng"))
    assert not LocalPlace(run.checkpoints).manifest(1).read_back


# -- what goes wrong


def limit_files(pid: int | None, size: int) -> None:
    """From now on no file that `pid` writes may be larger: the kernel refuses it, as on a full disk."""
    assert pid is not None
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_disk_that_takes_no_more_in_one_rank(ranks: Ranks, run: RunFolder) -> None:
    ranks.save(1, state(1))
    ranks.stage(state(2))
    limit_files(ranks.writers[1].pid, 100)
    first, second = ranks.parts(2)
    assert (first.ok, second.ok) == (True, False)
    assert "File too large (EFBIG)" in (second.problem or "")
    assert "rank-00001.safetensors" in (second.problem or "")
    assert "step-00000002.tmp-3/rank-00001.safetensors" not in names(run.checkpoints), (
        "half of it is of no use"
    )
    # The next attempt, of a later step: what was written of the one before is removed, and the disk takes it again.
    limit_files(ranks.writers[1].pid, resource.RLIM_INFINITY)
    ranks.save(3, state(3))
    assert [p.name for p in sorted(run.checkpoints.iterdir())] == ["latest", "step-00000001", "step-00000003"]


def test_a_full_disk_and_the_fallback(ranks: Ranks, run: RunFolder, tmp_path: Path) -> None:
    """The same copy goes to the other place."""
    with small_disk(tmp_path / "small", 64) as small:
        fallback = tmp_path / "fallback"
        fallback.mkdir()
        big = {**state(1), "model/big": torch.randn(100_000)}
        ranks.stage(big)
        parts = ranks.parts(4, url=str(small))
        assert {part.kind for part in parts} == {"full"}
        assert all("No space left on device (ENOSPC)" in (part.problem or "") for part in parts)
        parts = ranks.parts(4, url=str(fallback))
        assert [part.ok for part in parts] == [True, True]
        commit, _ = ranks.commit(4, url=str(fallback))
        assert commit.ok
        assert same(loaded(LocalPlace(fallback), 4), big)
        assert names(small) == []
        assert list(small.iterdir()) == [], "given up, and removed"


def test_a_storage_that_is_read_only_or_gone(ranks: Ranks, tmp_path: Path) -> None:
    ranks.stage(state(1))
    with small_disk(tmp_path / "disk", 4096) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        parts = ranks.parts(1, url=str(disk))
        assert {(part.ok, part.kind) for part in parts} == {(False, "denied")}
        assert all("(EROFS)" in (part.problem or "") for part in parts)
    parts = ranks.parts(1, url=str(tmp_path / "disk" / "gone"))
    assert {(part.ok, part.kind) for part in parts} == {(False, "missing")}
    assert not (tmp_path / "disk" / "gone").exists(), "it does not come back half"
    assert [part.ok for part in ranks.parts(1)] == [True, True], "the processes are as good as before"


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("a file system can be mounted by root only")
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", folder], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_process_that_was_killed_is_an_outcome_and_comes_again(ranks: Ranks, run: RunFolder) -> None:
    ranks.stage(state(1))
    writer = ranks.writers[1]
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)  # so that it is in the midst of it
    writer.order_part(1, ranks.url, 1, 3, True)
    assert writer.busy
    os.kill(writer.pid, signal.SIGKILL)
    told = outcome(writer)
    assert (told.attempt, told.what, told.ok, told.kind) == (1, "part", False, "writer")
    assert "was killed by SIGKILL" in (told.problem or "")
    assert not writer.busy
    ranks.attempt = 1
    assert [part.ok for part in ranks.parts(1)] == [True, True], "the copy is still there"
    assert all(o.ok for o in ranks.commit(1))
    assert same(loaded(LocalPlace(run.checkpoints), 1), state(1))


def test_one_that_died_while_it_had_nothing_to_do_is_not_noticed(ranks: Ranks, run: RunFolder) -> None:
    ranks.save(1, state(1))
    for writer in ranks.writers:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(1.0)  # its end is nothing to tell: where it has been seen already, nothing more comes
        assert writer.poll() == []
    ranks.save(2, state(2))
    assert LocalPlace(run.checkpoints).steps() == [2, 1]


def test_a_killed_commit_is_reported_with_its_retention(ranks: Ranks, run: RunFolder) -> None:
    ranks.stage(state(1))
    ranks.parts(1)
    writer = ranks.writers[0]
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    writer.order_commit(1, ranks.url, make_manifest(1), run.path, 3, 0)
    os.kill(writer.pid, signal.SIGKILL)
    told = writer.wait_removed(WAIT_S)
    assert sorted((o.what, o.ok, o.kind) for o in told) == [
        ("commit", False, "writer"),
        ("removed", False, "writer"),
    ]


def test_a_hung_writer_is_given_up_without_waiting(ranks: Ranks, run: RunFolder) -> None:
    ranks.stage(state(1))
    writer = ranks.writers[0]
    pid = writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    writer.order_part(1, ranks.url, 1, 3, True)
    writer.wait(0.01)
    assert writer.poll() == []
    assert writer.busy
    writer.abandon()
    assert not writer.busy
    assert writer.poll() == [], "it is not answered any more"
    assert pid not in process.living()
    ranks.stage(state(2))
    ranks.attempt = 1
    assert [part.ok for part in ranks.parts(2)] == [True, True]
    assert all(o.ok for o in ranks.commit(2))
    assert same(loaded(LocalPlace(run.checkpoints), 2), state(2))


def test_stopped_writer_process_is_killed_and_replaced(
    ranks: Ranks, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalled, "STOPPED_S", 0.3)
    tensors = state(1)
    ranks.stage(tensors)
    writer = ranks.writers[0]
    pid = writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    writer.order_part(1, ranks.url, 5, 3, True)
    until = time.monotonic() + WAIT_S
    while not (told := writer.poll()):
        assert time.monotonic() < until, "nobody notices"
        writer.wait(0.05)
    assert (told[0].ok, told[0].kind) == (False, "writer")
    assert "has been stopped by a signal" in (told[0].problem or "")
    assert pid not in process.living()
    ranks.save(6, tensors)
    assert same(loaded(LocalPlace(run.checkpoints), 6), tensors)


def test_finish_does_not_wait_for_a_stopped_writers_removals(
    ranks: Ranks, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalled, "STOPPED_S", 0.3)
    ranks.save(5, state(1))
    writer = ranks.writers[0]
    writer._orders[9, "removed"] = 0.0  # as if it were still removing
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    began = time.monotonic()
    (removed,) = writer.wait_removed(WAIT_S)
    assert not removed.ok
    assert time.monotonic() - began < WAIT_S / 2


def test_a_process_that_cannot_be_killed_keeps_its_memory(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an uninterruptible call it goes on reading: the next copy goes elsewhere."""
    ranks.stage(state(1))
    writer = ranks.writers[0]
    hanging = writer._process
    assert hanging is not None
    before = os.fstat(writer._memory.fd).st_ino
    with monkeypatch.context() as patch:
        patch.setattr(writer_process, "_DIE_S", 0.0)
        patch.setattr(hanging._process, "kill", lambda: None)
        writer.abandon()
    assert hanging.hangs
    writer.stage(rows(state(2), 0, 2))
    assert os.fstat(writer._memory.fd).st_ino != before
    hanging._process.kill()
    hanging._process.wait()


def test_staging_during_a_write_abandons_that_write(ranks: Ranks, run: RunFolder) -> None:
    ranks.stage(state(1))
    for writer in ranks.writers:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGSTOP)
        writer.order_part(1, ranks.url, 1, 3, True)
    ranks.attempt = 1
    ranks.save(2, state(2))
    assert same(loaded(LocalPlace(run.checkpoints), 2), state(2))


def test_no_memory_for_the_copy(run: RunFolder) -> None:
    """More than there can ever be."""
    n = 1 << 45
    writer = AsyncWriter(rank=0, world_size=1, device=torch.device("cpu"))
    huge = torch.empty(1).expand(n)
    try:
        with pytest.raises((OSError, ValueError, OverflowError)):
            writer.stage([Piece("model/w", huge, Box.whole((n,)), (n,))])
    finally:
        writer.close()


def test_memory_that_cannot_be_had_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        @staticmethod
        def madvise(*_: Any) -> int:
            return -1

    monkeypatch.setattr(staging_memory, "_libc", Refuses)
    monkeypatch.setattr(staging_memory.ctypes, "get_errno", lambda: 12)
    writer = AsyncWriter(rank=0, world_size=1, device=torch.device("cpu"))
    try:
        with pytest.raises(OSError, match="no memory for a copy of the state: Cannot allocate memory"):
            writer.stage(rows(state(1), 0, 1))
        monkeypatch.undo()
        writer.stage(rows(state(1), 0, 1))
    finally:
        writer.close()


def test_no_process_to_be_had(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(writer_process.subprocess, "Popen", refuse)
        ranks.stage(state(1))
        parts = ranks.parts(1)
    assert {(part.ok, part.kind) for part in parts} == {(False, "writer")}
    assert all("could not be started" in (part.problem or "") for part in parts)
    assert [part.ok for part in ranks.parts(1)] == [True, True]


def test_a_later_generation_has_begun(ranks: Ranks, run: RunFolder) -> None:
    ranks.stage(state(1))
    ranks.parts(1)
    run.generation_file.write_text("4\n")
    (told,) = ranks.commit(1)
    assert (told.what, told.ok, told.kind) == ("commit", False, "superseded")
    assert LocalPlace(run.checkpoints).steps() == []


def test_parts_are_missing_at_the_commit(ranks: Ranks, run: RunFolder) -> None:
    ranks.stage(state(1))
    ranks.attempt = 1
    ranks.writers[0].order_part(1, ranks.url, 1, 3, True)
    assert outcome(ranks.writers[0]).ok
    (told,) = ranks.commit(1)
    assert (told.ok, told.kind) == (False, "damaged")
    assert "index-00001.json is missing" in (told.problem or "")


def test_findings_of_retention_are_reported(ranks: Ranks, run: RunFolder) -> None:
    for step in (1, 2):
        ranks.stage(state(step))
        ranks.parts(step, read_back=False)
        ranks.commit(step)
    path = run.checkpoints / "step-00000001" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    ranks.stage(state(3))
    ranks.parts(3, read_back=False)
    _, removed = ranks.commit(3, keep=2)
    assert (removed.ok, removed.names) == (True, ["step-00000001"]), (
        "the damaged one is the oldest, and nobody reads it"
    )
    path = run.checkpoints / "step-00000003" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (run.checkpoints / "step-00000003" / "verified").unlink()
    ranks.stage(state(4))
    ranks.parts(4, read_back=False)
    _, removed = ranks.commit(4, keep=2)
    assert (removed.ok, removed.names) == (False, [])
    assert "step-00000003/rank-00000.safetensors has" in (removed.problem or "")
    assert LocalPlace(run.checkpoints).steps() == [4, 3, 2]


def test_interrupted_retention_is_reported_with_the_next(
    ranks: Ranks, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order comes after it has removed one: it stops, tells nothing, and the next retention tells of all."""
    for step in range(1, 7):
        ranks.save(step, state(step), keep=9)
    ours, theirs = Channel.pair()
    writer = Writer(theirs, 0)
    order = {"attempt": 6, "url": ranks.url, "keep": 2, "keep_every": 0}
    try:
        with monkeypatch.context() as patch:
            waiting = iter([False, False, False, True, True, True])
            patch.setattr(writer, "_receive", lambda _timeout: next(waiting))
            writer._retire(order)
        assert ours.receive() == []
        assert LocalPlace(run.checkpoints).steps() == [6, 5, 3, 2, 1]
        writer._retire({**order, "attempt": 7})
        (message,) = ours.receive()
        told = message["outcome"]
        assert (told["attempt"], told["what"], told["ok"]) == (7, "removed", True)
        assert sorted(told["names"]) == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
        assert (writer._retention, writer._removed) == (None, [])
    finally:
        ours.close()
        theirs.close()


def test_a_superseded_removal_is_not_waited_for(ranks: Ranks, run: RunFolder) -> None:
    first, told = ranks.writers[0], []
    for step in (1, 2, 3, 4):
        ranks.stage(state(step))
        ranks.attempt += 1
        for writer in ranks.writers:
            writer.order_part(ranks.attempt, ranks.url, step, 3, True)
        told += while_busy(ranks)
        first.order_commit(ranks.attempt, ranks.url, make_manifest(step), run.path, 1, 0)
        told += while_busy(ranks)
    assert {attempt for attempt, what in first._orders if what == "removed"} <= {4}
    told += first.wait_removed(WAIT_S)
    assert not first._orders
    assert LocalPlace(run.checkpoints).steps() == [4]
    assert sorted(name for o in told if o.what == "removed" for name in o.names) == [
        f"step-{step:08d}" for step in (1, 2, 3)
    ]


def while_busy(ranks: Ranks) -> list[Outcome]:
    told, until = [], time.monotonic() + WAIT_S
    while any(writer.busy for writer in ranks.writers):
        assert time.monotonic() < until
        for writer in ranks.writers:
            writer.wait(0.01)
            told += writer.poll()
    assert all(o.ok for o in told)
    return told


def test_the_process_dies_with_its_rank(run: RunFolder) -> None:
    read, write = os.pipe()

    def rank() -> int:
        writer = AsyncWriter(rank=0, world_size=1, device=torch.device("cpu"))
        writer.stage(rows(state(1), 0, 1))
        os.write(write, str(writer.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    pid = process.fork(rank)
    os.waitpid(pid, 0)
    child = int(os.read(read, 100))
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(child)
        poll = __import__("select").poll()
        poll.register(ended, 1)
        assert poll.poll(WAIT_S * 1000), "it lives"
        os.close(ended)
    os.close(read)
    os.close(write)


def test_it_loads_no_torch_and_ignores_stop_signals(ranks: Ranks) -> None:
    ranks.save(1, state(1))
    pid = ranks.writers[0].pid
    assert pid is not None
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, os.getpid()) or (
        os.getpriority(os.PRIO_PROCESS, pid) == 19
    )
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, signum)
    ranks.save(2, state(2))
    assert ranks.writers[0].pid == pid


def test_what_could_not_be_copied_is_never_written(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory still holds the save before: as the next one's part it would be a mixture of two steps."""
    ranks.save(5, state(5))
    monkeypatch.setattr(staging_memory.StagingMemory, "fill", _no_memory)
    for writer in ranks.writers:
        with pytest.raises(OSError, match="Cannot allocate"):
            writer.stage(rows(state(6), 0, 2))
    assert [part.problem for part in ranks.parts(6)] == ["the state could not be copied"] * 2
    assert LocalPlace(ranks.run.checkpoints).steps() == [5]


def _no_memory(*_: object) -> None:
    raise OSError(12, "Cannot allocate memory")


def test_after_a_process_that_hung_the_same_copy_goes_elsewhere(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.stage(state(5))
    assert [part.ok for part in ranks.parts(5)] == [True, True]
    kill = writer_process.WriterProcess.kill

    def hangs(self: writer_process.WriterProcess) -> None:
        kill(self)
        self.hangs = True

    monkeypatch.setattr(writer_process.WriterProcess, "kill", hangs)
    for writer in ranks.writers:
        writer.abandon()
    other = tmp_path / "other"
    other.mkdir()
    assert [part.ok for part in ranks.parts(5, url=str(other))] == [True, True]
    assert all(told.ok for told in ranks.commit(5, url=str(other)))
    assert loaded(LocalPlace(other), 5).keys() == state(5).keys()
    ranks.save(6, state(6))  # into memory of its own
    assert LocalPlace(ranks.run.checkpoints).steps() == [6]
