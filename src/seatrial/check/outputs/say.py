"""How a small reader's judge says what it found: each finding with its node and its places, and a PASS where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace

from seatrial.check.findings import Expected, Finding, Target, Verdict
from seatrial.check.tool import Context, evidence


class Say:
    """The findings of one output, in the order in which they are said."""

    def __init__(self, file: str, context: Context) -> None:
        self.file, self.context = file, context
        self.found: list[Finding] = []

    def __call__(
        self,
        code: str,
        verdict: Verdict,
        text: str,
        *lines: int | None,
        target: Target | None = None,
        measured: float | str | None = None,
        unit: str = "",
        expected: Expected | None = None,
        median: float | None = None,
    ) -> None:
        """One finding; `lines` are its places, none for the whole file. UNJUDGED has `text` as its reason."""
        places = evidence(self.file, [n for n in lines if n is not None]) or (self.file,)
        self.found.append(
            Finding(
                code,
                verdict,
                replace(target or Target(), node=(target and target.node) or self.context.node),
                text,
                measured,
                unit,
                expected,
                median,
                why_unjudged=text if verdict == "UNJUDGED" else "",
                evidence=places,
            )
        )

    def all_well(self, code: str, text: str, *lines: int | None) -> list[Finding]:
        """All findings; with a PASS where nothing else is among them."""
        if all(f.verdict == "PASS" for f in self.found):
            self(code, "PASS", text, *lines)
        return self.found
