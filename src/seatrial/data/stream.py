"""A token store on an object store: chunks are fetched on demand, verified, and cached on a local disk.

The order of samples is that of a local store, a permutation of all of them. So the next sample may be anywhere, and the
unit of fetching is not a shard but the chunk (256 KiB) that contains the sample. A node that trains at 100,000 tokens
per second on sequences of 4,096 fetches about 25 of them per second, 6 MB. `BatchLoader` prefetches some steps ahead,
so request latency delays nothing as long as the service keeps up.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from seatrial.base.errors import Diagnostic, InputError
from seatrial.data.cache import DiskCache
from seatrial.data.chunks import RESTORE_HINT, ChunkHashes, parse
from seatrial.data.documents import DocumentIndex
from seatrial.data.manifest import MANIFEST, Manifest, ShardFile, parse_manifest
from seatrial.data.mask import Bits
from seatrial.data.store import ShardReader, Tokens, TokenStore, check_index
from seatrial.storage.errors import StorageError
from seatrial.storage.names import join
from seatrial.storage.store import Store, open_store

AHEAD = 4  # steps: several times the duration of a slow request
_REQUESTS = 16  # concurrent, per process
_HASHES_KEPT = 128  # shards: 16 bytes for each 256 KiB of them
_HASH_BLOCK = 1 << 24
_T = TypeVar("_T", bound=np.generic)

# How to make a store that can be streamed: versions that wrote no chunk hashes are older than streaming.
_HINT = "make the store with `seatrial data prepare SOURCE... --out FOLDER` and copy that folder there"


class StreamedStore(TokenStore):
    """A `TokenStore` whose files are on an object store. Nothing is used unverified, neither fetched nor cached data.

    Errors of the object store are StorageError, after its own retries; damaged data is InputError, which names the
    object, the bytes, and both hashes.
    """

    ahead = AHEAD
    _indexes_kept = 16  # in memory: 8 bytes per document

    def __init__(self, objects: Store, manifest: Manifest, cache: DiskCache) -> None:
        self._objects = objects
        key = hashlib.sha256("".join([objects.url, *(s.sha256 for s in manifest.shards)]).encode())
        self._cache = cache
        self._key = key.hexdigest()[:16]
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        super().__init__(Path(objects.url), manifest)

    @classmethod
    def stream(cls, url: str, cache: Path, cache_bytes: int, *, check_sizes: bool = True) -> StreamedStore:
        """The store at `url`. InputError if there is none, it is incomplete, or it has no chunk hashes."""
        objects = open_store(url)
        place = join(url, MANIFEST)
        try:
            data = objects.read(MANIFEST)
        except StorageError as e:
            if e.kind != "missing":
                raise
            raise InputError(
                f"{url} is not a token store: it has no {MANIFEST} ({e.cause})", hint=_HINT
            ) from e
        manifest = parse_manifest(data, place, hint=_HINT)
        if bare := [s.file for s in manifest.shards if s.chunks is None]:
            raise InputError(
                f"{url}: {bare[0]} has no chunk hashes (one of {len(bare)}), so a part of it cannot be verified",
                hint=_HINT,
            )
        store = cls(objects, manifest, DiskCache(cache, cache_bytes))
        largest = max(c.chunk_bytes for s in manifest.shards if (c := s.chunks) is not None)
        if cache_bytes < _REQUESTS * largest:
            raise InputError(
                f"a cache of {cache_bytes} bytes is too small for {_REQUESTS} chunks of {largest} at once",
                hint="set a larger data.cache_gb",
            )
        if check_sizes and (problems := store.wrong_sizes()):
            raise InputError([Diagnostic(p, file=f, hint=_HINT) for f, p in problems])
        return store

    @property
    def place(self) -> str:
        return self._objects.url

    @property
    def address(self) -> str:
        return self._objects.url

    def hold(self) -> None:
        """No-op: an object store has no locks. A replaced object no longer matches the manifest."""

    def where(self, file: str) -> str:
        return join(self._objects.url, file)

    def close(self) -> None:
        """End the fetching threads."""
        if self._pool is not None:
            self._pool[1].shutdown(cancel_futures=True)
            self._pool = None

    def rows(self, starts: Sequence[int], length: int) -> Tokens:
        return self._concurrently(super().rows, starts, length)

    def counted(self, starts: Sequence[int], length: int) -> Bits:
        return self._concurrently(super().counted, starts, length)

    def _concurrently(
        self, read: Callable[[Sequence[int], int], NDArray[_T]], starts: Sequence[int], length: int
    ) -> NDArray[_T]:
        if len(starts) < 2:
            return read(starts, length)
        # One task per row, so that the requests are in flight concurrently.
        waiting: list[Future[NDArray[_T]]] = [
            self._threads().submit(read, [start], length) for start in starts
        ]
        try:
            return np.concatenate([row.result() for row in waiting])
        finally:
            for row in waiting:
                row.cancel()

    def wrong_sizes(self) -> list[tuple[str, str]]:
        # One listing instead of a request for each file.
        found = {entry.name: entry.bytes for entry in self._objects.names()}
        problems = []
        for file, expected, _, _ in self._files():
            actual = found.get(file)
            if actual is None:
                problems.append((self.where(file), "missing"))
            elif actual != expected:
                what = "truncated" if actual < expected else "too long"
                problems.append((self.where(file), f"{what}: {actual} bytes, the manifest has {expected}"))
        return problems

    def _blocks(self, file: str) -> Iterator[bytes]:
        size = next(s for name, s, _, _ in self._files() if name == file)
        for offset in range(0, size, _HASH_BLOCK):
            yield self._objects.read(file, offset, min(_HASH_BLOCK, size - offset))

    def _threads(self) -> ThreadPoolExecutor:
        # A forked child has the pool object, but none of its threads.
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = (os.getpid(), ThreadPoolExecutor(_REQUESTS, thread_name_prefix="fetch"))
        return self._pool[1]

    def _shard_opener(self) -> Callable[[int], ShardReader]:
        shards, objects, cache, key = self.manifest.shards, self._objects, self._cache, self._key
        hashes = lru_cache(maxsize=_HASHES_KEPT)(lambda n: _hashes(objects, cache, key, shards[n]))
        return lambda n: _StreamedShard(objects, cache, key, shards[n], partial(hashes, n))

    def _index_opener(self) -> Callable[[int], DocumentIndex]:
        shards, objects, cache, key = self.manifest.shards, self._objects, self._cache, self._key
        seen = self._indexes_seen

        def open_index(n: int) -> DocumentIndex:
            index = shards[n].index
            place = join(objects.url, index.file)

            def damage(data: bytes) -> str | None:
                return None if n in seen else _problem(lambda: check_index(index, place, [data]))

            def fetch() -> bytes:
                data = objects.read(index.file, 0, index.bytes)
                check_index(index, place, [data])
                return data

            data = cache.get(f"{key}/{index.file}", fetch, damage)
            seen.add(n)
            return DocumentIndex.of(data, index.n_documents, place)

        return open_index


class _StreamedShard:
    """Reads bytes of one shard through the cache."""

    def __init__(
        self,
        objects: Store,
        cache: DiskCache,
        key: str,
        shard: ShardFile,
        hashes: Callable[[], ChunkHashes],
    ) -> None:
        self._objects, self._cache, self._shard = objects, cache, shard
        self._folder = f"{key}/{Path(shard.file).stem}"
        self._hashes = hashes

    def read_into(self, view: memoryview, offset: int) -> None:
        hashes = self._hashes()
        done = 0
        while done < len(view):
            number, inside = divmod(offset + done, hashes.chunk_bytes)
            chunk = self._chunk(hashes, number)
            count = min(len(view) - done, len(chunk) - inside)
            view[done : done + count] = memoryview(chunk)[inside : inside + count]
            done += count

    def _chunk(self, hashes: ChunkHashes, number: int) -> bytes:
        def fetch() -> bytes:
            begin, size = hashes.span(number)
            data = self._objects.read(self._shard.file, begin, size)
            if (problem := hashes.problem(number, data)) is not None:
                place = join(self._objects.url, self._shard.file)
                raise InputError(Diagnostic(problem, file=place, hint=RESTORE_HINT))
            return data

        return self._cache.get(f"{self._folder}/{number:06d}", fetch, partial(hashes.problem, number))


def _hashes(objects: Store, cache: DiskCache, key: str, shard: ShardFile) -> ChunkHashes:
    stored = shard.chunks
    assert stored is not None  # checked by `stream`
    place = join(objects.url, stored.file)

    def damage(data: bytes) -> str | None:
        return _problem(lambda: parse(stored, shard.bytes, data, place))

    def fetch() -> bytes:
        data = objects.read(stored.file, 0, stored.bytes)
        parse(stored, shard.bytes, data, place)
        return data

    return parse(stored, shard.bytes, cache.get(f"{key}/{stored.file}", fetch, damage), place)


def _problem(check: Callable[[], object]) -> str | None:
    """The message of the InputError that `check` raises; None if it raises none."""
    try:
        check()
    except InputError as e:
        return e.message
    return None
