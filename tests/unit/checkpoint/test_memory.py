"""State in memory files: whole or nothing, verified, and made a checkpoint without the ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from saving import new_manifest, save
from seatrial.base import process
from seatrial.base.batches import BatchSizes
from seatrial.base.box import Box
from seatrial.checkpoint import memory
from seatrial.checkpoint.commit import Superseded, fence, index_name, progress_after
from seatrial.checkpoint.hashing import hash_of
from seatrial.checkpoint.local_place import LocalPlace, commit
from seatrial.checkpoint.manifest import Damaged, File, Manifest, Progress, folder_name
from seatrial.checkpoint.memory import Filling, Snapshot, layout_key
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.checkpoint.stream import FilePlan, raw_bytes
from seatrial.checkpoint.verified import verify
from seatrial.checkpoint.write import Piece, SaveFailed
from seatrial.data.loader import BatchLoader
from seatrial.job.layout import Layout
from seatrial.record.folder import RunFolder

WHOLE = torch.arange(70, dtype=torch.float32).reshape(10, 7)
LAYOUT = layout_key(Layout(shard=2).as_dict())


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def pieces(rank: int) -> list[Piece]:
    """Half of the rows of w; and all of v, which both have and rank 0 owns."""
    box = Box.whole((10, 7)).narrow(0, 5 * rank, 5)
    return [
        Piece("model/w", WHOLE[box.slices()].contiguous(), box, (10, 7)),
        Piece("model/v", torch.full((3,), 7.0), Box.whole((3,)), (3,), owner=rank == 0),
    ]


def put(fd: int, rank: int = 0, step: int = 5, generation: int = 1) -> Snapshot:
    """A snapshot of one of two ranks, as that rank would write it."""
    own = pieces(rank)
    plan = FilePlan([(p.key, p.tensor) for p in own])
    data = plan.head(memory.metadata(rank=rank, step=step, generation=generation, layout=LAYOUT))
    data += b"".join(bytes(raw_bytes(p.tensor)) for p in own)
    filling = Filling(fd, len(data))
    filling.add(data)
    index = {"pieces": [p.to_index() for p in own]}
    return Snapshot(
        rank, step, generation, LAYOUT, len(data), filling.finish(), json.loads(json.dumps(index))
    )


def entry(snapshot: Snapshot, slot: int = 0) -> dict[str, object]:
    return {"slot": slot, **snapshot.summary()}


def test_layout_key_depends_on_everything_that_shapes_rank_state() -> None:
    layout = Layout(2, 2, 2, 2, 1, "1f1b")
    changed = [{"pipeline": 4}, {"replicate": 1}, {"shard": 1}, {"tensor": 1}, {"stages_per_rank": 2}]
    keys = {layout_key(layout.as_dict()), *(layout_key(replace(layout, **c).as_dict()) for c in changed)}
    assert len(keys) == 6
    plain = {key: value for key, value in layout.as_dict().items() if key != "world_size"}
    assert layout_key(plain) == layout_key(layout.as_dict())


def test_a_snapshot_travels_as_json(fd: int) -> None:
    snapshot = put(fd)
    again = Snapshot.from_message(
        json.loads(json.dumps({**snapshot.to_message(), "slot": 1, "seconds": 0.1}))
    )
    assert again == snapshot
    assert again.index == snapshot.index
    assert Snapshot.from_message(snapshot.summary()) == snapshot
    for bad in ({"rank": -1}, {"step": "5"}, {"bytes": True}, {"hash": None}, {"index": [1]}):
        with pytest.raises(ValueError, match="snapshot"):
            Snapshot.from_message({**snapshot.to_message(), **bad})
    with pytest.raises(ValueError, match="without 'rank'"):
        Snapshot.from_message({})


@pytest.mark.parametrize("part", [1, 3, 8, 9, 100, 1 << 25])
def test_it_arrives_in_parts_of_any_size(fd: int, part: int) -> None:
    data = bytes(range(256)) * 20
    filling = Filling(fd, len(data))
    for begin in range(0, len(data), part):
        assert os.pread(fd, 8, 0) in (b"", bytes(8)), "nothing is there until all is"
        filling.add(data[begin : begin + part])
    assert filling.finish() == hash_of(data)
    assert os.pread(fd, len(data) + 1, 0) == data


def test_a_larger_content_is_replaced_by_a_smaller_one(fd: int) -> None:
    Filling(fd, 1 << 20).add(b"\xff" * (1 << 20))
    snapshot = put(fd)
    assert os.fstat(fd).st_size == snapshot.bytes
    memory.verify(fd, entry(snapshot))


def test_what_is_incomplete_or_wrong_never_becomes_valid(fd: int) -> None:
    for data, why in ((b"x" * 99, "99 of 100 bytes"), (b"x" * 100, "has XXH3-128")):
        filling = Filling(fd, 100)
        filling.add(data)
        with pytest.raises(Damaged, match=why):
            filling.finish("0" * 64)
        assert os.pread(fd, 8, 0) == bytes(8)


def test_a_snapshot_whose_replacement_has_begun_is_gone(fd: int) -> None:
    snapshot = put(fd)
    assert memory.holds(fd, snapshot)
    assert not memory.holds(fd, replace(snapshot, step=6)), "it is of another step"
    assert not memory.holds(fd, replace(snapshot, rank=1))
    assert not memory.holds(fd, replace(snapshot, generation=2))
    assert not memory.holds(fd, replace(snapshot, layout=layout_key(Layout(shard=4).as_dict())))
    Filling(fd, snapshot.bytes)
    assert not memory.holds(fd, snapshot)
    put(fd, step=7)
    assert not memory.holds(fd, snapshot), "whoever wrote step 7 was killed before it could tell"


def test_kill_9_while_one_file_is_written_leaves_the_other(fd: int) -> None:
    other = os.memfd_create("other")
    older, newer = put(fd, step=5), put(other, step=6)

    def die() -> int:
        filling = Filling(fd, older.bytes)
        filling.add(bytes(older.bytes // 2))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    pid = process.fork(die)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not memory.holds(fd, older)
    assert memory.holds(other, newer)
    found = memory.verified((fd, other), [entry(older, 0), entry(newer, 1)])
    assert [e["step"] for e in found] == [6]
    os.close(other)


@pytest.mark.parametrize("position", [0, 8, 40, 300, -1])
def test_one_flipped_bit_is_found(fd: int, position: int) -> None:
    snapshot = put(fd)
    at = position % snapshot.bytes
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    with pytest.raises(Damaged, match="step 5 has XXH3-128"):
        memory.verify(fd, entry(snapshot))
    assert memory.verified((fd,), [entry(snapshot)]) == []


def test_the_newest_comes_first_and_a_later_generation_is_newer(fd: int) -> None:
    other = os.memfd_create("other")
    before, after = put(fd, step=60, generation=1), put(other, step=50, generation=2)
    found = memory.verified((fd, other), [entry(before, 0), entry(after, 1)])
    assert [e["step"] for e in found] == [50, 60]
    os.close(other)


def test_invalid_headers(fd: int) -> None:
    for data in (
        b"",
        b"\0" * 8,
        (99).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        b"\xff" * 99,
    ):
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)
        with pytest.raises(Damaged, match="header"):
            memory.read_header(fd)


# -- a checkpoint made of snapshots


def manifest(step: int = 5, generation: int = 1) -> Manifest:
    return new_manifest(Progress(step, 10, 2, generation))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    folder.control.mkdir()
    folder.generation_file.write_text("1\n")
    return folder


def flush(run: RunFolder) -> Path:
    """Both ranks' parts, from memory."""
    for rank in (0, 1):
        fd = os.memfd_create("flush")
        write_part(run, fd, put(fd, rank), origin="memory")
        os.close(fd)
    return run.checkpoints / "step-00000005.tmp-1-memory"


def write_part(run: RunFolder, fd: int, held: Snapshot, origin: str = "") -> None:
    place = LocalPlace(run.checkpoints)
    place.put_part(
        held.step, 1, held.rank, fd, held.bytes, held.index, True, origin=origin, expected=held.hash
    )


def test_parts_from_memory_become_an_ordinary_checkpoint(run: RunFolder) -> None:
    temporary = flush(run)
    final = run.checkpoints / folder_name(5)
    commit(temporary, final, manifest(), 2, fence(run, 1))
    assert sorted(p.name for p in final.iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert verify(final).tensors["model/v"].parts[0].file == "rank-00000.safetensors"
    weights = CheckpointWeights(final)
    assert torch.equal(weights.read("w", Box((3, 2), (5, 4)), torch.float32), WHOLE[3:8, 2:6])
    assert torch.equal(weights.read("v", Box.whole((3,)), torch.float32), torch.full((3,), 7.0))
    weights.close()


def test_a_part_whose_memory_has_changed_is_not_written(fd: int, run: RunFolder) -> None:
    snapshot = put(fd)
    os.pwrite(fd, b"\1", snapshot.bytes - 2)
    with pytest.raises(Damaged, match=r"rank 0's state of step 5 in memory has XXH3-128 \w+, not \w+"):
        write_part(run, fd, snapshot)
    assert list(run.checkpoints.iterdir()) == []


def test_an_old_generation_does_not_publish(run: RunFolder) -> None:
    temporary = flush(run)
    run.generation_file.write_text("2\n")
    final = run.checkpoints / folder_name(5)
    with pytest.raises(Superseded, match="generation 2 has begun"):
        commit(temporary, final, manifest(), 2, fence(run, 1))
    assert not final.exists()


def test_generation_superseded_during_flush_does_not_publish(run: RunFolder) -> None:
    temporary = flush(run)
    final = run.checkpoints / folder_name(5)
    asked = []

    def check() -> None:
        asked.append(final.exists())
        if len(asked) == 2:
            run.generation_file.write_text("2\n")
        fence(run, 1)()

    with pytest.raises(Superseded):
        commit(temporary, final, manifest(), 2, check)
    assert asked == [False, False]
    assert not final.exists()


def test_a_rank_of_an_old_generation_does_not_publish_its_save(run: RunFolder) -> None:
    run.generation_file.write_text("9\n")
    piece = Piece("model/w", WHOLE, Box.whole((10, 7)), (10, 7))
    with pytest.raises(SaveFailed, match="generation 9 has begun"):
        save(
            run.checkpoints,
            manifest(),
            [piece],
            rank=0,
            world_size=1,
            agree=lambda ok: 0 if ok else 1,
            fence=fence(run, 1),
        )
    assert list(run.checkpoints.iterdir()) == []


def test_copies_without_an_owner_are_not_a_tensor(run: RunFolder) -> None:
    """A box that everybody has as a copy and nobody owns is missing from the manifest, and so is found missing."""
    temporary = flush(run)
    path = temporary / index_name(0)
    index = json.loads(path.read_text())
    assert File(**index["file"]).file == "rank-00000.safetensors"
    index["pieces"] = [{**p, "owner": p["key"] != "model/v"} for p in index["pieces"]]
    path.write_text(json.dumps(index))
    final = run.checkpoints / folder_name(5)
    commit(temporary, final, manifest(), 2, fence(run, 1))
    assert set(verify(final).tensors) == {"model/w"}


@pytest.mark.parametrize("step", [1, 7])
def test_the_position_after_a_step_is_where_the_loader_goes_on(step: int) -> None:
    train = SimpleNamespace(batches=BatchSizes.of(12, [(2, 4)]), sequence_length=32)
    progress = progress_after(SimpleNamespace(train=train), step, 3)  # type: ignore[arg-type]
    assert progress.next_sample == BatchLoader.samples(train, step + 1)[0]  # type: ignore[arg-type]
    assert progress.tokens == progress.next_sample * 32
