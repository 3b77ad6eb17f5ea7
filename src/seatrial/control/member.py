"""An agent's membership: it finds whoever coordinates, keeps in touch, and takes the lease when nobody does.

The right to run workers is itself a lease. Each beat is numbered and the coordinator returns it; the agent may go on
for `silence_s` from the moment it *sent* the last beat that came back. A coordinator that has not heard of an agent
for `silence_s` therefore knows that the agent has stopped its workers, whatever became of the network between them.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from seatrial.base.complain import complain
from seatrial.control import lease as leases
from seatrial.control.lease import Lease
from seatrial.control.wire import Link, Message, Outgoing

_SEEK_S = 0.05  # between two looks at the lease while nobody coordinates
_DIAL_S = 1.0
_TURN_S = 0.25  # each agent claims so much later than the one before it, so that they rarely meet
_CLAIM_S = 10.0  # a lease folder that takes no file for so long will not get better by waiting
_RESIGNED = 10.0  # times silence_s
_REFUSED = os.strerror(errno.ECONNREFUSED)


class Member:
    """The connection of one agent to the coordinator. `run` it often; it never waits."""

    def __init__(
        self,
        *,
        node: int,
        address: str,
        port: int,
        secret: bytes,
        folder: Path,
        heartbeat_s: float,
        silence_s: float,
        hello: Callable[[], Message],
        became: Callable[[Lease, int | None], None],
        joined: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        """`became(lease, node)` when the lease is ours; `node` had it before and its process is gone, None if nobody
        knows. `joined` is called with each new connection. `release` is called before `source` changes or is closed:
        nobody may wait for it any more."""
        self.node, self.address, self.port = node, address, port
        self.term = 0  # the newest that we obey
        self.link: Link | None = None
        self.dialing: Outgoing | None = None
        self.valid_until = time.monotonic() + 1e9  # nothing runs before the first coordinator starts it
        self._secret, self._folder = secret, folder
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._hello, self._became, self._joined, self._release = hello, became, joined, release
        self._beats: dict[int, float] = {}
        self.beats_sent = self.beats_returned = 0  # the number of the last one
        self._answered = False  # the coordinator that we are connected to has said something
        self._claim_after = 0.0
        self._next_beat = 0.0
        self._next_look = 0.0
        self._dial_until = 0.0
        self._holder = -1  # of the term that we obey
        self._seeking_since = time.monotonic()
        self._renewed: tuple[int, int] = (0, 0)  # term and time stamp of the lease as last seen
        self._renewed_at = time.monotonic()
        self._dead_term = 0  # its holder counts no more
        self._dead_node: int | None = None  # that holder's, where its process is gone for certain
        self._refused_since: float | None = None  # when the lease folder first took no file of ours

    # -- what the loop waits for

    @property
    def source(self) -> Link | Outgoing | None:
        """The socket to wait for; its `events` say what for."""
        return self.link or self.dialing

    @property
    def deadline(self) -> float:
        if self.link is not None:
            return min(self._next_beat, self.valid_until)
        return min(self._next_look if self.dialing is None else self._dial_until, self.valid_until)

    # -- what happens

    def receive(self) -> list[Message]:
        """Orders that have come from the coordinator."""
        if self.dialing is not None:
            self._advance()
        if self.link is None:
            return []
        orders = []
        for message in self.link.receive():
            self._answered = True
            if "beat" in message:
                self._beat_back(message["beat"])
            else:
                orders.append(message)
        self.link.flush()
        if self.link.closed:
            mute = not self._answered
            self.leave()
            if mute:
                self._has_resigned()
        return orders

    def _has_resigned(self) -> None:
        """Whoever listens there knows the secret and does not coordinate: its lease counts while it is renewed."""
        now = time.monotonic()
        self._next_look = now + _SEEK_S
        self._note_renewal(self.term, now)
        if now - self._renewed_at > self._silence_s:
            self._dead_term, self._dead_node = self.term, None

    def send(self, message: Message) -> bool:
        """Tell the coordinator; False if there is none now."""
        if self.link is None:
            return False
        self.link.send(message)
        return not self.link.closed

    def leave(self) -> None:
        """Let go of the coordinator and look for another, or the same one again."""
        self._release()
        for connection in (self.link, self.dialing):
            if connection is not None:
                connection.close()
        self.link = self.dialing = None
        self._beats.clear()
        self._seeking_since = self._next_look = time.monotonic()

    def tick(self, beat: Callable[[], Message]) -> bool:
        """What time demands; False once the right to run workers is over."""
        now = time.monotonic()
        if self.link is not None:
            if now >= self._next_beat:
                self._next_beat = now + self._heartbeat_s
                self.beats_sent += 1
                self._beats[self.beats_sent] = now
                self.link.send({"beat": self.beats_sent, **beat()})
            if self._beats and now - min(self._beats.values()) > self._silence_s:
                self.leave()  # it does not answer: perhaps it is another one by now
        elif self.dialing is not None:
            if now >= self._dial_until:
                self._gave_no_answer()
        elif now >= self._next_look:
            self._look(now)
        return now < self.valid_until

    def resign(self) -> None:
        """Our agent may not coordinate again for a while: it hears too few of the others."""
        self._claim_after = time.monotonic() + _RESIGNED * self._silence_s

    def _beat_back(self, number: int) -> None:
        sent = self._beats.get(number)
        if sent is not None:
            self.beats_returned = number
            self.valid_until = sent + self._silence_s
            for old in [n for n in self._beats if n <= number]:
                del self._beats[old]

    # -- finding one

    def _look(self, now: float) -> None:
        self._next_look = now + _SEEK_S
        try:
            found = leases.newest(self._folder)
        except OSError:
            return  # the file system is away; perhaps for a moment
        if found is not None and found.term >= self.term and found.term != self._dead_term and found.port:
            self._note_renewal(found.term, now)
            if found.node == self.node and found.port != self.port:
                self._dead_term, self._dead_node = found.term, None  # our own node's, of an agent before us
            else:
                self._dial(found, now)
                return
        self._claim_in_turn(now, found)

    def _note_renewal(self, term: int, now: float) -> None:
        stamp = leases.renewed(self._folder, term)
        if (term, stamp) != self._renewed:
            self._renewed, self._renewed_at = (term, stamp), now

    def _dial(self, found: Lease, now: float) -> None:
        hello = {"role": "agent", "term": found.term, **self._hello()}
        self.term, self._holder = found.term, found.node
        self.dialing = Outgoing(found.address, found.port, self._secret, hello)
        self._dial_until = now + _DIAL_S
        self._advance()

    def _advance(self) -> None:
        assert self.dialing is not None
        match self.dialing.advance():
            case "ready":
                self._release()
                self.link, self.dialing = self.dialing.link(), None
                self._next_beat, self._answered = 0.0, False
                # From when we greeted it: it may give us work before it has answered a beat.
                greeted = self._dial_until - _DIAL_S
                self.valid_until = min(self.valid_until, greeted + self._silence_s)
                self._joined()
            case "refused":
                refused = self.dialing.why == _REFUSED
                self._gave_no_answer(dead=refused)

    def _gave_no_answer(self, *, dead: bool = False) -> None:
        """No coordinator where the lease says. If nobody listens there its process is dead; otherwise the lease
        counts for as long as somebody renews it: perhaps it is us whom the network has left."""
        now = time.monotonic()
        assert self.dialing is not None
        self._release()
        self.dialing.close()
        self.dialing = None
        self._next_look = now + _SEEK_S
        self._note_renewal(self.term, now)
        if dead or now - self._renewed_at > self._silence_s:
            self._dead_term = self.term
            self._dead_node = self._holder if dead else None

    def _claim_in_turn(self, now: float, found: Lease | None) -> None:
        if now < self._claim_after or now - self._seeking_since < _TURN_S * self._turn(found):
            return
        term = max(leases.last_term(self._folder), self.term) + 1
        mine = Lease(term, self.node, self.address, self.port, time.time())
        try:
            won = leases.claim(self._folder, mine)
        except OSError as error:
            return self._could_not_claim(now, error)
        self._refused_since = None
        self._seeking_since = now
        if won:
            self._became(mine, self._dead_node)

    def _could_not_claim(self, now: float, error: OSError) -> None:
        """A full disk, most likely. Somebody may make room; but a run that nobody can coordinate must end."""
        if self._refused_since is None:
            self._refused_since = now
            complain(f"could not take the lease: {error}")
        if now - self._refused_since > _CLAIM_S:
            raise error

    def _turn(self, found: Lease | None) -> int:
        """0 for the first that may claim. The holder of the dead lease is not among those who can."""
        before = range(self.node)
        return sum(1 for node in before if found is None or node != found.node)

    def close(self) -> None:
        self.leave()
