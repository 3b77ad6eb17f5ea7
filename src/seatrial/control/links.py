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
    own: bool = False  # the coordinator's: it is the others' beats that take long, all of them

    def __str__(self) -> str:
        if self.own:
            return (
                f"the beats of all other nodes take {self.seconds:.2f} s there and back to node {self.node}, "
                f"its own {self.others * 1e3:.0f} ms: its network is slow"
            )
        return (
            f"the beats of node {self.node} take {self.seconds:.2f} s there and back, "
            f"those of the other nodes {self.others * 1e3:.0f} ms: its network is slow"
        )


class RoundTrips:
    """The newest round trip of each node."""

    def __init__(self, own: int) -> None:
        """`own`: the node that the beats go to."""
        self._own = own
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
        far = [s for n, s in self._seconds.items() if n != self._own]
        # With one other node nobody can say at which end of the link between them the fault is.
        here = len(far) > 1 and _slower(min(far), self._seconds.get(self._own, 0.0))
        seconds = self._seconds[node]
        if node == self._own:
            return SlowLink(node, median(far), seconds, own=True) if here else None
        others = [s for n, s in self._seconds.items() if n != node]
        if here or not others or not _slower(seconds, median(others)):
            return None
        return SlowLink(node, seconds, median(others))


def _slower(seconds: float, usual: float) -> bool:
    return seconds > max(_SLOW_S, _TIMES * usual)
