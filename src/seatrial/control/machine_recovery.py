"""What the control machine does about a failure: which nodes stay, whether to go on, and the order to stop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from seatrial.control.machine_state import FOREVER, State
from seatrial.control.machine_types import Ending, Failed, Finish, Lost, Note, Severity, Stop, Yield

if TYPE_CHECKING:
    from seatrial.control.policy import Action, Rule

_ANYWHERE = 3  # x max_same_failure: the same signal from changing places, without progress
_LOSSES = ("agent_exit", "node_silent")  # each of them has cost a node; they end of themselves


class Recovery(State):
    """The part of the machine that judges failures."""

    def _failed(self, event: Failed) -> None:
        rule, node, works = self.rules(event.signal), event.node, self.works(event.node)
        action = self._action(rule, event)
        # What is wrong with a node holds whatever runs there; what is wrong with a rank ends with its generation.
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
        node, worked = self.roster.node(event.node), self.works(event.node)
        self.roster.lost(event.node, certain=event.certain, gone_by=self._now + self.settings.fence_s)
        if node.out is None:
            node.cause = event.cause
        if worked:
            signal = "agent_exit" if event.certain else "node_silent"
            self._blame(event.node, self.rules(signal), event.cause)
            self._recover(signal, event.cause, node=event.node)

    def _action(self, rule: Rule, event: Failed) -> Action:
        """The rule's action, or its `repeat` once the signal has come from the node `evict_after` times (2 or more)."""
        s = self.settings
        times = self.counts.seen(event.signal, event.node, self._now, s.burst_s)
        if rule.repeat is None or times < max(2, s.evict_after):
            return rule.action
        if rule.repeat == "evict":
            # Restarts are counted by node, whatever the signal (see _blame). The others: not if it ended the run.
            others = sum(n.joined and n.out is None for k, n in self.roster.nodes.items() if k != event.node)
            if rule.action == "restart" or others < s.least:
                return rule.action
        return rule.repeat

    def _blame(self, number: int, rule: Rule, cause: str) -> None:
        """Count a failure against a node; after `evict_after` of them it goes, if a spare is ready to replace it."""
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
        """The node may not run anything from here on. What is to be done to it waits until it runs nothing."""
        node = self.roster.node(number)
        out = "evicted" if what == "evict" else "resetting"
        # One bad GPU has many messages: the first of them has asked for the reset.
        if node.out not in (out, "evicted"):
            node.out, node.cause = out, cause
            self._outgoing[number] = [what, gpu, drain]

    def _recover(
        self, signal: str, cause: str, *, step: int | None = None, node: int, rank: int | None = None
    ) -> None:
        """What runs has failed: on to the next generation, or the end where a budget is spent."""
        s, counts, out = self.settings, self.counts, self.roster.node(node).out
        step = max(counts.best, 0) if step is None else step
        where = f"node {node}" if rank is None else f"rank {rank}"
        counts.restarts += 1
        times = counts.same(signal, where, step)
        # Whoever is blamed for a hang or a lost collective may differ from time to time.
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
            self._finish("preempted", f"{where} failed on the way out: {cause}")
        elif s.max_restarts == 0:
            self._finish("failed", cause)
        elif times >= s.max_same_failure:
            self._give_up(f"{where} has failed {times} times at step {step} without progress: {cause}", data)
        elif anywhere >= _ANYWHERE * s.max_same_failure:
            self._give_up(
                f"{signal} has come {anywhere} times up to step {step} without progress, here and there; the last: "
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
        """Nothing of this generation is wanted any more; the next one starts when all of it has stopped."""
        self.phase, self._since, self._leaving, self._wait_told = "idle", None, None, False
        self._leave_by = FOREVER
        self._stop(self.roster.running)

    def _stop(self, nodes: Iterable[int]) -> None:
        """Tell those of `nodes` that are here. The others are asked when they come back."""
        s, told = self.settings, dict[int, list[int]]()
        for node in sorted(nodes):
            if self.roster.node(node).joined:
                told.setdefault(self.roster.running[node], []).append(node)
                self.roster.told_to_stop(node, self._now + s.stop_within_s)
        for generation, here in sorted(told.items()):
            self._actions.append(Stop(generation, tuple(here), s.stop_grace_s))

    def _yield(self, how: Literal["yielded", "preempted"]) -> None:
        if how == "yielded" and self._leaving is None:
            self._leave_by = self._now + self.settings.preempt_grace_s
        self._leaving = how
        self._actions.append(Yield(self.generation, how))

    def _finish(self, how: Ending, message: str) -> None:
        self._stop(self.roster.running)
        self.phase, self._ending = "finished", [how, message]
        self._actions.append(Finish(how, message))
