"""The coordinator's state machine, pure: events in, actions out. No clock, no socket, no file.

A run is in one of five phases:

    idle       no generation should run: wait until all have stopped, then for nodes; then Start
    flushing   before a start with another number of nodes, and before nodes leave: snapshots go to disk
    running    a generation is running
    adopting   after a change of coordinator: wait until all nodes confirm that they still run the generation
    finished

A generation starts only when no node can still run an older one; `roster.Roster` tracks which nodes could. The tests
in tests/sim drive this through random histories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from seatrial.control.machine.counts import Counts
from seatrial.control.machine.roster import Roster
from seatrial.control.machine.types import (
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
    Leaving,
    Lost,
    Note,
    Progress,
    Ready,
    Release,
    Requalified,
    Requalify,
    ResetGpu,
    RunEnding,
    Settings,
    Start,
    Stop,
    StopAsked,
    Stopped,
    Tick,
    Yield,
)
from seatrial.record.events import Severity
from seatrial.record.messages import Ending
from seatrial.record.states import WAIT_REPORTED_S

if TYPE_CHECKING:
    from seatrial.control.machine import policy

FOREVER = float("inf")
_STORY = 40  # events shown by a failed assertion
_ANYWHERE = 3  # x max_same_failure: limit for one signal from changing ranks or nodes, without progress
_LOSSES = ("agent_exit", "node_silent")  # each one costs a node, which limits their number

Phase = Literal["idle", "flushing", "adopting", "running", "finished"]


class Machine:
    """The state of one run as one coordinator knows it.

    `memory` is the previous coordinator's `memory()`, or None for a new run; it contains no times because clocks
    differ between coordinators. `rules` returns the policy rule for a signal.

    The caller must write `memory()` before executing the actions that `handle` returns, send a Tick at
    `deadline()`, and report a generation that makes no progress as Failed ("hang").
    """

    def __init__(
        self, settings: Settings, memory: dict[str, Any] | None, rules: Callable[[str], policy.Rule]
    ) -> None:
        self.settings = settings
        self.rules = rules
        self.phase: Phase = "idle"
        self.generation = settings.first_generation - 1  # the newest that was started
        self.shape = 0
        self.slots = {slot: slot for slot in range(settings.slots)}
        self.started = False  # whether any generation was started in this run
        self.finished: dict[int, Ending] = {}  # node of this generation -> how its ranks exited
        self.roster = Roster()
        self.counts = Counts()
        self._highest = self.generation  # highest generation that was started or reported
        self._reason = "first start"
        self._saved = False  # the state is on disk, or no more of it can be written
        self._progressed = False  # this generation has completed a step
        self._leaving: Literal["yielded", "preempted"] | None = None
        self._preempting = False
        self._outgoing: dict[int, list[Any]] = {}  # node -> what to do with it once it runs nothing
        self._ending: list[str] | None = None
        if memory is not None:
            self._recall(memory)
        self._members = set(self.slots.values())
        self._adopting: set[int] = set()  # nodes that have yet to confirm that they still run this generation
        if memory is not None and memory["phase"] in ("running", "adopting"):
            self._adopting = self._members - self.finished.keys()
        self._begun = memory is None
        self._now = -FOREVER
        self._settled_at = -FOREVER  # when every node has found the new coordinator or fenced itself
        self._since: float | None = None  # when this wait for nodes began
        self._wait_reported = False  # this wait has been reported
        self._home_until: float | None = None
        self._wake = self._flush_by = self._leave_by = self._preempt_by = FOREVER
        self._alone_at = FOREVER  # when the leaving nodes count as all that will leave
        self._actions: list[Action] = []
        self._story: deque[tuple[Event, list[Action]]] = deque(maxlen=_STORY)

    def handle(self, event: Event) -> list[Action]:
        """Process an event and return the actions, to be executed in order."""
        self._now = max(self._now, event.time)
        self._actions = []
        self._story.append((event, self._actions))
        if not self._begun:
            self._begin()
        if self.phase != "finished":
            self._apply(event)
            self._advance()
        return self._actions

    def deadline(self) -> float | None:
        """When a Tick is due, unless another event comes first; None if none is."""
        if self.phase == "finished":
            return None
        here = {"idle": self._wake, "flushing": self._flush_by, "running": self._leave_by}
        alone_at = self._alone_at if self._alone_at > self._now else None
        times = (self.roster.deadline(), self._preempt_by, alone_at, here.get(self.phase, FOREVER))
        found = min(time for time in times if time is not None)
        return None if found == FOREVER else found

    def _begin(self) -> None:
        """Resume from the previous coordinator's state, on the first event."""
        s, self._begun = self.settings, True
        if self._ending is not None:
            how, message = self._ending
            self._actions.append(Finish(how, message))  # type: ignore[arg-type]
            return
        # An agent that cannot find us has fenced itself by then: its last answered heartbeat is from before this term.
        self._settled_at = self._now + s.silence_s + s.fence_s
        for node in self.roster.running:
            self.roster.gone_by[node] = self._settled_at
        if self._preempting:
            self._preempt_by = self._now + s.preempt_grace_s
        if self._leaving == "yielded":
            self._leave_by = self._now + s.preempt_grace_s

    # -- events

    def _apply(self, event: Event) -> None:
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
                self.roster.stopped(event.node, event.generation)
                if unasked:
                    self._recover("agent_exit", "stopped without an order to", node=event.node)
            case Finished():
                if event.generation == self.generation and event.node in self._members:
                    self.finished[event.node] = event.how
                    self._adopting.discard(event.node)
                self.roster.stopped(event.node, event.generation)
            case Flushed():
                if self.phase == "flushing":
                    self.phase, self._saved = "idle", True
            case Requalified():
                self._requalified(event)
            case StopAsked():
                self._stop_asked(event)
            case Leaving():
                self._leaves(event.node, event.grace_s)
            case Tick():
                pass

    def _joined(self, event: Joined) -> None:
        number, roster = event.node, self.roster
        if event.replaces:
            self._lost(Lost(self._now, number, False, "it was replaced by another agent", heard=True))
            roster.fenced.update(roster.running.keys() & {number})
        node, works = roster.node(number), self.works(number)
        node.joined, node.ready, node.order = True, event.ready, event.order
        node.leave_by, node.released = None, False
        if event.leaving is not None:
            self._leaves(number, event.leaving)
        if works and event.running == self.generation:
            self._adopting.discard(number)
            roster.gone_by.pop(number, None)
            if self.phase == "running" and self._leaving is not None:
                self._yield(self._leaving)  # the first one may have been lost with the old connection
            return
        if event.running is not None:
            self._highest = max(self._highest, event.running)
            roster.may_run(number, event.running)
        if number not in roster.running:
            node.stuck = False
        if works:
            self._recover(
                "agent_exit",
                "it lost its ranks: its agent was restarted, or had no contact with the coordinator",
                node=number,
            )
        elif number in roster.running:
            # Whatever it reports, a start order may still be in flight to it: require its answer to a Stop.
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
        else:
            self._preempt(self.settings.preempt_grace_s)

    # -- transitions

    def _advance(self) -> None:
        s, now = self.settings, self._now
        gone, overdue = self.roster.expire(now, s.fence_s)
        for node in overdue:
            cause = f"did not stop within {s.stop_within_s:g} s"
            data = {"cause": cause, "certain": False}
            self._actions.append(Note("node_lost", f"node {node} {cause}", "error", node, data=data))
        if self.phase == "adopting":
            self._adopt(gone)
        self._check_leaving()
        if self.phase == "running":
            self._check_run()
        if self.phase != "finished" and now >= self._preempt_by:
            self._finish("preempted", f"not all ranks left within {s.preempt_grace_s:g} s")
        if self.phase == "flushing" and now >= self._flush_by:
            self.phase, self._saved = "idle", True
        if self.phase != "finished":
            self._send_out()
        if self.phase == "idle":
            self._wake = self._choose()
        self._release()

    def _adopt(self, gone: list[int]) -> None:
        missing = sorted(self._adopting.intersection(gone))
        if missing:
            self._recover("node_silent", "did not join the new coordinator", node=missing[0])
        elif not self._adopting:
            self.phase = "running"
            if self._preempting or self._leaving is not None:
                self._yield("preempted" if self._preempting else "yielded")

    def _check_run(self) -> None:
        if len(self.finished) == len(self._members):
            how = set(self.finished.values())
            if how == {"done"}:
                self._finish("done", "")
            elif "preempted" in how or self._preempting:
                self._finish("preempted", "the state is saved")
            else:
                # If the size changes, a Flush will show whether the save succeeded.
                self._reason = self._leave_reason() or "enough nodes to grow"
                self._halt()
        elif self._now >= self._leave_by:
            left = sorted(self._members - self.finished.keys())
            self._recover("hang", "did not save and leave in time", node=left[0])
        elif self.shape > 0 and self.settings.grow and self._progressed and self._leaving is None:
            # Only after a completed step, so that the run makes progress between changes of size.
            count = len(self._members) + self.roster.ready_spares(self._members)
            if self.settings.shapes[self.shape - 1] <= count:
                self._yield("yielded")

    def _choose(self) -> float:
        """Start the next generation if there are nodes for it; otherwise return when to check again."""
        s, now = self.settings, self._now
        if self.started and self.finished.keys() == self._members and set(self.finished.values()) == {"done"}:
            self._finish("done", "")  # they reported it after they were ordered to stop
            return FOREVER
        if self.roster.running:
            return FOREVER  # the roster has deadlines for these nodes
        if self._preempting:
            if self._unsaved():
                self._flush()
            else:
                self._finish("preempted", "stopped by request while nothing was running")
            return FOREVER
        self._since = since = now if self._since is None else self._since
        usable = self.roster.usable()
        allowed = range(self.shape if self.started and not s.grow else 0, len(s.shapes))
        fit = next((shape for shape in allowed if s.shapes[shape] <= len(usable)), None)
        if fit is not None and fit <= (self.shape if self.started else 0):
            if not self.started and not set(usable).issuperset(range(s.slots)):
                # Spares may join slightly before the nodes that these slots are meant for.
                self._home_until = now + s.silence_s if self._home_until is None else self._home_until
                if now < self._home_until:
                    return self._home_until
            self._start(fit)
            return FOREVER
        if self.roster.leaving() and self._unsaved():
            self._flush()  # the snapshots that they hold would be lost with them
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
        return min(fail_at, self._report_wait(since, fail_at, len(usable)))

    def _report_wait(self, since: float, until: float, usable: int) -> float:
        """Report a wait once, with the missing nodes; return when that is due. Delayed, as nodes join one by one."""
        if not self._wait_reported and self._now >= since + WAIT_REPORTED_S:
            self._wait_reported = True
            message = f"waiting for nodes: {self._too_few(usable)}"
            left = None if until == FOREVER else round(until - self._now, 1)
            data = {"usable": usable, "needed": self.settings.least, "until_s": left}
            self._actions.append(Note("waiting_for_nodes", message, "warning", data=data))
        return FOREVER if self._wait_reported else since + WAIT_REPORTED_S

    def _start(self, shape: int) -> None:
        s = self.settings
        if self.started and shape != self.shape and not self._saved:
            self._flush()
            return
        slots = self.roster.assign(self.slots, s.shapes[shape])
        if not self.started:
            slots = self.roster.in_order(slots)
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
        self._since, self._wait_reported = None, False
        self._actions.append(Start(self.generation, dict(slots), shape, in_place, self._reason))

    def _send_out(self) -> None:
        """Emit the pending actions on excluded nodes that no longer run anything."""
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
        for number in sorted({*range(s.slots + s.spares), *self.roster.nodes}):
            node = self.roster.nodes.get(number)
            if node is not None and node.out is not None:
                missing.append(f"node {number} is {node.out} ({node.cause})")
            elif node is None or not node.joined:
                missing.append(
                    f"node {number} is not connected" + (f" ({node.cause})" if node and node.cause else "")
                )
            elif node.stuck:
                missing.append(f"node {number} did not stop its ranks")
            elif node.leave_by is not None:
                missing.append(f"node {number} is leaving")
        return f"too few nodes: {here} are usable, {s.least} are needed; {'; '.join(missing)}"

    # -- failures: which nodes stay, whether to continue, and stopping

    def _failed(self, event: Failed) -> None:
        rule, node, works = self.rules(event.signal), event.node, self.works(event.node)
        action = self._action(rule, event)
        # A node fault counts whichever generation runs there; a rank fault counts only in its own generation.
        if action == "evict" or action == "reset":
            self._exclude(node, action, event.cause, gpu=event.gpu, drain=action == "evict")
            if works:
                return self._recover(event.signal, event.cause, step=event.step, node=node, rank=event.rank)
        elif event.generation == self.generation:
            if action == "restart":
                self._blame(node, rule, event.cause)
                if works:
                    return self._recover(
                        event.signal, event.cause, step=event.step, node=node, rank=event.rank
                    )
            elif action == "stop" and works:
                return self._finish("failed", event.cause)
        severity: Severity = "info" if action == "ignore" else "warning"
        data = {"signal": event.signal, "class": rule.cls, "action": action, "source": rule.source}
        self._actions.append(Note("signal", event.cause, severity, node, event.rank, data))

    def _lost(self, event: Lost) -> None:
        s, node, worked = self.settings, self.roster.node(event.node), self.works(event.node)
        gone_by = self._now + s.fence_s + (s.silence_s if event.heard else 0.0)
        self.roster.lost(event.node, certain=event.certain, gone_by=gone_by)
        if node.out is None:
            node.cause = event.cause
        if worked:
            signal = "agent_exit" if event.certain else "node_silent"
            self._blame(event.node, self.rules(signal), event.cause)
            self._recover(signal, event.cause, node=event.node)

    def _action(self, rule: policy.Rule, event: Failed) -> policy.Action:
        """The rule's action, or its `repeat` once the node has sent the signal `evict_after` times (at least 2)."""
        s = self.settings
        times = self.counts.seen(event.signal, event.node, self._now, s.burst_s)
        if rule.repeat is None or times < max(2, s.evict_after):
            return rule.action
        if rule.repeat == "evict":
            # Restarts are counted per node over all signals (see _blame). Others evict unless that would end the run.
            others = sum(n.joined and n.out is None for k, n in self.roster.nodes.items() if k != event.node)
            if rule.action == "restart" or others < s.least:
                return rule.action
        return rule.repeat

    def _blame(self, number: int, rule: policy.Rule, cause: str) -> None:
        """Count a failure against a node; evict it after `evict_after` of them if a spare is ready to replace it."""
        node = self.roster.node(number)
        if rule.repeat != "evict" or node.blamed_in == self.generation:
            return
        node.blames, node.blamed_in = node.blames + 1, self.generation
        others = [self.roster.node(n) for n in self._members if n != number]
        wanted = sum(not n.joined or n.out is not None for n in others)
        if node.blames >= self.settings.evict_after and self.roster.ready_spares(self._members) > wanted:
            self._exclude(number, "evict", f"{node.blames} failures, the last: {cause}")

    def _exclude(
        self,
        number: int,
        what: Literal["evict", "reset"],
        cause: str,
        *,
        gpu: int | None = None,
        drain: bool = False,
    ) -> None:
        """Exclude the node from now on. Its eviction or reset is deferred until it runs nothing."""
        node = self.roster.node(number)
        out = "evicted" if what == "evict" else "resetting"
        # One bad GPU causes many messages; the first of them has requested the reset.
        if node.out not in (out, "evicted"):
            node.out, node.cause = out, cause
            self._outgoing[number] = [what, gpu, drain]

    def _recover(
        self, signal: str, cause: str, *, step: int | None = None, node: int, rank: int | None = None
    ) -> None:
        """Handle a failure of the running generation: halt it for the next one, or finish if a budget is used up."""
        s, counts, out = self.settings, self.counts, self.roster.node(node).out
        step = max(counts.best, 0) if step is None else step
        where = f"node {node}" if rank is None else f"rank {rank}"
        counts.restarts += 1
        times = counts.same(signal, where, step)
        # The rank blamed for a hang or a lost collective may differ each time.
        anywhere = 0 if signal in _LOSSES else counts.same(signal, "anywhere", step)
        data = {
            "signal": signal,
            "class": self.rules(signal).cls,
            "cause": cause,
            "action": {None: "restart", "evicted": "evict", "resetting": "reset"}[out],
            "step": step,
            "node": node,
            "rank": rank,
            "restarts": counts.restarts,
        }
        if s.max_restarts > 0 and not self._preempting:
            self._actions.append(Note("recovering", f"{where}: {cause}", "warning", node, rank, data))
        if self._preempting:
            self._finish("preempted", f"{where} failed while it was leaving: {cause}")
        elif s.max_restarts == 0:
            self._finish("failed", cause)
        elif times >= s.max_same_failure:
            self._give_up(f"{where} has failed {times} times at step {step} without progress: {cause}", data)
        elif anywhere >= _ANYWHERE * s.max_same_failure:
            self._give_up(
                f"{signal} occurred {anywhere} times up to step {step} without progress, on changing ranks or nodes; the last: "
                f"{where}: {cause}",
                data,
            )
        elif counts.restarts > s.max_restarts:
            self._give_up(
                f"all {s.max_restarts} restarts are used up; the last failure: {where}: {cause}", data
            )
        else:
            self._reason = f"{where}: {cause}"
            self._halt()

    def _give_up(self, message: str, data: dict[str, Any]) -> None:
        self._actions.append(Note("gave_up", message, "error", data["node"], data["rank"], data))
        self._finish("failed", message)

    def _halt(self) -> None:
        """Stop this generation; the next one starts when all of it has stopped."""
        self.phase, self._since, self._leaving, self._wait_reported = "idle", None, None, False
        self._leave_by = FOREVER
        self._stop(self.roster.running)

    def _stop(self, nodes: Iterable[int]) -> None:
        """Send Stop to those of `nodes` that are connected. The others get it when they rejoin."""
        s, by_generation = self.settings, dict[int, list[int]]()
        for node in sorted(nodes):
            if self.roster.node(node).joined and node not in self.roster.fenced:
                by_generation.setdefault(self.roster.running[node], []).append(node)
                self.roster.stop_sent(node, self._now + s.stop_within_s)
        for generation, here in sorted(by_generation.items()):
            self._actions.append(Stop(generation, tuple(here), s.stop_grace_s))

    def _yield(self, how: Literal["yielded", "preempted"]) -> None:
        if how == "yielded" and self._leaving is None:
            self._leave_by = self._now + self.settings.preempt_grace_s
        self._leaving = how
        self._actions.append(Yield(self.generation, how))

    def _flush(self) -> None:
        """Have the in-memory snapshots written to disk; no generation runs meanwhile."""
        self.phase, self._flush_by = "flushing", self._now + self.settings.flush_wait_s
        self._actions.append(Flush(self.generation))

    def _finish(self, how: RunEnding, message: str) -> None:
        self._stop(self.roster.running)
        self.phase, self._ending = "finished", [how, message]
        self._actions.append(Finish(how, message))

    # -- nodes that leave
    #
    # If more than half of the nodes with ranks leave (of the connected nodes, if nothing runs), or fewer stay than any
    # shape needs, the run is preempted. If fewer leave, the run continues without them once `leaving_s` has passed: the
    # generation saves and ends at a step boundary, the next one uses other nodes, and once it has completed a step the
    # leaving nodes are released. If nothing runs, the in-memory snapshots are written to disk first.

    def _leaves(self, number: int, grace_s: float) -> None:
        node = self.roster.node(number)
        node.leave_by, node.released = self._now + grace_s, False
        if self._alone_at == FOREVER:
            # After a change of coordinator, give the other nodes time to rejoin.
            self._alone_at = max(self._now + min(self.settings.leaving_s, grace_s / 4), self._settled_at)

    def _check_leaving(self) -> None:
        leaving = self.roster.leaving()
        if not leaving or self._preempting or self.phase == "finished":
            self._alone_at = FOREVER
            return
        works, alone = self.at_work(self.generation), self._now >= self._alone_at
        here = {n for n, node in self.roster.nodes.items() if node.joined and not node.released}
        concerned = self._members if works else here
        # While nothing runs, more nodes may be about to join.
        most = (works or alone) and 2 * len(concerned & leaving.keys()) > len(concerned)
        if most or (alone and self.started and self.roster.staying() < self.settings.least):
            self._preempt(min(leaving.values()) - self._now)
        elif alone and self.phase == "running" and any(self.works(node) for node in leaving):
            if self._leaving is None:
                self._yield("yielded")
            self._leave_by = min(self._leave_by, *(leaving[n] for n in leaving if self.works(n)))

    def _leave_reason(self) -> str:
        """The reason if the generation yielded because nodes leave, else an empty string."""
        nodes = [str(node) for node in sorted(self._members & self.roster.leaving().keys())]
        return f"node {', '.join(nodes)} {'leaves' if len(nodes) == 1 else 'leave'}" if nodes else ""

    def _release(self) -> None:
        """Release leaving nodes that are no longer needed, nor the snapshots in their memory by the next start."""
        if self._preempting or self._now < self._alone_at:
            return
        for number in sorted(self.roster.leaving().keys() - self.roster.running.keys()):
            if self.phase == "running":
                free = number not in self._members and self._progressed
            else:
                free = self.phase == "idle" and not self._unsaved()
            if free:
                self.roster.node(number).released = True
                self._actions.append(Release(number))

    def _preempt(self, grace_s: float) -> None:
        """Save and end the run within `grace_s` at most."""
        if self._preempting:
            return
        self._preempting, self._alone_at = True, FOREVER
        self._preempt_by = self._now + max(0.0, min(grace_s, self.settings.preempt_grace_s))
        if self.phase == "running":
            self._yield("preempted")

    def _unsaved(self) -> bool:
        """Whether memory may hold newer state than the disk."""
        return self.started and not self._saved

    # -- handover to the next coordinator, and queries

    def memory(self) -> dict[str, Any]:
        """Everything that the next coordinator needs, as plain JSON."""
        return {
            "phase": self.phase,
            "generation": self.generation,
            "highest": self._highest,
            "shape": self.shape,
            "slots": [[slot, node] for slot, node in self.slots.items()],
            "started": self.started,
            "finished": [[node, how] for node, how in self.finished.items()],
            "reason": self._reason,
            "saved": self._saved,
            "progressed": self._progressed,
            "leaving": self._leaving,
            "preempting": self._preempting,
            "outgoing": [[node, *what] for node, what in self._outgoing.items()],
            "ending": self._ending,
            "roster": self.roster.to_memory(),
            "counts": self.counts.to_memory(),
        }

    def _recall(self, memory: dict[str, Any]) -> None:
        # What was running may still run. A flush is requested again: the process that was to answer may have exited.
        self.phase = {"running": "adopting", "flushing": "idle"}.get(memory["phase"], memory["phase"])
        self.generation, self._highest = memory["generation"], memory["highest"]
        self.shape, self.slots, self.started = memory["shape"], dict(memory["slots"]), memory["started"]
        self.finished = dict(memory["finished"])
        self._reason, self._saved = memory["reason"], memory["saved"]
        self._progressed, self._leaving = memory["progressed"], memory["leaving"]
        self._preempting, self._ending = memory["preempting"], memory["ending"]
        self._outgoing = {node: what for node, *what in memory["outgoing"]}
        self.roster = Roster.from_memory(memory["roster"])
        self.counts = Counts.from_memory(memory["counts"])

    def story(self) -> str:
        """The last events and the actions that they caused, as text."""
        lines = [f"phase {self.phase}, generation {self.generation}, running {self.roster.running}"]
        for event, actions in self._story:
            lines += [str(event), *(f"    {action}" for action in actions)]
        return "\n".join(lines)

    def at_work(self, generation: int) -> bool:
        """Whether `generation` is current and not being stopped: its reports are then news, not effects of a stop."""
        return generation == self.generation and self.phase in ("running", "adopting")

    def works(self, node: int) -> bool:
        """Whether the node has ranks in the current generation and has not finished it cleanly."""
        return node in self._members and self.at_work(self.generation) and node not in self.finished
