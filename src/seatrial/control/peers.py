"""The agents as the coordinator knows them: connected, silent, or gone.

A connection that ends says little. If nothing listens where the agent did, its process is gone, and with it all that it
had started; if something does, the agent lives and will connect again. One that says nothing for `silence_s` counts as
lost, and knows it: see `Member`.
"""

from __future__ import annotations

import errno
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seatrial.control.wire import Link, Message, Outgoing

_PROBE_S = 1.0
_PROBE_AGAIN_S = 0.05
_FLUSH_S = 1.0
_STALL_S = 0.5  # the coordinator looks at the time more often than this
_REFUSED = os.strerror(errno.ECONNREFUSED)


@dataclass
class Peer:
    """One agent."""

    node: int
    link: Link
    address: str
    port: int
    offer_port: int  # free for a process-group store, when it last told
    pid: int
    step: int = 0  # last step that all its ranks have done
    generation: int = 0  # that it works on
    lost: bool = False
    events: int | None = None  # what its link is watched for; None: it is not
    probe: Outgoing | None = None
    probe_at: float | None = None  # when to try again
    probe_until: float = 0.0  # then its silence decides


class Peers:
    """All agents that ever joined this term."""

    def __init__(
        self,
        *,
        secret: bytes,
        silence_s: float,
        watch: Callable[..., None],
        unwatch: Callable[[Any], None],
        told: Callable[[Peer, Message], None],
        lost: Callable[[Peer, bool, str], None],
    ) -> None:
        """`told(peer, message)` for each message; `lost(peer, certain, cause)` once for each loss."""
        self._secret, self._silence_s = secret, silence_s
        self._watch, self._unwatch = watch, unwatch
        self._told, self._lost = told, lost
        self._peers: dict[int, Peer] = {}
        self._ticked = time.monotonic()

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
        """Those that are not lost."""
        return [node for node in self._peers if node in self]

    def add(self, peer: Peer) -> None:
        """An agent has connected, for the first time or again."""
        old = self._peers.get(peer.node)
        if old is not None:
            self._close(old)
        self._peers[peer.node] = peer
        self._listen(peer)

    def send(self, node: int, message: Message) -> bool:
        """False if it is lost or its connection is gone."""
        if node not in self:
            return False
        peer = self._peers[node]
        peer.link.send(message)
        self._listen(peer)
        return not peer.link.closed

    @property
    def deadline(self) -> float | None:
        times: list[float | None] = []
        for peer in self._peers.values():
            times.append(peer.probe_until if peer.probe is not None else peer.probe_at)
            if not peer.lost:
                times.append(peer.link.heard + self._silence_s)
        return min((t for t in times if t is not None), default=None)

    def tick(self, now: float) -> None:
        """What time demands."""
        stalled = now - self._ticked
        self._ticked = now
        if stalled > _STALL_S:
            # Our own process did not get to run, or waited for a file system: it could not hear anybody. Whom it
            # counts as lost later than it might has stopped its ranks all the same.
            for peer in self._peers.values():
                peer.link.heard = min(now, peer.link.heard + stalled)
        for peer in list(self._peers.values()):
            if peer.probe is not None and now >= peer.probe_until:
                self._probed(peer)
            elif peer.probe is None and peer.probe_at is not None and now >= peer.probe_at:
                self._probe(peer)
            silent = now - peer.link.heard
            if not peer.lost and silent > self._silence_s:
                self._lose(peer, certain=False, cause=f"has not been heard from for {silent:.1f} s")

    def flush(self) -> None:
        """Pass on what the agents have still to hear. Waits for a second at most."""
        until = time.monotonic() + _FLUSH_S
        while any(p.link.events & selectors.EVENT_WRITE and not p.link.closed for p in self._peers.values()):
            for peer in self._peers.values():
                peer.link.flush()
            if time.monotonic() > until:
                break

    def close(self) -> None:
        """Let go of everybody."""
        for peer in self._peers.values():
            self._close(peer)

    # -- connections

    def _listen(self, peer: Peer) -> None:
        """Watch its link for what it waits for now."""
        wanted = None if peer.link.closed else peer.link.events
        if peer.events == wanted:
            return
        if peer.events is not None:
            self._unwatch(peer.link)
        peer.events = wanted
        if wanted is not None:
            self._watch(peer.link, lambda: self._on_link(peer), wanted)
        else:
            self._went(peer)

    def _on_link(self, peer: Peer) -> None:
        for message in peer.link.receive():
            self._told(peer, message)
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

    # -- is its process gone, or only the connection?

    def _went(self, peer: Peer) -> None:
        peer.probe_until = time.monotonic() + _PROBE_S
        self._probe(peer)

    def _probe(self, peer: Peer) -> None:
        peer.probe_at = None
        if peer.lost:
            return
        peer.probe = Outgoing(peer.address, peer.port, self._secret, {"role": "probe"})
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
        if probe.why == _REFUSED:
            self._lose(peer, certain=True, cause="its agent ended")
        elif progress == "refused" and time.monotonic() < peer.probe_until:
            # Reset: a child that was being forked may have held its listening socket for a moment longer.
            peer.probe_at = time.monotonic() + _PROBE_AGAIN_S
        # Otherwise it lives and will join again, or is silent until its time is over.

    def _lose(self, peer: Peer, *, certain: bool, cause: str) -> None:
        if not peer.lost:
            peer.lost = True
            self._close(peer)
            self._lost(peer, certain, cause)
