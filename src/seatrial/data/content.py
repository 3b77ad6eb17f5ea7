"""Detect what a source file contains from its first bytes: compression, format, and whether it is text."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Literal

from seatrial.data.packed import Packing, packing_of, unpack

Kind = Literal["text", "jsonl", "parquet"]

_HEAD = 1 << 16
_GOES_ON = _HEAD - len(codecs.BOM_UTF8)  # a head of this length, BOM removed, may be truncated
# "PAR1" and the first byte of a page header or footer; 0x15 does not occur in text.
_PARQUET = b"PAR1\x15"
# Control characters allowed in text: backspace, tab, line ends, form feed, DOS end-of-file, escape (colours).
_CONTROLS = bytes(sorted(set(range(32)) - set(b"\b\t\n\v\f\r\x1a\x1b"))) + b"\x7f"
_REPLACEMENT = "\ufffd"

_UNPACK = "unpack it, and give the files in it"
_CONVERT = "convert it: iconv -f ENCODING -t UTF-8"
# (offset, bytes, description, hint).
_SIGNATURES = (
    (0, codecs.BOM_UTF32_LE, "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (0, codecs.BOM_UTF32_BE, "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (0, codecs.BOM_UTF16_LE, "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (0, codecs.BOM_UTF16_BE, "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (0, b"PK\x03\x04", "a zip archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"\x04\x22\x4d\x18", "LZ4 data", _UNPACK),
    (4, b'\0\0\0\0{"', "a safetensors file", None),
    (0, b"ARROW1", "an Arrow file", "write it as Parquet or JSONL"),
    (0, b"MMIDIDX", "the index of a Megatron dataset", "import it with `seatrial data import`"),
    (0, b"\x93NUMPY", "a NumPy array", None),
    (0, b"\x89HDF", "an HDF5 file", None),
    (0, b"GGUF", "a GGUF file", None),
    (0, b"%PDF-", "a PDF file", "extract its text first, for example with pdftotext"),
    (0, b"\x89PNG", "an image", None),
    (0, b"\xff\xd8\xff", "an image", None),
    (0, b"\x7fELF", "a program", None),
)
_HINT = "supported are text, JSONL and Parquet, also compressed"


class NotTextError(Exception):
    """The file is not text, JSONL or Parquet."""

    def __init__(self, what: str, hint: str | None) -> None:
        super().__init__(f"not text: {what}")
        self.hint = hint or _HINT


def too_foreign(n: int, size: int) -> bool:
    """Whether `n` non-text bytes are too many for `size` bytes of text: more than a handful, and over 1 %."""
    return n > max(size // 100, min(8, size // 5 + 1))


def look(path: Path, kind: Kind | None, named: Packing | None) -> tuple[Kind, Packing | None]:
    """(kind, compression) of the file at `path`; `kind` and `named` are those of its suffixes.

    `kind` None means .json: JSONL if its first line is an object, else one text. NotTextError if it is neither text nor
    Parquet. Read errors are left to the reader, which reports them.
    """
    packing: Packing | None = None
    try:
        with open(path, "rb") as f:
            head = f.read(_HEAD)
        packing = packing_of(head, named)
        if packing is not None:
            with unpack(path, packing) as f:
                head = f.read(_HEAD)
    except OSError:
        return kind or "text", packing
    if packing is not None and (inner := packing_of(head)) is not None:
        raise NotTextError(f"{inner} data in compressed data", _UNPACK)
    if head.startswith(_PARQUET) or kind == "parquet":
        return "parquet", packing
    head = head.removeprefix(codecs.BOM_UTF8)
    if (what := _not_text(head)) is not None:
        raise NotTextError(*what)
    return kind or ("jsonl" if _is_lines(head) else "text"), packing


def _not_text(head: bytes) -> tuple[str, str | None] | None:
    """(description, hint) if `head` is not the beginning of a text."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head, final=len(head) < _GOES_ON)
    invalid = text.count(_REPLACEMENT) - head.count(_REPLACEMENT.encode())
    controls = len(head) - len(head.translate(None, _CONTROLS))
    foreign = too_foreign(invalid + controls, len(head))
    for offset, signature, what, hint in _SIGNATURES:
        # A text may begin with a printable signature.
        sure = not (signature.isascii() and signature.decode().isprintable())
        if (foreign or sure) and head.startswith(signature, offset):
            return what, hint
    if not foreign:
        return None
    if too_foreign(controls, len(head)):
        return "binary data", None
    return "text in another encoding than UTF-8, or binary data", _CONVERT


def _is_lines(head: bytes) -> bool:
    """Whether the first line is a whole JSON object, or too long to belong to a pretty-printed one."""
    first, newline, _ = head.lstrip().partition(b"\n")
    if not newline and len(head) >= _GOES_ON:
        return first.startswith(b"{")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False
