"""An agent's membership: it finds the coordinator, sends it heartbeats, and claims the lease when there is none.

The right to run workers is itself a lease. The coordinator returns each numbered heartbeat; the agent may continue for
`silence_s` from the moment it *sent* the last heartbeat that came back, less the age at that time of the proof for the
coordinator's own lease. A coordinator that has received nothing from an agent for `silence_s`, or whose predecessor
lost its right that long ago, therefore knows that the agent has stopped its workers, whatever the network did.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from seatrial.base.complain import complain
from seatrial.control.net.lease import Hold, Lease, Leases
from seatrial.control.net.wire import Link, Outgoing
from seatrial.record import messages as msg

_SEEK_S = 0.05  # between two reads of the lease while there is no coordinator
_DIAL_S = 1.0  # or half of `silence_s`, if that is longer: the coordinator may be blocked on its file system
_TURN_S = 0.25  # delay between the claims of successive agents, so that they rarely collide
_CLAIM_S = 10.0  # a lease folder that refuses files for this long will not recover by waiting
_RESIGNED = 10.0  # times silence_s: no new claim for this long after resigning


class Member:
    """The connection of one agent to the coordinator. Call `tick` often; it never blocks on the network."""

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
        hello: Callable[[int], msg.AgentJoins],
        became: Callable[[Hold, int | None], None],
        joined: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        """`hello(term)` returns our hello to the coordinator of `term`. `became(hold, node)` is called when the lease is ours; `node` held it before and its process is dead, None
        if that is unknown. `joined` is called on each new connection. `release` is called before `source` changes or
        is closed, so that no selector watches it any more."""
        self.node, self.address, self.port = node, address, port
        self.term = 0  # the newest that we obey
        self.link: Link | None = None
        self.dialing: Outgoing | None = None
        self.valid_until = time.monotonic() + 1e9  # nothing runs before the first coordinator starts it
        self._secret, self._leases = secret, Leases(folder)
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._dial_s = max(_DIAL_S, silence_s / 2)
        self._hello, self._became, self._joined, self._release = hello, became, joined, release
        self._beats: dict[int, float] = {}
        self.beats_sent = self.beats_returned = 0  # the number of the last one
        self._answered = False  # the coordinator that we are connected to has sent something
        self._claim_after = 0.0
        self._next_beat = 0.0
        self._next_check = 0.0
        self._dial_until = 0.0
        self._greeted_at: float | None = None  # when we sent our hello
        self._holder = -1  # of the term that we obey
        self._seeking_since = time.monotonic()
        self._renewed: tuple[int, int] = (0, 0)  # term and count of the lease as last seen
        self._renewed_at = time.monotonic()
        self._dead_term = 0  # term whose holder no longer counts
        self._dead_node: int | None = None  # that holder's node, if its process is certainly dead
        self._refused_since: float | None = None  # when the lease folder first refused our file

    # -- what the loop waits for

    @property
    def source(self) -> Link | Outgoing | None:
        """The socket to watch, for its `events`."""
        return self.link or self.dialing

    @property
    def deadline(self) -> float:
        if self.link is not None:
            return min(self._next_beat, self.valid_until)
        return min(self._next_check if self.dialing is None else self._dial_until, self.valid_until)

    # -- what happens

    def receive(self) -> list[msg.ToAgent]:
        """Orders received from the coordinator. Empty once the right to run workers has expired: this process was
        stalled and the orders may be just as old; `tick` then disconnects from the coordinator."""
        if self.dialing is not None:
            self._advance()
        if self.link is None:
            return []
        orders: list[msg.ToAgent] = []
        for values in self.link.receive():
            self._answered = True
            try:
                message: msg.ToAgent = msg.decode(values, msg.ToAgent)
            except ValueError as error:
                complain(f"protocol error from the coordinator: {error}")
                self.link.refuse(str(error))
                break
            if isinstance(message, msg.BeatReturned):
                self._beat_back(message)
            else:
                orders.append(message)
        self.link.flush()
        if self.link.closed:
            mute = not self._answered
            self.leave()
            if mute:
                self._has_resigned()
        return orders if time.monotonic() < self.valid_until else []

    def _has_resigned(self) -> None:
        """Handle a holder that knows the secret but does not coordinate: its lease counts while it is renewed."""
        now = time.monotonic()
        self._next_check = now + _SEEK_S
        self._look_for_renewal(now)
        if now - self._renewed_at > self._silence_s:
            self._dead_term, self._dead_node = self.term, None

    def send(self, message: msg.FromAgent) -> bool:
        """Send to the coordinator; False if there is none now."""
        if self.link is None:
            return False
        self.link.send(msg.encode(message))
        return not self.link.closed

    def leave(self) -> None:
        """Disconnect from the coordinator and look for another one, or the same one again."""
        self._release()
        for connection in (self.link, self.dialing):
            if connection is not None:
                connection.close()
        self.link = self.dialing = None
        self._beats.clear()
        self._seeking_since = self._next_check = time.monotonic()

    def tick(self, beat: Callable[[int], msg.Beat]) -> bool:
        """Handle everything that is due, with `beat(number)` as our next one; False once the right to run workers has expired."""
        now = time.monotonic()
        if self.link is not None:
            if now >= self._next_beat:
                self._next_beat = now + self._heartbeat_s
                self.beats_sent += 1
                self._beats[self.beats_sent] = now
                self.link.send(msg.encode(beat(self.beats_sent)))
            if self._beats and now - min(self._beats.values()) > self._silence_s:
                self.leave()  # it does not answer: there may be another coordinator by now
        elif self.dialing is not None:
            if now >= self._dial_until:
                self._gave_no_answer()
        elif now >= self._next_check:
            self._check_lease(now)
        return now < self.valid_until

    def resign(self) -> None:
        """Make no claim for a while: our agent, as coordinator, could reach too few of the others."""
        self._claim_after = time.monotonic() + _RESIGNED * self._silence_s

    def _beat_back(self, beat: msg.BeatReturned) -> None:
        sent = self._beats.get(beat.number)
        if sent is not None:
            self.beats_returned = beat.number
            self.valid_until = max(self.valid_until, sent - beat.proof_age_s + self._silence_s)
            for old in [n for n in self._beats if n <= beat.number]:
                del self._beats[old]

    # -- finding a coordinator

    def _check_lease(self, now: float) -> None:
        self._next_check = now + _SEEK_S
        try:
            found = self._leases.newest()
        except OSError:
            return  # the file system is unavailable, perhaps briefly
        if found is not None and found.term >= self.term and found.term != self._dead_term and found.port:
            self._note_renewal(found, now)
            if found.node == self.node and (found.address, found.port) != (self.address, self.port):
                self._dead_term, self._dead_node = found.term, None  # of an earlier agent of our own node
            else:
                self._dial(found, now)
                return
        self._claim_in_turn(now, found)

    def _note_renewal(self, found: Lease, now: float) -> None:
        if (found.term, found.count) != self._renewed:
            self._renewed, self._renewed_at = (found.term, found.count), now

    def _look_for_renewal(self, now: float) -> None:
        with contextlib.suppress(OSError):
            found = self._leases.newest()
            assert found is not None, "we have called its holder"
            self._note_renewal(found, now)

    def learn_of(self, lease: Lease) -> None:
        """Learn of a lease from another agent; leave our coordinator if its term is older, as it has lost its right."""
        self._leases.learn(lease)
        if lease.term > self.term and self.source is not None:
            self.leave()

    def _dial(self, found: Lease, now: float) -> None:
        hello = msg.encode(self._hello(found.term))
        self.term, self._holder = found.term, found.node
        self.dialing = Outgoing(found.address, found.port, self._secret, hello)
        self._dial_until, self._greeted_at = now + self._dial_s, None
        self._advance()

    def _advance(self) -> None:
        assert self.dialing is not None
        now = time.monotonic()
        progress = self.dialing.advance()
        if self._greeted_at is None and self.dialing.greeted:
            self._greeted_at = now
        match progress:
            case "ready":
                self._release()
                self.link, self.dialing = self.dialing.link(), None
                self._next_beat, self._answered = 0.0, False
                # Counted from our hello: it may give us work before it has answered a heartbeat.
                assert self._greeted_at is not None
                self.valid_until = min(self.valid_until, self._greeted_at + self._silence_s)
                self._joined()
            case "refused":
                self._gave_no_answer(dead=self.dialing.nothing_listens)

    def _gave_no_answer(self, *, dead: bool = False) -> None:
        """Handle an unreachable lease holder. If nothing listens at its address its process is dead; otherwise the
        lease counts for as long as it is renewed, since we may be the ones who are cut off."""
        now = time.monotonic()
        assert self.dialing is not None
        self._look_for_renewal(now)
        over = dead or now - self._renewed_at > self._silence_s
        of_ours = self._renewed[0] == self.term
        if self.dialing.connected and not self.dialing.why and of_ours and not over:
            # It is busy, as when thousands join: another connection would only add to its load.
            self._dial_until = now + self._dial_s
            return
        self._release()
        self.dialing.close()
        self.dialing = None
        self._next_check = now + _SEEK_S
        if over:
            self._dead_term = self.term
            self._dead_node = self._holder if dead else None

    def _claim_in_turn(self, now: float, found: Lease | None) -> None:
        if now < self._claim_after or now - self._seeking_since < _TURN_S * self._turn(found):
            return
        term = 1 if found is None else found.term + 1
        mine = Lease(term, self.node, self.address, self.port, time.time())
        try:
            hold = self._leases.claim(mine, self._silence_s)
        except OSError as error:
            return self._could_not_claim(now, error)
        self._refused_since = None
        self._seeking_since = now
        if hold is not None:
            self._became(hold, self._dead_node)

    def _could_not_claim(self, now: float, error: OSError) -> None:
        """Handle a full disk or a moved run folder: raise after `_CLAIM_S`, as a run without a coordinator must end."""
        if self._refused_since is None:
            self._refused_since = now
            complain(f"could not take the lease: {error}")
        if now - self._refused_since > _CLAIM_S:
            raise error

    def _turn(self, found: Lease | None) -> int:
        """Our position in the order of claims, from 0. The holder of the dead lease is skipped: it cannot claim."""
        before = range(self.node)
        return sum(1 for node in before if found is None or node != found.node)
