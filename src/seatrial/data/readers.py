"""Read documents from files: text (one per file), JSONL (one per line), Parquet (one per row), all as valid UTF-8.

A line of JSONL is a text or a conversation.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from seatrial.base.errors import Diagnostic, InputError
from seatrial.data.content import too_foreign
from seatrial.data.conversation import MESSAGES, ChatError, Conversation
from seatrial.data.packed import Unpacked, unpack
from seatrial.data.sources import SourceFile, Span

if TYPE_CHECKING:
    from seatrial.data.chat import Chat

MAX_PROBLEMS = 20
# Larger documents are split at a line end, so that memory stays bounded: a tokenizer uses about 100 bytes per
# token while it works. Only a merge across such a split differs from one call on the whole document.
PIECE_BYTES = 1 << 22
_LONGEST_LINE = 1 << 27  # of JSONL: while a line is parsed, memory holds several copies
_PARQUET_ROWS = 4096
_COPIED = 1 << 20
_BOM = b"\xef\xbb\xbf"
_REPLACEMENT = "\ufffd".encode()

# Pieces of a document, then None at its end. A conversation is one piece.
Piece = bytes | Conversation
Pieces = Iterator[Piece | None]


class Reader:
    """Reads documents and keeps counts; what cannot be read is collected in `problems`, up to MAX_PROBLEMS."""

    def __init__(
        self, text_key: str, scratch: Path, piece_bytes: int | None = None, *, chat: Chat | None = None
    ) -> None:
        """`scratch`: a folder with room for a decompressed Parquet file. Without `chat`, conversations are problems."""
        self.text_key = text_key
        self._chat = chat
        self.piece_bytes = PIECE_BYTES if piece_bytes is None else piece_bytes
        self.problems: list[Diagnostic] = []
        self.bytes_done = 0  # of the files on disk, compressed or not
        self.lines = 0  # of the last span, if it was JSONL
        self.read = 0  # bytes of the last span, decompressed
        self.foreign = 0  # non-text bytes among them
        self.replaced: dict[str, int] = {}  # path of a file -> bytes or characters that were not UTF-8
        self._scratch = scratch

    def documents(self, span: Span) -> Pieces:
        """The documents of `span`; InputError once MAX_PROBLEMS are found.

        A span of text that does not reach the file's end stops inside its document, without a None. Lines are counted
        from the beginning of the span. OSError if the scratch folder is full.
        """
        file = span.file
        self._before, self.read, self.lines, self.foreign = self.bytes_done, 0, 0, 0
        self._path = str(file.path)
        whole = span.begin == 0 and span.end is None
        try:
            with self._opened(file) as f:
                if file.kind == "parquet":
                    yield from self._parquet(span, f)
                else:
                    yield from self._jsonl(span, f) if file.kind == "jsonl" else self._text(span, f)
            status = file.path.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                # Otherwise the result could mix old and new text.
                self._problem(
                    Diagnostic(
                        "changed while it was being read",
                        file=self._path,
                        hint="run it again once nothing writes to it any more, or use a copy",
                    )
                )
            if whole and (problem := foreign_problem(file.path, self.foreign, self.read)) is not None:
                self._problem(problem)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the scratch folder is full: only that needs space
            self._problem(Diagnostic(f"cannot be read: {e.strerror or e}", file=self._path))
        if whole:
            self.bytes_done = self._before + file.size

    @contextlib.contextmanager
    def _opened(self, file: SourceFile) -> Iterator[BinaryIO]:
        """The content of the file, without a byte order mark; seekable unless it is compressed text."""
        with contextlib.ExitStack() as stack:
            f = stack.enter_context(_open(file))
            if file.kind == "parquet" and file.packing is not None:
                # Parquet is read from its end. The unnamed file disappears with this process.
                packed, f = f, stack.enter_context(tempfile.TemporaryFile(dir=self._scratch))
                shutil.copyfileobj(packed, f, _COPIED)
            elif file.kind != "parquet" and f.read(len(_BOM)) != _BOM:
                f = stack.enter_context(_open(file))
            yield f

    def _has_read(self, f: BinaryIO, n: int) -> None:
        """Count `n` more bytes of text, read from `f`."""
        self.read += n
        raw = getattr(f, "raw", None)
        self.bytes_done = self._before + (raw.position if isinstance(raw, Unpacked) else self.read)

    def _problem(self, problem: Diagnostic) -> None:
        self.problems.append(problem)
        self.problems[:] = merged(self.problems)
        if len(self.problems) >= MAX_PROBLEMS:
            raise InputError(self.problems)

    def _text(self, span: Span, f: BinaryIO) -> Pieces:
        for block in cut(f, self.piece_bytes, span.begin, span.end):
            self._has_read(f, len(block))
            yield self._valid(block)
        if span.end is None:
            yield None

    def _valid(self, raw: bytes) -> bytes:
        self.foreign += raw.count(0)
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError:
            fixed = raw.decode("utf-8", errors="replace").encode("utf-8")
            n = fixed.count(_REPLACEMENT) - raw.count(_REPLACEMENT)
            self.foreign += n
            self._count_replaced(n)
            return fixed
        return raw

    def _count_replaced(self, n: int) -> None:
        self.replaced[self._path] = self.replaced.get(self._path, 0) + n

    def _document(self, text: str) -> Pieces:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            # JSON can contain half of a surrogate pair ("\ud800"), which is not a character.
            data = text.encode("utf-8", errors="replace")
            self._count_replaced(sum("\ud800" <= c <= "\udfff" for c in text))
        self.foreign += data.count(0)
        if len(data) <= self.piece_bytes:
            yield data
        else:
            yield from cut(io.BytesIO(data), self.piece_bytes)
        yield None

    def _jsonl(self, span: Span, f: BinaryIO) -> Pieces:
        if span.begin:
            # The line that contains the preceding byte belongs to the previous span.
            f.seek(span.begin - 1)
            _skip_line(f)
        at = f.tell() if f.seekable() else 0
        while (span.end is None or at < span.end) and (line := f.readline(_LONGEST_LINE)):
            n = len(line)
            self.lines += 1
            if n == _LONGEST_LINE and not line.endswith(b"\n"):
                n += _skip_line(f)
                self._problem(
                    Diagnostic(f"a line longer than {_LONGEST_LINE:,} bytes", self._path, self.lines)
                )
                line = b""
            at += n
            self._has_read(f, n)
            if not line or line.isspace():
                continue
            found = self._line(span.file, self.lines, self._valid(line).decode("utf-8").rstrip("\r\n"))
            if isinstance(found, Conversation):
                yield self._valid_conversation(found)
                yield None
            elif found is not None:
                yield from self._document(found)

    def _valid_conversation(self, found: Conversation) -> Conversation:
        self.foreign += found.text.count("\0")
        try:
            found.text.encode("utf-8")
        except UnicodeEncodeError:  # see `_document`
            self._count_replaced(sum("\ud800" <= c <= "\udfff" for c in found.text))
            # One character for one: answers stay where they are.
            return replace(found, text=found.text.encode("utf-8", errors="replace").decode("utf-8"))
        return found

    def _line(self, file: SourceFile, number: int, line: str) -> str | Conversation | None:
        """The document of one line, or None after recording its problem."""
        place, column, hint = str(file.path), None, None
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            problem, column = f"bad JSON: {e.msg}", e.colno
        except RecursionError:
            problem = "bad JSON: nested too deeply"
        except ValueError:
            problem = "bad JSON: a number of thousands of digits"
        else:
            if not isinstance(row, dict):
                problem = f"a line must be a JSON object, not {_json_type(row)}"
            elif self._is_conversation(row):
                try:
                    return self._conversation(row, file.mtime_ns)
                except ChatError as error:
                    problem, hint = str(error), error.hint
            elif self.text_key not in row:
                problem, hint = f"no key {self.text_key!r}", _other_key("keys", row)
            elif not isinstance(text := row[self.text_key], str):
                problem = f"{self.text_key!r} must be a string, not {_json_type(text)}"
                hint = _other_key("string keys", [k for k, v in row.items() if isinstance(v, str)])
            else:
                return text
        shown = line if len(line) <= 160 and column is not None else None
        self._problem(Diagnostic(problem, place, number, column, source_line=shown, hint=hint))
        return None

    def _is_conversation(self, row: dict[str, object]) -> bool:
        if self.text_key == MESSAGES:
            return MESSAGES in row and not isinstance(row[MESSAGES], str)
        return MESSAGES in row and self.text_key not in row

    def _conversation(self, row: dict[str, object], time_ns: int) -> Conversation:
        if self._chat is None:
            raise ChatError(
                f"it is a conversation ({MESSAGES!r}), but the tokenizer has no chat template",
                "name the tokenizer.json of a chat model, with tokenizer_config.json or chat_template.jinja beside it",
            )
        return self._chat.conversation(row, time_ns)

    def _parquet(self, span: Span, f: BinaryIO) -> Pieces:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = span.file
        try:
            source = file.path if file.packing is None else f
            with pq.ParquetFile(source, page_checksum_verification=True) as table:
                if not self._has_text(file, table.schema_arrow):
                    return
                rows, done = table.metadata.num_rows, 0
                groups = range(table.metadata.num_row_groups)[span.begin : span.end]
                for batch in table.iter_batches(
                    batch_size=_PARQUET_ROWS, row_groups=groups, columns=[self.text_key]
                ):
                    for text in batch.column(0).to_pylist():
                        if text is None:
                            yield None
                        else:
                            self.read += len(text)
                            yield from self._document(text)
                    done += len(batch)
                    self.bytes_done = self._before + file.size * done // rows
        except (pa.ArrowException, UnicodeDecodeError) as e:
            self._problem(Diagnostic(f"bad Parquet file: {e}", file=str(file.path)))

    def _has_text(self, file: SourceFile, schema: object) -> bool:
        import pyarrow as pa

        assert isinstance(schema, pa.Schema)
        texts = [
            f.name
            for f in schema
            if pa.types.is_string(f.type)
            or pa.types.is_large_string(f.type)
            or pa.types.is_string_view(f.type)
        ]
        if self.text_key in texts:
            return True
        if self.text_key in schema.names:
            problem = f"column {self.text_key!r} has {schema.field(self.text_key).type}, not strings"
        else:
            problem = f"no column {self.text_key!r}"
        self._problem(Diagnostic(problem, file=str(file.path), hint=_other_key("string columns", texts)))
        return False


def merged(problems: Sequence[Diagnostic]) -> list[Diagnostic]:
    """`problems`, with those that repeat on many lines merged into one with a count."""
    found: dict[object, Diagnostic] = {}
    for i, problem in enumerate(problems):
        # A problem with a column shows its line, so it is not merged.
        key = problem.message if problem.line is not None and problem.column is None else i
        known = found.get(key)
        found[key] = problem if known is None else replace(known, count=known.count + problem.count)
    return list(found.values())


def foreign_problem(path: Path, foreign: int, size: int) -> Diagnostic | None:
    """The problem if `foreign` of the `size` bytes in a file are not text; None if they are only a handful."""
    if not too_foreign(foreign, size):
        return None
    return Diagnostic(
        f"is not text: at least {foreign:,} of its {size:,} bytes are NUL or not UTF-8",
        file=str(path),
        hint="remove it, or convert it: iconv -f ENCODING -t UTF-8",
    )


def _open(file: SourceFile) -> BinaryIO:
    return open(file.path, "rb") if file.packing is None else unpack(file.path, file.packing)


def _skip_line(f: BinaryIO) -> int:
    """Skip past the end of the current line; returns the number of bytes."""
    n = 0
    while part := f.readline(_COPIED):
        n += len(part)
        if part.endswith(b"\n"):
            break
    return n


def cut(f: BinaryIO, limit: int, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """The bytes of `f` in blocks of about `limit`, split after a line end, or at least between two characters.

    Block n ends near byte (n + 1) `limit`, counted from the current position of `f`. Its end depends only on the
    preceding `limit` bytes, so blocks [first, last) are the same whether or not the others are read.
    """
    rest = b""
    if first:
        f.seek((first - 1) * limit, os.SEEK_CUR)
        chunk = f.read(limit)
        rest = chunk[_end(chunk) :]
    number = first
    while (last is None or number < last) and (chunk := f.read(limit)):
        data = rest + chunk
        if len(chunk) < limit:
            rest = data
            break
        end = _end(data)
        rest = data[end:]
        number += 1
        yield data[:end]
    if rest and last is None:
        yield rest


def _end(data: bytes) -> int:
    """The end of a block whose end lies within `data`."""
    return data.rfind(b"\n") + 1 or _character_end(data)


def _character_end(data: bytes) -> int:
    """A position near the end of `data` that is not inside a UTF-8 character."""
    for back in range(1, min(4, len(data) - 1) + 1):
        if data[-back] & 0xC0 != 0x80:
            # A lead byte: its character may continue in the next block. An ASCII byte is complete.
            return len(data) - back if data[-back] >= 0xC0 else len(data) - back + 1
    return len(data)


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _other_key(what: str, names: object) -> str | None:
    found = [str(n) for n in names][:8] if isinstance(names, list | dict) else []
    return (
        f"{what} there: {', '.join(found)}; choose one with --text-key, or data.text_key of a job"
        if found
        else None
    )
