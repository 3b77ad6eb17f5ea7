"""Reading boxes of a checkpoint: right for any layout, and no byte that was not verified."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import add, rows, small_chunks, state

from seatrial.base.box import Box
from seatrial.checkpoint import read, verified
from seatrial.checkpoint.hashing import hash_of, spans
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.manifest import Damaged, File
from seatrial.checkpoint.object_place import ObjectPlace
from seatrial.checkpoint.place import Place
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.checkpoint.source import FolderSource
from seatrial.checkpoint.verified import VerifiedFiles
from seatrial.storage import StorageError
from seatrial.storage.local import LocalStore


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder, and a store (of files: the place does not know) as an object store is used."""
    small_chunks(monkeypatch)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return LocalPlace(folder) if request.param == "folder" else ObjectPlace(LocalStore(folder))


def boxes(shape: tuple[int, ...], generator: random.Random) -> Iterator[Box]:
    yield Box.whole(shape)
    for _ in range(12):
        offsets = tuple(generator.randrange(n) for n in shape)
        sizes = tuple(generator.randrange(1, n - o + 1) for n, o in zip(shape, offsets, strict=True))
        yield Box(offsets, sizes)


@pytest.mark.parametrize("ranks", [1, 3, 4, 11])
@pytest.mark.parametrize("block", [64, 1 << 25])
def test_any_box_of_any_layout(ranks: int, block: int, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_BLOCK_BYTES", block)
    whole = state()
    add(place, 5, [rows(whole, rank, ranks) for rank in range(ranks)])
    weights = place.open(5)
    generator = random.Random(ranks)
    for key, values in whole.items():
        for box, dtype in itertools.product(
            boxes(tuple(values.shape), generator), (values.dtype, torch.float64)
        ):
            kind, _, name = key.partition("/")
            found = weights.read_kind(kind, name, box, dtype)
            assert torch.equal(found, values[box.slices()].to(dtype)), (key, box, dtype)
            # Into the middle of something larger, as a shard in a flat buffer is.
            out = torch.full((*(n + 2 for n in box.sizes),), 9.0, dtype=dtype)
            inner = out[tuple(slice(1, 1 + n) for n in box.sizes)]
            weights.read_into(key, box, inner)
            assert torch.equal(inner, found)
            if out.dim():
                assert (out.numel() - inner.numel()) == int((out == 9.0).sum()), "nothing beside it"
    assert weights.step == 5
    assert weights.dtype("half") == torch.bfloat16
    noise = weights.tensor(ranks - 1, f"rng/cpu/{ranks - 1}")
    assert noise is not None
    assert torch.equal(noise, torch.arange(100, dtype=torch.uint8) + ranks - 1)
    assert weights.tensor(ranks - 1, "rng/cuda/0") is None
    assert weights.tensor(99, "rng/cpu/99") is None
    weights.close()


def victims(place: Place, step: int, rank: int) -> Path:
    """The file of a rank."""
    assert isinstance(place, LocalPlace | ObjectPlace)
    root = Path(place.url)
    (found,) = (root / f"step-{step:08d}").rglob(f"rank-{rank:05d}.safetensors")
    return found


@pytest.mark.parametrize("at", [0, 5, 300, -1])
def test_a_flipped_bit_is_named_with_its_place(at: int, place: Place) -> None:
    whole = state()
    add(place, 5, [rows(whole, rank, 2) for rank in range(2)])
    path = victims(place, 5, 1)
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    begin = at % len(data) // 256 * 256
    end = min(begin + 256, len(data)) - 1
    wanted = hash_of(data[begin : end + 1])
    for look in (lambda: place.verify(5), lambda: read_all(place.open(5))):
        with pytest.raises(Damaged) as caught:
            look()
        text = caught.value.message
        assert f"rank-00001.safetensors (rank 1) has XXH3-128 {wanted} in bytes {begin} to {end}," in text
        (file,) = (f for f in place.manifest(5).files if "00001" in f.file)
        assert text.endswith(f"the manifest has {file.hashes[begin // 256]}")
    place.verify(5, 0, 2)  # the other file
    with pytest.raises(Damaged):
        place.verify(5, 1, 2)


def read_all(weights: CheckpointWeights) -> None:
    for key, entry in weights.manifest.tensors.items():
        kind, _, name = key.partition("/")
        weights.read_kind(kind, name, Box.whole(entry.shape), weights._dtype(key, entry))


def test_what_is_cut_off_grows_or_goes(place: Place) -> None:
    whole = state()
    for step, change in enumerate(("cut", "grown", "gone"), start=1):
        add(place, step, [rows(whole, rank, 2) for rank in range(2)])
        path = victims(place, step, 0)
        data = path.read_bytes()
        if change == "gone":
            path.unlink()
        else:
            path.write_bytes(data[:-1] if change == "cut" else data + b"\0")
        why = "is missing" if change == "gone" else rf"has \d+ bytes, the manifest has {len(data)}"
        with pytest.raises(Damaged, match=why):
            place.verify(step)
        with pytest.raises(Damaged, match=why):
            place.open(step).read("w", Box.whole((10, 7)), torch.float32)


def test_unreachable_storage_is_not_damage(tmp_path: Path) -> None:
    """A checkpoint that cannot be seen for a while must not be quarantined for it."""
    place = LocalPlace(tmp_path / "checkpoints")
    place.prepare()
    add(place, 5, [rows(state(), 0, 1)])
    weights = place.open(5)
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    with pytest.raises(StorageError, match="No such file or directory") as caught:
        weights.read("w", Box.whole((10, 7)), torch.float32)
    assert caught.value.kind == "missing"


def test_header_and_manifest_must_agree(place: Place) -> None:
    """The hashes are right: whoever wrote the file was wrong."""
    add(place, 5, [rows(state(), 0, 1)])
    for change in ({"dtype": "F64"}, {"shape": [7, 10]}, {"data_offsets": [0, 4]}, {"data_offsets": None}):
        weights = place.open(5)
        (file,) = weights.manifest.files
        tensors, _ = weights._files.header(file.file)
        tensors["model/w"] |= change
        with pytest.raises(Damaged, match=r"has model/w as .*, the manifest as F32"):
            weights.read("w", Box.whole((10, 7)), torch.float32)
        weights.close()


def test_what_is_missing_is_never_invented(place: Place) -> None:
    add(place, 5, [rows(state(), rank, 3) for rank in range(3)])
    weights = place.open(5)
    with pytest.raises(Damaged, match="no tensor model/v"):
        weights.read("v", Box((0,), (1,)), torch.float32)
    weights.manifest.tensors["model/w"].parts.pop()
    with pytest.raises(Damaged, match="56 of 70 values"):
        weights.read("w", Box.whole((10, 7)), torch.float32)
    weights.manifest.tensors["model/w"].dtype = "float8"
    with pytest.raises(Damaged, match="unknown type 'float8'"):
        weights.read("w", Box.whole((10, 7)), torch.float32)


class Counting(FolderSource):
    """Counts what is read, and how much of it at a time lies in memory."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(folder)
        self.threads = threads
        self.reads: list[tuple[int, int]] = []
        self._counting = threading.Lock()

    def read_into(self, file: str, buffer: memoryview, offset: int) -> None:
        with self._counting:
            self.reads.append((offset, len(buffer)))
        super().read_into(file, buffer, offset)


CHUNK = 1000


def counted(folder: Path, size: int, threads: int, cache_bytes: int) -> tuple[bytes, VerifiedFiles, Counting]:
    data = random.Random(1).randbytes(size)
    (folder / "rank-00000.safetensors").write_bytes(data)
    hashes = [hash_of(data[begin:end]) for begin, end in spans(size, CHUNK)]
    source = Counting(folder, threads)
    file = File("rank-00000.safetensors", size, CHUNK, hashes)
    return data, VerifiedFiles(source, [file], cache_bytes=cache_bytes), source


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_small_reads_one_after_the_other_read_each_chunk_once(threads: int, tmp_path: Path) -> None:
    data, files, source = counted(tmp_path, 20_500, threads, 16 * CHUNK)
    for begin in range(0, len(data), 70):
        out = bytearray(min(70, len(data) - begin))
        files.read_into("rank-00000.safetensors", memoryview(out), begin)
        assert out == data[begin : begin + 70]
        assert files._cached_bytes <= 16 * CHUNK
    assert sorted(source.reads) == [(b, e - b) for b, e in spans(len(data), CHUNK)]
    files.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_whole_chunks_go_straight_to_where_they_are_wanted(threads: int, tmp_path: Path) -> None:
    data, files, source = counted(tmp_path, 20_500, threads, 4 * CHUNK)
    for begin, end in (
        (0, 20_500),
        (0, 1000),
        (999, 5001),
        (1000, 20_500),
        (19_999, 20_500),
        (300, 400),
        (7, 7),
    ):
        out = bytearray(end - begin)
        files.read_into("rank-00000.safetensors", memoryview(out), begin)
        assert out == data[begin:end], (begin, end)
    assert len(files._chunks) <= 4
    files.close()
    source.reads.clear()
    files.read_into("rank-00000.safetensors", memoryview(bytearray(20_500)), 0)
    assert files._cached_bytes == 0, "nothing of it was kept"
    assert len(source.reads) == 21
    files.close()


def test_a_read_that_failed_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, files, _ = counted(tmp_path, 5000, 2, 16 * CHUNK)
    real = Counting.read_into
    refused = iter([True])

    def once(self: Counting, file: str, buffer: memoryview, offset: int) -> None:
        if next(refused, False):
            raise StorageError("unreachable", "read", file, "no answer")
        real(self, file, buffer, offset)

    monkeypatch.setattr(Counting, "read_into", once)
    out = bytearray(10)
    with pytest.raises(StorageError, match="no answer"):
        files.read_into("rank-00000.safetensors", memoryview(out), 1500)
    files.read_into("rank-00000.safetensors", memoryview(out), 1500)
    assert out == data[1500:1510]
    files.close()


def test_beyond_the_end_and_of_another_file(tmp_path: Path) -> None:
    _, files, _ = counted(tmp_path, 5000, 2, 16 * CHUNK)
    with pytest.raises(Damaged, match="has 5000 bytes, 5001 are required"):
        files.read_into("rank-00000.safetensors", memoryview(bytearray(2)), 4999)
    with pytest.raises(Damaged, match="the manifest has no file rank-00001"):
        files.read_into("rank-00001.safetensors", memoryview(bytearray(2)), 0)
    files.close()


def test_verifying_stops_on_request(tmp_path: Path) -> None:
    _, files, source = counted(tmp_path, 20_500, 1, CHUNK)
    counts: list[int] = []
    with pytest.raises(verified.Stopped):
        files.verify(count=counts.append, stop=lambda: len(counts) == 3)
    assert counts == [CHUNK] * 3
    files.verify(count=counts.append)
    assert sum(counts) == 20_500 + 3 * CHUNK
    assert source.reads[-1] == (20_000, 500)
    files.close()
