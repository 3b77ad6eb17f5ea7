"""Hosts that claim leases on a network file system with caches, coordinate, and run ranks for whom they follow.

Leases and holds are the real ones (`seatrial.control.net.lease`). Agents and coordinators are reduced to what the lease is for:
who may start a generation, and until when ranks may run. Hosts stand still or die in the middle of an operation on a file,
and the network between them is cut in pairs; all of that ends at `CALM_S`, then there must be a coordinator again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
from pathlib import Path

from network_files import TTL_S, Client, Node, Server

from seatrial.control.coordinator.settings import _FENCE_S
from seatrial.control.net.lease import Hold, Lease, Leases, Succeeded

SILENCE_S = 3.0
BEAT_S = 0.25
CALM_S = 40.0
BOUND_S = TTL_S + 12 * SILENCE_S  # a cache may hide a new term for so long; then everybody has to find it
CONTROL = Path("/control")


class BrokenInvariantError(AssertionError):
    """What does not hold."""


class Died(BaseException):
    """The process ends in the middle of what it does."""


class Process:
    """The agent of one host; `number` is another one after each start."""

    def __init__(self, world: World, host: int, number: int) -> None:
        self.world, self.host, self.number = world, host, number
        self.leases = world.leases_type(CONTROL / "leases", world.clients[host], lambda: world.server.now)  # type: ignore[arg-type]
        self.hold: Hold | None = None
        self.following: tuple[Process, int, float] | None = None  # in which term, and connected when
        self.sent: list[float] = []  # beats that have not come back
        self.beat_at = 0.0
        self.since = world.server.now  # it seeks
        self.renewed, self.renewed_at = (0, 0), world.server.now
        self.dead_term = self.term = 0
        self.valid_until = float("inf")
        self.ranks: int | None = None  # the generation that runs here
        # As coordinator:
        self.began = 0.0
        self.inbox: list[tuple[Process, float]] = []
        self.heard: dict[int, float] = {}  # host -> when it last sent something that we have answered
        self.memory: tuple[int, list[int]] = (0, [])  # generation, and the hosts that may run it
        self.start_at = 0.0

    @property
    def now(self) -> float:
        return self.world.server.now

    def running(self) -> int | None:
        return self.ranks if self.now < self.valid_until else None

    # -- the agent

    def step(self) -> None:
        if self.now >= self.valid_until:
            self.ranks, self.valid_until = None, float("inf")
            self.leave()
        if self.hold is not None:
            self.coordinate()
        if self.following is None:
            self.seek()
        elif self.now >= self.beat_at:
            self.beat_at = self.now + BEAT_S
            coordinator = self.following[0]
            self.sent.append(self.now)
            if self.world.connected(self, coordinator):
                coordinator.inbox.append((self, self.now))
            if (
                self.now - self.sent[0] > SILENCE_S
                or not self.world.alive(coordinator)
                or not coordinator.hold
            ):
                self.leave()

    def follows(self, coordinator: Process, term: int) -> bool:
        return self.following is not None and self.following[:2] == (coordinator, term)

    def leave(self) -> None:
        self.following, self.since = None, self.now
        self.sent.clear()

    def seek(self) -> None:
        try:
            found = self.leases.newest()
        except OSError:
            return
        if found is not None and found.term != self.dead_term and found.port:
            if (found.term, found.count) != self.renewed:
                self.renewed, self.renewed_at = (found.term, found.count), self.now
            holder = self.world.process(found.node, found.port)
            self.term = found.term
            if holder is not None and self.world.connected(self, holder) and holder.hold is not None:
                self.following = (holder, holder.hold.lease.term, self.now)
                self.valid_until = min(self.valid_until, self.now + SILENCE_S)
                self.beat_at = 0.0
                return
            refused = holder is None and not self.world.cut(self.host, found.node)
            if refused or self.now - self.renewed_at > SILENCE_S:
                self.dead_term = found.term
            return
        if self.now - self.since < 0.25 * self.host:
            return
        mine = Lease(1 if found is None else found.term + 1, self.host, "", self.number, self.now)
        self.since = self.now
        try:
            self.hold = self.leases.claim(mine, SILENCE_S)
        except OSError:
            return
        if self.hold is not None:
            self.take_over()

    # -- the coordinator

    def take_over(self) -> None:
        assert self.hold is not None
        with contextlib.suppress(OSError):
            state = self.world.clients[self.host].read(self.hold.state)
            if state:
                generation, hosts = json.loads(state)
                self.memory = (generation, hosts)
        self.began, self.heard, self.inbox = self.now, {}, []
        self.start_at = self.now + self.world.rng.random() * 10
        self.world.takeovers += 1

    def holds(self, *, since: float | None = None) -> bool:
        assert self.hold is not None
        try:
            return self.hold.holds(since=since)
        except Succeeded:
            self.hold = None
            return False

    def coordinate(self) -> None:
        inbox, self.inbox = self.inbox, []
        for agent, sent in inbox:
            came = self.now
            if self.hold is None or not self.holds():
                break
            age = max(0.0, came - self.hold.proven_at)
            term = self.hold.lease.term
            if agent.follows(self, term) and self.world.alive(agent):
                self.heard[agent.host] = self.now
                if sent in agent.sent:
                    agent.sent = [s for s in agent.sent if s > sent]
                    agent.valid_until = max(agent.valid_until, sent - age + SILENCE_S)
        if self.hold is not None:
            self.holds()
        if self.hold is not None and self.now >= self.start_at:
            self.start()

    def start(self) -> None:
        assert self.hold is not None
        generation, before = self.memory
        term = self.hold.lease.term
        mine = [p for p in self.world.living() if p.follows(self, term) and p.host in self.heard]
        hosts = {p.host for p in mine}
        gone = (self.heard.get(h, self.began) + SILENCE_S + _FENCE_S for h in before if h not in hosts)
        if not mine or any(self.now < at for at in gone):
            return
        connections = {agent: agent.following for agent in mine}
        for agent in mine:
            agent.ranks = None  # told to stop, and it has said so
        self.start_at = self.now + 2 + self.world.rng.random() * 8
        self.memory = (generation + 1, sorted(hosts))
        began = self.now
        try:
            with contextlib.suppress(OSError):
                self.hold.write(self.hold.state, json.dumps(self.memory).encode())
            if not self.holds(since=began) or self.hold is None:
                self.hold = None
                return
            with contextlib.suppress(OSError):
                self.hold.write(CONTROL / "generation", json.dumps((generation + 1, term)).encode())
        except Succeeded:
            self.hold = None
            return
        for agent in mine:
            self.world.pause(self.host)
            connected = self.world.alive(agent) and agent.following == connections[agent]
            if connected and self.now < agent.valid_until:  # one that stood still takes no order
                self.world.started(agent, generation + 1)


class World:
    def __init__(self, seed: int, leases_type: type[Leases] = Leases) -> None:
        self.seed, self.rng, self.leases_type = seed, random.Random(seed), leases_type
        self.server = Server(self.rng)
        self.server.put(self.server.root, "control", Node(None, 0.0))
        self.server.done.append(self.renamed)
        count = self.rng.randint(2, 5)
        self.stall = self.rng.choice((0.005, 0.02, 0.05))
        self.death = self.rng.choice((0.0, 0.001, 0.004))
        self.cutting = self.rng.choice((0.003, 0.02))
        self.clients = [
            Client(self.server, str(h), lambda h=h: self.reach_server(h))  # type: ignore[misc]
            for h in range(count)
        ]
        self.away = [0.0] * count  # until then this host does not reach the server
        self.started_count = self.takeovers = 0
        self.highest_term = self.highest_generation = 0
        self.cuts: dict[tuple[int, int], float] = {}
        self.busy: set[int] = set()
        self.numbers = 0
        self.processes: list[Process | None] = [None] * count
        for host in range(count):
            self.begin(host)

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            raise BrokenInvariantError(f"history {self.seed}, at {self.server.now:.2f} s: {what}")

    # -- what there is

    def begin(self, host: int) -> None:
        self.numbers += 1
        self.processes[host] = Process(self, host, self.numbers)

    def living(self) -> list[Process]:
        return [p for p in self.processes if p is not None]

    def alive(self, process: Process) -> bool:
        return self.processes[process.host] is process

    def process(self, host: int, number: int) -> Process | None:
        found = self.processes[host] if 0 <= host < len(self.processes) else None
        return found if found is not None and found.number == number else None

    def cut(self, one: int, other: int) -> bool:
        return self.server.now < self.cuts.get((min(one, other), max(one, other)), 0.0)

    def connected(self, one: Process, other: Process) -> bool:
        return self.alive(other) and (one is other or not self.cut(one.host, other.host))

    # -- what must hold

    def renamed(self, host: str, target: Path) -> None:
        if target.name not in ("lease.json", "generation"):
            return
        node = (self.server.root.entries or {})["control"]
        content = json.loads((node.entries or {})[target.name].content or b"")
        term = content["term"] if target.name == "lease.json" else content[1]
        self.must(
            term >= self.highest_term,
            f"term {term} writes {target.name} after term {self.highest_term} has begun",
        )
        self.highest_term = term

    def started(self, agent: Process, generation: int) -> None:
        for other in self.living():
            runs = other.running()
            self.must(runs is None or runs == generation, f"{generation} starts while {runs} runs")
        self.must(
            generation >= self.highest_generation, f"{generation} comes after {self.highest_generation}"
        )
        self.started_count += generation > self.highest_generation
        self.highest_generation = generation
        agent.ranks = generation

    # -- what happens

    @property
    def calm(self) -> bool:
        return self.server.now >= CALM_S

    def pause(self, host: int) -> None:
        """`host` is in the middle of something: others may run, or it may die."""
        if self.calm:
            return
        chance = self.rng.random()
        if chance < self.death:
            raise Died
        if chance < self.death + self.stall and len(self.busy) < 3:
            until = self.server.now + self.rng.choice((0.3, 2.0, 8.0)) * self.rng.random()
            while self.server.now < until and not self.calm:
                self.turn()

    def reach_server(self, host: int) -> None:
        """Before and after what the server does: either may be lost."""
        self.pause(host)
        if not self.calm and self.server.now < self.away[host]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def turn(self) -> None:
        """A little time passes, and some host that does not stand still does something."""
        self.server.now += 0.1 * self.rng.random()
        free = [h for h in range(len(self.processes)) if h not in self.busy]
        if not free:
            return
        host = self.rng.choice(free)
        process = self.processes[host]
        if process is None:
            if self.calm or self.rng.random() < 0.05:
                self.begin(host)
            return
        if not self.calm and self.rng.random() < self.cutting and len(self.processes) > 1:
            one, other = sorted(self.rng.sample(range(len(self.processes)), 2))
            self.cuts[one, other] = self.server.now + 10 * self.rng.random()
        if self.rng.random() < self.cutting / 2:
            self.away[host] = self.server.now + 4 * self.rng.random()
        self.busy.add(host)
        try:
            process.step()
        except Died:
            self.processes[host] = None
        finally:
            self.busy.discard(host)

    def settled(self) -> bool:
        """All follow one coordinator that holds, and runs a generation on all of them."""
        living = self.living()
        heads = {p.following and p.following[:2] for p in living}
        runs = {p.running() for p in living}
        return (
            len(living) == len(self.processes)
            and len(heads) == 1
            and len(runs) == 1
            and None not in heads | runs
        )

    def run(self) -> None:
        while not self.calm:
            self.turn()
        self.cuts.clear()
        self.server.loses_answers = 0.0
        while not self.settled():
            self.turn()
            self.must(self.server.now < CALM_S + BOUND_S, "there is no coordinator whom all follow")
