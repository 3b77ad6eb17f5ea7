"""From what a job names as its data to a token store that fits the job."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seatrial.base.errors import Diagnostic, InputError, RunFailed
from seatrial.data.manifest import is_store
from seatrial.data.readers import Reader
from seatrial.data.sources import BUILTIN_LIBRARY, Found, find, refuse_remote
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import Tokenizer, load_tokenizer
from seatrial.data.writer import DEFAULT_SHARD_TOKENS, StoreWriter, temporary_prefix

# Called with (bytes read, bytes in all, what is being read).
Progress = Callable[[int, int, str], None]

# Goes into the names of cached stores: a change of what `prepare` writes must not meet an old cache.
_FORMAT = 1
_BATCH_BYTES = 1 << 22


class DataSection(Protocol):
    """The two keys of a job's [data] section that are used here."""

    @property
    def train(self) -> str: ...

    @property
    def tokenizer(self) -> str: ...


def prepare(
    sources: Sequence[str],
    tokenizer_spec: str,
    out: Path | str,
    *,
    text_key: str = "text",
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    progress: Progress | None = None,
    force: bool = False,
) -> TokenStore:
    """Tokenise `sources` into a new store at `out`; `store.manifest.source` tells what was read and skipped.

    InputError: nothing to read, unreadable files and lines (up to 20 at once), an `out` that exists.
    RunFailed: the disk gave out. Then nothing is left at `out`, or what was there before.
    """
    refuse_remote(str(out))
    out = Path(out)
    tokenizer = load_tokenizer(tokenizer_spec)
    found = find(sources)
    reader = Reader(text_key)
    with StoreWriter(out, tokenizer, shard_tokens=shard_tokens, replace=force) as writer:
        try:
            empty = _tokenise(found, reader, tokenizer, writer, progress)
            if reader.problems:
                raise InputError(reader.problems)
            if writer.n_tokens == 0:
                raise InputError(
                    f"no text in {', '.join(sources)}: {len(found.files)} files, every document empty",
                    hint="name files that hold text",
                )
            return writer.finish(
                {
                    "sources": list(sources),
                    "text_key": text_key,
                    "n_files": len(found.files),
                    "n_bytes": sum(f.size for f in found.files),
                    "skipped_files": dict(sorted(found.skipped.items())),
                    "empty_documents": empty,
                    "replaced_characters": reader.replaced,
                    "files_with_replaced_characters": reader.replaced_files,
                }
            )
        except OSError as e:
            raise RunFailed(
                f"cannot write the token store {out}: {e.strerror or e}",
                hint="free some space, or give another folder, and run it again",
            ) from e


def _tokenise(
    found: Found, reader: Reader, tokenizer: Tokenizer, writer: StoreWriter, progress: Progress | None
) -> int:
    """Append every document to `writer`; returns how many were empty. After a first problem it only reads on."""
    total = sum(f.size for f in found.files)
    pieces: list[bytes] = []
    ends: list[bool] = []  # whether the document ends after pieces[i]
    size, empty = 0, 0
    inside = False  # whether the document being read has pieces, here or written already
    begins = True  # whether pieces[0] begins a document

    def flush(name: str) -> None:
        nonlocal begins, size
        if pieces and not reader.problems:
            tokens, starts = _join(tokenizer, pieces, ends, begins)
            writer.append(tokens, starts)
        if pieces:
            begins = ends[-1]
        pieces.clear()
        ends.clear()
        size = 0
        if progress is not None:
            progress(reader.bytes_done, total, name)

    for file in found.files:
        for piece in reader.documents(file):
            if piece is None:
                if inside:
                    ends[-1] = True
                else:
                    empty += 1
                inside = False
            elif piece:
                # Before adding, never after: an end that follows must find its piece still here.
                if size >= _BATCH_BYTES:
                    flush(file.name)
                pieces.append(piece)
                ends.append(False)
                size += len(piece)
                inside = True
        if inside:
            # The file broke off inside a document (a problem is noted): the next file is another one.
            ends[-1], inside = True, False
    flush(found.files[-1].name)
    return empty


def _join(
    tokenizer: Tokenizer, pieces: list[bytes], ends: list[bool], begins: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens of all pieces with the ends of documents between them, where documents begin)."""
    encoded = tokenizer.encode_many(pieces)
    end_id = tokenizer.end_of_document
    has_end = np.array(ends) if end_id is not None else np.zeros(len(ends), dtype=bool)
    lengths = np.array([len(e) for e in encoded], dtype=np.int64) + has_end
    stops = np.cumsum(lengths)
    tokens = np.empty(int(stops[-1]), dtype=np.uint32 if tokenizer.vocab_size > 1 << 16 else np.uint16)
    starts = stops - lengths
    for ids, start in zip(encoded, starts.tolist(), strict=True):
        tokens[start : start + len(ids)] = ids
    if end_id is not None:
        tokens[stops[has_end] - 1] = end_id
    first = np.array([begins, *ends[:-1]])
    # A document of no tokens (a normaliser can drop all of a text) has no place of its own.
    return tokens, starts[first & (starts < len(tokens))]


def data_cache(root: Path) -> Path:
    """Where the runs below `root` keep data that was not prepared beforehand."""
    return root / ".data"


def resolve_store(
    data: DataSection, cache_root: Path, base_folder: Path, progress: Progress | None = None
) -> TokenStore:
    """The token store a job trains on: `data.train` itself, or prepared once into `cache_root` and reused.

    Relative paths are taken from `base_folder`. The cache's name holds a digest of the source's files
    (paths, sizes, times) and of the tokenizer. Of several callers at once one prepares, the others wait.
    """
    refuse_remote(data.train)
    tokenizer_spec = data.tokenizer if data.tokenizer == "bytes" else str(base_folder / data.tokenizer)
    source = data.train
    if not source.startswith("builtin:"):
        path = base_folder / source
        if is_store(path):
            return TokenStore.open(path)
        source = str(path)
    tokenizer = load_tokenizer(tokenizer_spec)
    digest = _source_digest(source, find([source]), tokenizer)
    stem = "python-library" if source == BUILTIN_LIBRARY else Path(source).name
    folder = cache_root / f"{re.sub(r'[^A-Za-z0-9._-]', '-', stem).lstrip('.-') or 'data'}-{digest[:12]}"
    if (cached := _open_cached(folder)) is not None:
        return cached
    with _locked(folder):
        if (cached := _open_cached(folder)) is not None:
            return cached
        # Under the lock nobody else writes here: these are of processes that died.
        for left in cache_root.glob(temporary_prefix(folder) + "*"):
            shutil.rmtree(left, ignore_errors=True)
        return prepare([source], tokenizer_spec, folder, progress=progress, force=True)


def _source_digest(source: str, found: Found, tokenizer: Tokenizer) -> str:
    files: list[list[Any]]
    if source == BUILTIN_LIBRARY:
        # No times: another installation of the same Python is the same corpus.
        files = [[f.name, f.size] for f in found.files]
        version = platform.python_version()
    else:
        files = [[f.name, f.size, f.mtime_ns] for f in found.files]
        version = ""
    return hashlib.sha256(json.dumps([_FORMAT, version, tokenizer.digest, files]).encode()).hexdigest()


def _open_cached(folder: Path) -> TokenStore | None:
    """The cached store, or None where there is none that can be used: it is prepared again then."""
    if not folder.exists():
        return None
    try:
        return TokenStore.open(folder)
    except InputError:
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = folder.parent / f".{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "w", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as e:
        raise InputError(
            f"cannot keep prepared data in {folder.parent}: {e.strerror}",
            hint="prepare it elsewhere with `seatrial data prepare` and name that folder as data.train",
        ) from e
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_store(
    store: TokenStore, *, vocab_size: int, sequence_length: int, global_batch: int, tokenizer_spec: str
) -> None:
    """InputError with every reason why a model of `vocab_size` cannot train on `store`.

    A step takes `global_batch` samples of `sequence_length` tokens, and each sample one token more to predict.
    """
    problems = []
    bad = next((s for s in store.manifest.shards if s.max_token >= vocab_size), None)
    if bad is not None:
        problems.append(
            Diagnostic(
                f"token id {bad.max_token} in {store.folder / bad.file} is beyond the vocabulary of {vocab_size}",
                hint=f"the store's tokenizer {store.tokenizer.name!r} has {store.tokenizer.vocab_size} ids: "
                "use a model with at least that vocab_size, or another tokenizer",
            )
        )
    samples = max(0, store.n_tokens - 1) // sequence_length
    if samples < global_batch:
        problems.append(
            Diagnostic(
                f"{store.folder} holds {store.n_tokens} tokens, {samples} samples of {sequence_length}: "
                f"fewer than one global batch of {global_batch}",
                hint="give more data, or a smaller train.global_batch or train.sequence_length",
            )
        )
    tokenizer = load_tokenizer(tokenizer_spec)
    if tokenizer.digest != store.tokenizer.digest:
        problems.append(
            Diagnostic(
                f"{store.folder} was made with the tokenizer {store.tokenizer.name!r} "
                f"(digest {store.tokenizer.digest[:12]}), the job names {tokenizer.name!r} "
                f"(digest {tokenizer.digest[:12]})",
                hint="set data.tokenizer to the tokenizer that made the store, or prepare the store again",
            )
        )
    if problems:
        raise InputError(problems)
