"""Tolerant reading of JSON documents, which may be from another version."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seatrial.base.files import parse_json, read_bytes

_LARGEST_BYTES = 16 << 20


class Document:
    """A value of a JSON document. What is absent or has another type reads as None, "" or empty."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def at(self, *keys: str) -> Document:
        """The value under nested keys."""
        value = self.value
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return Document(value)

    def number(self, *keys: str) -> float | None:
        """A finite number."""
        value = self.at(*keys).value
        known = type(value) is int or (type(value) is float and math.isfinite(value))
        return value if known and abs(value) < 1e300 else None

    def text(self, *keys: str) -> str:
        value = self.at(*keys).value
        return value if isinstance(value, str) else ""

    def each(self, *keys: str) -> list[Document]:
        """The items of a list."""
        value = self.at(*keys).value
        return [Document(item) for item in value] if isinstance(value, list) else []

    def items(self, *keys: str) -> Iterator[tuple[str, Document]]:
        """The entries of an object."""
        value = self.at(*keys).value
        if isinstance(value, dict):
            yield from ((key, Document(item)) for key, item in value.items())


def read_document(path: Path, missing: list[str]) -> Document | None:
    """The JSON document at `path`; None if it does not exist, or cannot be read, which is added to `missing`."""
    try:
        return Document(parse_json(read_bytes(path, most=_LARGEST_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        missing.append(f"{path.parent.name}/{path.name} cannot be read: {reason}")
        return None
