"""The one exception tree, and the diagnostic that points at a place in a file.

SeatrialError              exit 1: a run, check or test failed
 ├─ InputError             exit 2: what the user gave cannot be used; carries every problem at once
 ├─ RunFailed              exit 1: training stopped; names node, rank and cause
 └─ InternalError          exit 3: our fault
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERNAL = 3
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130

_LONGEST_LINE = 200  # characters of the user's file that an error shows


@dataclass(frozen=True)
class Diagnostic:
    """One problem in what the user gave, with the place and what to do about it.

    `line` and `column` count from 1; they are None where the problem has no place in a file
    (a missing folder, an environment variable). `source_line` is the text of that line. `count` lines have the
    problem, of which this is the first.
    """

    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    length: int = 1
    source_line: str | None = None
    hint: str | None = None
    count: int = 1

    @property
    def told(self) -> str:
        """The message, with how many lines it is about."""
        return f"{self.message} ({self.count:,} such lines were read)" if self.count > 1 else self.message

    def render(self) -> str:
        """The problem as text: `file:line:col: error: ...`, the line with a caret, then the hint."""
        place = ""
        if self.file is not None:
            place = self.file
            if self.line is not None:
                place += f":{self.line}"
                if self.column is not None:
                    place += f":{self.column}"
            place += ": "
        out = [f"{place}error: {self.told}"]
        if self.source_line is not None and self.line is not None and self.column is not None:
            gutter = f"{self.line} | "
            # Tabs keep their width, so that the caret stands under the right character.
            # Of a very long line, what stands around the place.
            start = (
                max(0, self.column - 1 - _LONGEST_LINE // 2) if len(self.source_line) > _LONGEST_LINE else 0
            )
            shown = self.source_line[start : start + _LONGEST_LINE]
            before = "".join("\t" if c == "\t" else " " for c in shown[: self.column - 1 - start])
            out.append(f"  {gutter}{shown}")
            out.append(
                f"  {' ' * (len(gutter) - 2)}| {before}{'^' * max(1, min(self.length, len(shown) - len(before)))}"
            )
        if self.hint is not None:
            out.append(f"  hint: {self.hint}")
        return "\n".join(out)


class SeatrialError(Exception):
    """A failure that is told to the user in words, never as a traceback."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        """The whole text for stderr."""
        text = f"error: {self.message}"
        return text if self.hint is None else f"{text}\n  hint: {self.hint}"


class InputError(SeatrialError):
    """Everything that is wrong with what the user gave, reported at once (exit 2)."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, problems: str | Diagnostic | list[Diagnostic], *, hint: str | None = None) -> None:
        if isinstance(problems, str):
            problems = [Diagnostic(problems, hint=hint)]
        elif isinstance(problems, Diagnostic):
            problems = [problems]
        self.diagnostics: list[Diagnostic] = problems
        super().__init__("; ".join(d.told for d in problems), hint=hint)

    def render(self) -> str:
        text = "\n".join(d.render() for d in self.diagnostics)
        n = len(self.diagnostics)
        return text if n == 1 else f"{text}\n{n} problems"


class RunFailed(SeatrialError):
    """A training run, a check or a test ended without success (exit 1)."""


class InternalError(SeatrialError):
    """Something that cannot happen did: a bug of ours (exit 3)."""

    exit_code = EXIT_INTERNAL
