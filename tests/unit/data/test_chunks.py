"""Verification before use: of local shards, chunk by chunk."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.data import chunks, store, writer
from seatrial.data.chunks import ChunkHasher, MadeHashes
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter

CHUNK = 64  # bytes: 32 tokens


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunks, writer, store):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(ChunkHasher.__init__, "__defaults__", (CHUNK,))


def write(folder: Path, n: int = 1000, shard_tokens: int = 400) -> TokenStore:
    with StoreWriter(folder, ByteTokenizer(), shard_tokens=shard_tokens) as w:
        w.append(np.arange(n) % 250, np.arange(0, n, 7))
        return w.finish({})


def flip(path: Path, at: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def forget_chunks(folder: Path) -> None:
    """Make it a store of a version that knew no chunks."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        (folder / shard.pop("chunks")["file"]).unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=6), size=st.integers(1, 100))
def test_hashes_do_not_depend_on_how_the_bytes_come(data: bytes, cuts: list[int], size: int) -> None:
    hasher = ChunkHasher(size)
    bounds = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for a, b in itertools.pairwise(bounds):
        hasher.update(data[a:b])
    expected = [xxhash.xxh3_128(data[i : i + size]).digest() for i in range(0, len(data), size)]
    assert hasher.finish() == b"".join(expected)


def test_the_writer_leaves_hashes_of_every_chunk(tmp_path: Path) -> None:
    made = write(tmp_path / "s")
    for shard in made.manifest.shards:
        assert shard.chunks is not None
        data = (tmp_path / "s" / shard.file).read_bytes()
        digests = (tmp_path / "s" / shard.chunks.file).read_bytes()
        assert digests == b"".join(
            xxhash.xxh3_128(data[i : i + CHUNK]).digest() for i in range(0, len(data), CHUNK)
        )
    assert made.verify() == []


def test_every_flipped_bit_is_named_before_it_is_used(tmp_path: Path) -> None:
    whole = write(tmp_path / "s")
    expected = whole.read(0, 1000).tolist()
    draw = random.Random(1)
    for _ in range(200):
        shard = draw.choice(whole.manifest.shards)
        path = tmp_path / "s" / shard.file
        at, bit = draw.randrange(shard.bytes), 1 << draw.randrange(8)
        flip(path, at, bit)
        fresh = TokenStore.open(tmp_path / "s")
        first, number = fresh._starts[whole.manifest.shards.index(shard)] + at // 2, at // CHUNK
        with pytest.raises(InputError) as e:
            fresh.read(first, 1)
        (problem,) = e.value.diagnostics
        assert problem.file == str(path)
        assert problem.message.startswith(f"damaged: bytes {number * CHUNK} to ")
        assert "have the XXH3-128" in problem.message
        # Other chunks can be used; the damaged one is not, however often it is asked for.
        other = 0 if number else shard.n_tokens - 1
        start = fresh._starts[whole.manifest.shards.index(shard)]
        assert fresh.read(start + other, 1).tolist() == expected[start + other : start + other + 1]
        with pytest.raises(InputError):
            fresh.read(first, 1)
        flip(path, at, bit)
    assert TokenStore.open(tmp_path / "s").read(0, 1000).tolist() == expected


def test_chunks_of_another_length_are_found_by_verify(tmp_path: Path) -> None:
    """The manifest says it, and nothing hashes the manifest."""
    assert write(tmp_path / "store").verify() == []
    path = tmp_path / "store" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][1]["chunks"]["chunk_bytes"] = CHUNK - 1  # as many chunks as before
    path.write_text(json.dumps(manifest))
    assert TokenStore.open(tmp_path / "store").verify() == [
        (str(tmp_path / "store" / "shard-00001.xxh3"), "not the hashes of shard-00001.bin")
    ]


def test_another_largest_token_is_found_by_verify(tmp_path: Path) -> None:
    """The manifest says it, and with it whether the tokens fit a model's vocabulary."""
    write(tmp_path / "store")
    path = tmp_path / "store" / "manifest.json"
    manifest = json.loads(path.read_text())
    largest = [shard["max_token"] for shard in manifest["shards"]]
    first = min(range(len(largest)), key=largest.__getitem__)  # not the one that makes the store's
    manifest["shards"][first]["max_token"] -= 1
    path.write_text(json.dumps(manifest))
    ((where, problem),) = TokenStore.open(tmp_path / "store").verify()
    assert where == str(tmp_path / "store" / manifest["shards"][first]["file"])
    assert problem == f"its largest token is {largest[first]}, the manifest has {largest[first] - 1}"


def test_hashes_of_some_shards_only_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "store")
    path = tmp_path / "store" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["shards"][1]["chunks"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="some of its shards have chunk hashes"):
        TokenStore.open(tmp_path / "store")


def test_a_swapped_shard_is_damage(tmp_path: Path) -> None:
    write(tmp_path / "s")
    a, b = tmp_path / "s/shard-00000.bin", tmp_path / "s/shard-00001.bin"
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    fresh = TokenStore.open(tmp_path / "s")
    for position in (0, 399, 400, 799):
        with pytest.raises(InputError, match="damaged"):
            fresh.read(position, 1)
    assert fresh.read(800, 1).tolist() == [50]


def test_damaged_hashes_are_not_trusted(tmp_path: Path) -> None:
    write(tmp_path / "s")
    flip(tmp_path / "s/shard-00001.xxh3", 20)
    fresh = TokenStore.open(tmp_path / "s")
    assert fresh.read(0, 1).tolist() == [0]
    with pytest.raises(InputError, match="XXH3-128") as e:
        fresh.read(400, 1)
    assert "shard-00001.xxh3" in e.value.render()


def test_a_damaged_document_index_is_not_used(tmp_path: Path) -> None:
    write(tmp_path / "s")
    flip(tmp_path / "s/shard-00001.idx", 3)
    fresh = TokenStore.open(tmp_path / "s")
    assert fresh.document_starts_between(0, 20).tolist() == [0, 7, 14]
    for _ in range(2):
        with pytest.raises(InputError, match="damaged: SHA-256") as e:
            fresh.document_starts_between(390, 410)
    assert "shard-00001.idx" in e.value.render()


def test_a_chunk_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write(tmp_path / "s")
    hashed: list[int] = []
    real = chunks.ChunkHashes.problem

    def problem(self: chunks.ChunkHashes, number: int, data: bytes) -> str | None:
        hashed.append(number)
        return real(self, number, data)

    monkeypatch.setattr(chunks.ChunkHashes, "problem", problem)
    made.read(0, 10)
    made.read(5, 40)  # into the next chunk
    made.read(0, 64)
    assert hashed == [0, 1]
    made.read(390, 20)  # from one shard into the next
    assert hashed == [0, 1, 12, 0]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_store_without_chunk_hashes_gets_them_at_first_use(tmp_path: Path, damaged: bool) -> None:
    write(tmp_path / "s")
    forget_chunks(tmp_path / "s")
    if damaged:
        flip(tmp_path / "s/shard-00001.bin", 700)
    kept = tmp_path / "kept"
    fresh = TokenStore.open(tmp_path / "s", made_hashes=kept)
    assert not kept.exists(), "opening must read no shard"
    assert fresh.read(0, 1).tolist() == [0]
    assert len(list(kept.glob("*.xxh3"))) == 1
    if damaged:
        with pytest.raises(InputError, match="damaged: SHA-256") as e:
            fresh.read(400, 1)
        assert "shard-00001.bin" in e.value.render()
        assert len(list(kept.glob("*.xxh3"))) == 1
    else:
        assert fresh.read(400, 1).tolist() == [150]
        assert len(list(kept.glob("*.xxh3"))) == 2


def test_kept_hashes_are_used_unless_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s")
    forget_chunks(tmp_path / "s")
    kept = tmp_path / "kept"
    TokenStore.open(tmp_path / "s", made_hashes=kept).read(0, 1)
    made: list[str] = []
    real = chunks._hash_shard
    monkeypatch.setattr(chunks, "_hash_shard", lambda s, p: made.append(p.name) or real(s, p))  # type: ignore[func-returns-value]
    TokenStore.open(tmp_path / "s", made_hashes=kept).read(0, 1)
    assert made == []
    (file,) = kept.glob("*.xxh3")
    flip(file, 40)
    TokenStore.open(tmp_path / "s", made_hashes=kept).read(0, 1)
    assert made == ["shard-00000.bin"]
    # Damage that comes after the hashes were made is found by them.
    flip(tmp_path / "s/shard-00000.bin", 100)
    with pytest.raises(InputError, match="damaged: bytes 64 to 127"):
        TokenStore.open(tmp_path / "s", made_hashes=kept).read(50, 1)


def _make(folder: str, kept: str, counter: str) -> None:
    real = chunks._hash_shard

    def counted(*arguments: object) -> bytes:
        with open(counter, "a", encoding="utf-8") as f:
            f.write(f"{os.getpid()}\n")
        return real(*arguments)  # type: ignore[arg-type]

    chunks._hash_shard = counted
    opened = TokenStore.open(folder)
    shard = opened.manifest.shards[0]
    MadeHashes(Path(kept)).of(shard, Path(folder) / shard.file)


@pytest.mark.cluster  # for its time only
def test_of_many_processes_one_makes_the_hashes(tmp_path: Path) -> None:
    write(tmp_path / "s")
    forget_chunks(tmp_path / "s")
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "s"), str(tmp_path / "kept"), str(tmp_path / "counter"))
    started = [context.Process(target=_make, args=arguments) for _ in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [p.exitcode for p in started] == [0] * 3
    assert len((tmp_path / "counter").read_text().splitlines()) == 1
