"""Compare what nodes report to run with what they were ordered to run. Pure; has no clock.

Every failure should be reported by the process that detects it. This catches unreported failures, whatever the reason,
before the first step is overdue.
"""

from __future__ import annotations

WAIT_S = 10.0  # an order arrives within milliseconds, and a failure report is sent before the heartbeat that shows it


class Confirmations:
    """Tracks the heartbeats of the nodes that should run ranks."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # node -> when its heartbeats began to differ from its orders

    def beat(self, node: int, wanted: int, runs: int, failed: int, now: float) -> str | None:
        """A node that should run `wanted` runs generation `runs`, and `failed` of its ranks have failed.

        Returns the problem once it has persisted for `WAIT_S`, else None.
        """
        if runs == wanted and not failed:
            self._since.pop(node, None)
            return None
        if now - self._since.setdefault(node, now) < WAIT_S:
            return None
        del self._since[node]
        if runs != wanted:
            return f"was ordered to run generation {wanted}, but still reports {runs}"
        return f"{failed} of its ranks have exited without a failure report"

    def forget(self, node: int) -> None:
        """Stop tracking a node that should run nothing, or has left cleanly."""
        self._since.pop(node, None)
