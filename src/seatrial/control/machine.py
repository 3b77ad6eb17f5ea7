"""What the coordinator decides, as a pure machine: events in, actions out. No clock, no socket, no file.

A run is in one of five phases:

    idle       nothing is meant to run: wait until nothing does, then for nodes; then Start
    flushing   before a start with another number of nodes: memory goes to disk
    running    a generation is at work
    adopting   after a change of coordinator: does everybody still run what ran before?
    finished

A generation starts only when no node can still run an older one; `roster.Roster` knows which could. The tests in
tests/sim drive this through random histories.
"""

from __future__ import annotations

from seatrial.control.machine_recovery import Recovery
from seatrial.control.machine_state import FOREVER
from seatrial.control.machine_types import (
    Action,
    Drain,
    Event,
    Evict,
    Failed,
    Finish,
    Finished,
    Flush,
    Flushed,
    Joined,
    Lost,
    Note,
    Progress,
    Ready,
    Requalified,
    Requalify,
    ResetGpu,
    Settings,
    Start,
    Stop,
    StopAsked,
    Stopped,
    Tick,
    Yield,
)

__all__ = [
    "Action",
    "Drain",
    "Event",
    "Evict",
    "Failed",
    "Finish",
    "Finished",
    "Flush",
    "Flushed",
    "Joined",
    "Lost",
    "Machine",
    "Note",
    "Progress",
    "Ready",
    "Requalified",
    "Requalify",
    "ResetGpu",
    "Settings",
    "Start",
    "Stop",
    "StopAsked",
    "Stopped",
    "Tick",
    "Yield",
]


_WAIT_TOLD_S = 5.0  # a wait for nodes that lasts so long is told of


class Machine(Recovery):
    """The state of one run. `memory` is what `memory()` gave to the coordinator before, or None for a new run;
    `rules` tells what is to be done about a signal.

    Whoever drives it writes `memory()` before carrying out what `handle` returns, sends a Tick at `deadline()`, and
    sees to it that a generation in which nothing moves any more is reported as Failed ("hang").
    """

    def handle(self, event: Event) -> list[Action]:
        """Take an event; the actions are to be carried out in their order."""
        self._now = max(self._now, event.time)
        self._actions = []
        self._story.append((event, self._actions))
        if not self._begun:
            self._begin()
        if self.phase != "finished":
            self._take(event)
            self._advance()
        return self._actions

    def deadline(self) -> float | None:
        """When it wants a Tick, if nothing else happens before."""
        if self.phase == "finished":
            return None
        here = {"idle": self._wake, "flushing": self._flush_by, "running": self._leave_by}
        times = (self.roster.deadline(), self._preempt_by, here.get(self.phase, FOREVER))
        found = min(time for time in times if time is not None)
        return None if found == FOREVER else found

    def _begin(self) -> None:
        """The first event after a change of coordinator."""
        s, self._begun = self.settings, True
        if self._ending is not None:
            how, message = self._ending
            self._actions.append(Finish(how, message))  # type: ignore[arg-type]
            return
        # An agent that cannot find us has fenced itself by then: nobody has heard it since before this term.
        self._settled_at = self._now + s.silence_s + s.fence_s
        for node in self.roster.running:
            self.roster.gone_by[node] = self._settled_at
        if self._preempting:
            self._preempt_by = self._now + s.preempt_grace_s
        if self._leaving == "yielded":
            self._leave_by = self._now + s.preempt_grace_s

    # -- events

    def _take(self, event: Event) -> None:
        match event:
            case Joined():
                self._joined(event)
            case Ready():
                node = self.roster.node(event.node)
                node.ready = node.joined
            case Lost():
                self._lost(event)
            case Progress():
                if event.generation == self.generation:
                    self.counts.best = max(self.counts.best, event.step)
                    self._progressed = True
            case Failed():
                self._failed(event)
            case Stopped():
                unasked = self.works(event.node) and event.generation >= self.generation
                self.roster.ended(event.node, event.generation)
                if unasked:
                    self._recover("agent_exit", "stopped without being asked to", node=event.node)
            case Finished():
                if event.generation == self.generation and event.node in self._members:
                    self.finished[event.node] = event.how
                    self._adopting.discard(event.node)
                self.roster.ended(event.node, event.generation)
            case Flushed():
                if self.phase == "flushing":
                    self.phase, self._saved = "idle", True
            case Requalified():
                self._requalified(event)
            case StopAsked():
                self._stop_asked(event)
            case Tick():
                pass

    def _joined(self, event: Joined) -> None:
        number, roster, works = event.node, self.roster, self.works(event.node)
        node = roster.node(number)
        node.joined, node.ready = True, event.ready
        if works and event.running == self.generation:
            self._adopting.discard(number)
            roster.gone_by.pop(number, None)
            if self.phase == "running" and self._leaving is not None:
                self._yield(self._leaving)  # the one before may have gone down with the old connection
            return
        if event.running is not None:
            self._highest = max(self._highest, event.running)
            roster.may_run(number, event.running)
        if number not in roster.running:
            node.stuck = False
        if works:
            self._recover("agent_exit", "its ranks are gone: its agent started again", node=number)
        elif number in roster.running:
            # Whatever it says of itself, an order to start may still be on its way to it: it must answer.
            self._stop([number])
        if node.out is not None and number not in self._outgoing:
            self._outgoing[number] = ["evict" if node.out == "evicted" else "requalify", None, False]

    def _requalified(self, event: Requalified) -> None:
        node = self.roster.node(event.node)
        if node.out != "resetting" or event.node in self._outgoing:
            return
        if event.ok:
            node.out, node.cause = None, ""
        else:
            self._exclude(event.node, "evict", f"failed its test after: {node.cause}", drain=True)

    def _stop_asked(self, event: StopAsked) -> None:
        if event.why != "preempt":
            self._finish("interrupted", "stopped by request")
        elif self.phase not in ("running", "adopting"):
            self._finish("preempted", "stopped by request while nothing was running")
        elif not self._preempting:
            self._preempting = True
            self._preempt_by = self._now + self.settings.preempt_grace_s
            if self.phase == "running":
                self._yield("preempted")

    # -- what follows from where things stand

    def _advance(self) -> None:
        s, now = self.settings, self._now
        gone, overdue = self.roster.expire(now, s.fence_s)
        for node in overdue:
            cause = f"did not stop within {s.stop_within_s:g} s"
            data = {"cause": cause, "certain": False}
            self._actions.append(Note("node_lost", f"node {node} {cause}", "error", node, data=data))
        if self.phase == "adopting":
            self._adopt(gone)
        if self.phase == "running":
            self._look_at_run()
        if self.phase != "finished" and now >= self._preempt_by:
            self._finish("preempted", f"not everything left within {s.preempt_grace_s:g} s")
        if self.phase == "flushing" and now >= self._flush_by:
            self.phase, self._saved = "idle", True
        if self.phase != "finished":
            self._send_out()
        if self.phase == "idle":
            self._wake = self._choose()

    def _adopt(self, gone: list[int]) -> None:
        missing = sorted(self._adopting.intersection(gone))
        if missing:
            self._recover("node_silent", "did not come to the new coordinator", node=missing[0])
        elif not self._adopting:
            self.phase = "running"
            if self._preempting or self._leaving is not None:
                self._yield("preempted" if self._preempting else "yielded")

    def _look_at_run(self) -> None:
        if len(self.finished) == len(self._members):
            how = set(self.finished.values())
            if how == {"done"}:
                self._finish("done", "")
            elif "preempted" in how or self._preempting:
                self._finish("preempted", "the state is saved")
            else:
                self._reason = "enough nodes to grow"  # a Flush will tell whether the save succeeded
                self._halt()
        elif self._now >= self._leave_by:
            left = sorted(self._members - self.finished.keys())
            self._recover("hang", "did not save and leave in time", node=left[0])
        elif self.shape > 0 and self.settings.grow and self._progressed and self._leaving is None:
            # Not before it has done a step: so every change of size brings the run further.
            count = len(self._members) + self.roster.ready_spares(self._members)
            if self.settings.shapes[self.shape - 1] <= count:
                self._yield("yielded")

    def _choose(self) -> float:
        """Start the next generation if there are nodes for it; otherwise, until when to wait for them."""
        s, now = self.settings, self._now
        if self.started and self.finished.keys() == self._members and set(self.finished.values()) == {"done"}:
            self._finish("done", "")  # they told so after they were told to stop
            return FOREVER
        if self.roster.running:
            return FOREVER  # its own deadlines are in the roster
        self._since = since = now if self._since is None else self._since
        usable = self.roster.usable()
        allowed = range(self.shape if self.started and not s.grow else 0, len(s.shapes))
        fit = next((shape for shape in allowed if s.shapes[shape] <= len(usable)), None)
        if fit is not None and fit <= (self.shape if self.started else 0):
            if not self.started and not set(usable).issuperset(range(s.slots)):
                # Spares may come a moment earlier than the nodes whose places these are.
                self._home_until = now + s.silence_s if self._home_until is None else self._home_until
                if now < self._home_until:
                    return self._home_until
            self._start(fit)
            return FOREVER
        join_wait = s.join_wait_s or FOREVER
        fail_at = max(since + join_wait, since + s.node_wait_s, self._settled_at)
        shrink_at = max(since + (s.node_wait_s if self.started else join_wait), self._settled_at)
        if fit is not None and s.shrink:
            if now < shrink_at:
                return shrink_at
            self._start(fit)
            return FOREVER
        if now >= fail_at:
            self._finish("failed", self._too_few(len(usable)))
        return min(fail_at, self._tell_wait(since, fail_at, len(usable)))

    def _tell_wait(self, since: float, until: float, usable: int) -> float:
        """Say once that it waits, and for whom; when to do so. Not at once: nodes come one after the other."""
        if not self._wait_told and self._now >= since + _WAIT_TOLD_S:
            self._wait_told = True
            message = f"waiting for nodes: {self._too_few(usable)}"
            left = None if until == FOREVER else round(until - self._now, 1)
            data = {"usable": usable, "needed": self.settings.least, "until_s": left}
            self._actions.append(Note("waiting_for_nodes", message, "warning", data=data))
        return FOREVER if self._wait_told else since + _WAIT_TOLD_S

    def _start(self, shape: int) -> None:
        s = self.settings
        if self.started and shape != self.shape and not self._saved:
            self.phase, self._flush_by = "flushing", self._now + s.flush_wait_s
            self._actions.append(Flush(self.generation))
            return
        slots = self.roster.assign(self.slots, s.shapes[shape])
        in_place = s.in_place and self.started and shape == self.shape
        if shape != self.shape:
            smaller = shape > self.shape
            message = f"from {s.shapes[self.shape]} to {s.shapes[shape]} nodes"
            data = {"shape": shape, "slots": s.shapes[shape]}
            kind = "shrunk" if smaller else "grown"
            self._actions.append(Note(kind, message, "warning" if smaller else "info", data=data))
        assert not self.roster.running, self.story()
        self._highest += 1
        self.generation, self.shape, self.slots = self._highest, shape, slots
        self._members = set(slots.values())
        self.roster.started(self.generation, self._members)
        self.phase, self.started, self.finished = "running", True, {}
        self._progressed = self._saved = False
        self._since, self._wait_told = None, False
        self._actions.append(Start(self.generation, dict(slots), shape, in_place, self._reason))

    def _send_out(self) -> None:
        """What is to be done to nodes that are out, as soon as they run nothing."""
        for number in [n for n in self._outgoing if n not in self.roster.running]:
            node, (what, gpu, drain) = self.roster.nodes[number], self._outgoing[number]
            if what == "evict":
                self._actions.append(Evict(number, node.cause))
                if drain:
                    self._actions.append(Drain(number, node.cause))
            elif not node.joined:
                continue
            elif what == "reset":
                self._actions.append(ResetGpu(number, gpu, node.cause))
            else:
                self._actions.append(Requalify(number))
            del self._outgoing[number]

    def _too_few(self, here: int) -> str:
        s = self.settings
        missing = []
        for number in range(s.slots + s.spares):
            node = self.roster.nodes.get(number)
            if node is not None and node.out is not None:
                missing.append(f"node {number} is {node.out} ({node.cause})")
            elif node is None or not node.joined:
                missing.append(
                    f"node {number} is not here" + (f" ({node.cause})" if node and node.cause else "")
                )
            elif node.stuck:
                missing.append(f"node {number} did not stop its ranks")
        return f"too few nodes: {here} can be used, {s.least} are needed; {'; '.join(missing)}"
