"""The outcome of a check: findings of each output, findings from comparisons, and the overall verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from seatrial.check.judging.check_run import CheckRun
from seatrial.check.judging.findings import ORDER, Finding, Target, Verdict, worst
from seatrial.check.ranges import natural

_BLAME = "BLM"


@dataclass(frozen=True)
class Judged:
    """One output: its file, its node, and its findings. `tool` is empty if unknown."""

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
    """A whole check. `compared` are the findings about several outputs or several measurements together.

    `check_run` describes how it was measured; None if existing outputs were judged.
    """

    judged: tuple[Judged, ...]
    compared: tuple[Finding, ...] = ()
    check_run: CheckRun | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, worst first, without duplicates; among equal verdicts blames before observations."""
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
        """Number of findings by verdict, worst first."""
        counts = Counter(f.verdict for f in self.findings)
        return {verdict: counts[verdict] for verdict in ORDER}

    @property
    def nodes(self) -> dict[str, Verdict]:
        """Node -> its verdict, for all named nodes, sorted by name.

        A node that was measured with others and has no findings of its own gets the PASS findings about all of them.
        """
        names: dict[str, list[Finding]] = {j.node: [] for j in self.judged if j.node is not None}
        for finding in self.findings:
            if finding.target.node is not None:
                names.setdefault(finding.target.node, []).append(finding)
        if self.check_run is not None:
            common = [f for f in self.findings if f.target == Target() and f.verdict == "PASS"]
            for node in self.check_run.nodes:
                names[node] = names.get(node) or common
        return {name: worst(names[name]) for name in sorted(names, key=natural)}

    def also(self, findings: list[Finding]) -> Report:
        """This report with `findings` added to `compared`."""
        return replace(self, compared=(*self.compared, *findings))

    def passes(self, *, strict: bool) -> bool:
        """Whether nothing failed; `strict`: whether everything passed."""
        return self.verdict == "PASS" if strict else self.verdict != "FAIL"
