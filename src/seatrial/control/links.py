"""Find the node with a slow network from the kernel's round-trip times between agents and coordinator. Pure.

The connection carries a few hundred bytes several times a second, which queue behind training traffic on a saturated
link. A busy host delays its agent, but not the kernel's acknowledgements.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

_SLOW_S = 0.1  # a delayed acknowledgement takes up to 0.04 s
_TIMES = 8.0  # as long as the others' median
_IN_A_ROW = 4


@dataclass(frozen=True)
class SlowLink:
    """A node with long round trips, and the round trips of the others for comparison."""

    node: int
    seconds: float
    others: float
    own: bool = False  # the coordinator's own link: round trips to all others are long

    def __str__(self) -> str:
        if self.own:
            return (
                f"TCP round trips between node {self.node} and all other nodes take {self.seconds:.2f} s: "
                "its network is slow"
            )
        return (
            f"TCP round trips to node {self.node} take {self.seconds:.2f} s, "
            f"those to other nodes {self.others * 1e3:.0f} ms: its network is slow"
        )


class RoundTrips:
    """The newest round trip of each node."""

    def __init__(self, own: int) -> None:
        """`own`: the node that the beats go to."""
        self._own = own
        self._seconds: dict[int, float] = {}
        self._slow: dict[int, int] = {}  # node -> beats in a row

    def add(self, node: int, seconds: float) -> SlowLink | None:
        """Add a measurement; returns a finding once each time a node's link becomes slow."""
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
