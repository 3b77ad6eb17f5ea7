"""Split the work of tokenising into parts that depend only on the sources, never on the workers.

So any number of workers, in any order, and any number of attempts produce the same store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.data import readers
from seatrial.data.sources import SourceFile, SourceFiles, Span

# Part of fingerprints: parts written by an older version with other content must not be reused.
_FORMAT = 3
_FEWEST_BYTES, _MOST_BYTES = 1 << 22, 1 << 25
_PARTS = 256  # of a source whose part size is between these limits
_MOST_FILES = 4096


@dataclass(frozen=True)
class Part:
    """Consecutive spans of the sources, of `size` bytes: several whole files, or one span of a file."""

    number: int
    spans: tuple[Span, ...]
    size: int
    fingerprint: str  # of what the part's tokens depend on

    @property
    def goes_on(self) -> bool:
        """Whether it begins in the file that the previous part ends in."""
        return self.spans[0].begin > 0

    def as_json(self) -> dict[str, Any]:
        """As JSON, for a worker."""
        spans = [
            [str(f.path), f.name, f.kind, f.size, f.mtime_ns, f.packing, s.begin, s.end]
            for s in self.spans
            for f in [s.file]
        ]
        return {
            "number": self.number,
            "spans": spans,
            "size": self.size,
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Part:
        """The inverse of `as_json`."""
        spans = tuple(
            Span(SourceFile(Path(path), *of_file), begin, end)
            for path, *of_file, begin, end in content["spans"]
        )
        return cls(content["number"], spans, content["size"], content["fingerprint"])


def part_bytes(total: int) -> int:
    """Source bytes per part: a power of two, so that a source that grows keeps most of its parts."""
    wanted = max(_FEWEST_BYTES, min(_MOST_BYTES, total // _PARTS))
    return 1 << (wanted.bit_length() - 1)


def plan_parts(found: SourceFiles, *, tokenizer_digest: str, text_key: str) -> list[Part]:
    """Split all of `found` into parts, in its order."""
    limit = part_bytes(sum(f.size for f in found.files))
    parts: list[Part] = []
    for spans, size in _grouped(found.files, limit):
        described = [
            [str(f.path.absolute()), f.kind, f.size, f.mtime_ns, f.packing, s.begin, s.end]
            for s in spans
            for f in [s.file]
        ]
        content = json.dumps([_FORMAT, readers.PIECE_BYTES, tokenizer_digest, text_key, described])
        parts.append(Part(len(parts), spans, size, hashlib.sha256(content.encode()).hexdigest()))
    return parts


def _grouped(files: list[SourceFile], limit: int) -> Iterator[tuple[tuple[Span, ...], int]]:
    group: list[Span] = []
    size = 0
    for file in files:
        whole = file.size <= limit or file.packing is not None
        spans = [(Span(file), file.size)] if whole else list(_cut_file(file, limit))
        if len(spans) > 1 or size + file.size > limit or len(group) == _MOST_FILES:
            if group:
                yield tuple(group), size
            group, size = [], 0
        if len(spans) > 1:
            for span, n in spans:
                yield (span,), n
        else:
            group.append(spans[0][0])
            size += file.size
    if group:
        yield tuple(group), size


def _cut_file(file: SourceFile, limit: int) -> Iterator[tuple[Span, int]]:
    """Spans of about `limit` bytes of a larger file, and their sizes."""
    if file.kind == "parquet":
        yield from _cut_parquet(file, limit)
        return
    unit = readers.PIECE_BYTES if file.kind == "text" else 1
    step = max(1, limit // unit)
    # A last piece that is shorter counts as a piece. A byte order mark may account for three of the bytes.
    pieces = max(1, -(-(file.size - 3) // unit)) if file.kind == "text" else file.size
    for begin in range(0, pieces, step):
        end = begin + step
        last = end >= pieces
        done = begin * unit
        yield Span(file, begin, None if last else end), (file.size if last else end * unit) - done


def _cut_parquet(file: SourceFile, limit: int) -> Iterator[tuple[Span, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(file.path)
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError):
        sizes = []  # its reader will report the error
    total = sum(sizes)
    begin, taken, size = 0, 0, 0
    for i, group in enumerate(sizes[:-1]):
        size += group
        # A span's size is its share of the file, not its decompressed size.
        share = file.size * size // max(1, total)
        if share - taken >= limit:
            yield Span(file, begin, i + 1), share - taken
            begin, taken = i + 1, share
    yield Span(file, begin, None), file.size - taken
