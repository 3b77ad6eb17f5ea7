"""The bytes of a checkpoint; none is returned before the chunk that contains it was compared with its hash.

Without torch: `read.py` makes tensors of them.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.hashing import NAME, new_hash
from seatrial.checkpoint.manifest import Damaged, File, Manifest, read_manifest
from seatrial.checkpoint.source import FolderSource, Source

# Chunks kept, so that consecutive small tensors, and boxes scattered over many files, are read once.
CACHE_BYTES = 1 << 27
_SMALLEST_CACHE = 4  # chunks, however large they are
_AT_ONCE_BYTES = 1 << 19  # stays in a core's cache between reading and hashing
_LONGEST_HEADER = 100_000_000  # bytes: the format's own limit
BOXES = "boxes"  # key in a file's metadata; its value is JSON: key -> [offsets, shape of the whole]
_RANK = re.compile(r"(?:.*/)?rank-([0-9]+)\.safetensors")

Stop = Callable[[], bool]
Counted = Callable[[int], None]


class Stopped(Exception):
    """Reading was cancelled."""


def rank_of(file: str) -> int | None:
    """The rank that wrote a part file, from the file's name."""
    match = _RANK.fullmatch(file)
    return int(match[1]) if match else None


class VerifiedFiles:
    """The files of one checkpoint. Not thread-safe; it reads with several threads of its own."""

    def __init__(self, source: Source, files: Sequence[File], *, cache_bytes: int = CACHE_BYTES) -> None:
        """`files`: their entries in the manifest; no other file can be read."""
        self.source = source
        self._files = {file.file: file for file in files}
        self._by_rank = {rank_of(name): name for name in self._files}
        self._cache_bytes = cache_bytes
        self._chunks: OrderedDict[tuple[str, int], Future[memoryview]] = OrderedDict()
        self._cached_bytes = 0
        self._spare: memoryview | None = None
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}
        self._boxes: dict[str, Any] = {}  # file -> where its tensors belong, according to its own metadata
        self._sized: set[str] = set()
        self._last: dict[str, int] = {}  # file -> the chunk that was requested last
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()  # a buffer per thread

    def close(self) -> None:
        """Release files and memory."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._chunks.clear()
        self._cached_bytes = 0
        self._spare = None
        self.source.close()

    def file_of(self, rank: int) -> str | None:
        """The file that `rank` wrote, or None."""
        return self._by_rank.get(rank)

    # -- tensors

    def header(self, file: str) -> tuple[dict[str, Any], int]:
        """(tensors by name, offset of the data) of a safetensors file."""
        if file not in self._headers:
            self._headers[file] = self._read_header(file)
        return self._headers[file]

    def _read_header(self, file: str) -> tuple[dict[str, Any], int]:
        path, size = f"{self.source.where}/{file}", self._described(file).bytes
        if size < 8:
            raise Damaged(f"{path} has {size} bytes and so no header")
        first = bytearray(8)
        self.read_into(file, memoryview(first), 0)
        length = int.from_bytes(first, "little")
        if not 0 < length <= min(size - 8, _LONGEST_HEADER):
            raise Damaged(f"{path} has no header: it would be {length} bytes long")
        text = bytearray(length)
        self.read_into(file, memoryview(text), 8)
        try:
            tensors = json.loads(text)
            own = tensors.pop("__metadata__", {})
            self._boxes[file] = json.loads(own.get(BOXES, "{}"))
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise Damaged(f"the header of {path} cannot be read: {error!r}") from None
        return tensors, 8 + length

    def check_box(self, file: str, key: str, offsets: tuple[int, ...], whole: tuple[int, ...]) -> None:
        """Raise Damaged if the file's own metadata places its part of `key` elsewhere."""
        self.header(file)
        stated = self._boxes[file].get(key)
        if stated is not None and stated != [list(offsets), list(whole)]:
            raise Damaged(
                f"{self.source.where}/{file} places its part of {key} at {stated[0]} of {stated[1]}, the "
                f"manifest at {list(offsets)} of {list(whole)}"
            )

    def find(self, file: str, key: str, *, dtype: str, shape: tuple[int, ...], size: int) -> int:
        """Where the `size` bytes of tensor `key` begin in `file`.

        `dtype` is the format's own name, "F32". Damaged if the file's header disagrees.
        """
        tensors, start = self.header(file)
        found: Any = tensors.get(key)
        try:
            begin, end = found["data_offsets"]
            fits = (found["dtype"], tuple(found["shape"])) == (dtype, shape)
            fits = fits and begin >= 0 and end - begin == size and start + end <= self._files[file].bytes
        except (TypeError, KeyError, ValueError):
            fits = False
        if not fits:
            raise Damaged(
                f"{self.source.where}/{file} has {key} as {found}, the manifest as {dtype} {list(shape)}"
            )
        return int(start + begin)

    # -- bytes

    def read_into(self, file: str, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` with the bytes of `file` starting at `offset`.

        Raises Damaged, which names file, position, rank and both hashes, and StorageError; `buffer` is then undefined.
        """
        described = self._described(file)
        end = offset + len(buffer)
        if end > described.bytes:
            raise Damaged(f"{self.source.where}/{file} has {described.bytes} bytes, {end} are required")
        if not buffer:
            return
        chunk = described.chunk_bytes
        touched = range(offset // chunk, (end - 1) // chunk + 1)
        # A chunk that is wanted as a whole is read directly into `buffer`, and verified there.
        whole = [i for i in touched if offset <= i * chunk and i * chunk + _length(described, i) <= end]
        running: list[Future[None]] = []
        try:
            for i in whole:
                part = buffer[i * chunk - offset :][: _length(described, i)]
                if len(whole) == 1 or self.source.threads == 1:
                    self._read_chunk(described, i, part)
                else:
                    running.append(self._threads().submit(self._read_chunk, described, i, part))
            for i in sorted({touched[0], touched[-1]}.difference(whole)):
                data, begin = self._cached(described, i), i * chunk
                low, high = max(offset, begin), min(end, begin + len(data))
                buffer[low - offset : high - offset] = data[low - begin : high - begin]
        finally:
            wait(running)  # afterwards no thread writes into `buffer` any more
        _first_failure(running)

    def _described(self, file: str) -> File:
        described = self._files.get(file)
        if described is None:
            raise Damaged(f"{self.source.where}: the manifest has no file {file}")
        if file not in self._sized:
            size = self.source.size(file)
            if size != described.bytes:
                raise Damaged(
                    f"{self.source.where}/{file} has {size} bytes, the manifest has {described.bytes}"
                )
            self._sized.add(file)
        return described

    def _cached(self, file: File, i: int) -> memoryview:
        """Chunk `i`, read through the cache; reads ahead if chunks are requested in sequence."""
        key = (file.file, i)
        before, self._last[file.file] = self._last.get(file.file), i
        if key not in self._chunks:
            self._load(file, i)
        self._chunks.move_to_end(key)
        wanted = self._chunks[key]
        if before in (i, i - 1) and self.source.threads > 1:
            # Limited so that the read-ahead of many files does not evict itself from the cache.
            ahead = min(self.source.threads, self._cache_bytes // file.chunk_bytes // (2 * len(self._last)))
            for following in range(i + 1, min(i + 1 + ahead, len(file.hashes))):
                if (file.file, following) not in self._chunks:
                    self._load(file, following)
        try:
            return wanted.result()
        except (OSError, SeatrialError):
            if self._chunks.pop(key, None) is not None:
                self._cached_bytes -= _length(file, i)  # the next request reads it again
            raise

    def _load(self, file: File, i: int) -> None:
        size = _length(file, i)
        room = max(self._cache_bytes, _SMALLEST_CACHE * file.chunk_bytes)
        while self._chunks and self._cached_bytes + size > room:
            (name, old), loading = self._chunks.popitem(last=False)
            self._cached_bytes -= _length(self._files[name], old)
            if not loading.cancel() and loading.done() and loading.exception() is None:
                self._spare = loading.result()  # reusing touched memory is faster than new memory
        self._cached_bytes += size
        spare, self._spare = self._spare, None
        reused = spare if spare is not None and len(spare) == size else None

        def load() -> memoryview:
            buffer = memoryview(bytearray(size)) if reused is None else reused
            self._read_chunk(file, i, buffer)
            return buffer

        if self.source.threads > 1:
            self._chunks[file.file, i] = self._threads().submit(load)
            return
        done: Future[memoryview] = Future()
        try:
            done.set_result(load())
        except (OSError, SeatrialError) as error:  # raised where the chunk is used
            done.set_exception(error)
        self._chunks[file.file, i] = done

    def _read_chunk(self, file: File, i: int, buffer: memoryview) -> None:
        digest, begin, at_once = new_hash(), i * file.chunk_bytes, self._at_once(len(buffer))
        for at in range(0, len(buffer), at_once):
            piece = buffer[at : at + at_once]
            self.source.read_into(file.file, piece, begin + at)
            digest.update(piece)
        self._compare(file, i, digest.hexdigest())

    def _compare(self, file: File, i: int, found: str) -> None:
        if found == file.hashes[i]:
            return
        begin, rank = i * file.chunk_bytes, rank_of(file.file)
        whose = "" if rank is None else f" (rank {rank})"
        raise Damaged(
            f"{self.source.where}/{file.file}{whose} has {NAME} {found} in bytes {begin} to "
            f"{begin + _length(file, i) - 1}, the manifest has {file.hashes[i]}"
        )

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.source.threads, thread_name_prefix="checkpoint")
        return self._pool

    # -- without caching

    def verify(
        self, part: int = 0, parts: int = 1, *, count: Counted | None = None, stop: Stop | None = None
    ) -> None:
        """Read every `parts`-th file, starting with the `part`-th; Damaged names the first chunk that differs.

        `count` is called with the bytes of each chunk, from several threads; if `stop` returns true, Stopped is raised.
        """
        files = [self._described(file) for file in list(self._files)[part::parts]]
        if self.source.threads == 1:
            for file in files:
                for i in range(len(file.hashes)):
                    self._verify_chunk(file, i, count, stop)
            return
        pool = self._threads()
        running: list[Future[None]] = []
        for file in files:
            for i in range(len(file.hashes)):
                if (
                    len(running) >= 4 * self.source.threads
                ):  # bounded: a large checkpoint has hundreds of thousands
                    running.pop(0).result()
                running.append(pool.submit(self._verify_chunk, file, i, count, stop))
        _first_failure(running)

    def _verify_chunk(self, file: File, i: int, count: Counted | None, stop: Stop | None) -> None:
        if stop is not None and stop():
            raise Stopped
        digest, begin, left = new_hash(), i * file.chunk_bytes, _length(file, i)
        buffer = self._buffer(self._at_once(left))
        for at in range(0, left, len(buffer)):
            piece = buffer[: left - at]
            self.source.read_into(file.file, piece, begin + at)
            digest.update(piece)
        self._compare(file, i, digest.hexdigest())
        if count is not None:
            count(left)

    def _at_once(self, size: int) -> int:
        """Bytes per read: from a disk what fits into the core's cache; remotely all, as each read is a request."""
        return max(1, size if self.source.threads > 4 else min(size, _AT_ONCE_BYTES))

    def _buffer(self, size: int) -> memoryview:
        """This thread's own buffer."""
        if len(getattr(self._own, "buffer", b"")) < size:
            self._own.buffer = memoryview(bytearray(size))
        buffer: memoryview = self._own.buffer
        return buffer[:size]


def verify(folder: Path, part: int = 0, parts: int = 1) -> Manifest:
    """Compare the files of a checkpoint's folder with its manifest: presence, size, every byte; the manifest.

    Raises Damaged, which names the first difference; OtherVersion; StorageError. `part` and `parts` let several callers
    share the files.
    """
    return verify_source(FolderSource(folder), read_manifest(folder), part, parts)


def verify_source(
    source: Source, manifest: Manifest, part: int = 0, parts: int = 1, *, stop: Stop | None = None
) -> Manifest:
    """Like `verify`, for the files of `source` with their manifest."""
    files = VerifiedFiles(source, manifest.files)
    try:
        files.verify(part, parts, stop=stop)
    finally:
        files.close()
    return manifest


def _length(file: File, i: int) -> int:
    return min(file.chunk_bytes, file.bytes - i * file.chunk_bytes)


def _first_failure(running: Sequence[Future[None]]) -> None:
    for future in running:
        future.result()
