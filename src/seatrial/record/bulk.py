"""Parses many lines of a records file at once into columns: a month's run has hundreds of thousands of lines, too many to decode one by one.

Only where there is nothing to judge: for data with any line that is not a record `columns` returns None, and the caller
reads them line by line.

Parsing the JSON of a month takes a second, so the monitor of a run keeps the columns of each piece of it (`keep`,
`jsonl.piece_bytes`). They are found by the digest of the piece, so they are never those of other lines, and may be deleted.
"""

from __future__ import annotations

import contextlib
import json
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from seatrial.base import atomic
from seatrial.base.files import open_file, parse_json
from seatrial.record.typed import LAST_TIME

Columns = dict[str, NDArray[Any]]

_BLOCK_BYTES = 1 << 20  # parsed by one thread
_DIGEST_BYTES = 16
_KEPT = frozenset({"<i8", "<f8", "|b1"})  # types of kept columns, as numpy writes them


def columns(cls: Any, data: bytearray, kept: Path) -> Columns | None:
    """Field -> values of the records in `data`, complete lines. NaN where an optional number is null; without fields of other types.

    None if a line is not a record of dataclass `cls`, or a number is not finite. `kept`: the folder of kept columns.
    """
    found = _load(_path(kept, data), cls, data)
    return _parse(cls, bytes(data)) if found is None else found


def keep(cls: Any, path: Path, offset: int, size: int, kept: Path) -> tuple[int, Path] | None:
    """Cache the columns of the piece of `size` bytes at `offset` of the records file `path`.

    Returns where its last line ends and the file of its columns, which is not written if they cannot be kept. None: it has
    no complete line. Raises OSError.
    """
    with open(open_file(path), "rb") as f:
        f.seek(offset)
        data = f.read(size)
    data = data[: data.rfind(b"\n") + 1]
    if not data:
        return None
    target = _path(kept, data)
    if _load(target, cls, data) is None:
        found = _parse(cls, data)
        # A truth value that older versions left out is None: an object, which needs a pickle.
        if found is not None and all(values.dtype.str in _KEPT for values in found.values()):
            head = {"rows": len(found["step"]), "columns": [(k, v.dtype.str) for k, v in found.items()]}
            # Column by column, as they are read: a field of a table of records is spread over all of it.
            content = b"".join([json.dumps(head).encode(), b"\n", *(v.tobytes() for v in found.values())])
            kept.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(target, xxhash.xxh3_128_digest(content) + content, durable=False)
    return offset + len(data), target


def _path(kept: Path, data: bytes | bytearray) -> Path:
    return kept / xxhash.xxh3_128_hexdigest(data)


def _load(path: Path, cls: Any, data: bytes | bytearray) -> Columns | None:
    """None: nothing is kept of `data`, by another version, or it is damaged. Allocates no more than the file has."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        with open(open_file(path), "rb") as f:
            content = f.read(len(data))  # JSON takes more than numbers do
        if xxhash.xxh3_128_digest(memoryview(content)[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
            return None
        end = content.index(b"\n", _DIGEST_BYTES)
        head = parse_json(content[_DIGEST_BYTES:end])
        rows, kinds = int(head["rows"]), dict(head["columns"])
        names = [f.name for f in _fields(typing.cast(Any, cls))]
        if rows < 0 or [*kinds] != names or not _KEPT.issuperset(kinds.values()):
            return None
        # The file name is the digest of its lines, so they are not counted, which takes as long as reading them.
        found: Columns = {}
        at = end + 1
        for name, kind in kinds.items():
            found[name] = np.frombuffer(content, kind, rows, at)
            at += found[name].nbytes
        return found if at == len(content) else None
    return None


def _parse(cls: Any, data: bytes) -> Columns | None:
    """Like `columns`, parsed from the JSON."""
    import pyarrow as pa
    from pyarrow.json import ParseOptions, ReadOptions, read_json

    fields, lines = _fields(typing.cast(Any, cls)), data.count(b"\n")
    kinds = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(f.name, kinds[f.kind]) for f in fields])
    try:
        table = read_json(
            pa.BufferReader(data),
            read_options=ReadOptions(block_size=_BLOCK_BYTES),
            parse_options=ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return None
    # Arrow also takes objects over several lines, and several on one.
    if table.num_rows != lines:
        return None
    for f in fields:
        nulls = table[f.name].null_count and not f.optional
        # null or absent: Arrow does not distinguish them.
        if nulls and (not f.nullable or data.count(f'"{f.name}":'.encode()) < table.num_rows):
            return None
    found: Columns = {f.name: table[f.name].to_numpy() for f in fields}
    times = found.get("time")
    return found if times is None or bool(((times >= 0) & (times < LAST_TIME)).all()) else None


class _Field(NamedTuple):
    name: str
    kind: type[Any]
    nullable: bool
    optional: bool  # may be left out


@cache
def _fields(cls: Any) -> list[_Field]:
    """The fields that are a number, a truth value, or one of these or None."""
    found = []
    for name, hint in typing.get_type_hints(cls).items():
        members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds = [kind for kind in members if kind is not type(None)]
        if len(kinds) == 1 and kinds[0] in (int, float, bool):
            found.append(_Field(name, kinds[0], len(members) > 1, hasattr(cls, name)))
    return found
