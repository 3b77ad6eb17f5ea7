"""Detect which nodes that have not joined a new coordinator yet are dead, and which may still join."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from seatrial.control.net.lease import Lease
from seatrial.control.net.wire import Outgoing
from seatrial.record import messages as msg

_AGAIN_S = 0.1
_DIAL_S = 1.0


class RejoinProbe:
    """Connects to where each of them last listened. If nothing listens there, its process has certainly exited."""

    def __init__(
        self,
        roster: Mapping[int, tuple[str, int]],
        *,
        lease: Lease,
        secret: bytes,
        silence_s: float,
        watch: Callable[..., None],
        unwatch: Callable[[Any], None],
        lost: Callable[[int, bool, str], None],
    ) -> None:
        """`roster`: node -> address and port. `lease`: ours, sent to all. `lost(node, certain, cause)`: once a loss."""
        self._secret, self._silence_s = secret, silence_s
        self._hello = msg.encode(msg.Probe(lease))
        self._watch, self._unwatch, self._lost = watch, unwatch, lost
        self._roster = dict(roster)
        self._until = time.monotonic() + silence_s
        self._probes: dict[int, tuple[Outgoing, float]] = {}  # with the time of its timeout
        self._next = time.monotonic()

    @property
    def deadline(self) -> float | None:
        if not self._roster:
            return None
        return min([self._until, self._next, *(until for _, until in self._probes.values())])

    def joined(self, node: int) -> None:
        """Stop probing `node`: it has joined, or is known to be lost."""
        self._roster.pop(node, None)
        self._end(node)

    def tick(self, now: float) -> None:
        """Handle everything that is due."""
        for node in [n for n, (_, until) in self._probes.items() if now >= until]:
            self._end(node)
        if now >= self._until:
            for node in list(self._roster):
                self.joined(node)
                self._lost(node, False, f"did not join the new coordinator within {self._silence_s:g} s")
        elif now >= self._next:
            self._next = now + _AGAIN_S
            for node in [n for n in self._roster if n not in self._probes]:
                self._connect(node)

    def close(self) -> None:
        """Stop all probes."""
        for node in list(self._roster):
            self.joined(node)

    def _connect(self, node: int) -> None:
        address, port = self._roster[node]
        probe = Outgoing(address, port, self._secret, self._hello)
        self._probes[node] = (probe, time.monotonic() + _DIAL_S)
        self._watch(probe, lambda: self._answered(node), probe.events)
        if probe.why:
            self._answered(node)

    def _answered(self, node: int) -> None:
        if node not in self._probes:
            return
        probe, _ = self._probes[node]
        progress = probe.advance()
        if progress == "wait":
            self._unwatch(probe)
            self._watch(probe, lambda: self._answered(node), probe.events)
            return
        self._end(node)
        if probe.nothing_listens and node in self._roster:
            self.joined(node)
            self._lost(node, True, "its agent exited")

    def _end(self, node: int) -> None:
        if node in self._probes:
            probe, _ = self._probes.pop(node)
            self._unwatch(probe)
            probe.close()
