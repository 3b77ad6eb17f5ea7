"""A simulated cluster that drives the control machine: nodes, agents, ranks, the network, and a coordinator that moves.

Time is simulated. Messages are delayed at random: in order between one node and the coordinator, in any order between
nodes.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from history import HANG_S, KILL_S, RULES, History
from watcher import Watcher

from seatrial.control.coordinator.handover import MachineMemory
from seatrial.control.machine import types as m
from seatrial.control.machine.machine import Machine


@dataclass(slots=True)
class Host:
    """A node as it really is."""

    number: int
    alive: bool = True
    cut: bool = False  # from the coordinator's side of the network
    ready: bool = False
    link: int = 0  # the connection to the coordinator; 0: none
    workers: int | None = None  # the generation whose ranks, running or parked, live here
    claims: int | None = None  # a generation that its agent says it runs, although its ranks have failed
    barred: int = 0  # generations up to here were told to stop
    silent: float | None = None  # since when nobody is known to have heard it
    slow: bool = False  # that its ranks have stopped is told far too late next time, or never
    down_at: float = 0.0  # when the last message on its way here arrives
    up_at: float = 0.0
    left: tuple[int, str] | None = None  # the generation that its ranks left in order, and how
    incarnation: int = 0
    ghosts: list[int] = field(
        default_factory=list
    )  # generations whose ranks live below agents that were replaced
    leaving: tuple[float, float] | None = None  # signalled: when, and when it ends


@dataclass(slots=True)
class Generation:
    """The true state of a generation."""

    generation: int
    slots: dict[int, int]
    step: int
    begun: set[int] = field(default_factory=set)
    broken: bool = False
    leave: str | None = None
    over: bool = False


class Cluster:
    """The true state of all nodes, one of which coordinates."""

    def __init__(self, history: History, machine_type: type[Machine] = Machine) -> None:
        self.history, self.random = history, history.random
        s = self.settings = history.settings
        self.machine_type = machine_type
        self.now = 0.0
        self.events = 0
        self.hosts = [Host(number) for number in range(s.slots + s.spares + history.cold)]
        self.watcher = Watcher(self)
        self.current: Generation | None = None
        self.saved = self.reached = 0  # steps on disk; the furthest of any generation
        self.machine: Machine | None = None
        self.seat = 0  # the node whose agent coordinates
        self.term = 0
        self.memory: dict[str, Any] | None = None
        self.heard: dict[int, int] = {}  # node -> the connection over which the coordinator knows it
        self.known: dict[int, int] = {}  # node -> its incarnation, as the coordinator knows it
        self.kept: dict[int, int] = {}  # and as the next one will
        self.moved = 0.0  # when the coordinator last saw progress
        self.halfway = False  # the coordinator will die while it carries out its next actions
        self.bad_times = history.bad_times
        self.wake: float | None = None  # when the machine wants a Tick
        self._links = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    # -- time

    def at(self, time: float, what: Callable[..., None], *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (max(time, self.now), self._number, what, args))

    def delay(self) -> float:
        return self.random.random() * self.history.delay_s

    # -- the coordinator

    def elect(self) -> None:
        """An agent takes the lease and goes on from the memory."""
        able = [h for h in self.hosts if h.alive and not h.cut]
        if not able:
            self.at(self.now + 1.0, self.elect)
            return
        self.seat = self.random.choice(able).number
        self.term += 1
        text = None if self.memory is None else json.dumps(self.memory)
        if text is not None:
            MachineMemory.model_validate_json(
                text, strict=True
            )  # else a real coordinator would not believe it
        memory = None if text is None else json.loads(text)
        self.machine = self.machine_type(self.settings, memory, RULES.__getitem__)
        self.heard, self.moved, self.halfway = {}, self.now, False
        self.known = dict(self.kept)
        self.watcher.elected()
        self.at(self.now + HANG_S, self.watch, self.term)
        for host in able:
            self.at(self.now + self.random.random() * self.history.rejoin_s, self.connect, host)

    def depose(self) -> None:
        """The coordinator is gone, with all its connections; what it has sent and nobody has read is gone too."""
        if self.machine is None:
            return
        self.machine = self.wake = None
        for host in self.hosts:
            self.fence_ghosts(host)
            if host.link:
                self.hang_up(host)
        self.at(self.now + self.random.uniform(0.3, 1.5 * self.settings.silence_s), self.elect)

    def watch(self, term: int) -> None:
        """The coordinator's own eye for generations that do not move."""
        if term != self.term or self.machine is None:
            return
        if (
            self.now - self.moved >= HANG_S - 1e-6
            and self.machine.at_work(self.machine.generation)
            and self.machine.phase == "running"
            and self.current is not None
        ):
            self.moved = self.now
            node = self.random.choice(list(self.current.slots.values()))
            step = max(self.machine.counts.best, 0)
            self.tell(m.Failed(self.now, self.machine.generation, node, node * 8, "hang", "overdue", step))
        self.at(max(self.moved, self.now - HANG_S + 1.0) + HANG_S, self.watch, term)

    def tell(self, event: m.Event) -> None:
        """The machine gets an event, and what it wants is done."""
        machine = self.machine
        if machine is None:
            return
        self.events += 1
        self.watcher.before(event)
        actions = machine.handle(event)
        self.wake = machine.deadline()
        self.watcher.waits(self.wake)
        if not actions:
            return
        self.memory, self.kept = machine.memory(), dict(self.known)
        dies = self.halfway and any(isinstance(a, m.Start | m.Stop | m.Yield | m.Finish) for a in actions)
        done = self.random.randint(0, len(actions)) if dies else len(actions)
        self.watcher.after(actions, done)
        for action in actions[:done]:
            self.carry_out(action, dies)
        if dies:
            self.depose()

    def carry_out(self, action: m.Action, dies: bool) -> None:
        match action:
            case m.Start():
                self.moved = self.now
                current = Generation(action.generation, action.slots, self.where_to_resume())
                self.current = current
                for node in action.slots.values():
                    self.order(node, dies, self.start, current)
            case m.Stop():
                for node in action.nodes:
                    self.order(node, dies, self.stop, action.generation, action.grace_s)
            case m.Yield():
                for node in self.current.slots.values() if self.current is not None else ():
                    self.order(node, dies, self.ask_to_leave, action.generation, action.how)
            case m.Flush():
                works, fails = self.history.flush
                luck = self.random.random()
                if luck < works + fails:
                    self.at(self.now + luck * 3, self.flushed, self.term, luck < works)
            case m.ResetGpu() | m.Requalify():
                self.order(action.node, dies, self.test)
            case m.Release():
                self.order(action.node, dies, self.end)
            case _:
                pass

    def order(self, node: int, dies: bool, what: Callable[..., None], *args: Any) -> None:
        """A message to a node; lost if the connection over which it goes is not the one that the node has."""
        if dies and self.random.random() < 0.5:
            return
        host = self.hosts[node]
        link = self.heard.get(node)
        if link is not None and link == host.link:
            host.down_at = max(host.down_at, self.now + self.delay())
            self.at(host.down_at, self.deliver, host, link, what, args)

    def deliver(self, host: Host, link: int, what: Callable[..., None], args: Sequence[Any]) -> None:
        if host.link == link:
            what(host, *args)

    # -- agents

    def report(self, host: Host, event: Callable[..., m.Event | None], *args: Any) -> None:
        """A message to the coordinator."""
        if host.link:
            host.up_at = max(host.up_at, self.now + self.delay())
            self.at(host.up_at, self.arrive, host, host.link, event, args)

    def failed(self, time: float, generation: int, *args: Any) -> m.Event | None:
        """What the coordinator makes of a rank's end: nothing, unless its generation is at work."""
        assert self.machine is not None
        return m.Failed(time, generation, *args) if self.machine.at_work(generation) else None

    def arrive(
        self, host: Host, link: int, event: Callable[..., m.Event | None], args: Sequence[Any]
    ) -> None:
        if self.machine is None or (host.link != link and self.random.random() < 0.5):
            return
        if event is m.Joined:
            if host.link != link:
                return
            self.heard[host.number] = link
            self.at(self.now + self.delay(), self.acknowledge, host, link)
            before = self.known.setdefault(host.number, host.incarnation)
            args = (*args, before != host.incarnation)
            if before != host.incarnation:
                self.fence_ghosts(host)
                self.known[host.number] = host.incarnation
        elif self.heard.get(host.number) != link:
            return
        for _ in range(2 if self.random.random() < 0.02 else 1):
            if self.machine is not None and (told := event(self.now, *args)) is not None:
                self.tell(told)
            if event is m.Joined and args[-1]:
                args = (*args[:-1], False)  # by now it is known
                if self.machine is not None:
                    self.memory, self.kept = self.machine.memory(), dict(self.known)

    def connect(self, host: Host) -> None:
        if not host.alive or host.cut or host.link or self.machine is None:
            return
        self._links += 1
        host.link = self._links
        host.down_at = host.up_at = self.now
        running = host.claims if host.workers is None else host.workers
        leaving = None if host.leaving is None else host.leaving[1] - self.now
        self.report(host, m.Joined, host.number, host.ready, running, "", leaving)
        if host.left is not None:
            generation, how = host.left  # perhaps nobody has heard it
            self.report(host, m.Finished, generation, host.number, how)
        if not host.ready:
            self.at(self.now + self.random.uniform(0.5, 4.0), self.becomes_ready, host, host.link)

    def becomes_ready(self, host: Host, link: int) -> None:
        if host.link == link and not host.ready:
            host.ready = True
            self.report(host, m.Ready, host.number)

    def acknowledge(self, host: Host, link: int) -> None:
        if host.link == link:
            host.silent = None

    def hang_up(self, host: Host) -> None:
        """The connection ends; from here on nobody is known to hear this agent."""
        host.link = 0
        self.fence_ghosts(host)
        host.silent = self.now - self.random.random() * 0.3 if host.silent is None else host.silent
        if host.workers is not None:
            self.at(host.silent + self.settings.silence_s, self.fence, host, host.silent)

    def replace(self, host: Host) -> None:
        """Another agent starts on the node's number, while the one before may live: nobody hears it from then on."""
        if host.workers is not None:
            host.ghosts.append(host.workers)
            if host.silent is not None:  # nobody is known to have heard it since
                latest = host.silent + self.settings.silence_s + self.random.random() * KILL_S
                self.at(latest, self.ghost_ends, host, host.workers)
            if self.current is not None and host.workers == self.current.generation:
                self.current.broken = True
        host.incarnation += 1
        host.link, host.workers, host.claims, host.left, host.leaving = 0, None, None, None, None
        host.barred, host.silent, host.slow, host.ready = 0, None, False, False
        self.connect(host)
        if not host.link:
            self.fence_ghosts(host)

    def fence_ghosts(self, host: Host) -> None:
        for generation in host.ghosts:
            latest = self.now + self.settings.silence_s + self.random.random() * KILL_S
            self.at(latest, self.ghost_ends, host, generation)

    def ghost_ends(self, host: Host, generation: int) -> None:
        if generation in host.ghosts:
            host.ghosts.remove(generation)

    def end(self, host: Host) -> None:
        """Its agent ends, and all its ranks with it."""
        self.silence(host, "ended", certain=True)
        host.alive = host.ready = False
        self.end_workers(host)
        host.left = host.leaving = None
        if host.number == self.seat:
            self.depose()

    def fence(self, host: Host, since: float) -> None:
        if host.silent == since and host.alive and host.workers is not None:
            self.at(self.now + self.random.random() * KILL_S, self.kill, host, host.workers)

    def kill(self, host: Host, generation: int) -> None:
        """Its ranks die without an order; whoever is connected then connects anew to say so."""
        if host.alive and host.workers == generation:
            self.end_workers(host)
            if self.random.random() < 0.3:
                host.claims = generation  # some had failed before that, and nobody has heard it
            if host.link:
                host.link = 0
                self.connect(host)

    def lose(self, host: Host, link: int, certain: bool, cause: str) -> None:
        """The coordinator takes note that a connection is gone for good."""
        if self.machine is not None and self.heard.get(host.number) == link:
            del self.heard[host.number]
            self.tell(m.Lost(self.now, host.number, certain, cause))

    def silence(self, host: Host, cause: str, certain: bool = False) -> None:
        """Have the coordinator notice that the node is out of touch."""
        link = self.heard.get(host.number)
        if link is not None:
            latest = self.now + self.settings.silence_s + self.delay()
            soon = certain or self.history.early
            time = self.random.uniform(self.now, latest) if soon else latest
            self.at(time, self.lose, host, link, certain, cause)
        self.hang_up(host)

    # -- ranks

    def where_to_resume(self) -> int:
        """Carried state, memory or disk: the newest that is left."""
        if self.current is None:
            return self.saved
        return self.random.randint(max(self.saved, self.current.step - 3), max(self.saved, self.current.step))

    def end_workers(self, host: Host) -> None:
        if self.current is not None and host.workers == self.current.generation:
            self.current.broken = True
        host.workers = None

    def start(self, host: Host, current: Generation) -> None:
        if current.generation <= host.barred:
            return
        self.watcher.worker_born(host, current.generation)
        host.workers, host.left, host.claims = current.generation, None, None
        current.begun.add(host.number)
        if len(current.begun) == len(current.slots):
            self.at(self.now + self.random.uniform(0.2, 3.0), self.step, current)

    def step(self, current: Generation) -> None:
        if current is not self.current or current.over or current.broken:
            return
        bad, poison = self.history.bad_node, self.history.poison
        if poison is not None and poison[0] == current.step + 1:
            self.fail(current, current.slots[poison[1]], poison[2])
            return
        if (
            bad is not None
            and self.bad_times
            and bad in current.slots.values()
            and self.random.random() < 0.4
        ):
            self.bad_times -= 1
            self.fail(current, bad, "worker_exit")
            return
        if current.step < self.history.steps:
            current.step += 1
            self.reached = max(self.reached, current.step)
        self.report(self.hosts[current.slots[0]], m.Progress, current.generation, current.step)
        how = "done" if current.step >= self.history.steps else current.leave
        if how is not None or current.step % 5 == 0:
            self.saved = max(self.saved, current.step)
        if how is None:
            self.at(self.now + 1.0, self.step, current)
            return
        current.over = True
        for node in current.slots.values():
            self.at(self.now + self.random.random(), self.leave, self.hosts[node], current, how)

    def leave(self, host: Host, current: Generation, how: str) -> None:
        if host.workers == current.generation:
            host.workers, host.left = None, (current.generation, how)
            self.report(host, m.Finished, current.generation, host.number, how)

    def fail(self, current: Generation, node: int, signal: str) -> None:
        """A rank ends; its peers park. A hang nobody reports but the watch."""
        current.broken = True
        if signal != "hang":
            host = self.hosts[node]
            host.claims = current.generation
            self.report(
                host,
                self.failed,
                current.generation,
                node,
                node * 8,
                signal,
                "broken",
                current.step,
            )

    def ask_to_leave(self, host: Host, generation: int, how: str) -> None:
        current = self.current
        if current is not None and current.generation == generation and host.workers == generation:
            current.leave = how if current.leave != "preempted" else current.leave

    def stop(self, host: Host, generation: int, grace_s: float) -> None:
        host.barred = max(host.barred, generation)
        if host.claims is not None and host.claims <= generation:
            host.claims = None
        if host.workers is None or host.workers > generation:
            self.report(host, m.Stopped, generation, host.number)
            return
        if self.current is not None and host.workers == self.current.generation:
            self.current.broken = True
        ends = self.now + self.random.random() * grace_s
        slow, host.slow = host.slow, False
        self.at(ends, self.stopped, host, host.workers)
        if not slow or self.random.random() < 0.7:
            told = ends + (self.random.uniform(5.0, 15.0) if slow else 0.0)
            self.at(told, self.tell_stopped, host, host.link, generation)

    def stopped(self, host: Host, generation: int) -> None:
        if host.alive and host.workers == generation:
            self.end_workers(host)

    def tell_stopped(self, host: Host, link: int, generation: int) -> None:
        if host.link == link:
            self.report(host, m.Stopped, generation, host.number)

    def test(self, host: Host) -> None:
        ok = self.random.random() < self.history.test_passes
        self.at(self.now + self.random.uniform(0.5, 6.0), self.tested, host, host.link, ok)

    def tested(self, host: Host, link: int, ok: bool) -> None:
        if host.link == link:
            self.report(host, m.Requalified, host.number, ok)

    def flushed(self, term: int, ok: bool) -> None:
        if term == self.term and self.machine is not None:
            if ok and self.current is not None:
                self.saved = max(self.saved, self.current.step - self.random.randint(0, 2))
            self.tell(m.Flushed(self.now, self.saved, ok))
