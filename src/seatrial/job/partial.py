"""Partly readable job files: valid values stay usable, accessing an invalid one raises UnreadableError.

All problems of a job file are reported at once, so the rules between keys must run even when some other key
is wrong. A rule that meets an unreadable value is skipped; it cannot be judged yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnreadableError(Exception):
    """A value that could not be read was accessed."""


class Partial:
    """Attributes as given; any other attribute raises UnreadableError."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnreadableError(name)
