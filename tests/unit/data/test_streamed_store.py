"""A token store that is streamed; the object store is a folder here (tests/cluster has a real service)."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from seatrial.base.batches import BatchSizes
from seatrial.base.errors import InputError
from seatrial.data import stream as stream_module
from seatrial.data import writer
from seatrial.data.chunks import ChunkHasher
from seatrial.data.loader import NO_TARGET, BatchLoader
from seatrial.data.store import TokenStore
from seatrial.data.stream import AHEAD, StreamedStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter
from seatrial.storage.errors import StorageError
from seatrial.storage.local import LocalStore

N, CHUNK = 60_000, 1024
ROOMY = 1 << 20


class WideTokenizer(ByteTokenizer):
    vocab_size = 1 << 20


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token i is i; 4 bytes each, chunks of 256 tokens, shards of 11,000."""
    monkeypatch.setattr(writer, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(ChunkHasher.__init__, "__defaults__", (CHUNK,))
    with StoreWriter(tmp_path / "remote", WideTokenizer(), shard_tokens=11_000) as w:
        w.append(np.arange(N), np.arange(0, N, 13))
        w.finish({})
    return tmp_path / "remote"


class Requests:
    """What was asked of the object store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        real = LocalStore.read

        def read(store: LocalStore, name: str, offset: int = 0, length: int | None = None) -> bytes:
            self.ranges.append((name, offset))
            self.threads.add(threading.current_thread().name)
            return real(store, name, offset, length)

        monkeypatch.setattr(LocalStore, "read", read)

    def chunks(self) -> list[tuple[str, int]]:
        return [(name, offset) for name, offset in self.ranges if name.endswith(".bin")]


def stream(remote: Path, cache_bytes: int = ROOMY) -> StreamedStore:
    return StreamedStore.stream(f"file://{remote}", remote.parent / "cache", cache_bytes)


def cached(remote: Path) -> int:
    files = [p for p in (remote.parent / "cache").rglob("*") if p.is_file() and p.name != ".used"]
    return sum(p.stat().st_size for p in files)


def loader(store: TokenStore, **changes: object) -> BatchLoader:
    sizes = {"sequence_length": 50, "batches": BatchSizes.of(16), "seed": 5, "vocab_size": 1 << 20}
    return BatchLoader(store, **(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("across", [True, False])
def test_the_same_batches_as_from_a_local_folder(remote: Path, across: bool) -> None:
    streamed, local = stream(remote), TokenStore.open(remote)
    assert streamed.identity() == local.identity()
    ours = loader(streamed, attend_across_documents=across, ahead=AHEAD)
    theirs = loader(local, attend_across_documents=across)
    for step in [*range(1, 90), 10**9]:
        for a, b in zip(ours.batch(step, 4, 8), theirs.batch(step, 4, 8), strict=True):
            assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
    ours.close()
    theirs.close()
    streamed.close()


def test_a_mask_is_streamed_and_verified_like_the_tokens(remote: Path) -> None:
    counted = np.random.default_rng(1).random(N) < 0.3
    with StoreWriter(remote, WideTokenizer(), shard_tokens=11_000, replace=True) as w:
        w.append(np.arange(N), np.arange(0, N, 13), counted)
        local = w.finish({})
    streamed = stream(remote)
    ours, theirs = (loader(s, ahead=0).batch(3, 4, 8).target_BT for s in (streamed, local))
    assert torch.equal(ours, theirs)
    assert (
        (ours == NO_TARGET)
        == torch.from_numpy(~counted)[loader(local, loss="all", ahead=0).batch(3, 4, 8).target_BT]
    ).all()
    path = remote / "shard-00005.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged: bytes"):
        streamed.counted([N - 9, N - 8], 8)
    streamed.close()


def test_only_what_is_needed_is_fetched_and_only_once(remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Requests(monkeypatch)
    store = stream(remote)
    assert store.read(300, 10).tolist() == list(range(300, 310))
    assert asked.chunks() == [("shard-00000.bin", CHUNK)]
    assert store.read(500, 20).tolist() == list(range(500, 520))  # one token more than the chunk has
    assert asked.chunks()[1:] == [("shard-00000.bin", 2 * CHUNK)]
    assert store.read(10_990, 20).tolist() == list(range(10_990, 11_010))
    assert asked.chunks()[2:] == [("shard-00000.bin", 42 * CHUNK), ("shard-00001.bin", 0)]
    before = len(asked.ranges)
    other = stream(remote)  # another rank, or the next start
    other.read(300, 200)
    assert [name for name, _ in asked.ranges[before:]] == ["manifest.json"]


def test_rows_are_fetched_together_and_ahead_of_their_step(
    remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Requests(monkeypatch)
    store = stream(remote)
    data = loader(store, ahead=AHEAD)
    data.batch(1, 0, 16)
    assert all(name.startswith("fetch") for name in asked.threads - {"MainThread"})
    assert len(asked.threads) > 2
    # The next steps are being fetched now; once they are here, asking for them asks nobody.
    for future in list(data._coming.values()):
        future.result()
    known = set(asked.chunks())
    batch = data.batch(2, 0, 16)
    for row in batch.ids_BT[:, 0].tolist():
        shard, token = divmod(row, 11_000)
        assert (f"shard-{shard:05d}.bin", token * 4 // CHUNK * CHUNK) in known
    data.close()
    store.close()


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("across", [True, False])
def test_cache_smaller_than_the_data_works_and_stays_bounded(remote: Path, across: bool) -> None:
    limit = 16 * CHUNK + 3000
    store, local = stream(remote, limit), TokenStore.open(remote)
    data = loader(store, attend_across_documents=across, ahead=AHEAD)
    plain = loader(local, attend_across_documents=across, ahead=0)
    for step in range(1, 40):
        assert torch.equal(data.batch(step, 0, 16).ids_BT, plain.batch(step, 0, 16).ids_BT)
        for future in list(data._coming.values()):
            future.result()  # nothing comes and goes while we look
        assert cached(remote) <= limit
    data.close()
    store.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_a_damaged_shard_is_named_before_it_is_used(remote: Path) -> None:
    flip(remote / "shard-00002.bin", 5 * CHUNK + 17)
    store = stream(remote)
    assert store.read(22_000, 1280).tolist() == list(range(22_000, 23_280))
    for _ in range(2):
        with pytest.raises(InputError) as e:
            store.rows([0, 22_000, 23_280, 5], 10)
        (problem,) = e.value.diagnostics
        assert problem.file == str(remote / "shard-00002.bin")
        assert f"damaged: bytes {5 * CHUNK} to {6 * CHUNK - 1} have the XXH3-128" in problem.message
        assert "expected" in problem.message
    shutil.copy(remote / "shard-00001.bin", remote / "shard-00002.bin")
    with pytest.raises(InputError, match="damaged: bytes"):
        store.read(32_000, 10)
    store.close()


@pytest.mark.parametrize("suffix", ["xxh3", "idx"])
def test_damage_beside_the_tokens_is_named(remote: Path, suffix: str) -> None:
    flip(remote / f"shard-00001.{suffix}", 9)
    store = stream(remote)
    assert store.read(0, 5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InputError, match="damaged") as e:
        store.read(11_000, 1) if suffix == "xxh3" else store.document_starts_between(11_000, 12_000)
    assert f"shard-00001.{suffix}" in e.value.render()


def test_damage_in_the_cache_is_fetched_again(remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stream(remote)
    store.rows([0, 11_000, 30_000], 10)
    store.document_starts_between(0, 10)
    for path in (remote.parent / "cache").rglob("*"):
        if path.is_file() and path.name != ".used":
            flip(path, 5)
    asked = Requests(monkeypatch)
    fresh = stream(remote)
    assert fresh.rows([0, 11_000, 30_000], 2).tolist() == [[0, 1], [11_000, 11_001], [30_000, 30_001]]
    assert fresh.document_starts_between(0, 20).tolist() == [0, 13]
    assert len(asked.chunks()) == 3
    store.close()
    fresh.close()


def test_an_incomplete_store_is_refused_at_once(remote: Path) -> None:
    (remote / "shard-00001.bin").unlink()
    os.truncate(remote / "shard-00003.idx", 8)
    with pytest.raises(InputError) as e:
        stream(remote)
    text = e.value.render()
    assert f"{remote}/shard-00001.bin: error: missing" in text
    assert "shard-00003.idx: error: truncated: 8 bytes, the manifest has" in text


def test_what_is_not_a_store_and_what_is_too_old(remote: Path) -> None:
    (remote.parent / "empty").mkdir()
    with pytest.raises(InputError, match=r"is not a token store: it has no manifest\.json") as e:
        stream(remote.parent / "empty")
    assert "seatrial data prepare" in e.value.render()
    with pytest.raises(InputError, match="there is no folder"):
        stream(remote.parent / "empty2")
    manifest = json.loads((remote / "manifest.json").read_text())
    for shard in manifest["shards"]:
        del shard["chunks"]
    (remote / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"shard-00000\.bin has no chunk hashes"):
        stream(remote)


def test_a_cache_that_holds_less_than_the_requests_at_once(remote: Path) -> None:
    with pytest.raises(InputError, match="too small for 16 chunks"):
        stream(remote, 16 * CHUNK - 1)


def test_verify_reads_the_objects(remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_HASH_BLOCK", 1000)
    store = stream(remote)
    assert store.verify() == []
    flip(remote / "shard-00004.bin", 7)
    ((place, problem),) = store.verify()
    assert place == f"{remote}/shard-00004.bin"
    assert problem.startswith("damaged: SHA-256")


def test_an_unreachable_service_is_not_damage(remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stream(remote)

    def read(*arguments: object) -> bytes:
        raise StorageError("unreachable", "read", "s3://b/x", "timed out")

    monkeypatch.setattr(LocalStore, "read", read)
    with pytest.raises(StorageError, match="timed out"):
        store.rows([0, 5000], 10)
    monkeypatch.undo()
    assert store.rows([0, 5000], 1).tolist() == [[0], [5000]]
    store.close()


def test_a_fork_fetches_with_threads_of_its_own(remote: Path) -> None:
    store = stream(remote)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=lambda: results.put(store.rows([0, 40_000], 2).tolist()))
    child.start()
    assert results.get() == [[0, 1], [40_000, 40_001]]
    child.join()
    assert child.exitcode == 0
