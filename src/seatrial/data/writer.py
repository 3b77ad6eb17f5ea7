"""Write a token store into a hidden folder next to the target, renamed into place when it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from seatrial.base.atomic import fsync_folder, write_bytes, write_json
from seatrial.base.errors import InputError
from seatrial.data.chunks import CHUNK_BYTES, ChunkHasher
from seatrial.data.in_use import claimed
from seatrial.data.manifest import (
    MANIFEST,
    ChunkFile,
    IndexFile,
    Manifest,
    ShardFile,
    TokenizerInfo,
    is_store,
)
from seatrial.data.mask import Bits, MaskPacker
from seatrial.data.store import TokenStore
from seatrial.data.tokenise import token_type
from seatrial.data.tokenizer import Tokenizer

DEFAULT_SHARD_TOKENS = 1 << 28
_LINK_BLOCK = 1 << 23


class StoreWriter:
    """Context manager: `append` documents, then `finish`; exiting without `finish` leaves nothing behind.

    InputError at once if `folder` cannot become a store: it exists (and `replace` is False), or it
    contains something other than a token store (then also with `replace`, to protect other people's files).
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        replace: bool = False,
        work_folder: WorkFolder | None = None,
        dtype: np.dtype[np.unsignedinteger] | None = None,
    ) -> None:
        """With `work_folder` it continues in a folder that outlives this process and belongs to the caller.

        `dtype` is that of stored tokens; from the tokenizer if missing.
        """
        if shard_tokens < 1:
            raise ValueError(f"a shard needs at least one token, not {shard_tokens}")
        self.folder = folder
        check_target(folder, replace=replace)
        self._tokenizer = TokenizerInfo(
            name=tokenizer.name,
            digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
        )
        self.dtype = token_type(tokenizer) if dtype is None else dtype
        self._shard_tokens = shard_tokens
        self._work_folder = work_folder
        self._shards: list[ShardFile] = [] if work_folder is None else list(work_folder.shards)
        self._shard: _Shard | None = None
        own = folder.parent / f"{temporary_prefix(folder)}{os.getpid()}"
        self._temporary = own if work_folder is None else work_folder.folder

    def __enter__(self) -> StoreWriter:
        if self._work_folder is not None:
            return self
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            # Left by a dead process that had our pid.
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir()
        except OSError as e:
            raise InputError(
                f"cannot write next to {self.folder}: {e.strerror}",
                hint="give an --out folder that you may write to",
            ) from e
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shard is not None:
            self._shard.abandon()
        if self._work_folder is None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def n_tokens(self) -> int:
        """Tokens appended so far."""
        return sum(s.n_tokens for s in self._shards) + (self._shard.n_tokens if self._shard else 0)

    def append(
        self, tokens: npt.NDArray[np.integer], starts: npt.NDArray[np.integer], counted: Bits | None = None
    ) -> None:
        """Add `tokens`; a document begins at each of `starts` (ascending positions in `tokens`).

        `counted`: which of them count in the loss; all if missing.
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
            of_these = None if counted is None else counted[done : done + count]
            self._shard.append(narrow[done : done + count], inside - done, of_these)
            done += count
            if self._shard.n_tokens == self._shard_tokens:
                self._close_shard()

    def link(
        self, path: Path, starts: Iterable[npt.NDArray[np.integer]], progress: Callable[[int], None]
    ) -> None:
        """Add the whole file at `path`, tokens of this store's dtype, as the next shard, by a link to it.

        Documents begin at `starts` in it. It is read once, for its hashes; `progress` is called with the bytes done.
        InputError for an id that is not below the tokenizer's vocabulary size.
        """
        self._close_shard()
        shard = _Shard(self._temporary, len(self._shards), link=path.absolute())
        self._shard = shard
        for block in starts:
            shard.append(np.empty(0, dtype=self.dtype), block)
        with open(path, "rb", buffering=0) as f:
            done = 0
            while data := f.read(_LINK_BLOCK):
                # A short read may end within a token.
                while len(data) % self.dtype.itemsize and (more := f.read(1)):
                    data += more
                tokens = np.frombuffer(data, dtype=self.dtype)
                largest = int(tokens.max())
                if largest >= self._tokenizer.vocab_size:
                    at = done // self.dtype.itemsize + int(tokens.argmax())
                    raise InputError(
                        f"token {at} of {path} is id {largest}, beyond the {self._tokenizer.vocab_size} ids of the "
                        f"tokenizer {self._tokenizer.name!r}",
                        hint="name the tokenizer that made these tokens: --tokenizer, or data.tokenizer",
                    )
                shard.append(tokens, np.empty(0, dtype=np.int64))
                done += len(data)
                progress(done)
        self._close_shard()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shards.append(self._shard.describe())
            self._shard = None
            if self._work_folder is not None:
                self._work_folder.shard_done(self._shards)

    def finish(self, source: dict[str, Any]) -> TokenStore:
        """Write the manifest and move the store into place; ValueError if nothing was appended.

        RunFailed, with everything unchanged, if a run has begun to use the store that would be replaced.
        """
        self._close_shard()
        if not self._shards:
            raise ValueError("a token store needs at least one token")
        with claimed(self.folder):
            self._move_into_place(source)
        return TokenStore.open(self.folder)

    def _move_into_place(self, source: dict[str, Any]) -> None:
        if self._work_folder is not None:
            self._work_folder.clear_up()
        manifest = Manifest(
            schema_version=1,
            tokenizer=self._tokenizer,
            dtype="uint16" if self.dtype.itemsize == 2 else "uint32",
            n_tokens=sum(s.n_tokens for s in self._shards),
            n_documents=sum(s.index.n_documents for s in self._shards),
            max_token=max(s.max_token for s in self._shards),
            shards=self._shards,
            # Replace surrogates, which come from file names that are not UTF-8.
            source=json.loads(json.dumps(source, ensure_ascii=False).encode("utf-8", "replace")),
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


@dataclass(frozen=True)
class WorkFolder:
    """A folder that may contain shards of an earlier attempt, and that stays if this attempt does not finish."""

    folder: Path
    shards: list[ShardFile]  # complete and durable there
    shard_done: Callable[[list[ShardFile]], None]  # called after each shard with all complete ones
    clear_up: Callable[
        [], None
    ]  # called when the folder is about to become the store: removes what is not part of it


def check_target(folder: Path, *, replace: bool) -> None:
    """InputError if `folder` cannot become a token store; changes nothing.

    RunFailed if a run uses the store that would be replaced.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or not is_store(folder):
        raise InputError(
            f"{folder} exists and is not a token store; it is left unchanged",
            hint="give another --out folder",
        )
    if not replace:
        raise InputError(
            f"{folder} already contains a token store",
            hint="--force replaces it; use another --out folder to keep both",
        )
    with claimed(folder):
        pass


def temporary_prefix(folder: Path) -> str:
    """The common prefix of the temporary folder names of a store at `folder`."""
    return f".{folder.name}.tmp-"


class _Shard:
    """One .bin with its .idx and .xxh3 being written, hashed on the way."""

    def __init__(self, folder: Path, number: int, *, link: Path | None = None) -> None:
        """With `link` the tokens are already in that file: it is linked to, and nothing is written to it."""
        self.n_tokens = 0
        self._max_token = 0
        self._tokens = _HashedFile(folder / f"shard-{number:05d}.bin", link)
        self._chunks = ChunkHasher()
        self._chunk_file: ChunkFile | None = None
        self._index = _HashedFile(folder / f"shard-{number:05d}.idx")
        self._mask: MaskPacker | None = None  # only if some token does not count

    def append(
        self,
        tokens: npt.NDArray[np.unsignedinteger],
        starts: npt.NDArray[np.integer],
        counted: Bits | None = None,
    ) -> None:
        if counted is not None and self._mask is None and not counted.all():
            self._mask = MaskPacker(self.n_tokens)
        if self._mask is not None:
            self._mask.append(np.ones(len(tokens), dtype=np.bool_) if counted is None else counted)
        data = np.ascontiguousarray(tokens).view(np.uint8).data
        self._tokens.write(data)
        self._chunks.update(data)
        self._index.write((starts + self.n_tokens).astype("<u8").tobytes())
        self.n_tokens += len(tokens)
        if len(tokens):
            self._max_token = max(self._max_token, int(tokens.max()))

    def close(self) -> None:
        if self._mask is not None:
            mask = self._mask.finish()
            self._tokens.write(mask)
            self._chunks.update(mask)
        self._tokens.close()
        self._index.close()
        digests = self._chunks.finish()
        path = self._tokens.path.with_suffix(".xxh3")
        write_bytes(path, digests)
        self._chunk_file = ChunkFile(
            file=path.name,
            xxh3_128=xxhash.xxh3_128_hexdigest(digests),
            bytes=len(digests),
            chunk_bytes=CHUNK_BYTES,
        )

    def abandon(self) -> None:
        """Close the files, ignoring errors: their content is not needed, so a full disk does not matter."""
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
            chunks=self._chunk_file,
            n_counted=None if self._mask is None else self._mask.n_counted,
        )


class _HashedFile:
    """A file being written, or an existing one that is linked to; hashes the data passed to it."""

    def __init__(self, path: Path, link: Path | None = None) -> None:
        self.path = path
        self.hash = hashlib.sha256()
        self.n_bytes = 0
        self._file: BinaryIO | None = None
        if link is None:
            self._file = open(path, "wb")  # noqa: SIM115  closed by close()
        else:
            path.symlink_to(link)

    def write(self, data: bytes | memoryview) -> None:
        if self._file is not None:
            self._file.write(data)
        self.hash.update(data)
        self.n_bytes += len(data)

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
