"""Snapshots in memory: bit-exact, two files of which one is always intact, without blocking training."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_cases
import safetensors
import torch
from rank_cases import assert_same, build, cut, everything, mesh, train

from saving import new_manifest
from seatrial.base.box import Box
from seatrial.checkpoint import memory
from seatrial.checkpoint.commit import fence
from seatrial.checkpoint.hashing import hash_of
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.manifest import Damaged, Progress
from seatrial.checkpoint.memory import Snapshot
from seatrial.job.layout import Layout
from seatrial.job.optimizers import ADAMW
from seatrial.model.decoder import whole_shapes
from seatrial.parallel.build import ParallelModel
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.messages import SnapshotFilled
from seatrial.train.checkpointing import snapshot, state
from seatrial.train.checkpointing.snapshot import Snapshots, restore_from_memory
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.records import into_file

TWO = Layout(shard=2)
WAIT_S = 20.0  # nothing takes that long unless it is broken


class Rank:
    """A rank with its two memory files, and what it has told its agent."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.fds = (os.memfd_create("a"), os.memfd_create("b"))
        self.told: list[SnapshotFilled] = []
        self.snapshots: Snapshots | None = None

    def start(self, model: Any, optimizer: ShardedAdamW, generation: int = 1, **options: Any) -> Snapshots:
        self.snapshots = Snapshots(
            self.fds,
            model,
            optimizer,
            records=into_file(self.folder, generation, model.mesh.rank),
            every=options.pop("every", 10),
            report=self.told.append,
            **options,
        )
        self.wait()
        return self.snapshots

    def wait(self) -> None:
        """Until it could take one."""
        assert self.snapshots is not None
        assert self.snapshots._free.wait(WAIT_S)

    def take(self, *steps: int) -> None:
        assert self.snapshots is not None
        for step in steps:
            assert self.snapshots.take(step)
            self.wait()

    def entries(self) -> list[dict[str, Any]]:
        """As the agent has them for the next generation: the last of each file."""
        assert self.snapshots is not None
        self.snapshots.close()
        newest = {m.slot: vars(m) for m in self.told}
        return [{"slot": slot, **Snapshot.from_message(s).summary()} for slot, s in newest.items()]

    def close(self) -> None:
        if self.snapshots is not None:
            self.snapshots.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "checkpoints").mkdir()
    return RunFolder(tmp_path)


@pytest.fixture
def rank(folder: RunFolder) -> Iterator[Rank]:
    rank = Rank(folder)
    yield rank
    rank.close()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


def test_training_resumes_from_a_snapshot_bit_identically(rank: Rank) -> None:
    model, optimizer = build()
    train(model, optimizer, range(3))
    rank.start(model, optimizer).take(3)
    then = everything(model, optimizer)
    train(model, optimizer, range(3, 6))
    straight = everything(model, optimizer)

    (entry,) = rank.entries()
    other, its_optimizer = build(seed=1)
    train(other, its_optimizer, range(1))
    assert restore_from_memory(rank.fds[entry["slot"]], entry, other, its_optimizer) == 3
    assert_same(everything(other, its_optimizer), then)
    train(other, its_optimizer, range(3, 6))
    assert_same(everything(other, its_optimizer), straight)


def test_training_does_not_change_a_snapshot_in_progress(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while the file is written."""
    model, optimizer = build()
    go = threading.Event()
    add = memory.Filling.add
    monkeypatch.setattr(memory.Filling, "add", lambda self, data: go.wait(WAIT_S) and add(self, data))
    snapshots = rank.start(model, optimizer)
    train(model, optimizer, range(1))
    then = everything(model, optimizer)
    assert snapshots.take(1)
    train(model, optimizer, range(1, 3))
    go.set()
    (entry,) = rank.entries()
    restore_from_memory(rank.fds[0], entry, model, optimizer)
    assert_same(everything(model, optimizer), then)


def test_report_and_safetensors_content(rank: Rank) -> None:
    model, optimizer = build()
    train(model, optimizer, range(2))
    part, its_optimizer = cut(model, optimizer, 1, TWO)
    rank.start(part, its_optimizer, generation=4)
    rank.take(20)
    rank.entries()
    told = vars(rank.told[0])
    assert (told["slot"], told["step"], told["rank"], told["generation"]) == (0, 20, 1, 4)
    assert told["layout"] == memory.layout_key(Layout(shard=2).as_dict())
    data = os.pread(rank.fds[0], told["bytes"] + 1, 0)
    assert (len(data), hash_of(data)) == (told["bytes"], told["hash"])
    assert json.loads(json.dumps(told)) == {
        **told,
        "index": json.loads(json.dumps(told["index"])),
    }, "nothing but JSON"
    local = {f"model/{s.name}": s.local for s in part.shards if s.box.numel}
    local |= {f"{kind}/{s.name}": values for kind, s, values in its_optimizer.state()}
    with safetensors.safe_open(f"/proc/self/fd/{rank.fds[0]}", framework="pt") as file:
        assert file.metadata() == memory.metadata(rank=1, step=20, generation=4, layout=told["layout"])
        assert set(file.keys()) == {*local, state.UPDATES, "rng/cpu/1"}
        for key, values in local.items():
            assert torch.equal(file.get_tensor(key), values)
        assert file.get_tensor(state.UPDATES).tolist() == [2.0]
    by_key = {p["key"]: p for p in told["index"]["pieces"]}
    assert not by_key[state.UPDATES]["owner"], "rank 0 saves it"
    assert by_key["rng/cpu/1"]["owner"]


def test_files_alternate_and_the_newer_one_is_kept(rank: Rank) -> None:
    model, optimizer = build()
    rank.start(model, optimizer)
    rank.take(10, 20, 30, 40)
    assert [e["step"] for e in memory.verified(rank.fds, rank.entries())] == [40, 30]
    assert [m.slot for m in rank.told] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("held", "slot"),
    [
        ([], 0),
        ([{"slot": 0, "generation": 1, "step": 30}], 1),
        ([{"slot": 0, "generation": 1, "step": 30}, {"slot": 1, "generation": 1, "step": 20}], 1),
        ([{"slot": 0, "generation": 1, "step": 10}, {"slot": 1, "generation": 1, "step": 20}], 0),
        ([{"slot": 0, "generation": 1, "step": 60}, {"slot": 1, "generation": 2, "step": 50}], 0),
    ],
)
def test_a_new_process_overwrites_the_older_file_first(rank: Rank, held: list[Any], slot: int) -> None:
    model, optimizer = build()
    rank.start(model, optimizer, generation=3, held=held).take(70)
    assert [e["slot"] for e in rank.entries()] == [slot]


def test_due(rank: Rank) -> None:
    model, optimizer = build()
    snapshots = rank.start(model, optimizer, every=4)
    assert [step for step in range(1, 13) if snapshots.due(step)] == [4, 8, 12]
    snapshots._every = 0
    assert not any(snapshots.due(step) for step in range(20))


def test_take_skips_while_a_snapshot_is_being_written(
    rank: Rank, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    snapshots = rank.start(model, optimizer)
    rank.take(10, 20)
    before = list(rank.told)
    begun, go = threading.Event(), threading.Event()

    def slow(self: memory.Filling, data: bytes | memoryview) -> None:
        begun.set()
        assert go.wait(WAIT_S)
        add(self, data)

    add = memory.Filling.add
    monkeypatch.setattr(memory.Filling, "add", slow)
    assert snapshots.take(30)
    assert begun.wait(WAIT_S)
    # Whoever looks now finds one whole state, and no trace of the other.
    newest, oldest = vars(before[1]), vars(before[0])
    assert memory.holds(rank.fds[1], Snapshot.from_message(newest))
    assert not memory.holds(rank.fds[0], Snapshot.from_message(oldest))
    assert [e["step"] for e in memory.verified(rank.fds, [oldest, newest])] == [20]
    assert [snapshots.take(step) for step in (40, 50, 60)] == [False] * 3
    assert rank.told == before, "told only when it is complete"
    assert (snapshots.taken, snapshots.skipped) == (3, 3)
    go.set()
    rank.wait()
    rank.take(70)
    assert [e["step"] for e in memory.verified(rank.fds, rank.entries())] == [70, 30]
    told = [(e.kind, e.data) for e in read_events(folder)[0]]
    assert told == [("snapshot_skipped", {"step": step, "skipped": n}) for step, n in ((40, 1), (50, 2))]


def test_a_failed_write_loses_only_that_snapshot(
    rank: Rank, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    snapshots = rank.start(model, optimizer)
    rank.take(10)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        patch.setattr(memory.Filling, "add", full)
        rank.take(20)
    rank.take(30)
    assert snapshots.failed == 1
    assert [e["step"] for e in memory.verified(rank.fds, rank.entries())] == [30, 10]
    (event,) = read_events(folder)[0]
    assert (event.kind, event.rank, event.data) == ("snapshot_failed", 0, {"step": 20, "failed": 1})
    assert "Cannot allocate memory" in event.message


def test_damage_is_detected_and_the_other_file_is_used(rank: Rank) -> None:
    model, optimizer = build()
    rank.start(model, optimizer)
    train(model, optimizer, range(1))
    rank.take(1)
    then = everything(model, optimizer)
    train(model, optimizer, range(1, 2))
    rank.take(2)
    entries = rank.entries()
    newer = max(entries, key=lambda e: e["step"])
    fd, at = rank.fds[newer["slot"]], newer["bytes"] // 2
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x40]), at)
    before = everything(model, optimizer)
    with pytest.raises(Damaged, match="step 2 has XXH3-128"):
        restore_from_memory(fd, newer, model, optimizer)
    assert_same(everything(model, optimizer), before)
    (good,) = memory.verified(rank.fds, entries)
    assert restore_from_memory(rank.fds[good["slot"]], good, model, optimizer, checked=True) == 1
    assert_same(everything(model, optimizer), then)


def test_a_replicas_snapshot_restores_all_but_random_state(rank: Rank) -> None:
    model, optimizer = build()
    train(model, optimizer, range(2))
    giver, its_optimizer = cut(model, optimizer, 0, Layout(replicate=2))
    rank.start(giver, its_optimizer)
    rank.take(5)
    (entry,) = rank.entries()
    then = everything(giver, its_optimizer)
    taker, own_optimizer = cut(*build(seed=1), 1, Layout(replicate=2))
    torch.manual_seed(99)
    own_random = torch.get_rng_state()
    assert restore_from_memory(rank.fds[0], entry, taker, own_optimizer) == 5
    assert_same(everything(taker, own_optimizer), {**then, "rng": own_random})


def test_another_ranks_state_is_refused(rank: Rank) -> None:
    model, optimizer = build()
    part, its_optimizer = cut(model, optimizer, 0, TWO)
    rank.start(part, its_optimizer)
    rank.take(5)
    (entry,) = rank.entries()
    before = everything(model, optimizer)
    for other, its in (
        cut(model, optimizer, 1, TWO),
        cut(model, optimizer, 0, Layout(shard=4)),
        (model, optimizer),
    ):
        with pytest.raises(Damaged, match="the memory file holds"):
            restore_from_memory(rank.fds[0], entry, other, its)
    with pytest.raises(Damaged, match="the memory file holds"):
        restore_from_memory(rank.fds[0], {**entry, "step": 6}, part, its_optimizer)
    same_place = SimpleNamespace(shards=model.shards, mesh=mesh(Layout(shard=2)))
    with pytest.raises(Damaged, match="the memory file has"):
        restore_from_memory(rank.fds[0], entry, same_place, optimizer)  # type: ignore[arg-type]
    assert_same(everything(model, optimizer), before)


def test_a_second_tensor_of_one_name_gets_another_key(rank: Rank) -> None:
    """A tied embedding whose two copies stand in two stages of one rank; the copy may come first."""
    model, _ = build()
    embedding = next(s for s in model.shards if s.name == "model.embed_tokens.weight")
    model.shards.insert(0, rank_cases.second_copy(embedding))
    optimizer = ShardedAdamW(model.shards, rank_cases.OPTIMIZER)
    for kind, s, values in optimizer.state():
        values.fill_(len(kind) + (0.5 if s.counted else 0.0))
    pieces = {piece.key: piece for piece in state.lasting_pieces(model, optimizer)}
    assert pieces["model/model.embed_tokens.weight"].owner
    assert torch.equal(pieces["model/model.embed_tokens.weight"].tensor, embedding.local)
    assert not pieces["model/model.embed_tokens.weight#2"].owner
    for kind in ADAMW.states:
        first, second = (pieces[f"{kind}/model.embed_tokens.weight{end}"] for end in ("", "#2"))
        assert (first.owner, second.owner) == (True, False)
        assert float(first.tensor[0, 0]) == float(second.tensor[0, 0]) + 0.5
    assert len(pieces) == 3 * len(model.shards) + 1
    rank.start(model, optimizer).take(1)
    then = everything(model, optimizer)
    for s in model.shards:
        s.local.zero_()
    (entry,) = rank.entries()
    restore_from_memory(rank.fds[0], entry, model, optimizer)
    assert_same(everything(model, optimizer), then)


def test_a_restore_does_not_count_skipped_updates(rank: Rank) -> None:
    model, optimizer = build()
    train(model, optimizer, range(2))
    rank.start(model, optimizer).take(9)  # 7 of 9 steps made no update
    (entry,) = rank.entries()
    other, its_optimizer = build()
    assert restore_from_memory(rank.fds[0], entry, other, its_optimizer) == 9
    assert rank_cases.optimizer_updates(its_optimizer) == 2


def test_after_a_rollback_later_snapshots_are_overwritten_first(rank: Rank) -> None:
    model, optimizer = build()
    snapshots = rank.start(model, optimizer)
    for step in (10, 20):
        rank.take(step)
    snapshots.settle()
    snapshots.forget_after(10)
    assert [entry["step"] for entry in snapshots.settle()] == [10]
    rank.take(12)
    assert sorted(entry["step"] for entry in snapshots.settle()) == [10, 12]
    rank.take(20)
    assert sorted(entry["step"] for entry in snapshots.settle()) == [12, 20]


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(replicate=2)], ids=str)
def test_snapshots_of_all_ranks_make_a_checkpoint_for_any_layout(
    layout: Layout, rank: Rank, folder: RunFolder
) -> None:
    model, optimizer = build()
    train(model, optimizer, range(3))
    place = LocalPlace(folder.checkpoints)
    for number in (0, 1):
        part, its_optimizer = cut(model, optimizer, number, layout)
        one = Rank(folder)
        one.start(part, its_optimizer)
        one.take(3)
        (entry,) = one.entries()
        told = Snapshot.from_message(vars(one.told[0]))
        fd = one.fds[entry["slot"]]
        place.put_part(3, 1, number, fd, told.bytes, told.index, True, origin="memory", expected=told.hash)
        one.close()
    told = {"architecture": rank_cases.ARCH.as_dict(), "layout": layout.as_dict()}
    manifest = new_manifest(Progress(3, 0, 12, 1), **told)
    folder.control.mkdir(exist_ok=True)
    folder.generation_file.write_text("1")
    place.commit(3, 1, manifest, 2, fence(folder, 1), origin="memory")

    chosen = place.open(3)
    assert chosen.manifest.read_back
    one = ParallelModel(rank_cases.ARCH, mesh(), rank_cases.SETTINGS, chosen)
    its_optimizer = ShardedAdamW(one.shards, rank_cases.OPTIMIZER)
    assert state.restore(one, its_optimizer, chosen).next_sample == 12
    assert_same(everything(one, its_optimizer), everything(model, optimizer))
    for name, shape in whole_shapes(rank_cases.ARCH).items():
        rows = Box.whole(shape).narrow(0, shape[0] // 3, shape[0] // 2)
        whole = next(s.local for s in model.shards if s.name == name)
        assert torch.equal(chosen.read(name, rows, torch.float32), whole[rows.slices()])
    chosen.close()


def test_snapshots_reference_only_tensors_of_the_model(rank: Rank) -> None:
    """Its process groups must be able to go before the next generation makes new ones."""
    model, optimizer = build()
    snapshots = rank.start(model, optimizer)
    assert not any(isinstance(v, ParallelModel | ShardedAdamW) for v in vars(snapshots).values())
    assert snapshot.Snapshots.__init__.__doc__
