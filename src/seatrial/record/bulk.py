"""Many lines of a records file at once, as columns: a run of a month has hundreds of thousands, too many to decode one by one.

Only where there is nothing to judge: for data with any line that is not a record it returns None, and the caller reads
them line by line.
"""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Any, NamedTuple

from numpy.typing import NDArray

from seatrial.record.typed import LAST_TIME

Columns = dict[str, NDArray[Any]]

_BLOCK_BYTES = 1 << 20  # parsed by one thread


def columns(cls: Any, data: bytes, lines: int) -> Columns | None:
    """Field -> values of the records in `data`, so many complete lines. NaN where an optional number is null; without fields of other types.

    None if a line is not a record of dataclass `cls`, or a number is not finite.
    """
    import pyarrow as pa
    from pyarrow import json

    fields = _fields(cls)
    kinds = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(f.name, kinds[f.kind]) for f in fields])
    try:
        table = json.read_json(
            pa.BufferReader(data),
            read_options=json.ReadOptions(block_size=_BLOCK_BYTES),
            parse_options=json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        return None
    # Arrow also takes objects over several lines, and several on one.
    if table.num_rows != lines:
        return None
    for f in fields:
        nulls = table[f.name].null_count and not f.optional
        # null, or not there at all: Arrow does not tell.
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
