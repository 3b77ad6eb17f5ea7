"""The text of a job file with the positions of its keys and values, and the overrides of the command line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import read_named
from seatrial.job import scanner
from seatrial.job.scanner import Path, Span


@dataclass(frozen=True)
class SourceLocation:
    """Where something was written: a span of the file, or an override (then `line` is None)."""

    file: str
    line: int | None = None
    column: int | None = None
    length: int = 1
    source_line: str | None = None

    def diagnostic(self, message: str, hint: str | None = None) -> Diagnostic:
        """A problem at this location."""
        return Diagnostic(message, self.file, self.line, self.column, self.length, self.source_line, hint)


class Source:
    """Values of a TOML text, and where each was written."""

    def __init__(self, text: str, file: str) -> None:
        """Parse `text`. Raises InputError with the location of the first syntax error."""
        text = text.removeprefix("\ufeff").replace("\r\n", "\n")
        self.file = file
        self.lines = text.split("\n")
        self.values: dict[str, Any] = self._parse(text)
        self.positions = scanner.scan(text)
        self.overrides: dict[Path, str] = {}

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            return tomllib.loads(text)
        except RecursionError:
            raise InputError(Diagnostic("arrays or tables are nested too deeply", self.file)) from None
        except ValueError as error:  # TOMLDecodeError, or int() refusing thousands of digits
            raise InputError(self._syntax_error(str(error))) from None

    def _syntax_error(self, text: str) -> Diagnostic:
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", text, re.DOTALL)
        if found is None:
            return Diagnostic(f"not valid TOML: {text}", self.file)
        message = found[1][0].lower() + found[1][1:]
        if found[2] is None:
            line = max((i for i, t in enumerate(self.lines, 1) if t.strip()), default=1)
            column = len(self.lines[line - 1]) + 1
        else:
            line, column = int(found[2]), int(found[3])
        hint = next((hint for pattern, hint in _SYNTAX_HINTS if re.match(pattern, message)), None)
        if message.startswith("cannot ") and self._says_auto_and_more(line):
            hint = _ONE_OF_TWO
        if message.startswith("cannot "):
            message = re.sub(r"\('([^']*)',\)", r"[\1]", message)
            # tomllib points behind the second definition; the key in front of it is the one to look at.
            start = re.match(r"[\s\[]*", self.lines[line - 1])
            column = (start.end() if start else 0) + 1
        return SourceLocation(self.file, line, column, 1, self.lines[line - 1]).diagnostic(
            f"not valid TOML: {message}", hint
        )

    def _says_auto_and_more(self, line: int) -> bool:
        """Whether the file has both `parallel = ...` and [parallel], and one of them is on this line."""
        both = [any(re.match(pattern, text) for text in self.lines) for pattern in (_AUTO, _TABLE)]
        return all(both) and re.match(f"{_AUTO}|{_TABLE}", self.lines[line - 1]) is not None

    def override(
        self,
        assignment: str,
        *,
        text_fields: frozenset[Path],
        list_fields: frozenset[Path] = frozenset(),
    ) -> Diagnostic | None:
        """Apply one `a.b=value` of the command line over the file; return the problem with it, if any.

        The value is TOML, or else text; for the paths in `text_fields` numbers and the like are text too, and so are
        arrays, except for the paths in `list_fields`.
        """
        key, equals, raw = assignment.partition("=")
        path: Path = tuple(part.strip() for part in key.split("."))
        label = f"--set {assignment}"
        if not equals or not all(path):
            return Diagnostic(
                "an override is KEY=VALUE", file=label, hint="for example --set train.steps=200"
            )
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except (ValueError, RecursionError):
            value = raw.strip()  # if text is not allowed there, the type check reports it
        is_list = isinstance(value, list) and path in list_fields
        if path in text_fields and not is_list and not isinstance(value, str | dict):
            value = raw.strip()
        table = self.values
        for i, part in enumerate(path[:-1]):
            inner = table.setdefault(str(part), {})
            if not isinstance(inner, dict):
                name = ".".join(map(str, path[: i + 1]))
                hint = _ONE_OF_TWO if inner == "auto" else None
                return Diagnostic(f"`{name}` is a value, not a section", file=label, hint=hint)
            table = inner
        table[str(path[-1])] = value
        for old in [p for p in self.overrides if p[: len(path)] == path]:
            del self.overrides[old]
        for spans in (self.positions.keys, self.positions.values):
            for old in [p for p in spans if p[: len(path)] == path]:
                del spans[old]
        self.overrides[path] = label
        return None

    def overridden(self, path: Path) -> str | None:
        """The override that set `path` or something around it, as `--set ...`; else None."""
        for n in range(len(path), 0, -1):
            if path[:n] in self.overrides:
                return self.overrides[path[:n]]
        return None

    def value_place(self, path: Path) -> SourceLocation:
        """Where the value of `path` was written; for a section or a default the nearest enclosing location."""
        return self._place(path, self.positions.values, self.positions.keys)

    def key_place(self, path: Path) -> SourceLocation:
        """Where the key `path` was written."""
        return self._place(path, self.positions.keys, self.positions.values)

    def first_place(self, paths: Sequence[Path]) -> SourceLocation:
        """The location of the first of `paths` that was written; else what encloses the first one."""
        for path in paths:
            if path in self.overrides or path in self.positions.values or path in self.positions.keys:
                return self.value_place(path)
        return self.value_place(paths[0])

    def _place(self, path: Path, first: dict[Path, Span], second: dict[Path, Span]) -> SourceLocation:
        for n in range(len(path), 0, -1):
            part = path[:n]
            if part in self.overrides:
                return SourceLocation(self.overrides[part])
            span = first.get(part) or second.get(part)
            if span is not None:
                return SourceLocation(
                    self.file, span.line, span.column, span.length, self.lines[span.line - 1]
                )
        # A section that only overrides mention.
        label = next((label for p, label in self.overrides.items() if p[: len(path)] == path), None)
        return SourceLocation(label or self.file)


_AUTO, _TABLE = r"\s*parallel\s*=", r"\s*\[\s*parallel\s*\]"
_ONE_OF_TWO = 'parallel = "auto" chooses every key of [parallel]: keep one of the two'
_SYNTAX_HINTS = (
    ("invalid value", 'text needs double quotes; numbers, true and false need none: name = "voyage"'),
    ("cannot overwrite a value", "the key is set twice: keep one of them"),
    ("cannot declare .* twice", "the section occurs twice: merge the two"),
    ("expected newline or end of document", "write one key per line"),
    ("expected '=' after a key", "a line is KEY = VALUE, or [SECTION]"),
    ("unterminated string", "the closing quote is missing"),
    ("illegal character '\\\\n'", "the closing quote is missing"),
)


def read_text(path: FilePath) -> str:
    """The text of a job file; raises InputError if it cannot be read."""
    try:
        return read_named(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(
            Diagnostic(
                "no such file",
                str(path),
                hint=f"create one: seatrial init --preset first-voyage --out {path}",
            )
        ) from None
    except IsADirectoryError:
        raise InputError(
            Diagnostic("this is a folder, not a job file", str(path), hint=f"give the file in {path}")
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            Diagnostic(f"not UTF-8 text (byte {error.start})", str(path), hint="save the file as UTF-8")
        ) from None
    except OSError as error:
        raise InputError(
            Diagnostic(
                f"cannot be read: {error.strerror}", str(path), hint="check the path and its permissions"
            )
        ) from None
