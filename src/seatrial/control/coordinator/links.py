"""Find the node with a slow network from the kernel's round-trip times between agents and coordinator. Pure.

The connection carries a few hundred bytes several times a second, which queue behind training traffic on a saturated
link. A busy host delays its agent, but not the kernel's acknowledgements.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

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
        """`own`: the coordinator's node, which receives the heartbeats."""
        self._own = own
        self._seconds: dict[int, float] = {}
        self._sorted: list[float] = []  # their values: there may be thousands, judged at each heartbeat
        self._slow: dict[int, int] = {}  # node whose link is slow -> heartbeats in a row

    def add(self, node: int, seconds: float) -> SlowLink | None:
        """Add a measurement; returns a finding once each time a node's link becomes slow."""
        self._drop(node)
        self._seconds[node] = seconds
        insort(self._sorted, seconds)
        found = self._judge(node)
        if found is None:
            self._slow.pop(node, None)
            return None
        self._slow[node] = self._slow.get(node, 0) + 1
        return found if self._slow[node] == _IN_A_ROW else None

    def forget(self, node: int) -> None:
        """Drop a lost node."""
        self._drop(node)
        self._slow.pop(node, None)

    def slowest(self) -> SlowLink | None:
        """The node with a slow link now; None if there is none, or more than one."""
        found = [link for node in self._slow if (link := self._judge(node)) is not None]
        return found[0] if len(found) == 1 else None

    def _drop(self, node: int) -> None:
        seconds = self._seconds.pop(node, None)
        if seconds is not None:
            del self._sorted[bisect_left(self._sorted, seconds)]

    def _judge(self, node: int) -> SlowLink | None:
        own = self._seconds.get(self._own)
        # With only one other node, the faulty end of the link between them cannot be determined.
        here = len(self._seconds) - (own is not None) > 1 and _slower(self._without(own, 0), own or 0.0)
        seconds, others = self._seconds[node], len(self._seconds) - 1
        if others == 0:
            return None
        usual = (self._without(seconds, (others - 1) // 2) + self._without(seconds, others // 2)) / 2
        if node == self._own:
            return SlowLink(node, usual, seconds, own=True) if here else None
        return None if here or not _slower(seconds, usual) else SlowLink(node, seconds, usual)

    def _without(self, one: float | None, index: int) -> float:
        """The value at `index` of the sorted values without `one`."""
        at = len(self._sorted) if one is None else bisect_left(self._sorted, one)
        return self._sorted[index if index < at else index + 1]


def _slower(seconds: float, usual: float) -> bool:
    return seconds > max(_SLOW_S, _TIMES * usual)
