"""Writing a token store: into a hidden folder beside the target, renamed into place when it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from seatrial.base.atomic import fsync_folder, write_json
from seatrial.base.errors import InputError
from seatrial.data.manifest import (
    MANIFEST,
    IndexFile,
    Manifest,
    ShardFile,
    TokenizerInfo,
    is_store,
)
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import Tokenizer

DEFAULT_SHARD_TOKENS = 1 << 28


class StoreWriter:
    """Context manager: `append` documents, then `finish`; leaving without `finish` leaves nothing behind.

    InputError at once where `folder` cannot become a store: it exists (and `replace` is False), or it
    holds something else than a token store (then also with `replace`: other people's files stay).
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        replace: bool = False,
    ) -> None:
        if shard_tokens < 1:
            raise ValueError(f"a shard needs at least one token, not {shard_tokens}")
        self.folder = folder
        self._check_target(replace)
        self._tokenizer = TokenizerInfo(
            name=tokenizer.name,
            digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
        )
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._shard_tokens = shard_tokens
        self._shards: list[ShardFile] = []
        self._shard: _Shard | None = None
        self._temporary = folder.parent / f"{temporary_prefix(folder)}{os.getpid()}"

    def _check_target(self, replace: bool) -> None:
        folder = self.folder
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return
        if not folder.is_dir() or not is_store(folder):
            raise InputError(
                f"{folder} exists and is no token store; it stays as it is", hint="give another --out folder"
            )
        if not replace:
            raise InputError(
                f"{folder} holds a token store already",
                hint="--force replaces it; another --out folder keeps both",
            )

    def __enter__(self) -> StoreWriter:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            # Of a dead process that had our pid.
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir()
        except OSError as e:
            raise InputError(
                f"cannot write beside {self.folder}: {e.strerror}",
                hint="give an --out folder that you may write to",
            ) from e
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shard is not None:
            self._shard.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def n_tokens(self) -> int:
        """Tokens appended so far."""
        return sum(s.n_tokens for s in self._shards) + (self._shard.n_tokens if self._shard else 0)

    def append(self, tokens: npt.NDArray[np.integer], starts: npt.NDArray[np.integer]) -> None:
        """Add `tokens`; a document begins at each of `starts` (ascending positions in `tokens`).

        ValueError for an id that is not below the tokenizer's vocabulary size.
        """
        if len(tokens) == 0:
            return
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._tokenizer.vocab_size:
            raise ValueError(f"a token id is outside [0, {self._tokenizer.vocab_size})")
        narrow = tokens.astype(self.dtype, copy=False)
        done = 0
        while done < len(tokens):
            if self._shard is None:
                self._shard = _Shard(self._temporary, len(self._shards))
            count = min(len(tokens) - done, self._shard_tokens - self._shard.n_tokens)
            inside = starts[np.searchsorted(starts, done) : np.searchsorted(starts, done + count)]
            self._shard.append(narrow[done : done + count], inside - done)
            done += count
            if self._shard.n_tokens == self._shard_tokens:
                self._close_shard()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shards.append(self._shard.describe())
            self._shard = None

    def finish(self, source: dict[str, Any]) -> TokenStore:
        """Write the manifest and move the store into place; ValueError where nothing was appended."""
        self._close_shard()
        if not self._shards:
            raise ValueError("a token store needs at least one token")
        manifest = Manifest(
            schema_version=1,
            tokenizer=self._tokenizer,
            dtype="uint16" if self.dtype.itemsize == 2 else "uint32",
            n_tokens=sum(s.n_tokens for s in self._shards),
            n_documents=sum(s.index.n_documents for s in self._shards),
            max_token=max(s.max_token for s in self._shards),
            shards=self._shards,
            source=source,
        )
        write_json(self._temporary / MANIFEST, manifest.model_dump())
        old: Path | None = None
        if self.folder.exists() and any(self.folder.iterdir()):
            old = self.folder.parent / f".{self.folder.name}.old-{os.getpid()}"
            os.rename(self.folder, old)
        os.rename(self._temporary, self.folder)
        fsync_folder(self.folder.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        return TokenStore.open(self.folder)


def temporary_prefix(folder: Path) -> str:
    """How the names begin under which a store for `folder` is written."""
    return f".{folder.name}.tmp-"


class _Shard:
    """One .bin and its .idx being written, hashed on the way."""

    def __init__(self, folder: Path, number: int) -> None:
        self.n_tokens = 0
        self._max_token = 0
        self._tokens = _HashedFile(folder / f"shard-{number:05d}.bin")
        self._index = _HashedFile(folder / f"shard-{number:05d}.idx")

    def append(self, tokens: npt.NDArray[np.unsignedinteger], starts: npt.NDArray[np.integer]) -> None:
        self._tokens.write(tokens.tobytes())
        self._index.write((starts + self.n_tokens).astype("<u8").tobytes())
        self.n_tokens += len(tokens)
        self._max_token = max(self._max_token, int(tokens.max()))

    def close(self) -> None:
        self._tokens.close()
        self._index.close()

    def abandon(self) -> None:
        """Let go of the files: what they hold is not wanted, so a full disk does not matter any more."""
        for file in (self._tokens, self._index):
            with contextlib.suppress(OSError):
                file.close()

    def describe(self) -> ShardFile:
        """The manifest's entry; call after `close`."""
        return ShardFile(
            file=self._tokens.path.name,
            n_tokens=self.n_tokens,
            sha256=self._tokens.hash.hexdigest(),
            bytes=self._tokens.n_bytes,
            max_token=self._max_token,
            index=IndexFile(
                file=self._index.path.name,
                sha256=self._index.hash.hexdigest(),
                bytes=self._index.n_bytes,
                n_documents=self._index.n_bytes // 8,
            ),
        )


class _HashedFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.hash = hashlib.sha256()
        self.n_bytes = 0
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed by close()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.n_bytes += len(data)

    def close(self) -> None:
        if not self._file.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
