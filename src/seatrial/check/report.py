"""The outcome of a check: what each output said, what comparisons said, and the verdict on all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from seatrial.check.findings import Finding, Target, Verdict, worst

if TYPE_CHECKING:
    from seatrial.check.course import Course

ORDER: tuple[Verdict, ...] = ("FAIL", "WARN", "UNJUDGED", "PASS")
_BLAME = "BLM"


@dataclass(frozen=True)
class Judged:
    """One output: where it came from, whose it is, and its findings. `tool` is empty where it is unknown."""

    file: str
    node: str | None
    tool: str
    findings: tuple[Finding, ...]
    inventory: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)


@dataclass(frozen=True)
class Report:
    """A whole check. `compared` are the findings about several outputs together, or about what was measured together.

    `course` says how it was measured; None where outputs were handed in.
    """

    judged: tuple[Judged, ...]
    compared: tuple[Finding, ...] = ()
    course: Course | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, the worst first, each place once; among equals who is to blame before what was seen of it."""
        every = [f for j in self.judged for f in j.findings] + list(self.compared)
        return tuple(
            sorted(
                dict.fromkeys(every), key=lambda f: (ORDER.index(f.verdict), not f.code.startswith(_BLAME))
            )
        )

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many findings of each verdict, the worst first."""
        said = Counter(f.verdict for f in self.findings)
        return {verdict: said[verdict] for verdict in ORDER}

    @property
    def nodes(self) -> dict[str, Verdict]:
        """Node -> verdict on it, of all nodes that are named, in order of their names.

        A node that was measured with others and of which nothing is said has what is said of all of them.
        """
        names: dict[str, list[Finding]] = {j.node: [] for j in self.judged if j.node is not None}
        for finding in self.findings:
            if finding.target.node is not None:
                names.setdefault(finding.target.node, []).append(finding)
        if self.course is not None:
            common = [f for f in self.findings if f.target == Target() and f.verdict == "PASS"]
            for node in self.course.nodes:
                names[node] = names.get(node) or common
        return {name: worst(names[name]) for name in sorted(names, key=natural)}

    def also(self, findings: list[Finding]) -> Report:
        """This report with more findings about all of it."""
        return replace(self, compared=(*self.compared, *findings))

    def passes(self, *, strict: bool) -> bool:
        """Whether nothing failed; `strict`: whether everything passed."""
        return self.verdict == "PASS" if strict else self.verdict != "FAIL"


def natural(name: str) -> list[tuple[int, int, str]]:
    """For sorting: node2 before node10."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for c in [*name, ""]:
        if c.isdecimal() and c.isascii():
            digits += c
            continue
        if digits:
            parts.append((0, int(digits), digits))
            digits = ""
        if c:
            parts.append((1, 0, c))
    return parts
