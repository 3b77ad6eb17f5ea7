"""What a rule reports: a message about keys, not yet about locations in a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from seatrial.base.errors import Diagnostic
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.partial import Partial
from seatrial.job.schema import JobFile
from seatrial.job.source import Source


@dataclass(frozen=True)
class RuleViolation:
    """A broken rule. `keys` are dotted (`data.weights.1` is the second item of a list); the caret goes to the first
    of them that was written.
    """

    keys: tuple[str, ...]
    message: str
    hint: str

    def locate(self, source: Source) -> Diagnostic:
        """The finding at its location in `source`."""
        paths = [
            tuple(int(part) if part.isdecimal() else part for part in key.split(".")) for key in self.keys
        ]
        return source.first_place(paths).diagnostic(self.message, self.hint)


@dataclass(frozen=True)
class Facts:
    """What the rules check. Each part may be a Partial: reading what is missing raises UnreadableError."""

    job: JobFile
    architecture: Architecture = field(default_factory=lambda: cast(Architecture, Partial({})))
    layout: Layout = field(default_factory=lambda: cast(Layout, Partial({})))
