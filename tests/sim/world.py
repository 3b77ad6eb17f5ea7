"""One history, played: the faults that strike the cluster, from the first start to the end of the run."""

from __future__ import annotations

import heapq

from history import LEAVE_S, Fault

from cluster import Cluster, Host
from seatrial.control.machine import types as m

MOST_EVENTS = 400_000


class World(Cluster):
    """A cluster and what happens to it."""

    def run(self) -> None:
        """Until the run is over and nothing more can come of it."""
        for host in self.hosts:
            if self.random.random() < 0.05:
                host.alive = False
                self.at(self.random.random() * 40, self.revive, host)
        for host in self.hosts[self.settings.slots + self.settings.spares :]:
            host.alive = False
            self.at(self.random.random() * self.history.quiet, self.revive, host)
        for fault in self.history.faults:
            self.at(fault.time, self.strike, fault)
        self.at(self.history.quiet, self.calm)
        self.elect()
        bound = self.history.bound
        while self.watcher.ended is None and self.now <= bound and self.events < MOST_EVENTS:
            if self.wake is not None and (not self._queue or self.wake <= self._queue[0][0]):
                self.now = max(self.now, self.wake)
                self.tell(m.Tick(self.now))
                continue
            if not self._queue:
                break
            self.now, _, what, args = heapq.heappop(self._queue)
            what(*args)
        self.watcher.at_the_end()

    # -- faults

    def strike(self, fault: Fault) -> None:
        self.watcher.troubled = self.now
        getattr(self, f"strike_{fault.kind.replace(' ', '_')}")()

    def any_host(self, *, working: bool = False) -> Host:
        if working and self.current is not None and self.random.random() < 0.8:
            return self.hosts[self.random.choice(list(self.current.slots.values()))]
        return self.random.choice(self.hosts)

    def signal(self, host: Host, signal: str) -> None:
        """Whatever runs there now, the node's agent reports this."""
        current = self.current
        generation = 0 if current is None else current.generation
        self.report(
            host,
            m.Failed,
            generation,
            host.number,
            None,
            signal,
            signal,
            current.step if current else 0,
        )

    def strike_die(self, host: Host | None = None) -> None:
        host = host or self.any_host(working=True)
        if not host.alive:
            return
        self.silence(host, "died", certain=self.random.random() < 0.5)
        host.alive = host.ready = False
        self.end_workers(host)
        host.left = host.leaving = None
        if host.number == self.seat:
            self.depose()

    def strike_several(self) -> None:
        for _ in range(self.random.randint(2, 4)):
            self.random.choice((self.strike_die, self.strike_cut, self.strike_rank))()

    def revive(self, host: Host) -> None:
        if not host.alive:
            host.alive = True
            host.barred, host.silent, host.slow, host.claims = 0, None, False, None
            host.incarnation += 1
            self.connect(host)

    def strike_return(self) -> None:
        down = [h for h in self.hosts if not h.alive]
        if down:
            self.revive(self.random.choice(down))

    def strike_cut(self) -> None:
        host = self.any_host(working=True)
        if not host.cut and host.alive:
            host.cut = True
            self.silence(host, "silent")
            if host.number == self.seat:
                self.depose()
            if self.random.random() < 0.5:
                self.at(self.now + self.random.uniform(0.1, 2 * self.settings.silence_s), self.mend, host)

    def mend(self, host: Host) -> None:
        if host.cut:
            host.cut = False
            self.connect(host)

    def strike_heal(self) -> None:
        cut = [h for h in self.hosts if h.cut]
        if cut:
            self.mend(self.random.choice(cut))

    def strike_leave(self, host: Host | None = None) -> None:
        """Its agent is signalled."""
        host = host or self.any_host(working=True)
        if host.alive and host.leaving is None:
            host.leaving = (self.now, self.now + LEAVE_S)
            self.report(host, m.Leaving, host.number, LEAVE_S)
            self.at(self.now + LEAVE_S, self.overstays, host, host.incarnation)

    def strike_leave_all(self) -> None:
        for host in self.hosts:
            self.at(self.now + self.random.random() * 1.5, self.strike_leave, host)

    def overstays(self, host: Host, incarnation: int) -> None:
        """The grace is over, and nobody has let it go."""
        if host.alive and host.leaving is not None and host.incarnation == incarnation:
            self.watcher.overstayed(host)
            self.watcher.troubled = self.now
            self.end(host)

    def strike_replace(self) -> None:
        host = self.any_host(working=True)
        if host.alive and not host.cut and host.number != self.seat:
            self.replace(host)
            if self.random.random() < 0.4:
                self.at(self.now + self.random.uniform(0.1, self.settings.silence_s), self.depose)

    def strike_rank(self) -> None:
        host = self.any_host(working=True)
        current = self.current
        if current is not None and host.workers == current.generation:
            self.fail(current, host.number, self.random.choice(("worker_exit", "oom")))

    def strike_hang(self) -> None:
        if self.current is not None:
            self.current.broken = True

    def strike_stale(self) -> None:
        """A report of an older generation, or of a rank that is well."""
        if self.current is not None:
            host, current = self.any_host(), self.current
            generation = self.random.randint(max(0, current.generation - 2), current.generation)
            self.report(
                host, m.Failed, generation, host.number, 0, "worker_exit", "false alarm", current.step
            )

    def strike_evicting(self) -> None:
        self.signal(self.any_host(), "xid:79")

    def strike_resetting(self) -> None:
        self.signal(self.any_host(), "xid:74")

    def strike_tolerated(self) -> None:
        self.signal(self.any_host(), "retransmissions")

    def strike_recorded(self) -> None:
        self.signal(self.any_host(), "congestion")

    def strike_application(self) -> None:
        if self.current is not None and not self.current.broken:
            self.fail(self.current, self.any_host(working=True).number, "app_error")

    def strike_coordinator(self) -> None:
        self.depose()

    def strike_halfway(self) -> None:
        self.halfway = True

    def strike_slow_stop(self) -> None:
        self.any_host(working=True).slow = True

    def strike_preempt(self) -> None:
        if self.machine is None:
            self.at(self.now + 1.0, self.strike_preempt)
            return
        self.tell(m.StopAsked(self.now, "preempt"))

    def strike_interrupt(self) -> None:
        if self.machine is None:
            self.at(self.now + 1.0, self.strike_interrupt)
            return
        self.tell(m.StopAsked(self.now, "interrupt"))

    def calm(self) -> None:
        """No more faults; mostly everything comes back."""
        self.halfway = False
        for host in self.hosts:
            host.slow = False
            if not (host.cut or not host.alive):
                continue
            if self.history.heals or self.random.random() < 0.3:
                self.at(self.now + self.random.uniform(0.0, 3.0), self.mend, host)
                self.at(self.now + self.random.uniform(0.0, 3.0), self.revive, host)
