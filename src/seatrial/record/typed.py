"""Decode a JSON object to a dataclass, with validation: files outlive crashes and disk errors, messages cross processes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar

from seatrial.record.jsonl import Problem

Record = TypeVar("Record")

LAST_TIME = 1e11  # last unix time that a calendar can show; NaN is invalid too
_LARGEST = 2**63  # readers of records keep integers in eight bytes
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_Read = Callable[
    [Any], Any
]  # a JSON value to a field's value; ValueError, with the reason where that is not obvious


def decode(cls: type[Record], values: Mapping[str, Any], *, exact: bool = False) -> Record:
    """An instance of dataclass `cls` from `values`; ValueError names every invalid field.

    Keys that `cls` does not have are ignored, as a newer version may have written them; or, if `exact`, an error. The same
    within its fields.
    """
    fields, wrong = {}, []
    for name, read, required in _fields(typing.cast(Any, cls), exact):
        if name not in values:
            if required:
                wrong.append(f"`{name}` is missing")
            continue
        try:
            fields[name] = read(values[name])
        except ValueError as error:
            reason = str(error)
            wrong.append(f"`{name}`: {reason}" if reason else f"`{name}` is {values[name]!r:.40}")
    if exact and len(fields) < len(values):
        known = {name for name, _, _ in _fields(typing.cast(Any, cls), exact)}
        wrong += [f"`{key}` is unknown" for key in values if key not in known]
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


@cache
def _fields(cls: Any, exact: bool) -> list[tuple[str, _Read, bool]]:
    """(name, how its value is read, required) of each field."""
    hints = typing.get_type_hints(cls)
    out = []
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        read = _time if field.name == "time" else _reader(hints[field.name], exact)
        out.append((field.name, read, required))
    return out


def _reader(hint: Any, exact: bool) -> _Read:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, exact)
    if origin is Literal:
        return _one_of(arguments)
    if origin is list:
        return _list(_reader(arguments[0], exact))
    if origin is dict:
        return _dict(_reader(arguments[1], exact))
    if hint is Any:
        return _anything
    if hint is float:
        return _float
    if hint is int and not exact:
        return _int_of_record
    if dataclasses.is_dataclass(hint):
        return _nested(hint, exact)
    return _exactly(hint)


def _exactly(kind: type) -> _Read:
    """Not isinstance, so that true does not pass for 1."""

    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError
        return value

    return read


def _int_of_record(value: Any) -> int:
    if type(value) is not int or not -_LARGEST <= value < _LARGEST:
        raise ValueError
    return value


def _anything(value: Any) -> Any:
    return value


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is str and value in _NON_FINITE:
        return _NON_FINITE[value]
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError from None
    raise ValueError


def _time(value: Any) -> float:
    time = _float(value)
    if not 0 <= time < LAST_TIME:
        raise ValueError
    return time


def _one_of(choices: tuple[Any, ...]) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not str or value not in choices:
            raise ValueError
        return value

    return read


def _union(kinds: tuple[Any, ...], exact: bool) -> _Read:
    members = [_reader(kind, exact) for kind in kinds if kind is not type(None)]

    def read(value: Any) -> Any:
        if value is None and len(members) < len(kinds):
            return None
        for member in members[:-1]:
            with contextlib.suppress(ValueError):
                return member(value)
        return members[-1](value)

    return read


def _list(item: _Read) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise ValueError
        return value if item is _anything else [item(v) for v in value]

    return read


def _dict(item: _Read) -> _Read:
    """Keys are texts in any JSON object."""

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise ValueError
        return value if item is _anything else {k: item(v) for k, v in value.items()}

    return read


def _nested(cls: Any, exact: bool) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise ValueError
        return decode(cls, value, exact=exact)

    return read
