"""What nodes say that they run, held against what they were told to run. Pure; knows no clock.

Every failure is reported by whoever sees it. This finds what nobody reported, whatever the reason, before the first
step is overdue.
"""

from __future__ import annotations

WAIT_S = 10.0  # an order takes milliseconds to arrive, and the report of a failure is sent before the beat that shows it


class Confirmations:
    """The beats of the nodes that are to run ranks."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # node -> when its beats began to differ from its orders

    def beat(self, node: int, wanted: int, runs: int, failed: int, now: float) -> str | None:
        """A node that is to run generation `wanted` works on `runs`, where `failed` of its ranks have ended badly.

        What is wrong with that once it has been so for `WAIT_S`; None before that, and where nothing is wrong.
        """
        if runs == wanted and not failed:
            self._since.pop(node, None)
            return None
        if now - self._since.setdefault(node, now) < WAIT_S:
            return None
        del self._since[node]
        if runs != wanted:
            return f"was told to run generation {wanted}, and still is at {runs}"
        return f"{failed} of its ranks have ended, and nobody said why"

    def forget(self, node: int) -> None:
        """The node is not to run anything, or has left in order."""
        self._since.pop(node, None)
