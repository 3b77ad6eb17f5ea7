"""Machines with one mistake each. The watcher must see every one of them, or it would not see a real mistake."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from seatrial.control.machine import types as m
from seatrial.control.machine.machine import Machine


class StartsWithoutWaiting(Machine):
    """Takes a node that was told to stop for stopped."""

    def _stop(self, nodes: Iterable[int]) -> None:
        told = [n for n in nodes if self.roster.node(n).joined]
        super()._stop(told)
        for node in told:
            self.roster.stopped(node, self.generation)


class ReusesALostNode(Machine):
    """Forgets that a lost node is not there."""

    def _lost(self, event: m.Lost) -> None:
        super()._lost(event)
        self.roster.node(event.node).joined = True


class ForgetsEqualFailures(Machine):
    """Every failure is the first of its kind."""

    def _recover(self, *args: Any, **options: Any) -> None:
        self.counts._same.clear()
        super()._recover(*args, **options)


class RepeatsAGeneration(Machine):
    """A new coordinator counts from the generation before."""

    def _recall(self, memory: dict[str, Any]) -> None:
        super()._recall(memory)
        self._highest -= 1


class BelievesEveryLoss(Machine):
    """Takes a silent node for dead, though its ranks may live until it fences itself."""

    def _lost(self, event: m.Lost) -> None:
        super()._lost(replace(event, certain=True))


class TrustsTheOldFence(Machine):
    """A node comes back in time: it is heard again and will not fence itself, but the deadline still counts."""

    def _joined(self, event: m.Joined) -> None:
        before = dict(self.roster.gone_by)
        super()._joined(event)
        self.roster.gone_by.update({n: t for n, t in before.items() if n in self.roster.running})


class ReadmitsEverybody(Machine):
    """Coming back is enough to be in again."""

    def _joined(self, event: m.Joined) -> None:
        self.roster.node(event.node).out = None
        super()._joined(event)


class ForgetsWhoIsOut(Machine):
    """The next coordinator does not know whom the last one put out."""

    def memory(self) -> dict[str, Any]:
        memory = super().memory()
        memory["roster"]["nodes"] = []
        memory["outgoing"] = []
        return memory


class ForgetsWhatMayRun(Machine):
    """The next coordinator does not know where the generation before may still run."""

    def memory(self) -> dict[str, Any]:
        memory = super().memory()
        memory["roster"]["running"] = []
        return memory


class IsHaltedByAnOldStop(Machine):
    """Takes any order to stop for one to the generation at work, also what only ends an older one somewhere."""

    halted = False

    def _stop(self, nodes: Iterable[int]) -> None:
        super()._stop(nodes)
        self.halted = True

    def _start(self, shape: int) -> None:
        super()._start(shape)
        self.halted = False

    def at_work(self, generation: int) -> bool:
        return super().at_work(generation) and not self.halted


class IgnoresThatNobodyAnswers(Machine):
    """Waits for ever for a node that does not stop."""

    def _stop(self, nodes: Iterable[int]) -> None:
        super()._stop(nodes)
        self.roster.answer_by.clear()


class WaitsForAFlush(Machine):
    """Waits for ever for a flush that nobody answers."""

    def _start(self, shape: int) -> None:
        super()._start(shape)
        self._flush_by = float("inf")


class GivesANodeTwoSlots(Machine):
    """Fills a gap with a node that has a slot."""

    def _start(self, shape: int) -> None:
        assign = self.roster.assign
        self.roster.assign = lambda before, count: {  # type: ignore[method-assign]
            slot: (node if node == before.get(slot, node) else before[0])
            for slot, node in assign(before, count).items()
        }
        super()._start(shape)
        self.roster.assign = assign  # type: ignore[method-assign]


class EndsWithTheFirstNode(Machine):
    """Takes the run for done when one node has finished."""

    def _check_run(self) -> None:
        if "done" in self.finished.values():
            self._finish("done", "")
            return
        super()._check_run()


class GoesOnAfterTheEnd(Machine):
    """Answers events after the end as if there were something to do."""

    def handle(self, event: m.Event) -> list[m.Action]:
        if self.phase == "finished":
            return [m.Stop(self.generation, (0,), 1.0)]
        return super().handle(event)


class GivesUpAtOnce(Machine):
    """Ends the run at the first failure, whatever is allowed."""

    def _halt(self) -> None:
        self._finish("failed", "a failure")


class StartsOnLeavingNodes(Machine):
    """Forgets that a node leaves."""

    def _choose(self) -> float:
        self._forget()
        return super()._choose()

    def _forget(self) -> None:
        for number in self.roster.leaving():
            self.roster.node(number).leave_by = None


class LetsNobodyGo(Machine):
    """A node that leaves waits for its own end."""

    def _release(self) -> None:
        pass


class LetsGoAtOnce(Machine):
    """Does not mind what a leaving node does or holds."""

    def _release(self) -> None:
        for number in self.roster.leaving():
            self.roster.node(number).released = True
            self._actions.append(m.Release(number))


class LetsGoWithTheMemory(Machine):
    """A node may go as soon as it runs nothing."""

    def _unsaved(self) -> bool:
        return False


class EndsForOneThatLeaves(Machine):
    """Takes any node that leaves for a preemption of all."""

    def _leaves(self, number: int, grace_s: float) -> None:
        super()._leaves(number, grace_s)
        self._preempt(grace_s)


class BelievesTheNewAgent(Machine):
    """Takes the word of an agent for what another one may run, which it has replaced."""

    def _joined(self, event: m.Joined) -> None:
        super()._joined(replace(event, replaces=False))


class ForgetsWhoWasReplaced(Machine):
    """The next coordinator takes the word of the new agent."""

    def memory(self) -> dict[str, Any]:
        memory = super().memory()
        memory["roster"]["fenced"] = []
        return memory


BROKEN = [
    value for value in list(globals().values()) if isinstance(value, type) and value.__base__ is Machine
]
