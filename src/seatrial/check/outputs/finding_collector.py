"""Shared by small readers: recognising a text, and collecting findings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.outputs.tool import Context, evidence


def having(pattern: str) -> Callable[[str], bool]:
    """A `matches` function for a tool: whether `pattern` (re.MULTILINE) is found in the text."""
    compiled = re.compile(pattern, re.MULTILINE)
    return lambda text: compiled.search(text) is not None


class FindingCollector:
    """Collects the findings of one output. `code` and `target` are the defaults."""

    def __init__(self, file: str, context: Context, code: str, target: Target | None = None) -> None:
        self.file, self.context, self.code, self.target = file, context, code, target or Target()
        self.found: list[Finding] = []

    def __call__(
        self,
        verdict: Verdict,
        text: str,
        *lines: int | None,
        code: str = "",
        target: Target | None = None,
        measured: float | str | None = None,
        unit: str = "",
        expected: Expected | None = None,
        median: float | None = None,
        why: str = "",
        action: str = "",
    ) -> None:
        """Add a finding; `lines` are its places, none for the whole file. `unit` is by default that of `expected`."""
        target = target or self.target
        target = replace(target, node=target.node or self.context.node)
        unit = unit or (expected.unit if expected else "")
        places = evidence(self.file, [n for n in lines if n is not None]) or (self.file,)
        found = (code or self.code, verdict, target, text, measured, unit, expected, median, why, action)
        self.found.append(Finding(*found, evidence=places))

    def with_pass(self, text: str, code: str = "") -> list[Finding]:
        """All findings, plus this PASS if none of them is worse than PASS."""
        if all(f.verdict == "PASS" for f in self.found):
            self("PASS", text, code=code)
        return self.found
