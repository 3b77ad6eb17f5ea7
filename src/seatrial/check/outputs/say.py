"""What small readers share: how a text is recognised, and how a judge says what it found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from seatrial.check.findings import Expected, Finding, Target, Verdict
from seatrial.check.tool import Context, evidence


def having(pattern: str) -> Callable[[str], bool]:
    """Whether a text has what `pattern` (re.MULTILINE) finds: for a tool's `matches`."""
    compiled = re.compile(pattern, re.MULTILINE)
    return lambda text: compiled.search(text) is not None


class Say:
    """The findings of one output, in the order in which they are said; about `code` and `target` where no other is named."""

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
        expected: Expected | None = None,
        median: float | None = None,
    ) -> None:
        """One finding; `lines` are its places, none for the whole file."""
        target = target or self.target
        target = replace(target, node=target.node or self.context.node)
        unit = expected.unit if expected else ""
        places = evidence(self.file, [n for n in lines if n is not None]) or (self.file,)
        code = code or self.code
        self.found.append(
            Finding(code, verdict, target, text, measured, unit, expected, median, evidence=places)
        )

    def all_well(self, text: str, code: str = "") -> list[Finding]:
        """All findings; with a PASS where nothing else is among them."""
        if all(f.verdict == "PASS" for f in self.found):
            self("PASS", text, code=code)
        return self.found
