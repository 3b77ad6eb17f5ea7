"""From a JSON object to one of our record dataclasses, trusting nothing: the files outlive crashes and disks."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from seatrial.record.jsonl import Problem

Record = TypeVar("Record")

_LAST_TIME = 1e11  # last unix time that a calendar can show; NaN is invalid too
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def decode(cls: type[Record], values: Mapping[str, Any]) -> Record:
    """An instance of dataclass `cls` from `values`; ValueError tells every wrong field.

    Keys that `cls` does not have are skipped: a newer version may have written them.
    """
    fields, wrong = {}, []
    for name, kinds, required in _fields(typing.cast(Any, cls)):
        if name not in values:
            if required:
                wrong.append(f"`{name}` is missing")
            continue
        value = values[name]
        if float in kinds:
            value = _as_float(value)
        if type(value) not in kinds or (name == "time" and not 0 <= value < _LAST_TIME):
            wrong.append(f"`{name}` is {values[name]!r:.40}")
        fields[name] = value
    if wrong:
        raise ValueError(", ".join(wrong))
    return cls(**fields)


def decode_all(
    cls: type[Record], numbered: Iterable[tuple[int, Mapping[str, Any]]], *, file: str, noun: str
) -> tuple[list[Record], list[Problem]]:
    """Every usable record in file order, and a Problem "not `noun` (...)" for each other line."""
    records: list[Record] = []
    problems: list[Problem] = []
    for line, values in numbered:
        try:
            records.append(decode(cls, values))
        except ValueError as error:
            problems.append(Problem(file, line, f"not {noun} ({error})"))
    return records, problems


def _as_float(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return value
    return value


@cache
def _fields(cls: Any) -> list[tuple[str, tuple[type, ...], bool]]:
    """(name, allowed exact types, required) of each field; exact, so that true is no 1."""
    hints = typing.get_type_hints(cls)
    out = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        kinds = tuple(typing.get_origin(k) or k for k in (typing.get_args(hint) if union else (hint,)))
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        out.append((field.name, kinds, required))
    return out
