"""A token store: flat little-endian token shards, a document index beside each, and a manifest with hashes.

    shard-00000.bin   uint16 or uint32 tokens, one document after the other
    shard-00000.idx   uint64 starts of the documents that begin in this shard, in tokens from its start
    manifest.json     sizes, hashes, tokenizer, source

A document may run on into the next shard. Reading is `pread`, not a memory map: a file that shrinks or a
file system that fails is then an error with the file's name, where a map would kill the process by SIGBUS.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from seatrial.base.errors import Diagnostic, InputError
from seatrial.data.manifest import Manifest, prepare_hint, read_manifest

# Open files kept a store: enough for every shard of most stores, far below the usual limit of 1,024.
_OPEN_FILES = 128
_HASH_BLOCK = 1 << 22

HashProgress = Callable[[int, int, str], None]


class TokenStore:
    """A read-only sequence of `n_tokens` tokens; safe to read from several threads and after a fork."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tokenizer = manifest.tokenizer
        self.n_tokens = manifest.n_tokens
        self.n_documents = manifest.n_documents
        self.max_token = manifest.max_token
        self.dtype = np.dtype("<u2" if manifest.dtype == "uint16" else "<u4")
        # starts[i] is the first token of shard i; one more at the end: n_tokens.
        self._starts = [0, *accumulate(s.n_tokens for s in manifest.shards)]
        # lru_cache is safe between threads without a lock of ours, which a fork could copy while it is held.
        # The function does not refer to the store: files close as soon as the store is let go.
        self._file = lru_cache(maxsize=_OPEN_FILES)(lambda n: _OpenFile(folder / manifest.shards[n].file))

    def identity(self) -> dict[str, object]:
        """What the samples of a run depend on: the content of the shards, and the tokenizer that made them."""
        digest = hashlib.sha256("".join(s.sha256 for s in self.manifest.shards).encode()).hexdigest()
        return {"data.tokens_sha256": digest, "data.tokenizer_digest": self.tokenizer.digest}

    @classmethod
    def open(cls, folder: Path | str, *, check_sizes: bool = True) -> TokenStore:
        """The store in `folder`, its files' sizes compared with the manifest; InputError names what is wrong."""
        folder = Path(folder)
        store = cls(folder, read_manifest(folder))
        if check_sizes and (problems := store.wrong_sizes()):
            raise InputError(
                [Diagnostic(p, file=str(f), hint=prepare_hint(folder) + " --force") for f, p in problems]
            )
        return store

    def _files(self) -> list[tuple[Path, int, str]]:
        """(path, bytes, SHA-256) of every data file, as the manifest has it."""
        found = []
        for s in self.manifest.shards:
            found.append((self.folder / s.file, s.bytes, s.sha256))
            found.append((self.folder / s.index.file, s.index.bytes, s.index.sha256))
        return found

    def wrong_sizes(self) -> list[tuple[Path, str]]:
        """(file, problem) of each file that is missing, truncated or too long."""
        problems = []
        for path, expected, _ in self._files():
            try:
                actual = path.stat().st_size
            except OSError as e:
                problems.append((path, f"cannot be read: {e.strerror}"))
                continue
            if actual != expected:
                what = "truncated" if actual < expected else "too long"
                problems.append((path, f"{what}: {actual} bytes, the manifest says {expected}"))
        return problems

    def verify(self, progress: HashProgress | None = None) -> list[tuple[Path, str]]:
        """(file, problem) of each file whose size or SHA-256 is not the manifest's; empty: all is as written."""
        problems = self.wrong_sizes()
        known = {path for path, _ in problems}
        files = self._files()
        total, done = sum(size for _, size, _ in files), 0
        for path, size, expected in files:
            if path not in known:
                try:
                    actual = _sha256(path)
                except OSError as e:
                    problems.append((path, f"cannot be read: {e.strerror}"))
                else:
                    if actual != expected:
                        problems.append((path, f"damaged: SHA-256 {actual}, the manifest says {expected}"))
            done += size
            if progress is not None:
                progress(done, total, path.name)
        return problems

    def locate(self, position: int) -> tuple[Path, int]:
        """(file, token within that file) of token `position` of the store."""
        shard = bisect_right(self._starts, position, hi=len(self._starts) - 1) - 1
        return self.folder / self.manifest.shards[shard].file, position - self._starts[shard]

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) as int64, across shards; ValueError outside the store."""
        row: npt.NDArray[np.int64] = self.read_rows([start], length)[0]
        return row

    def read_rows(self, starts: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """[row, token]: `length` tokens from each of `starts` on, as int64; reads nothing else."""
        rows = np.empty((len(starts), length), dtype=self.dtype)
        for row, start in zip(rows, starts, strict=True):
            if start < 0 or start + length > self.n_tokens:
                raise ValueError(f"tokens [{start}, {start + length}) are outside a store of {self.n_tokens}")
            self._fill(row, start)
        return rows.astype(np.int64)

    def _fill(self, row: npt.NDArray[np.unsignedinteger], start: int) -> None:
        shard = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(row):
            offset = start + done - self._starts[shard]
            count = min(len(row) - done, self._starts[shard + 1] - self._starts[shard] - offset)
            self._file(shard).read_into(row[done : done + count], offset * self.dtype.itemsize)
            done += count
            shard += 1

    def document_starts(self) -> npt.NDArray[np.uint64]:
        """First token of every document, ascending, in tokens of the whole store."""
        parts = []
        for s, base in zip(self.manifest.shards, self._starts, strict=False):
            parts.append(
                np.fromfile(self.folder / s.index.file, dtype="<u8").astype(np.uint64) + np.uint64(base)
            )
        return np.concatenate(parts)


class _OpenFile:
    """A descriptor that closes when the last user lets go: another thread may still read an evicted one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise self._lost(e.strerror or str(e)) from e

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read_into(self, out: npt.NDArray[np.unsignedinteger], offset: int) -> None:
        """Fill `out` from byte `offset` on; InputError where the file does not have those bytes."""
        view = out.data.cast("B")
        done = 0
        while done < len(view):
            try:
                n = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as e:
                raise self._lost(e.strerror or str(e)) from e
            if n == 0:
                raise self._lost(
                    f"it ends before byte {offset + len(view)}; it was longer when the store was opened"
                )
            done += n

    def _lost(self, why: str) -> InputError:
        return InputError(
            Diagnostic(
                f"cannot read tokens: {why}",
                file=str(self.path),
                hint=f"check the store with: seatrial data verify {self.path.parent}",
            )
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as f:
        while block := f.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
