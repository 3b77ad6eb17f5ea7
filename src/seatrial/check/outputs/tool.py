"""The parts of a reader for a tool's output: recognise, parse, judge, and values to compare between siblings.

**Every line is accounted for.** A reader iterates over `Lines` and claims each line that it understood with
`lines.claim(number)`; in a document (JSON, XML) with `lines.claim_text(start, end)`. It claims nothing else: no line
that it skips, that merely looks harmless, or that it treats as damage. offline.py passes unclaimed lines to the other
readers and searches the rest for unmistakable faults; what is still unclaimed prevents a PASS and is quoted. So a
reader needs no rules for unknown lines, and a missing claim is noticed at once. Blank lines and text around outputs
(prompts, titles, separators, dates: noise.py) need not be claimed.

A file may hold several outputs. split.py cuts it where a line matches `first_line` of another tool than the one before. If
the pattern has a group `id`, a second match with the same text begins another output of the same tool: use it for a
header that an output has only once. A repeated group `device` is cut at as well, but prevents a PASS, because damage
can also duplicate a name. Without these groups the reader itself handles several outputs. Logs have `log_line` instead:
every line that matches belongs to the log, also between the lines of another output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from seatrial.base.errors import Diagnostic, InputError
from seatrial.check.judging.findings import Finding, Target
from seatrial.check.outputs.noise import is_noise

Facts = TypeVar("Facts")

_LONGEST = 8192  # characters of a line, as long as a record of the kernel's log
_SHOWN = 3  # places that a finding names; more add nothing


class ParseError(InputError):
    """A tool's output that cannot be read: not this tool's, cut off, or damaged. Names file and line."""

    def __init__(
        self,
        message: str,
        *,
        file: str,
        line: int | None = None,
        source_line: str | None = None,
    ) -> None:
        super().__init__(
            Diagnostic(
                message,
                file=file,
                line=line,
                column=None if source_line is None else 1,
                length=len(source_line or ""),
                source_line=source_line,
                hint="collect the complete output again",
            )
        )


@dataclass(frozen=True)
class Context:
    """What is known apart from the output itself. None means unknown; nothing is guessed in its place."""

    node: str | None = None
    gpu: str | None = None  # catalogue name or device name of the GPUs that the node has
    gpus: int | None = None  # GPUs that the node must have, by the plan or its siblings
    nodes: int | None = None  # nodes that took part in a collective
    nic_gbit_s: float | None = None  # rate of each GPU's own NIC, one direction


class Lines:
    """The numbered lines of one output, and which of them a reader has understood.

    Iterating yields (number, line), with overlong lines truncated; a truncated line cannot be claimed by its number.
    For a long log, `passed` is the number of irrelevant lines that were dropped, and `repeated` maps a line number to
    the number of dropped lines like it.
    """

    def __init__(
        self,
        lines: Sequence[tuple[int, str]],
        passed: int = 0,
        repeated: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._lines = lines
        self._claimed: set[int] = set()
        self._long = {number for number, line in lines if len(line) > _LONGEST}
        self.passed = passed
        self.repeated = repeated

    @classmethod
    def of(cls, text: str) -> Lines:
        """Number the lines as an editor does: only line feeds end a line, not other Unicode line separators."""
        return cls(list(enumerate(text.replace("\r\n", "\n").split("\n"), 1)))

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((number, line[:_LONGEST]) for number, line in self._lines)

    @property
    def whole(self) -> Sequence[tuple[int, str]]:
        """As iterating, without truncation."""
        return self._lines

    @cached_property
    def text(self) -> str:
        """The lines joined, for readers that do not work line by line."""
        return "\n".join(line for _, line in self._lines) + "\n"

    def number(self, place: int) -> int:
        """The number of the line that contains `text[place]`."""
        return self._lines[min(self.text.count("\n", 0, place), len(self._lines) - 1)][0]

    def claim(self, *numbers: int) -> None:
        """Mark these lines as understood."""
        self._claimed.update(n for n in numbers if n not in self._long)

    def claim_text(self, start: int, end: int) -> None:
        """Mark the lines of `text[start:end]` as understood, except partial ones."""
        place = 0
        for number, line in self._lines:
            if start <= place + len(line) - len(line.lstrip()) and place + len(line.rstrip()) <= end:
                self._claimed.add(number)
            place += len(line) + 1

    def unclaimed(self) -> Lines:
        """The unclaimed lines; empty if they are all noise."""
        left = [(n, line) for n, line in self._lines if n not in self._claimed]
        return Lines(left if any(not is_noise(line) for _, line in left) else [])

    def __bool__(self) -> bool:
        return bool(self._lines)


@dataclass(frozen=True)
class Tool(Generic[Facts]):
    """The reader of one tool's output.

    `parse` claims what it understands and raises ParseError; `judge` is pure and never returns an empty list.
    """

    name: str  # the command: "nvidia-smi nvlink -s"
    matches: Callable[[str], bool]  # whether a text is this tool's, by its content; cheap
    parse: Callable[[Lines, str], Facts]  # lines, file name (for places in messages)
    judge: Callable[[Facts, Context], list[Finding]]
    # Property -> value, for comparison between nodes that should be alike: {"GPUs": 8, "driver": "535.183.01"}.
    inventory: Callable[[Facts], Mapping[str, str | int | float]] = field(default=lambda facts: {})
    first_line: re.Pattern[str] | None = None  # matches the first line of an output, see above
    log_line: re.Pattern[str] | None = None  # for a log: matches each of its lines

    def read(self, text: str, file: str, context: Context | None = None) -> list[Finding]:
        """Parse and judge. Never raises for what `text` contains: what cannot be read is UNJUDGED."""
        context, lines = context or Context(), Lines.of(text)
        try:
            found = self.judge(self.parse(lines, file), context)
        except ParseError as error:
            problem = error.diagnostics[0]
            place = file if problem.line is None else f"{file}:{problem.line}"
            text, why = f"{self.name}: {problem.message}", problem.message
            target = Target(node=context.node)
            return [Finding("OUT001", "UNJUDGED", target, text, why_unjudged=why, evidence=(place,))]
        return found + unclaimed_findings(lines.unclaimed(), file, context, self.name)

    def inventory_of(self, text: str, file: str) -> Mapping[str, str | int | float]:
        """The inventory in `text`; empty if it cannot be read."""
        try:
            return self.inventory(self.parse(Lines.of(text), file))
        except ParseError:
            return {}


def unclaimed_findings(lines: Lines, file: str, context: Context, tool: str) -> list[Finding]:
    """UNJUDGED for lines that no reader understood; nothing if there are none."""
    numbered = [(n, line) for n, line in lines if not is_noise(line)]
    if not numbered:
        return []
    many = f"{len(numbered)} lines" if len(numbered) > 1 else "a line"
    why = f"{many} not recognised, the first: {quoted(numbered[0][1])}"
    target, places = Target(node=context.node), evidence(file, (n for n, _ in numbered))
    return [Finding("OUT002", "UNJUDGED", target, f"{tool}: {why}", why_unjudged=why, evidence=places)]


def read_json(lines: Lines, file: str) -> Any:
    """Parse and claim the first JSON document in `lines`. ParseError if it is incomplete or has duplicate keys."""
    begin = re.search(r"^\s*[{\[]", lines.text, re.MULTILINE)
    start = 0 if begin is None else begin.end() - 1
    try:
        value, end = json.JSONDecoder(object_pairs_hook=_unique).raw_decode(lines.text, start)
    except json.JSONDecodeError as error:
        line = lines.number(error.pos)
        raise ParseError(f"the JSON cannot be read: {error.msg}", file=file, line=line) from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ParseError(f"the JSON cannot be read: {why}", file=file, line=lines.number(start)) from None
    lines.claim_text(start, end)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a duplicate name in one object")
    return found


def lines_of(text: str) -> list[str]:
    """The lines as an editor numbers them: only line feeds end a line, not other Unicode line separators.

    Truncated to a length that no tool's lines exceed; the rest of a longer line would only cost time.
    """
    return [line[:_LONGEST] for line in text.replace("\r\n", "\n").split("\n")]


def quoted(line: str, longest: int = 80) -> str:
    """A line quoted for a message, without terminal control characters."""
    line = " ".join(line.split())
    shown = "".join(c if c.isprintable() else "?" for c in line[:longest])
    return f"'{shown}{'...' if len(line) > longest else ''}'"


def evidence(file: str, lines: Iterable[int]) -> tuple[str, ...]:
    """ "FILE:LINE" for the first few of `lines`."""
    places = [f"{file}:{line}" for _, line in zip(range(_SHOWN + 1), lines, strict=False)]
    return tuple(places if len(places) <= _SHOWN else [*places[:_SHOWN], "..."])
