"""How a declared message travels between two processes: as the JSON object {op: {field: value, ...}}."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from seatrial.record import typed


class Message:
    """Base of all messages, which are frozen dataclasses."""

    op: ClassVar[str]  # its name on the wire, unique in its direction


def encode(message: Message) -> dict[str, Any]:
    """The message as a JSON object, which shares lists and dicts with `message`."""
    return {message.op: _values(message)}


def decode(values: Mapping[str, Any], among: Any, *, exact: bool = True) -> Any:
    """The opposite of `encode`, for a message of the union `among`. ValueError names the op and every invalid field.

    Unknown fields are ignored if not `exact`: of a message from another version.
    """
    if len(values) != 1:
        raise ValueError(f"not exactly one message: {values!s:.80}")
    ((op, content),) = values.items()
    cls = _by_op(among).get(op)
    if cls is None:
        raise ValueError(f"unknown message {op!r:.40}")
    if type(content) is not dict:
        raise ValueError(f"{op}: {content!r:.80}")
    try:
        return typed.decode(cls, content, exact=exact)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None


def _values(thing: Any) -> dict[str, Any]:
    values, cls = dict(vars(thing)), typing.cast(Any, type(thing))
    for name in _with_dataclasses(cls):
        value = values[name]
        if isinstance(value, list):
            values[name] = [_values(one) for one in value]
        elif value is not None:
            values[name] = _values(value)
    return values


@cache
def _by_op(among: Any) -> dict[str, type[Message]]:
    return {cls.op: cls for cls in typing.get_args(among) or (among,)}


@cache
def _with_dataclasses(cls: Any) -> list[str]:
    """The fields that hold a dataclass, or a list of them."""
    return [name for name, hint in typing.get_type_hints(cls).items() if _holds_dataclass(hint)]


def _holds_dataclass(hint: Any) -> bool:
    if typing.get_origin(hint) in (list, types.UnionType):
        return any(_holds_dataclass(argument) for argument in typing.get_args(hint))
    return dataclasses.is_dataclass(hint)
