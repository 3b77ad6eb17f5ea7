"""Positions of each key and value in a TOML text.

`tomllib` gives values without positions, so this scanner walks the same text a second time and only records
positions. It is given text that `tomllib` has accepted, which keeps it small: it never has to validate.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Span:
    """`length` characters on one line; `line` and `column` count from 1. Longer spans end with their first line."""

    line: int
    column: int
    length: int


@dataclass
class Positions:
    """The spans of keys and values by path; an item of an array has its index in the path."""

    keys: dict[Path, Span]
    values: dict[Path, Span]


_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_QUOTED_KEY = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')
# Up to two quotes may stand right before the closing three.
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


def scan(text: str) -> Positions:
    """Positions of every key and value of `text`, which `tomllib.loads` has accepted."""
    return _Scanner(text.replace("\r\n", "\n")).run()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.found = Positions({}, {})
        self.arrays: dict[Path, int] = {}  # [[array of tables]] -> index of its newest table
        self.line_starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.line_index = 0

    def run(self) -> Positions:
        table: Path = ()
        while True:
            self._skip(_BLANK)
            if self.at >= len(self.text):
                return self.found
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._key_value(table)

    def _header(self) -> Path:
        brackets = 2 if self.text.startswith("[[", self.at) else 1
        self.at += brackets
        parts = self._key()
        self.at += brackets
        path: Path = ()
        for name, span in parts:
            # Inside an array of tables a header refers to the newest table.
            if path in self.arrays:
                path = (*path, self.arrays[path])
            path = (*path, name)
            self.found.keys.setdefault(path, span)
        if brackets == 2:
            self.arrays[path] = self.arrays.get(path, -1) + 1
        if path in self.arrays:
            path = (*path, self.arrays[path])
            self.found.values.setdefault(path, parts[-1][1])
        return path

    def _key(self) -> list[tuple[str, Span]]:
        parts = []
        while True:
            self._skip(_SPACE)
            start = self.at
            if self.text[start] in "\"'":
                raw = self._consume(_QUOTED_KEY)
                name = next(iter(tomllib.loads(f"{raw} = 0")))
            else:
                name = raw = self._consume(_BARE_KEY)
            parts.append((name, self._span(start)))
            self._skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return parts
            self.at += 1

    def _key_value(self, table: Path) -> None:
        path = table
        for name, span in self._key():
            path = (*path, name)
            self.found.keys.setdefault(path, span)
        self.at += 1  # the "="
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: Path) -> None:
        start = self.at
        first = self.text[start]
        if first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        elif first in "\"'":
            self._consume(_STRING)
        else:
            self.at += len(self._match(_SCALAR).rstrip())
        self.found.values[path] = self._span(start)

    def _array(self, path: Path) -> None:
        self.at += 1
        index = 0
        while not self._closed("]"):
            self._value((*path, index))
            index += 1

    def _inline_table(self, path: Path) -> None:
        self.at += 1
        while not self._closed("}"):
            self._key_value(path)

    def _closed(self, bracket: str) -> bool:
        """Skip blanks and a comma; True if the closing bracket was consumed."""
        self._skip(_BLANK)
        if self.text[self.at] == ",":
            self.at += 1
            self._skip(_BLANK)
        if self.text[self.at] != bracket:
            return False
        self.at += 1
        return True

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"the scanner does not follow tomllib at character {self.at}")
        return found.group()

    def _consume(self, pattern: re.Pattern[str]) -> str:
        raw = self._match(pattern)
        self.at += len(raw)
        return raw

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self.at += len(self._match(pattern))

    def _span(self, start: int) -> Span:
        """The span from `start` to here, cut at the end of its first line."""
        # Spans of outer values come after their inner ones, so the line is searched both ways.
        while self.line_starts[self.line_index] > start:
            self.line_index -= 1
        while self.line_index + 1 < len(self.line_starts) and self.line_starts[self.line_index + 1] <= start:
            self.line_index += 1
        end = self.text.find("\n", start, self.at)
        length = (self.at if end < 0 else end) - start
        return Span(self.line_index + 1, start - self.line_starts[self.line_index] + 1, length)
