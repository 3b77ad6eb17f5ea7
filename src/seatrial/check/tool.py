"""What every reader of a tool's output is made of: recognise, parse, judge, and what siblings are compared by.

**Every line is accounted for.** A reader gets `Lines`, goes over them, and claims each line that it understood, with
`lines.claim(number)`; a document (JSON, XML) with `lines.claim_text(start, end)`. It claims nothing else: a line that it
passes over, that merely looks harmless, or that it reads as damage is not claimed. What no reader has claimed is left over.
offline.py offers it to the other readers, looks in it for unmistakable faults, and what still is left bars PASS, with its
lines. So a reader needs no word for lines that it does not know, and one that forgets to claim is noticed at once.
Blank lines and what frames an output (prompts, titles, rules, dates: noise.py) need not be claimed.

A file may hold several outputs. split.py cuts it where a line matches the `begins` of another tool than the one before:
there an output of that tool begins for certain. If the pattern has a group `id`, the same text in it once more begins
another output of the same tool: it is what one output has only once, its head. A group `device` is cut at as well, but
bars PASS, because damage can double a name too. Without these groups the reader itself takes several outputs. Logs have
`each` instead: every line that matches is the log's, wherever it stands, also between the lines of another output.
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
from seatrial.check.findings import Finding, Target
from seatrial.check.noise import is_noise
from seatrial.check.ranges import pieces, ranges

Facts = TypeVar("Facts")

_LONGEST = 8192  # characters of a line, as long as a record of the kernel's log
_SHOWN = 3  # places that a finding names; more say nothing new


class ParseError(InputError):
    """A tool's output that cannot be read: not this tool's, cut off, or damaged. Names file and line."""

    def __init__(
        self,
        message: str,
        *,
        file: str,
        line: int | None = None,
        source_line: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(
            Diagnostic(
                message,
                file=file,
                line=line,
                column=None if source_line is None else 1,
                length=len(source_line or ""),
                source_line=source_line,
                hint=hint or "collect the output again, all of it",
            )
        )


@dataclass(frozen=True)
class Context:
    """What is known beside the output itself. None is unknown; nothing is guessed from it."""

    node: str | None = None
    gpu: str | None = None  # catalogue name or device name of the GPUs that the node has
    gpus: int | None = None  # GPUs that the node must have, by the plan or its siblings
    nodes: int | None = None  # nodes that took part in a collective
    nic_gbit_s: float | None = None  # rate of the NIC that each GPU has for itself, one direction


class Lines:
    """The lines of one output, numbered as in their file, and which of them a reader has understood.

    Iterating gives (number, line), with longer lines than any tool writes cut; of such a line only a part is seen, so it
    cannot be claimed by its number. Of a long log `passed` counts the lines that were left out because they say nothing, and
    `repeated` those that are like the line of this number.
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
        """The lines as an editor numbers them: only line feeds end one, whatever else Unicode knows as a line's end."""
        return cls(list(enumerate(text.replace("\r\n", "\n").split("\n"), 1)))

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((number, line[:_LONGEST]) for number, line in self._lines)

    @property
    def whole(self) -> Sequence[tuple[int, str]]:
        """As iterating, with lines of any length."""
        return self._lines

    @cached_property
    def text(self) -> str:
        """All of it, for what is no matter of lines."""
        return "\n".join(line for _, line in self._lines) + "\n"

    def number(self, place: int) -> int:
        """The number of the line that holds `text[place]`."""
        return self._lines[min(self.text.count("\n", 0, place), len(self._lines) - 1)][0]

    def claim(self, *numbers: int) -> None:
        """These lines are understood."""
        self._claimed.update(n for n in numbers if n not in self._long)

    def claim_text(self, start: int, end: int) -> None:
        """The lines of `text[start:end]` are understood, but not one that goes on before or after it."""
        place = 0
        for number, line in self._lines:
            if start <= place + len(line) - len(line.lstrip()) and place + len(line.rstrip()) <= end:
                self._claimed.add(number)
            place += len(line) + 1

    def left(self) -> Lines:
        """The lines that are not claimed; none at all where only noise is left."""
        left = [(n, line) for n, line in self._lines if n not in self._claimed]
        return Lines(left if any(not is_noise(line) for _, line in left) else [])

    def __bool__(self) -> bool:
        return bool(self._lines)


@dataclass(frozen=True)
class Tool(Generic[Facts]):
    """How one tool's output is read. `parse` claims what it understands and raises ParseError; `judge` is pure and never
    returns nothing.
    """

    name: str  # the command: "nvidia-smi nvlink -s"
    matches: Callable[[str], bool]  # whether a text is this tool's, by its content; cheap
    parse: Callable[[Lines, str], Facts]  # lines, file name (for places in messages)
    judge: Callable[[Facts, Context], list[Finding]]
    # Property -> value, for comparison between nodes that should be alike: {"GPUs": 8, "driver": "535.183.01"}.
    inventory: Callable[[Facts], Mapping[str, str | int | float]] = field(default=lambda facts: {})
    begins: re.Pattern[str] | None = None  # matches the line with which an output begins, see above
    each: re.Pattern[str] | None = None  # of a log: matches each of its lines

    def read(self, text: str, file: str, context: Context | None = None) -> list[Finding]:
        """Parse and judge. Never raises for what stands in `text`: what cannot be read is UNJUDGED."""
        context, lines = context or Context(), Lines.of(text)
        try:
            found = self.judge(self.parse(lines, file), context)
        except ParseError as error:
            problem = error.diagnostics[0]
            place = file if problem.line is None else f"{file}:{problem.line}"
            return [
                Finding(
                    "OUT001",
                    "UNJUDGED",
                    Target(node=context.node),
                    f"{self.name}: {problem.message}",
                    why_unjudged=problem.message,
                    evidence=(place,),
                )
            ]
        return found + left_over(lines.left(), file, context, self.name)

    def inventory_of(self, text: str, file: str) -> Mapping[str, str | int | float]:
        """The inventory in `text`; empty where it cannot be read."""
        try:
            return self.inventory(self.parse(Lines.of(text), file))
        except ParseError:
            return {}


def left_over(lines: Lines, file: str, context: Context, tool: str) -> list[Finding]:
    """UNJUDGED for lines that nobody understood; nothing if there are none."""
    numbered = [(n, line) for n, line in lines if not is_noise(line)]
    if not numbered:
        return []
    many = f"{len(numbered)} lines" if len(numbered) > 1 else "a line"
    why = f"{many} not understood, the first: {quoted(numbered[0][1])}"
    return [
        Finding(
            "OUT002",
            "UNJUDGED",
            Target(node=context.node),
            f"{tool}: {why}",
            why_unjudged=why,
            evidence=evidence(file, (n for n, _ in numbered)),
        )
    ]


def read_json(lines: Lines, file: str) -> Any:
    """The first JSON document in `lines`, which it claims. Raises ParseError where it is not whole, or has a name twice."""
    begin = re.search(r"^\s*[{\[]", lines.text, re.MULTILINE)
    start = 0 if begin is None else begin.end() - 1
    try:
        value, end = json.JSONDecoder(object_pairs_hook=_unique).raw_decode(lines.text, start)
    except json.JSONDecodeError as error:
        line = lines.number(error.pos)
        raise ParseError(f"the JSON cannot be read: {error.msg}", file=file, line=line) from None
    except (ValueError, RecursionError) as error:
        why = "nested deeper than any tool does" if isinstance(error, RecursionError) else str(error)
        raise ParseError(f"the JSON cannot be read: {why}", file=file, line=lines.number(start)) from None
    lines.claim_text(start, end)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice in one object")
    return found


def lines_of(text: str) -> list[str]:
    """The lines as an editor numbers them: only line feeds end one, whatever else Unicode knows as a line's end.

    No tool prints longer ones than are kept here; the rest of a longer one would only take time.
    """
    return [line[:_LONGEST] for line in text.replace("\r\n", "\n").split("\n")]


def quoted(line: str, longest: int = 80) -> str:
    """A line of a file as a message shows it: in quotation marks, without what a terminal would act on."""
    line = " ".join(line.split())
    shown = "".join(c if c.isprintable() else "?" for c in line[:longest])
    return f"'{shown}{'...' if len(line) > longest else ''}'"


def evidence(file: str, lines: Iterable[int]) -> tuple[str, ...]:
    """ "FILE:LINE" for the first few of `lines`."""
    places = [f"{file}:{line}" for _, line in zip(range(_SHOWN + 1), lines, strict=False)]
    return tuple(places if len(places) <= _SHOWN else [*places[:_SHOWN], "..."])


def listed(items: Iterable[object], limit: int = 8) -> str:
    """ "0-2, 5" (numbers in order, and names with numbers, as ranges), and how many more if there are more than `limit` of these."""
    every = list(items)
    if all(isinstance(i, int) for i in every):
        said = ranges(i for i in every if isinstance(i, int))
    elif all(isinstance(i, str) for i in every):
        said = pieces(str(i) for i in every)
    else:
        said = [(str(i), 1) for i in every]
    more = sum(count for _, count in said[limit:])
    return ", ".join(text for text, _ in said[:limit]) + (f" and {more} more" if more else "")
