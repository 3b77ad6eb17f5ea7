"""The agents as the coordinator sees them: connected, silent, or lost.

A closed connection proves little. If nothing listens on the agent's port any more, its process has exited, and with it
everything that it started; if something does, the agent is alive and will reconnect. An agent that is silent for
`silence_s` counts as lost, and has by then noticed it itself: see `Member`.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seatrial.base.complain import complain
from seatrial.control.coordinator.steps import NOTHING, Done
from seatrial.control.net.wire import Link, Outgoing
from seatrial.record import messages as msg

_PROBE_S = 1.0
_PROBE_AGAIN_S = 0.05
_FLUSH_S = 1.0
_STALL_S = 0.5  # ticks are normally closer together than this


@dataclass
class Peer:
    """One agent."""

    node: int
    link: Link
    address: str
    port: int
    offer_port: int  # port for a process-group store that was free at its last report
    incarnation: str  # unique to each agent process with this node number
    done: Done = NOTHING  # what all its ranks have done
    generation: int = 0  # the one that it runs
    lost: bool = False
    events: int | None = None  # selector events that its link is watched for; None: not watched
    probe: Outgoing | None = None
    probe_at: float | None = None  # when to probe again
    probe_until: float = 0.0  # from then on only the silence timeout decides


class Peers:
    """All agents that have joined in this term."""

    def __init__(
        self,
        *,
        secret: bytes,
        silence_s: float,
        watch: Callable[..., None],
        unwatch: Callable[[Any], None],
        received: Callable[[Peer, msg.FromAgent], None],
        lost: Callable[[Peer, bool, str], None],
    ) -> None:
        """`received(peer, message)` for each message; `lost(peer, certain, cause)` once for each loss."""
        self._secret, self._silence_s = secret, silence_s
        self._watch, self._unwatch = watch, unwatch
        self._received, self._lost = received, lost
        self._peers: dict[int, Peer] = {}
        self._ticked = time.monotonic()
        self._look_at: float | None = None  # earliest timeout; checking thousands of peers takes time

    def __getitem__(self, node: int) -> Peer:
        return self._peers[node]

    def __contains__(self, node: int) -> bool:
        """Whether `node` joined and is not lost."""
        peer = self._peers.get(node)
        return peer is not None and not peer.lost

    def get(self, node: int) -> Peer | None:
        """The agent, lost or not; None if it never joined."""
        return self._peers.get(node)

    def nodes(self) -> list[int]:
        """Nodes that are not lost."""
        return [node for node in self._peers if node in self]

    def address(self, node: int) -> msg.AgentAddress:
        """Where the agent of `node` listens."""
        peer = self._peers[node]
        return msg.AgentAddress(node, peer.address, peer.port)

    def add(self, peer: Peer) -> None:
        """An agent has connected, for the first time or again."""
        old = self._peers.get(peer.node)
        if old is not None:
            self._close(old)
        self._peers[peer.node] = peer
        self._look_by(peer.link.heard + self._silence_s)
        self._listen(peer)

    def send(self, node: int, message: msg.ToAgent) -> bool:
        """Send a message; False if the agent is lost or its connection is closed."""
        if node not in self:
            return False
        peer = self._peers[node]
        peer.link.send(msg.encode(message))
        self._listen(peer)
        return not peer.link.closed

    @property
    def deadline(self) -> float | None:
        return self._look_at

    def tick(self, now: float) -> None:
        """Handle everything that is due: probes and silence timeouts."""
        stalled = now - self._ticked
        self._ticked = now
        if stalled > _STALL_S:
            # Our own process was not scheduled, or blocked on a file system, and could not receive anything. An agent
            # that counts as lost later because of this has stopped its ranks all the same.
            for peer in self._peers.values():
                peer.link.heard = min(now, peer.link.heard + stalled)
        if self._look_at is None or now < self._look_at:
            return
        for peer in list(self._peers.values()):
            if peer.probe is not None and now >= peer.probe_until:
                self._probed(peer)
            elif peer.probe is None and peer.probe_at is not None and now >= peer.probe_at:
                self._probe(peer)
            silent = now - peer.link.heard
            if not peer.lost and silent > self._silence_s:
                if peer.link.unread():
                    peer.link.heard = now  # we are late reading, it is not silent
                    continue
                self._lose(peer, certain=False, cause=f"has been silent for {silent:.1f} s")
        times: list[float | None] = []
        for peer in self._peers.values():
            times.append(peer.probe_until if peer.probe is not None else peer.probe_at)
            if not peer.lost:
                times.append(peer.link.heard + self._silence_s)
        self._look_at = min((t for t in times if t is not None), default=None)

    def _look_by(self, at: float) -> None:
        self._look_at = at if self._look_at is None else min(self._look_at, at)

    def flush(self) -> None:
        """Send pending messages to the agents. Blocks for a second at most."""
        until = time.monotonic() + _FLUSH_S
        while any(p.link.events & selectors.EVENT_WRITE and not p.link.closed for p in self._peers.values()):
            for peer in self._peers.values():
                peer.link.flush()
            if time.monotonic() > until:
                break

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            self._close(peer)

    # -- connections

    def _listen(self, peer: Peer) -> None:
        """Watch its link for the events that it needs now."""
        wanted = None if peer.link.closed else peer.link.events
        if peer.events == wanted:
            return
        if peer.events is not None:
            self._unwatch(peer.link)
        peer.events = wanted
        if wanted is not None:
            self._watch(peer.link, lambda: self._on_link(peer), wanted)
        else:
            self._on_disconnect(peer)

    def _on_link(self, peer: Peer) -> None:
        for values in peer.link.receive():
            try:
                message: msg.FromAgent = msg.decode(values, msg.FromAgent)
            except ValueError as error:
                complain(f"protocol error from node {peer.node}: {error}")
                peer.link.refuse(str(error))
                break
            self._received(peer, message)
        peer.link.flush()
        self._listen(peer)

    def _close(self, peer: Peer) -> None:
        if peer.events is not None:
            self._unwatch(peer.link)
            peer.events = None
        peer.link.close()
        if peer.probe is not None:
            self._unwatch(peer.probe)
            peer.probe.close()
            peer.probe = None
        peer.probe_at = None

    # -- did its process exit, or was only the connection lost?

    def _on_disconnect(self, peer: Peer) -> None:
        peer.probe_until = time.monotonic() + _PROBE_S
        self._look_by(peer.probe_until)
        self._probe(peer)

    def _probe(self, peer: Peer) -> None:
        peer.probe_at = None
        if peer.lost:
            return
        peer.probe = Outgoing(peer.address, peer.port, self._secret, msg.encode(msg.Probe(None)))
        self._watch(peer.probe, lambda: self._probed(peer), peer.probe.events)
        if peer.probe.why:
            self._probed(peer)

    def _probed(self, peer: Peer) -> None:
        probe = peer.probe
        if probe is None:
            return
        progress = probe.advance()
        self._unwatch(probe)
        if progress == "wait" and time.monotonic() < peer.probe_until:
            self._watch(probe, lambda: self._probed(peer), probe.events)
            return
        probe.close()
        peer.probe = None
        if probe.nothing_listens:
            self._lose(peer, certain=True, cause="its agent exited")
        elif progress == "refused" and time.monotonic() < peer.probe_until:
            # Connection reset: a child that was being forked may have held its listening socket open a moment longer.
            peer.probe_at = time.monotonic() + _PROBE_AGAIN_S
            self._look_by(peer.probe_at)
        # Otherwise it is alive and will rejoin, or stays silent until its timeout.

    def _lose(self, peer: Peer, *, certain: bool, cause: str) -> None:
        if not peer.lost:
            peer.lost = True
            self._close(peer)
            self._lost(peer, certain, cause)
