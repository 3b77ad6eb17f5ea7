"""Finds the node with a slow link from the connections between nodes. Pure.

All members of a collective wait for its slowest link alike, so their times cannot name it. But a connection over that
link drains slowly while it has data to send, and those over other links do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from seatrial.hardware.tcp import Connection

_TIMES = 2.0  # a slow link has less than 1/2 of the rate of every other
_LEAST_BYTES = 1 << 20  # below this a connection carried only control messages


@dataclass(frozen=True)
class SlowLink:
    """The slow link of one node; or, with a `peer`, the path between two."""

    node: int
    peer: int | None
    bytes_per_s: float  # rate of its fastest connection
    others: float  # rate of the slowest connection elsewhere, bytes/s
    busy_s: float  # seconds of the run in which its slowest connection had data to send
    excess_s: float  # the part of `busy_s` in excess of the time at the others' rate

    @property
    def nodes(self) -> tuple[int, ...]:
        return (self.node,) if self.peer is None else (self.node, self.peer)


def slow_link(found: Mapping[int, Sequence[Connection]], node_of: Mapping[int, int]) -> SlowLink | None:
    """The one slow link that explains every slow connection; None if there is none, or too few to compare.

    `found`: rank -> its connections; `node_of`: rank -> node.
    """
    pairs = _pairs(found, node_of)
    order = sorted(pairs, key=lambda pair: pairs[pair].rate)
    causes = []
    for count in range(1, len(order)):
        slow, slowest_elsewhere = order[:count], pairs[order[count]].rate
        fastest = pairs[slow[-1]].rate
        if fastest * _TIMES >= slowest_elsewhere:
            continue
        longest = max((pairs[pair] for pair in slow), key=lambda traffic: traffic.busy_s)
        excess = longest.busy_s - longest.sent_bytes / slowest_elsewhere
        common = sorted(set.intersection(*map(set, slow)))
        nodes = [n for n in common if sum(n in pair for pair in pairs) == count]
        if nodes or len(common) == 2:
            node, peer = (nodes[0], None) if nodes else (common[0], common[1])
            causes.append(SlowLink(node, peer, fastest, slowest_elsewhere, longest.busy_s, excess))
    return max(causes, key=lambda cause: cause.excess_s, default=None)


@dataclass
class _Traffic:
    sent_bytes: int = 0
    busy_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.sent_bytes / self.busy_s


def _pairs(
    found: Mapping[int, Iterable[Connection]], node_of: Mapping[int, int]
) -> dict[tuple[int, int], _Traffic]:
    """(sending node, receiving node) -> traffic, if enough to compare."""
    at = {each.here: node_of[rank] for rank, own in found.items() for each in own}
    pairs: dict[tuple[int, int], _Traffic] = defaultdict(_Traffic)
    for each in (each for own in found.values() for each in own):
        here, there = at[each.here], at.get(each.there)
        if there is not None and there != here and each.sent_bytes >= _LEAST_BYTES and each.busy_s > 0:
            pairs[here, there].sent_bytes += each.sent_bytes
            pairs[here, there].busy_s += each.busy_s
    return dict(pairs)
