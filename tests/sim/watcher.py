"""What must hold in every history, whatever happens. Each method says in words what it holds the machine to.

Nothing here asks the machine: the watcher sees the events that it was given, the actions that it gave back, and the
true state of the nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from history import RULES

from seatrial.control.machine import types as m

if TYPE_CHECKING:
    from cluster import Cluster, Host


class BrokenInvariantError(AssertionError):
    """What does not hold, and how it came to it."""


class Watcher:
    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.settings = world.settings
        self.newest = world.settings.first_generation - 1
        self.starts = self.yields = self.recoveries = 0
        self.evicted: set[int] = set()
        self.resetting: set[int] = set()
        self.doubtful: set[int] = set()  # that were ever to be reset
        self.declared: set[int] = set()  # lost by the machine's own judgement: they did not stop
        self.finish: m.Finish | None = None
        self.ended: m.Finish | None = None
        self.asked: set[str] = set()
        self.stopping = False  # a failure was reported after which the run must end
        self.failures: dict[tuple[str, Any], int] = {}  # in all
        self.in_vain: dict[tuple[str, Any], tuple[int, int]] = {}  # furthest step then, times without more
        self.told_step = (
            self.kept_step
        ) = -1  # the furthest that the machine was told of, and keeps in its memory
        self.gave_up = False
        self.leaving: set[int] = set()  # nodes of which the coordinator knows that they leave
        self.may_preempt = False  # most nodes have left, or too few have stayed
        self.secured = True  # what memory holds is on disk, or a later generation has gone on from it
        self.troubled = 0.0  # when something last went wrong

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            machine = self.world.machine
            story = machine.story() if machine is not None else ""
            raise BrokenInvariantError(
                f"history {self.world.history.seed}, at {self.world.now:.2f} s: {what}\n{story}"
            )

    # -- as things happen

    def before(self, event: m.Event) -> None:
        """Keep in mind what the machine has been told."""
        match event:
            case m.Joined():
                self.declared.discard(event.node)
                self.leaving.discard(event.node)
                if event.leaving is not None:
                    self.leaving.add(event.node)
            case m.Stopped():
                self.declared.discard(event.node)
            case m.Leaving():
                self.leaving.add(event.node)
            case m.Lost():
                self.leaving.discard(event.node)
            case m.Flushed():
                self.secured = True
            case m.Progress():
                self.told_step = max(self.told_step, event.step)
                self.secured = self.secured or event.generation == self.newest
            case m.Failed():
                action = RULES[event.signal].action
                if action == "evict":
                    self.evicted.add(event.node)
                elif action == "reset":
                    self.resetting.add(event.node)
                    self.doubtful.add(event.node)
                elif action == "stop":
                    self.stopping = True
            case m.Requalified():
                if not event.ok and event.node in self.resetting:  # the first answer counts
                    self.evicted.add(event.node)
                self.resetting.discard(event.node)
            case m.StopAsked():
                self.asked.add(event.why)
            case _:
                pass
        here = self.world.heard.keys() - self.evicted - self.resetting - self.declared
        members = set() if self.world.current is None else set(self.world.current.slots.values())
        for group in (here, members):
            self.may_preempt = self.may_preempt or 2 * len(group & self.leaving) > len(group)
        # Of a node that was ever to be reset the machine may still wait to hear that it passed its test.
        few = bool(self.leaving) and len(here - self.leaving - self.doubtful) < self.settings.least
        self.may_preempt = self.may_preempt or few

    def elected(self) -> None:
        """Another coordinator knows what is in the memory, which is written when there is something to do."""
        self.told_step = self.kept_step
        self.leaving.clear()
        self.troubled = self.world.now

    def after(self, actions: list[m.Action], done: int) -> None:
        """Hold what the machine wants against the truth. All of it is remembered, the first `done` are carried out."""
        self.kept_step = self.told_step
        for action in actions:
            if isinstance(action, m.Note):
                self.note(action)
        for action in actions[:done]:
            if self.finish is not None:
                self.must(isinstance(action, m.Note), f"nothing but notes may follow the end, not {action}")
            match action:
                case m.Start():
                    self.start(action)
                case m.Evict():
                    self.evicted.add(action.node)
                case m.Yield():
                    self.yields += 1
                case m.Release():
                    self.released(action.node)
                case m.Finish():
                    self.finished(action)
                case _:
                    pass

    def waits(self, until: float | None) -> None:
        if until is not None and until <= self.world.now:
            self.must(False, f"the machine waits for the future, not for {until}")

    def start(self, start: m.Start) -> None:
        world, s = self.world, self.settings
        self.must(
            start.generation > self.newest,
            f"generations only grow: {start.generation} after {self.newest}, over all coordinators",
        )
        self.newest = start.generation
        living = [h.number for h in world.hosts if h.workers is not None or h.ghosts]
        self.must(not living, f"no worker of an older generation may live at a start: on nodes {living}")
        slots, nodes = start.slots, list(start.slots.values())
        self.must(0 <= start.shape < len(s.shapes), f"there is no shape {start.shape}")
        self.must(
            sorted(slots) == list(range(s.shapes[start.shape])),
            f"a start fills every slot of its shape ({s.shapes[start.shape]}): {sorted(slots)}",
        )
        self.must(len(set(nodes)) == len(nodes), f"a node has one slot: {slots}")
        for what, out in (
            ("lost", set(nodes) - world.heard.keys() | self.declared),
            ("leaving", self.leaving),
            ("evicted", self.evicted),
            ("resetting", self.resetting),
        ):
            self.must(out.isdisjoint(nodes), f"no {what} node takes part: {sorted(out.intersection(nodes))}")
        self.must(s.shrink or start.shape == 0, "a run that may not shrink does not")
        self.starts += 1
        self.secured = False
        self.must(
            self.starts <= 1 + s.max_restarts + self.yields,
            f"no endless loop: {self.starts} starts with {s.max_restarts} restarts and {self.yields} growths allowed",
        )
        vain = {key: times for key, (_, times) in self.in_vain.items() if times >= self.often(key)}
        self.must(not vain, f"no endless loop: started again after equal failures without progress: {vain}")

    def released(self, node: int) -> None:
        """It may go: the run has no use for it, nor for what it holds."""
        host = self.world.hosts[node]
        self.must(node in self.leaving, f"node {node} was not leaving")
        self.must(host.workers is None, f"node {node} still runs generation {host.workers}")
        self.must(self.secured or self.starts == 0, f"what node {node} holds may still be needed")

    def overstayed(self, host: Host) -> None:
        """A signalled agent has to end by itself: not if nothing went wrong meanwhile, nor shortly before."""
        since = host.leaving[0] if host.leaving is not None else 0.0
        calm = self.troubled <= since and self.world.history.poison is None
        self.must(
            self.ended is not None or not calm or host.cut,
            f"node {host.number} said at {since:.2f} s that it leaves, and was not let go",
        )

    def worker_born(self, host: Host, generation: int) -> None:
        self.must(
            generation == self.newest,
            f"one generation at a time: a worker of {generation} begins on node {host.number}, {self.newest} was started",
        )

    def note(self, note: m.Note) -> None:
        if note.kind == "node_lost":
            assert note.node is not None
            self.declared.add(note.node)
        elif note.kind == "gave_up":
            self.gave_up = True
        elif note.kind == "recovering":
            self.recoveries += 1
            data = note.data
            where = data["node"] if data["rank"] is None else f"rank {data['rank']}"
            self.failed((data["signal"], where), data["step"])
            if data["signal"] not in ("agent_exit", "node_silent"):
                self.failed((data["signal"], "anywhere"), data["step"])

    def failed(self, key: tuple[str, Any], step: int) -> None:
        self.failures[key] = self.failures.get(key, 0) + 1
        furthest = max(self.told_step, step)
        before, times = self.in_vain.get(key, (-1, 0))
        self.in_vain[key] = (furthest, times + 1 if furthest <= before else 1)

    def often(self, key: tuple[str, Any]) -> int:
        """How many equal failures without progress are too many: of one rank, or of changing ones."""
        return self.settings.max_same_failure * (3 if key[1] == "anywhere" else 1)

    def finished(self, finish: m.Finish) -> None:
        world, s = self.world, self.settings
        self.must(self.finish is None, "a run ends once")
        self.finish = self.ended = finish
        if finish.how == "done":
            self.must(world.saved >= world.history.steps, "done means that every step is done")
            living = [h.number for h in world.hosts if h.workers is not None]
            self.must(not living, f"nothing runs any more when all is done: nodes {living}")
        elif finish.how == "preempted":
            self.must(
                "preempt" in self.asked or self.may_preempt,
                "preempted only if somebody asked for it, or most nodes leave, or too few stay",
            )
        elif finish.how == "interrupted":
            self.must("interrupt" in self.asked, "interrupted only if somebody asked for it")
        else:
            # Where no restart is allowed nothing is called a recovery, and the first failure is the end.
            spent = s.max_restarts in (0, self.recoveries - 1) or any(
                times >= self.often(key) for key, times in self.failures.items()
            )
            out = self.evicted | self.resetting | self.declared | self.leaving
            here = [n for n in world.heard if n not in out]
            self.must(
                self.stopping or spent or len(here) < s.least,
                f"a run fails only for a reason: {finish.message!r}; {self.failures}, {len(here)} nodes",
            )

    # -- when all is over

    def at_the_end(self) -> None:
        """Progress: when the faults are over the run ends in time, unless it lacks nodes and may wait for ever."""
        world, s = self.world, self.settings
        if self.ended is None:
            out = self.evicted | self.resetting | self.declared
            able = [h for h in world.hosts if h.alive and not h.cut and h.number not in out]
            self.must(
                not able or (s.join_wait_s == 0 and len(able) < s.slots),
                f"progress: not over at {world.now:.0f} s, {len(able)} nodes are well, faults ended at "
                f"{world.history.quiet:.0f} s, {world.events} events",
            )
            return
        if world.machine is None:
            return
        # Whatever else still comes, a run that is over stays over.
        generation = self.newest
        for event in (
            m.Joined(world.now, 0, True, generation),
            m.Lost(world.now, 0, True, "late"),
            m.Failed(world.now, generation, 0, 0, "worker_exit", "late", 1),
            m.Stopped(world.now, generation, 0),
            m.Finished(world.now, generation, 0, "done"),
            m.StopAsked(world.now, "preempt"),
            m.Tick(world.now + 1e6),
        ):
            late = world.machine.handle(event)
            self.after(late, len(late))
        self.must(world.machine.deadline() is None, "a run that is over waits for nothing")
