"""Which node's network is slow, from the round trips of the agents' own beats. Pure.

A beat is a few hundred bytes and answered at once. On a link that training has filled it waits with the rest, and it
costs nothing to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

_SLOW_S = 0.1  # an agent on a busy host may take that long to get to run, but not time after time
_TIMES = 8.0  # as long as the others' median
_IN_A_ROW = 4


@dataclass(frozen=True)
class SlowLink:
    """A node whose beats take long, and what the others' take."""

    node: int
    seconds: float
    others: float

    def __str__(self) -> str:
        return (
            f"the beats of node {self.node} take {self.seconds:.2f} s there and back, "
            f"those of the other nodes {self.others * 1e3:.0f} ms: its network is slow"
        )


class RoundTrips:
    """The newest round trip of each node."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._slow: dict[int, int] = {}  # node -> beats in a row

    def add(self, node: int, seconds: float) -> SlowLink | None:
        """A beat's round trip; a finding once for each time that a node's link becomes slow."""
        self._seconds[node] = seconds
        found = self._judge(node)
        self._slow[node] = self._slow.get(node, 0) + 1 if found is not None else 0
        return found if self._slow[node] == _IN_A_ROW else None

    def forget(self, node: int) -> None:
        """The node is gone."""
        self._seconds.pop(node, None)
        self._slow.pop(node, None)

    def slowest(self) -> SlowLink | None:
        """The node with a slow link now; None if there is none, or more than one."""
        found = [link for node in self._seconds if (link := self._judge(node)) is not None]
        return found[0] if len(found) == 1 else None

    def _judge(self, node: int) -> SlowLink | None:
        others = [s for n, s in self._seconds.items() if n != node]
        if not others:
            return None
        usual, own = median(others), self._seconds[node]
        return SlowLink(node, own, usual) if own > max(_SLOW_S, _TIMES * usual) else None
