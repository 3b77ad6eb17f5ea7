"""A token store: flat little-endian token shards, a document index for each, and a manifest with hashes.

    shard-00000.bin   uint16 or uint32 tokens, the documents concatenated; then, if some do not count in the loss, a bit for
                      each (`mask.py`)
    shard-00000.idx   uint64 starts of the documents that begin in this shard, in tokens from its start
    shard-00000.xxh3  hashes of the shard's chunks, 16 bytes each
    manifest.json     sizes, hashes, tokenizer, source

A document may continue in the next shard. Reading uses `pread`, not a memory map: a file that shrinks or a
file system that fails then raises an error with the file's name, while a map would kill the process by SIGBUS.

Nothing is used before it was verified: of a shard, the chunk that contains it, once per process; of an index, all of
it. So a start costs the same whatever the size of the store, and damage is reported before a step is trained on it.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from seatrial.base.errors import Diagnostic, InputError, RunFailed
from seatrial.base.files import open_file, read_bytes
from seatrial.data.chunks import CHUNK_BYTES, RESTORE_HINT, ChunkHasher, ChunkHashes, MadeHashes, parse
from seatrial.data.documents import DocumentIndex, Positions
from seatrial.data.in_use import hold
from seatrial.data.manifest import IndexFile, Manifest, ShardFile, prepare_hint, read_manifest
from seatrial.data.mask import Bits, mask_bytes, unpack_mask
from seatrial.data.shards import VerifiedFile

# Open files kept per store: enough for every shard of most stores, far below the usual limit of 1,024.
_OPEN_FILES = 128
_HASH_BLOCK = 1 << 22

HashProgress = Callable[[int, int, str], None]
Tokens = npt.NDArray[np.unsignedinteger]


class ShardReader(Protocol):
    """Reads bytes of one shard's tokens."""

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` (bytes, at least one) from byte `offset` on; InputError if they cannot be verified."""


class TokenStore:
    """A read-only sequence of `n_tokens` tokens; safe to read from several threads and after a fork."""

    ahead = 1  # steps that a loader should prefetch
    _indexes_kept = _OPEN_FILES

    def __init__(self, folder: Path, manifest: Manifest, made_hashes: Path | None = None) -> None:
        """`made_hashes`: a folder for the hashes of shards that have none; without it those are not verified."""
        self.folder = folder
        self.manifest = manifest
        self.tokenizer = manifest.tokenizer
        self.n_tokens = manifest.n_tokens
        self.n_documents = manifest.n_documents
        self.max_token = manifest.max_token
        self.dtype = np.dtype("<u2" if manifest.dtype == "uint16" else "<u4")
        # starts[i] is the first token of shard i; the last entry is n_tokens.
        self._starts = [0, *accumulate(s.n_tokens for s in manifest.shards)]
        self._made = None if made_hashes is None else MadeHashes(made_hashes)
        # One bit per verified chunk (256 KiB), allocated when a shard is first used.
        self._seen: dict[int, bytearray] = {}
        self._indexes_seen: set[int] = set()
        # lru_cache is thread-safe without a lock of ours, which a fork could copy while it is held.
        # Nothing cached refers to the store: files close as soon as the store is no longer referenced.
        self._file = lru_cache(maxsize=_OPEN_FILES)(self._shard_opener())
        self._index = lru_cache(maxsize=self._indexes_kept)(self._index_opener())

    @property
    def place(self) -> str:
        """Path or address of the store, as its user would write it."""
        return str(self.folder)

    @property
    def address(self) -> str:
        """`place`, independent of the working folder: another process opens the store by it."""
        return str(self.folder.absolute())

    def where(self, file: str) -> str:
        """The path or address of one of its files."""
        return str(self.folder / file)

    def identity(self) -> dict[str, object]:
        """Identity of the samples: the content of the shards, masks included, and their tokenizer."""
        digest = hashlib.sha256("".join(s.sha256 for s in self.manifest.shards).encode()).hexdigest()
        return {"data.tokens_sha256": digest, "data.tokenizer_digest": self.tokenizer.digest}

    @property
    def digest(self) -> str:
        """SHA-256 of its manifest, which contains hashes of everything else: a recreated store has another digest."""
        return hashlib.sha256(self.manifest.model_dump_json().encode()).hexdigest()

    @classmethod
    def open(
        cls, folder: Path | str, *, check_sizes: bool = True, made_hashes: Path | None = None
    ) -> TokenStore:
        """The store in `folder`, its files' sizes compared with the manifest; InputError lists what is wrong."""
        folder = Path(folder)
        store = cls(folder, read_manifest(folder), made_hashes)
        if check_sizes and (problems := store.wrong_sizes()):
            hint = prepare_hint(folder) + " --force"
            raise InputError([Diagnostic(p, file=f, hint=hint) for f, p in problems])
        return store

    def hold(self) -> None:
        """Lock this store against replacement until the last reference to this object is gone.

        RunFailed if it has just been replaced; OSError if the file system has no locks.
        """
        fd = hold(self.folder)
        weakref.finalize(self, os.close, fd)
        if read_manifest(self.folder) != self.manifest:
            raise RunFailed(f"{self.place} has just been replaced", hint="run the same command again")

    # -- files and hashes

    def _shard_opener(self) -> Callable[[int], ShardReader]:
        """A function that opens shard n for reading. It must not refer to the store."""
        folder, shards, seen, made = self.folder, self.manifest.shards, self._seen, self._made

        def open_shard(n: int) -> ShardReader:
            shard, path = shards[n], folder / shards[n].file
            chunk_bytes = CHUNK_BYTES if shard.chunks is None else shard.chunks.chunk_bytes
            bits = seen.setdefault(n, bytearray(-(-shard.bytes // chunk_bytes) // 8 + 1))
            return VerifiedFile(path, _hashes_of(folder, shard, made), bits, chunk_bytes)

        return open_shard

    def _index_opener(self) -> Callable[[int], DocumentIndex]:
        """A function that opens and verifies the document index of shard n. It must not refer to the store."""
        folder, shards, seen = self.folder, self.manifest.shards, self._indexes_seen

        def open_index(n: int) -> DocumentIndex:
            index = shards[n].index
            path = folder / index.file
            if n not in seen:
                check_index(index, str(path), _blocks(path))
                seen.add(n)
            return DocumentIndex.open(path, index.n_documents)

        return open_index

    def _size(self, file: str) -> int:
        """Bytes of `file`; OSError if it does not exist."""
        return (self.folder / file).stat().st_size

    def _blocks(self, file: str) -> Iterator[bytes]:
        """The content of `file`, in blocks; OSError if it cannot be read."""
        return _blocks(self.folder / file)

    def _files(self) -> list[tuple[str, int, str, str]]:
        """(file, bytes, name of the hash, hash) of every data file, from the manifest."""
        found = []
        for s in self.manifest.shards:
            found.append((s.file, s.bytes, "SHA-256", s.sha256))
            found.append((s.index.file, s.index.bytes, "SHA-256", s.index.sha256))
            if s.chunks is not None:
                found.append((s.chunks.file, s.chunks.bytes, "XXH3-128", s.chunks.xxh3_128))
        return found

    def wrong_sizes(self) -> list[tuple[str, str]]:
        """(place, problem) of each file that is missing, truncated or too long."""
        problems = []
        for file, expected, _, _ in self._files():
            try:
                actual = self._size(file)
            except OSError as e:
                problems.append((self.where(file), f"cannot be read: {e.strerror}"))
                continue
            if actual != expected:
                what = "truncated" if actual < expected else "too long"
                problems.append((self.where(file), f"{what}: {actual} bytes, the manifest has {expected}"))
        return problems

    def verify(self, progress: HashProgress | None = None) -> list[tuple[str, str]]:
        """(place, problem) of each file whose size or hash does not match the manifest; empty: all intact."""
        problems = self.wrong_sizes()
        known = {place for place, _ in problems}
        files = self._files()
        total, done = sum(size for _, size, _, _ in files), 0
        shards = {s.file: s for s in self.manifest.shards}
        for file, size, kind, expected in files:
            if self.where(file) not in known:
                shard = shards.get(file)
                chunks = None if shard is None else shard.chunks
                # Include the chunk length: with a wrong one every chunk hash would be wrong.
                by_chunk = None if chunks is None else ChunkHasher(chunks.chunk_bytes)
                seen = None if shard is None else _Content(self.dtype, shard.n_tokens * self.dtype.itemsize)
                try:
                    state = hashlib.sha256() if kind == "SHA-256" else xxhash.xxh3_128()
                    actual = _hash(state, self._blocks(file), by_chunk, seen)
                except OSError as e:
                    problems.append((self.where(file), f"cannot be read: {e.strerror}"))
                else:
                    if actual != expected:
                        problem = f"damaged: {kind} {actual}, the manifest has {expected}"
                        problems.append((self.where(file), problem))
                    elif (
                        chunks is not None
                        and by_chunk is not None
                        and xxhash.xxh3_128_hexdigest(by_chunk.finish()) != chunks.xxh3_128
                    ):
                        problems.append((self.where(chunks.file), f"not the hashes of {file}"))
                    elif shard is not None and seen is not None and seen.largest != shard.max_token:
                        problem = f"its largest token is {seen.largest}, the manifest has {shard.max_token}"
                        problems.append((self.where(file), problem))
                    elif shard is not None and seen is not None and seen.counted != (shard.n_counted or 0):
                        problem = f"{seen.counted} tokens count, the manifest has {shard.n_counted}"
                        problems.append((self.where(file), problem))
            done += size
            if progress is not None:
                progress(done, total, file)
        return problems

    # -- tokens

    def locate(self, position: int) -> tuple[str, int]:
        """(path or address of the file, token within that file) of token `position` of the store."""
        shard = self._shard_of(position)
        return self.where(self.manifest.shards[shard].file), position - self._starts[shard]

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) as int64, across shards; ValueError outside the store."""
        row: npt.NDArray[np.int64] = self.rows([start], length)[0].astype(np.int64)
        return row

    def rows(self, starts: Sequence[int], length: int) -> Tokens:
        """[row, token] in the store's own dtype: `length` tokens from each of `starts` on; reads nothing else."""
        out = np.empty((len(starts), length), dtype=self.dtype)
        view = out.reshape(-1).view(np.uint8).data
        width = length * self.dtype.itemsize
        for i, start in enumerate(starts):
            if start < 0 or start + length > self.n_tokens:
                raise ValueError(f"tokens [{start}, {start + length}) are outside a store of {self.n_tokens}")
            if width:
                self._read_row(view[i * width : (i + 1) * width], start)
        return out

    def _read_row(self, row: memoryview, start: int) -> None:
        itemsize = self.dtype.itemsize
        shard = self._shard_of(start)
        done = 0
        while done < len(row):
            offset = start * itemsize + done - self._starts[shard] * itemsize
            count = min(len(row) - done, self._starts[shard + 1] * itemsize - start * itemsize - done)
            self._file(shard).read_into(row[done : done + count], offset)
            done += count
            shard += 1

    @property
    def masked(self) -> bool:
        """Whether some tokens do not count in the loss."""
        return any(s.n_counted is not None for s in self.manifest.shards)

    def counted(self, starts: Sequence[int], length: int) -> Bits:
        """[row, token]: whether each of `length` tokens from each of `starts` on counts in the loss."""
        out = np.ones((len(starts), length), dtype=np.bool_)
        for row, start in zip(out, starts, strict=True):
            shard, done = self._shard_of(start), 0
            while done < length:
                first = start + done - self._starts[shard]
                count = min(length - done, self._starts[shard + 1] - start - done)
                about = self.manifest.shards[shard]
                if about.n_counted is not None:
                    begin, size = mask_bytes(first, count)
                    data = np.empty(size, dtype=np.uint8)
                    self._file(shard).read_into(data.data, about.n_tokens * self.dtype.itemsize + begin)
                    row[done : done + count] = unpack_mask(data, first, count)
                done += count
                shard += 1
        return out

    def _shard_of(self, position: int) -> int:
        return bisect_right(self._starts, position, hi=len(self._starts) - 1) - 1

    # -- documents

    def document_starts(self) -> npt.NDArray[np.uint64]:
        """First token of every document, ascending, in tokens of the whole store; memory for all of them."""
        return self.document_starts_between(0, self.n_tokens).astype(np.uint64)

    def document_starts_between(self, begin: int, end: int) -> Positions:
        """Starts of documents in [begin, end), ascending, in tokens of the whole store, int64."""
        parts = []
        shard = self._shard_of(max(0, begin))
        while shard < len(self.manifest.shards) and self._starts[shard] < end:
            base = self._starts[shard]
            if self.manifest.shards[shard].index.n_documents:
                parts.append(self._index(shard).between(max(0, begin - base), end - base) + base)
            shard += 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _hashes_of(folder: Path, shard: ShardFile, made: MadeHashes | None) -> Callable[[], ChunkHashes] | None:
    """A function that returns the hashes of the shard's chunks; None if it has none and none are made."""
    stored = shard.chunks
    if stored is None:
        return None if made is None else lambda: made.of(shard, folder / shard.file)
    place = folder / stored.file

    def read() -> ChunkHashes:
        try:
            return parse(stored, shard.bytes, read_bytes(place, links=True), str(place))
        except OSError as e:
            raise InputError(
                Diagnostic(f"cannot be read: {e.strerror}", file=str(place), hint=RESTORE_HINT)
            ) from e

    return read


def check_index(index: IndexFile, place: str, blocks: Iterable[bytes]) -> None:
    """Raise InputError unless `blocks` match the document index in the manifest."""
    try:
        found = _hash(hashlib.sha256(), blocks)
    except OSError as e:
        raise InputError(Diagnostic(f"cannot be read: {e.strerror}", file=place, hint=RESTORE_HINT)) from e
    if found != index.sha256:
        problem = f"damaged: SHA-256 {found}, the manifest has {index.sha256}"
        raise InputError(Diagnostic(problem, file=place, hint=RESTORE_HINT))


class _Sink(Protocol):
    def update(self, data: bytes, /) -> object: ...


class _Hash(_Sink, Protocol):
    def hexdigest(self) -> str: ...


class _Content:
    """The largest token in a shard and how many bits of its mask are set, read in blocks of any size."""

    def __init__(self, dtype: np.dtype[np.unsignedinteger], token_bytes: int) -> None:
        self.largest = 0
        self.counted = 0
        self._dtype = dtype
        self._left = token_bytes
        self._rest = b""

    def update(self, data: bytes) -> None:
        data, mask = data[: self._left], data[self._left :]
        self._left -= len(data)
        self.counted += int(np.unpackbits(np.frombuffer(mask, dtype=np.uint8)).sum(dtype=np.int64))
        data = self._rest + data
        count = len(data) // self._dtype.itemsize
        if count:
            self.largest = max(self.largest, int(np.frombuffer(data, self._dtype, count).max()))
        self._rest = data[count * self._dtype.itemsize :]


def _hash(state: _Hash, blocks: Iterable[bytes], *others: _Sink | None) -> str:
    """The digest of `blocks`, which are also passed to the `others`."""
    sinks: list[_Sink] = [state, *(other for other in others if other is not None)]
    for block in blocks:
        for sink in sinks:
            sink.update(block)
    return state.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with open(open_file(path, links=True), "rb", buffering=0) as f:
        while block := f.read(_HASH_BLOCK):
            yield block
