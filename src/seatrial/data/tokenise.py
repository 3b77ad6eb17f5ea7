"""Tokenise one part of the sources: read, encode, and write it to its own file with a hash.

part-00000007.bin    per batch: its tokens, then the starts of documents (int64, offsets from the batch's first token), then,
                     if it has conversations, one bit per token: whether it counts in the loss
part-00000007.json   counts, hash, fingerprint of the sources, sealed; written last: without it the part is missing
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from seatrial.base.atomic import write_text
from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import open_file, parse_json, read_bytes
from seatrial.data.conversation import Conversation
from seatrial.data.mask import Bits
from seatrial.data.parts import Part
from seatrial.data.readers import Piece, Reader
from seatrial.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 22

Tokens = npt.NDArray[np.unsignedinteger]
Starts = npt.NDArray[np.int64]
# Tokens, offsets where documents begin, which tokens count in the loss (None: all).
Batch = tuple[Tokens, Starts, Bits | None]
Batches = Iterator[Batch]
# Called with (bytes of the part read, what is being read).
PartProgress = Callable[[int, str], None]


@dataclass(frozen=True)
class PartResult:
    """The result of a part: a file in the folder of parts, or problems."""

    number: int
    fingerprint: str
    lines: int  # of JSONL, in the part's last file: offset for the line numbers of the next part
    read: int = 0  # bytes, decompressed, in the part's last file
    foreign: int = 0  # non-text bytes among them
    batches: tuple[tuple[int, int, bool], ...] = ()  # (tokens, documents that begin, some have bits) of each
    hash: str = ""  # XXH3-128 of the file
    empty: int = 0  # documents without text
    replaced: dict[str, int] = field(default_factory=dict)  # file -> number of non-UTF-8 sequences
    problems: tuple[Diagnostic, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file or a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> PartResult:
        """The inverse of `as_json`; TypeError if `content` is not a result."""
        problems = tuple(Diagnostic(**problem) for problem in content["problems"])
        return cls(**{**content, "problems": problems})


def sealed(content: object) -> str:
    """`content` as JSON with a hash, because JSON with a damaged number may still parse."""
    text = json.dumps(content)
    return json.dumps({"content": content, "xxh3_128": xxhash.xxh3_128_hexdigest(text.encode())})


def unsealed(data: bytes) -> Any:
    """The inverse of `sealed`; ValueError, TypeError or KeyError if `data` was damaged."""
    document = parse_json(data)
    if xxhash.xxh3_128_hexdigest(json.dumps(document["content"]).encode()) != document["xxh3_128"]:
        raise ValueError("damaged")
    return document["content"]


def token_type(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    """The dtype of stored tokens: little-endian uint16 if every id fits, else uint32."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def tokenise_part(
    part: Part,
    reader: Reader,
    tokenizer: Tokenizer,
    folder: Path,
    progress: PartProgress,
    *,
    only_check: bool = False,
) -> PartResult:
    """Tokenise `part` into `folder`. If something in it cannot be read, the result has problems and no file.

    With `only_check` nothing is tokenised: no store will be made, but every problem is to be reported.
    OSError if the file cannot be written.
    """
    reader.problems = []
    reader.replaced = {}
    reader.bytes_done = 0
    path, batches, state = _data_file(folder, part.number), [], xxhash.xxh3_128()
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    sink = _Batches(part, reader, tokenizer, progress)
    try:
        with open(temporary, "wb") as file:
            with contextlib.suppress(InputError):  # the limit of problems; they are in reader.problems
                for tokens, begins, counted in sink.run(only_check):
                    bits = np.empty(0, np.uint8) if counted is None else np.packbits(counted)
                    for array in (tokens, begins.astype("<i8", copy=False), bits):
                        data = np.ascontiguousarray(array).view(np.uint8).data
                        state.update(data)
                        file.write(data)
                    batches.append((len(tokens), len(begins), counted is not None))
            if reader.problems or only_check:
                return PartResult(
                    part.number, part.fingerprint, reader.lines, problems=tuple(reader.problems)
                )
        result = PartResult(
            part.number,
            part.fingerprint,
            reader.lines,
            read=reader.read,
            foreign=reader.foreign,
            batches=tuple(batches),
            hash=state.hexdigest(),
            empty=sink.empty,
            replaced=dict(reader.replaced),
        )
        os.replace(temporary, path)
        # Neither file is fsynced: after a power loss the hash shows whether the part is intact.
        write_text(_result_file(folder, part.number), sealed(result.as_json()), durable=False)
        return result
    finally:
        temporary.unlink(missing_ok=True)


def find_part(part: Part, folder: Path) -> PartResult | None:
    """The result of an earlier attempt at `part`; None if there is none, or it is damaged."""
    try:
        result = PartResult.from_json(unsealed(read_bytes(_result_file(folder, part.number))))
        if result.fingerprint != part.fingerprint:
            return None
        return result if _hash(_data_file(folder, part.number)) == result.hash else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def load_part(result: PartResult, folder: Path, kind: np.dtype[np.unsignedinteger]) -> Batches:
    """The batches of a part in `folder`.

    OSError, before the first batch, if the file is damaged.
    """
    path = _data_file(folder, result.number)
    if _hash(path) != result.hash:
        raise OSError(None, f"{path} has other bytes than were written to it")
    with open(open_file(path), "rb") as f:
        for n_tokens, n_starts, has_bits in result.batches:
            tokens = np.fromfile(f, dtype=kind, count=n_tokens)
            starts = np.fromfile(f, dtype="<i8", count=n_starts).astype(np.int64, copy=False)
            counted = None
            if has_bits:
                bits = np.fromfile(f, dtype=np.uint8, count=-(-n_tokens // 8))
                counted = np.unpackbits(bits, count=n_tokens).view(np.bool_)
            yield tokens, starts, counted


def _hash(path: Path) -> str:
    with open(open_file(path), "rb", buffering=0) as f:
        return hashlib.file_digest(f, xxhash.xxh3_128).hexdigest()


def drop_part(number: int, folder: Path) -> None:
    """Remove a part's files; a no-op if there are none."""
    _result_file(folder, number).unlink(missing_ok=True)
    _data_file(folder, number).unlink(missing_ok=True)


def _data_file(folder: Path, number: int) -> Path:
    return folder / f"part-{number:08d}.bin"


def _result_file(folder: Path, number: int) -> Path:
    return folder / f"part-{number:08d}.json"


class _Batches:
    """The documents of a part, tokenised some megabytes at a time."""

    def __init__(self, part: Part, reader: Reader, tokenizer: Tokenizer, progress: PartProgress) -> None:
        self.empty = 0
        self._part = part
        self._reader = reader
        self._tokenizer = tokenizer
        self._progress = progress
        self._pieces: list[Piece] = []
        self._ends: list[bool] = []  # whether the document ends after _pieces[i]
        self._size = 0
        # Whether _pieces[0] begins a document. A span of text that begins inside a file continues one.
        self._begins = not (part.goes_on and part.spans[0].file.kind == "text")

    def run(self, only_check: bool) -> Batches:
        """Batch by batch; after the first problem it only reads on."""
        inside = False  # whether the document being read has pieces, pending or already written
        for span in self._part.spans:
            for piece in self._reader.documents(span):
                if piece is None:
                    if inside:
                        self._ends[-1] = True
                    else:
                        self.empty += 1
                    inside = False
                elif piece:
                    # Flush before adding, never after: a document end that follows must find its piece still here.
                    if self._size >= _BATCH_BYTES:
                        yield from self._flush(span.file.name, only_check)
                    self._pieces.append(piece)
                    self._ends.append(False)
                    self._size += len(piece.text if isinstance(piece, Conversation) else piece)
                    inside = True
            if inside and span.end is None:
                # The file ended inside a document (a problem is recorded): the next file begins a new one.
                self._ends[-1], inside = True, False
        yield from self._flush(self._part.spans[-1].file.name, only_check)

    def _flush(self, name: str, only_check: bool) -> Batches:
        if self._pieces:
            if not self._reader.problems and not only_check:
                yield _join(self._tokenizer, self._pieces, self._ends, self._begins)
            self._begins = self._ends[-1]
        self._pieces.clear()
        self._ends.clear()
        self._size = 0
        self._progress(min(self._reader.bytes_done, self._part.size), name)


def _join(tokenizer: Tokenizer, pieces: list[Piece], ends: list[bool], begins: bool) -> Batch:
    """The tokens of all pieces, with end-of-document ids after texts.

    A conversation gets none: its chat template writes what ends it.
    """
    chats = [piece for piece in pieces if isinstance(piece, Conversation)]
    said = iter(_encode(tokenizer, chats))
    texts = iter(tokenizer.encode_many([piece for piece in pieces if isinstance(piece, bytes)]))
    pairs = [(next(texts), None) if isinstance(piece, bytes) else next(said) for piece in pieces]
    encoded = [ids for ids, _ in pairs]
    end_id = tokenizer.end_of_document
    has_end = np.array(
        [end_id is not None and c is None and e for (_, c), e in zip(pairs, ends, strict=True)]
    )
    lengths = np.array([len(e) for e in encoded], dtype=np.int64) + has_end
    stops = np.cumsum(lengths)
    tokens = np.empty(int(stops[-1]), dtype=token_type(tokenizer))
    starts = stops - lengths
    for ids, start in zip(encoded, starts.tolist(), strict=True):
        tokens[start : start + len(ids)] = ids
    if end_id is not None:
        tokens[stops[has_end] - 1] = end_id
    first = np.array([begins, *ends[:-1]])
    counted = None
    if chats:
        counted = np.ones(len(tokens), dtype=np.bool_)
        for (ids, of_chat), start in zip(pairs, starts.tolist(), strict=True):
            if of_chat is not None:
                counted[start : start + len(ids)] = of_chat
    # A document without tokens (a normaliser can drop all of a text) has no position of its own.
    return tokens, starts[first & (starts < len(tokens))], counted


def _encode(
    tokenizer: Tokenizer, chats: list[Conversation]
) -> list[tuple[npt.NDArray[np.integer], Bits | None]]:
    if not chats:
        return []
    assert tokenizer.chat is not None  # the reader made them with it
    return [*tokenizer.chat.encode(chats)]
