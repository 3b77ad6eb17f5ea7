"""Read a file or a pipe as numbered lines: decompressed, decoded, in bounded memory.

A kernel log of several months can be gigabytes with a few relevant lines. After the first block, log lines that state
nothing about hardware, and frequent repetitions of a message, are counted and dropped. Everything else is kept.
"""

from __future__ import annotations

import bz2
import codecs
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import zstandard

from seatrial.check.intake.labels import Label, are_labelled, label_of
from seatrial.check.outputs import kernel_text

BLOCK_BYTES = 1 << 20
LARGEST_CHARS = 64 << 20  # of kept lines
LONGEST_LINE = 4 << 20
_KEPT_REPETITIONS = 200  # similar messages to keep; beyond that, only the last one
_FORMS = 100_000  # limit of cached line forms, and of distinct messages to count

# Decompressors of one stream; another stream may follow it.
_PACKED: dict[bytes, tuple[str, Callable[[], Any]]] = {
    b"\x1f\x8b": ("gzip", lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)),
    b"\xfd7zXZ": ("xz", lambda: lzma.LZMADecompressor(memlimit=_XZ_BYTES)),
    b"BZh": ("bzip2", bz2.BZ2Decompressor),
    b"\x28\xb5\x2f\xfd": ("zstd", lambda: zstandard.ZstdDecompressor().decompressobj()),
}
_XZ_BYTES = 1 << 28  # memory limit; xz -9 needs 65 MiB
_AT_ONCE = 1 << 12  # compressed bytes per call, which expand to at most 128 MiB
_DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\n]*(?:\x07|\x1b\\)")
# Control characters of terminals and pagers are not damage: tab, newline, return, backspace, form feed.
_FOREIGN = re.compile("[\x00-\x07\x0b\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_DIGITS = str.maketrans("123456789", "0" * 9)
_FOREIGN_BYTES = bytes(n for n in range(256) if _FOREIGN.match(chr(n)))


@dataclass
class StreamContent:
    """The content of a stream. `problem`: why it is not text (code and reason); then there are no lines.

    `passed`: number of dropped lines, by label if lines have one; `repeated`: line number -> number of dropped lines
    like it. `damage`: what is incomplete or damaged, and in which line.
    """

    lines: list[tuple[int, str]] = field(default_factory=list)
    passed: Counter[Label | None] = field(default_factory=Counter)
    repeated: dict[int, int] = field(default_factory=dict)
    labelled: bool = False
    damage: list[tuple[str, int | None]] = field(default_factory=list)
    problem: tuple[str, str] | None = None


def read_stream(raw: IO[bytes], report: Callable[[int], None] = lambda read: None) -> StreamContent:
    """Read everything in `raw`. `report` is called with the bytes read so far. Raises OSError if it cannot be read."""
    content = StreamContent()
    blocks = _blocks(raw, content)
    head = next(blocks, b"")
    if not head.strip(b"\0 \t\r\n"):
        causes = [why for why, _ in content.damage]
        content.problem = (
            ("FILE004", f"cannot be unpacked: {causes[0]}") if causes else ("FILE002", "the file is empty")
        )
        return content
    if archive := _archive(head):
        content.problem = "FILE004", f"{archive}: unpack it, and pass the folder"
        return content
    wide = head[:2] in (b"\xff\xfe", b"\xfe\xff")  # UTF-16, as written by `>` in PowerShell
    decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")("replace")
    lines_kept = _Lines(content)
    text = decoder.decode(head)
    if len(_FOREIGN.findall(text[:65536])) > len(text[:65536]) // 10:
        content.problem = "FILE004", "binary data"
        return content
    rest, read, skipping = "", 0, False
    while text or head:
        if skipping:  # to the end of an overlong line
            _, ended, text = text.partition("\n")
            text, skipping = ended + text, not ended
        *lines, rest = _plain(rest + text).split("\n")
        # A cheap test first: the regex search takes longer than everything else.
        lines_kept.searched |= not head.isascii() or len(head.translate(None, _FOREIGN_BYTES)) < len(head)
        lines_kept.add(lines)
        read += len(head)
        report(read)
        if len(rest) > LONGEST_LINE and not skipping:
            content.damage.append((f"a line longer than {LONGEST_LINE >> 20} MiB", lines_kept.next))
            rest, skipping = rest[:LONGEST_LINE], True
        if lines_kept.full:
            why = f"more than {LARGEST_CHARS >> 20} MiB that are not an uneventful log: the rest was not read"
            content.damage.append((why, lines_kept.next))
            break
        head = next(blocks, b"")
        text = decoder.decode(head, final=not head)
    lines_kept.add([rest] if rest else [])
    lines_kept.end()
    return content


def _archive(head: bytes) -> str:
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive"
    return "a tar archive" if head[257:262] == b"ustar" else ""


def _blocks(raw: IO[bytes], content: StreamContent) -> Iterator[bytes]:
    """The decompressed content in blocks of about BLOCK_BYTES; decompression errors are recorded as damage."""
    start = raw.read(BLOCK_BYTES)
    # A read from a pipe may be short.
    while 0 < len(start) < BLOCK_BYTES and (more := raw.read(BLOCK_BYTES - len(start))):
        start += more
    if _packing(start) is None:
        yield start
        yield from iter(lambda: raw.read(BLOCK_BYTES), b"")
        return
    block = b""
    try:
        for data in _unpacked(start, raw):
            block += data
            if len(block) >= BLOCK_BYTES:
                yield block
                block = b""
    except _DECOMPRESSION_ERRORS as error:
        content.damage.append((f"the compressed data is truncated or damaged ({error})", None))
    if block:
        yield block


def _packing(start: bytes) -> tuple[str, Callable[[], Any]] | None:
    return next((how for magic, how in _PACKED.items() if start.startswith(magic)), None)


def _unpacked(data: bytes, raw: IO[bytes]) -> Iterator[bytes]:
    """Decompress `data` and the rest of `raw`, one stream after the other. Raises one of _DECOMPRESSION_ERRORS."""
    decoder = None
    while data or (data := raw.read(BLOCK_BYTES)):
        if decoder is None:
            data = data.lstrip(b"\0")
            data += raw.read(8) if len(data) < 8 else b""
            if not data:
                continue
            if (how := _packing(data)) is None:
                raise EOFError("trailing data")
            decoder = how[1]()
        part, data = data[:_AT_ONCE], data[_AT_ONCE:]
        yield decoder.decompress(part)
        if decoder.eof:
            data, decoder = decoder.unused_data + data, None
    if decoder is not None:
        raise EOFError("unexpected end of stream")


def _plain(text: str) -> str:
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.replace("\r\n", "\n") if "\r" in text else text


class _Lines:
    """Collects lines; from the second block on, drops irrelevant ones."""

    def __init__(self, content: StreamContent) -> None:
        self.next = 1  # number of the next line
        self.searched = False  # whether unexpected characters may be present
        self._content = content
        self._chars = 0
        self._foreign = False
        self._quiet: set[str] = set()
        self._relevant: set[str] = set()
        self._passed: Counter[str] = Counter()  # by the text before the colon
        self._repetitions: dict[str, list[int]] = {}  # message -> [kept, dropped]
        self._last: dict[str, tuple[int, str]] = {}  # the last dropped line of each message

    @property
    def full(self) -> bool:
        return self._chars > LARGEST_CHARS

    def add(self, lines: list[str]) -> None:
        """Add the next lines."""
        first, self.next = self.next, self.next + len(lines)
        self._damage(first, lines)
        if first == 1:
            self._content.labelled = are_labelled(lines)
            self._keep(list(enumerate(lines, 1)))
            return
        forms = "\n".join(lines).translate(_DIGITS).split("\n") if lines else []
        self._learn(set(forms))
        relevant = [n for n, form in enumerate(forms) if form not in self._quiet]
        if self._content.labelled:
            relevant = self._with_new_labels(lines, set(relevant))
        else:
            self._content.passed[None] += len(lines) - len(relevant)
        self._keep([(first + n, lines[n]) for n in relevant if self._is_new(first + n, lines[n])])

    def _keep(self, lines: list[tuple[int, str]]) -> None:
        self._content.lines += lines
        self._chars += sum(len(line) + 1 for _, line in lines)

    def _damage(self, first: int, lines: list[str]) -> None:
        """Record the first line with unexpected characters."""
        if not self.searched or self._foreign:
            return
        text = "\n".join(lines)
        if found := _FOREIGN.search(text):
            self._foreign = True
            self._content.damage.append(("unexpected characters", first + text.count("\n", 0, found.start())))

    def _learn(self, forms: set[str]) -> None:
        """Classify new lines as quiet or not, cached by form (all digits replaced by 0): most logs have few forms."""
        if len(self._quiet) + len(self._relevant) > _FORMS:
            self._quiet, self._relevant = set(), set()
        new = list(forms - self._quiet - self._relevant)
        for form, quiet in zip(new, kernel_text.quiet_of([self._bare(form) for form in new]), strict=True):
            (self._quiet if quiet else self._relevant).add(form)

    def _bare(self, line: str) -> str:
        found = label_of(line) if self._content.labelled else None
        return line if found is None else found[1]

    def _with_new_labels(self, lines: list[str], relevant: set[int]) -> list[int]:
        """`relevant` plus the first line of each new host: its presence in the log matters."""
        found = []
        for n, line in enumerate(lines):
            word = line.partition(":")[0]
            if n in relevant or word not in self._passed:
                found.append(n)
                self._passed[word] += 0
            else:
                self._passed[word] += 1
        return found

    def _is_new(self, number: int, line: str) -> bool:
        key = kernel_text.repetition_key(line)
        if key is None or len(self._repetitions) > _FORMS:
            return True
        count = self._repetitions.setdefault(key, [0, 0])
        if count[0] < _KEPT_REPETITIONS:
            count[0] += 1
            return True
        count[1] += 1
        self._last[key] = (number, line)
        return False

    def end(self) -> None:
        """Add the last line of each dropped message, with its count, and the counts of quiet lines by label."""
        for word, count in self._passed.items():
            self._content.passed[(label_of(f"{word}:") or (None, ""))[0]] += count
        for key, (number, _) in self._last.items():
            self._content.repeated[number] = self._repetitions[key][1] - 1
        self._keep(list(self._last.values()))
        self._content.lines.sort(key=lambda each: each[0])
