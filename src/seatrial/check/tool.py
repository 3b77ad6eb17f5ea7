"""What every reader of a tool's output is made of: recognise, parse, judge, and what siblings are compared by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from seatrial.base.errors import Diagnostic, InputError
from seatrial.check.findings import Finding, Target
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


@dataclass(frozen=True)
class Stray:
    """Lines that are none of the tool's: numbers from 1, and the text."""

    file: str
    lines: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Tool(Generic[Facts]):
    """How one tool's output is read. `parse` raises ParseError; `judge` is pure and never returns nothing."""

    name: str  # the command: "nvidia-smi nvlink -s"
    matches: Callable[[str], bool]  # whether a text is this tool's, by its content; cheap
    parse: Callable[[str, str], Facts]  # text, file name (for places in messages)
    judge: Callable[[Facts, Context], list[Finding]]
    # Property -> value, for comparison between nodes that should be alike: {"GPUs": 8, "driver": "535.183.01"}.
    inventory: Callable[[Facts], Mapping[str, str | int | float]] = field(default=lambda facts: {})

    def read(self, text: str, file: str, context: Context | None = None) -> list[Finding]:
        """Parse and judge. Never raises for what stands in `text`: what cannot be read is UNJUDGED."""
        context = context or Context()
        try:
            return self.judge(self.parse(text, file), context)
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

    def inventory_of(self, text: str, file: str) -> Mapping[str, str | int | float]:
        """The inventory in `text`; empty where it cannot be read."""
        try:
            return self.inventory(self.parse(text, file))
        except ParseError:
            return {}


def stray_findings(stray: Stray, context: Context, tool: str) -> list[Finding]:
    """UNJUDGED for the lines that nobody could read; nothing if there are none."""
    if not stray.lines:
        return []
    _, text = stray.lines[0]
    shown = "".join(c if c.isprintable() else "?" for c in text.strip()[:80])
    why = f"{len(stray.lines)} line{'s' * (len(stray.lines) > 1)} not understood, the first: {shown!r}"
    places = evidence(stray.file, (n for n, _ in stray.lines))
    return [
        Finding(
            "OUT002",
            "UNJUDGED",
            Target(node=context.node),
            f"{tool}: {why}",
            why_unjudged=why,
            evidence=places,
        )
    ]


def lines_of(text: str) -> list[str]:
    """The lines as an editor numbers them: only line feeds end one, whatever else Unicode knows as a line's end.

    No tool prints longer ones than are kept here; the rest of a longer one would only take time.
    """
    return [line[:_LONGEST] for line in text.replace("\r\n", "\n").split("\n")]


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
