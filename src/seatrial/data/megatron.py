"""Megatron's pair of files, NAME.bin and NAME.idx: reading and checking the index, and writing both.

NAME.bin holds tokens and nothing else. NAME.idx, all numbers little-endian:

    9 bytes  "MMIDIDX" and two zero bytes
    uint64   1, the version
    uint8    type of the tokens, see TYPES
    uint64   S, number of sequences
    uint64   D, number of entries of the document index: documents + 1
    int32 x S   tokens of each sequence
    int64 x S   its start in NAME.bin, in bytes
    int64 x D   document i is the sequences [entry i, entry i + 1); the first entry is 0, the last is S

After Megatron-LM's description of its "indexed dataset" (megatron/core/datasets/readme.md). A file with several modes
has int8 x S after that; those are refused.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from seatrial.base.atomic import fsync_folder
from seatrial.base.errors import Diagnostic, InputError, RunFailed
from seatrial.base.files import open_file
from seatrial.data.store import TokenStore

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_HEADER = struct.Struct("<9sQBQQ")
_LONGEST = 2**31 - 1  # tokens of a sequence
_ENTRIES = 1 << 20  # read or written at a time
_TOKENS = 1 << 22
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

Positions = npt.NDArray[np.int64]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Pair:
    """The two files of `prefix`, whose index has been checked."""

    prefix: Path
    kind: np.dtype[np.integer]
    n_sequences: int
    n_documents: int
    n_tokens: int
    contiguous: bool  # the sequences cover the .bin, in order

    @property
    def bin(self) -> Path:
        """The file of tokens."""
        return self.prefix.with_name(self.prefix.name + ".bin")

    @property
    def idx(self) -> Path:
        """The index."""
        return self.prefix.with_name(self.prefix.name + ".idx")

    def sequences(self) -> Iterator[tuple[Positions, Positions]]:
        """(first token in the .bin, number of tokens) of the sequences, in blocks."""
        with open(open_file(self.idx, links=True), "rb", buffering=0) as f:
            for first in range(0, self.n_sequences, _ENTRIES):
                n = min(_ENTRIES, self.n_sequences - first)
                lengths = _column(f, _HEADER.size + 4 * first, n, "<i4")
                pointers = _column(f, _HEADER.size + 4 * self.n_sequences + 8 * first, n, "<i8")
                yield pointers // self.kind.itemsize, lengths

    def documents(self) -> Iterator[Positions]:
        """Entries of the document index, in blocks; each begins with the last entry of the previous one."""
        begin = _HEADER.size + 12 * self.n_sequences
        with open(open_file(self.idx, links=True), "rb", buffering=0) as f:
            for first in range(0, self.n_documents, _ENTRIES):
                n = min(_ENTRIES, self.n_documents - first) + 1
                yield _column(f, begin + 8 * first, n, "<i8")

    def document_starts(self) -> Iterator[Positions]:
        """Starts of documents that have tokens, in tokens counted over the concatenated sequences."""
        blocks = (block[:-1] for block in self.documents())
        block = np.empty(0, dtype=np.int64)
        before, number, last = (
            0,
            0,
            -1,
        )  # tokens and sequences before the current block; the last start
        for _, lengths in self.sequences():
            begins = before + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
            number += len(lengths)
            while True:
                inside = block[: np.searchsorted(block, number)]
                if len(inside):
                    starts = begins[inside - number + len(lengths)]
                    # Of documents that begin at the same position, all but the last have no tokens.
                    new = (np.diff(starts, prepend=last) > 0) & (starts < self.n_tokens)
                    last = int(starts[-1])
                    yield starts[new]
                    block = block[len(inside) :]
                if len(block):
                    break
                if (following := next(blocks, None)) is None:
                    return
                block = following
            before = int(begins[-1])


def _column(f: BinaryIO, offset: int, count: int, kind: str) -> Positions:
    """`count` numbers of `kind` starting at byte `offset`; OSError if the file ends before."""
    f.seek(offset)
    data = bytearray(count * np.dtype(kind).itemsize)
    view, done = memoryview(data), 0
    while done < len(data):
        n = f.readinto(view[done:])  # type: ignore[attr-defined]  # every binary file has it
        if not n:
            raise OSError(None, f"{f.name} ends within its tables")
        done += n
    return np.frombuffer(data, dtype=kind).astype(np.int64)


def find_pair(path: Path) -> Path | None:
    """The prefix of the pair at `path` (NAME, NAME.bin or NAME.idx); None if there is none."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if prefix == path and path.exists():
        return None
    idx = prefix.with_name(prefix.name + ".idx")
    if not prefix.with_name(prefix.name + ".bin").is_file():
        return None
    try:
        with open(open_file(idx, links=True), "rb") as f:
            return prefix if f.read(len(MAGIC)) == MAGIC else None
    except OSError:
        return None


def open_pair(path: Path) -> Pair:
    """The pair at `path`, its index read once and checked; InputError lists everything that is wrong."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if not prefix.name:
        raise InputError(
            f"{path} has no name, so it is not a Megatron dataset", hint="give NAME of NAME.bin and NAME.idx"
        )
    idx, data = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    try:
        n_bytes, idx_bytes = data.stat().st_size, idx.stat().st_size
        with open(open_file(idx, links=True), "rb") as f:
            header = f.read(_HEADER.size)
        kind, n_sequences, entries = _header(header, idx, idx_bytes)
        pair = Pair(prefix, kind, n_sequences, entries - 1, 0, True)
        n_tokens, contiguous, problems = _check(pair, n_bytes)
    except OSError as e:
        raise InputError(
            f"cannot read {e.filename or idx}: {e.strerror or e}",
            hint="a Megatron dataset is NAME.bin and NAME.idx; give NAME",
        ) from e
    if problems:
        raise InputError([Diagnostic(problem, file=str(idx)) for problem in problems])
    return Pair(prefix, kind, n_sequences, entries - 1, n_tokens, contiguous)


def _header(header: bytes, idx: Path, idx_bytes: int) -> tuple[np.dtype[np.integer], int, int]:
    def refuse(message: str, hint: str | None = None) -> InputError:
        return InputError(Diagnostic(message, file=str(idx), hint=hint))

    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise refuse("not an index of a Megatron dataset: it does not begin with MMIDIDX")
    _, version, code, n_sequences, entries = _HEADER.unpack(header)
    if version != VERSION:
        raise refuse(f"version {version} of the index; only version {VERSION} is supported")
    name = TYPES.get(code)
    if name is None or name.startswith("float"):
        raise refuse(
            f"type {code} is not a token type" if name is None else f"it contains {name}, not tokens",
            f"integers are: {', '.join(f'{c} {t}' for c, t in TYPES.items() if 'int' in t)}",
        )
    wanted = _HEADER.size + 12 * n_sequences + 8 * entries
    if idx_bytes == wanted + n_sequences and n_sequences:
        raise refuse("it has a mode for each sequence: datasets of several modes are not supported")
    if idx_bytes != wanted:
        what = "truncated" if idx_bytes < wanted else "too long"
        raise refuse(
            f"{what}: {n_sequences} sequences and {entries} document entries are {wanted} bytes, not {idx_bytes}"
        )
    if n_sequences == 0 or entries < 2:
        raise refuse("it has no documents")
    return np.dtype(name).newbyteorder("<"), n_sequences, entries


def _check(pair: Pair, n_bytes: int) -> tuple[int, bool, list[str]]:
    """(tokens, whether the sequences cover the .bin in order, what is wrong)."""
    problems: list[str] = []
    itemsize = pair.kind.itemsize
    if n_bytes % itemsize:
        problems.append(
            f"{pair.bin.name} has {n_bytes} bytes, which is not a whole number of {pair.kind.name}"
        )
    n_tokens, expected, contiguous, number = 0, 0, True, 0
    with open(open_file(pair.idx, links=True), "rb", buffering=0) as f:
        for first in range(0, pair.n_sequences, _ENTRIES):
            n = min(_ENTRIES, pair.n_sequences - first)
            lengths = _column(f, _HEADER.size + 4 * first, n, "<i4")
            pointers = _column(f, _HEADER.size + 4 * pair.n_sequences + 8 * first, n, "<i8")
            bad = (lengths < 0) | (pointers < 0) | (pointers % itemsize != 0)
            # Divided, not multiplied: a damaged number must not overflow.
            bad |= pointers // itemsize > n_bytes // itemsize - lengths
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                problems.append(
                    f"sequence {first + at}: {lengths[at]} tokens from byte {pointers[at]} on are not in "
                    f"{pair.bin.name}, which has {n_bytes} bytes"
                )
                return n_tokens, False, problems
            some = lengths > 0  # the position of an empty sequence is irrelevant
            if some.any():
                begins, ends = pointers[some], (pointers + lengths * itemsize)[some]
                contiguous &= int(begins[0]) == expected and bool((begins[1:] == ends[:-1]).all())
                expected = int(ends[-1])
            n_tokens += int(lengths.sum())
    last = 0
    for block in pair.documents():
        if number == 0 and block[0] != 0:
            problems.append(f"the first document begins with sequence {block[0]}, not 0")
        if (np.diff(block) < 0).any():
            at = number + int(np.flatnonzero(np.diff(block) < 0)[0])
            problems.append(f"document {at} ends before it begins")
            return n_tokens, contiguous, problems
        number, last = number + len(block) - 1, int(block[-1])
    if last != pair.n_sequences:
        problems.append(f"the last document ends with sequence {last}, but there are {pair.n_sequences}")
    if n_tokens == 0:
        problems.append("every document is empty")
    return n_tokens, contiguous and expected == n_bytes, problems


def export_pair(
    store: TokenStore, prefix: Path, *, force: bool = False, progress: Progress | None = None
) -> Pair:
    """Write `store` as PREFIX.bin and PREFIX.idx: one sequence per document, uint16 or int32 according to the store.

    A document of more than 2^31 - 1 tokens becomes several sequences. InputError if the files exist (and not `force`)
    or an id does not fit; RunFailed if the disk fails or is full: a pair that was there is kept, or
    at worst left without its .idx, which no reader accepts.
    """
    if store.masked:
        raise InputError(
            f"{store.place} says which tokens count in the loss, which a Megatron dataset cannot",
            hint="a job of seatrial can name the store itself",
        )
    names = [prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")]
    for path in names:
        if path.is_dir() or (path.exists() and not force):
            raise InputError(f"{path} exists", hint="--force replaces it; use another --out to keep both")
    if store.max_token > _LONGEST:
        raise InputError(f"{store.place} has the token id {store.max_token}, which is not an int32")
    code = 8 if store.dtype.itemsize == 2 else 4
    temporary = [path.with_name(f".{path.name}.tmp-{os.getpid()}") for path in names]
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with open(open_file(temporary[0], _NEW), "wb") as data:
            for first in range(0, store.n_tokens, _TOKENS):
                n = min(_TOKENS, store.n_tokens - first)
                # An id below 2^31 has the same bytes as uint32 and as int32.
                data.write(store.rows([first], n)[0].tobytes())
                if progress is not None:
                    progress(first + n, store.n_tokens, names[0].name)
            _sync(data)
        with open(open_file(temporary[1], _NEW), "wb") as index:
            _write_index(index, store, code)
            _sync(index)
        # The index last: without it the .bin is not a dataset, and an old index next to new data would be wrong.
        names[1].unlink(missing_ok=True)
        for source, target in zip(temporary, names, strict=True):
            os.replace(source, target)
        fsync_folder(prefix.parent)
    except OSError as e:
        raise RunFailed(
            f"cannot write {prefix}.bin and .idx: {e.strerror or e}",
            hint="free some space, or give another --out, and run it again",
        ) from e
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return open_pair(prefix)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write_index(index: BinaryIO, store: TokenStore, code: int) -> None:
    """Write the tables in sequence, each recomputed from the store's own index: memory does not grow with it."""
    n_sequences = sum(len(lengths) for lengths, _ in _sequences(store))
    n_documents = sum(int(begins.sum()) for _, begins in _sequences(store))
    index.write(_HEADER.pack(MAGIC, VERSION, code, n_sequences, n_documents + 1))
    for lengths, _ in _sequences(store):
        index.write(lengths.astype("<i4").tobytes())
    begin = 0
    for lengths, _ in _sequences(store):
        ends = begin + np.cumsum(lengths) * store.dtype.itemsize
        index.write((ends - lengths * store.dtype.itemsize).astype("<i8").tobytes())
        begin = int(ends[-1])
    number = 0
    for lengths, begins in _sequences(store):
        index.write((np.flatnonzero(begins) + number).astype("<i8").tobytes())
        number += len(lengths)
    index.write(struct.pack("<q", n_sequences))


def _sequences(store: TokenStore) -> Iterator[tuple[Positions, npt.NDArray[np.bool_]]]:
    """(number of tokens, whether a document begins) of the sequences that the store becomes, in blocks."""
    open_since = 0  # start of the document that is not yet complete
    for first in range(0, store.n_tokens, _TOKENS):
        until = min(first + _TOKENS, store.n_tokens)
        starts = np.unique(store.document_starts_between(max(first, 1), until))
        bounds = [open_since, *starts.tolist(), *([store.n_tokens] if until == store.n_tokens else [])]
        ends = np.array(bounds, dtype=np.int64)
        lengths = ends[1:] - ends[:-1]
        open_since = bounds[-1]
        if len(lengths):
            yield _split(lengths)


def _split(lengths: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
    pieces = -(-lengths // _LONGEST)
    if int(pieces.max()) == 1:
        return lengths, np.ones(len(lengths), dtype=bool)
    split: list[int] = []
    begins: list[bool] = []
    for length, n in zip(lengths.tolist(), pieces.tolist(), strict=True):
        split += [_LONGEST] * (n - 1) + [length - _LONGEST * (n - 1)]
        begins += [True] + [False] * (n - 1)
    return np.array(split, dtype=np.int64), np.array(begins)
