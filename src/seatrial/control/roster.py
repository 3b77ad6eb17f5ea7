"""The nodes of a run: who is here, who is out, and which of them may still run workers of an earlier generation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Node:
    """What is known of one node."""

    joined: bool = False
    ready: bool = False
    stuck: bool = False  # it was told to stop and did not answer in time
    out: str | None = None  # "evicted" or "resetting": why it may not run anything
    cause: str = ""  # of its being out
    blames: int = 0
    blamed_in: int = -1  # a generation blames a node once


class Roster:
    """Nodes, and what each may be running.

    `running` holds a node from the Start that uses it until it is known to run nothing: it said so, it is certainly
    dead, or it has been out of touch for so long that it has fenced itself. No generation may start before it is empty.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.running: dict[int, int] = {}  # node -> generation
        self.answer_by: dict[int, float] = {}  # node that was told to stop -> when its answer is overdue
        self.gone_by: dict[int, float] = {}  # node out of touch -> when it runs nothing for sure

    def node(self, number: int) -> Node:
        """The node, made known if it was not."""
        found = self.nodes.get(number)
        if found is None:
            found = self.nodes[number] = Node()
        return found

    def usable(self) -> list[int]:
        """Nodes that a generation can start on."""
        return [
            number
            for number, node in self.nodes.items()
            if node.joined and node.out is None and not node.stuck and number not in self.running
        ]

    def ready_spares(self, members: Collection[int]) -> int:
        """How many nodes could take the place of one of `members` at once."""
        return sum(self.nodes[n].ready for n in self.usable() if n not in members)

    def started(self, generation: int, nodes: Collection[int]) -> None:
        """These nodes may run `generation` from now on."""
        assert not self.running, f"generation {generation} starts beside {self.running}"
        self.running = dict.fromkeys(nodes, generation)

    def may_run(self, number: int, generation: int) -> None:
        """The node says, or may be taken to, that it runs this generation."""
        self.running[number] = max(generation, self.running.get(number, generation))

    def told_to_stop(self, number: int, answer_by: float) -> None:
        """It is in touch, so that it will not fence itself: only its answer counts."""
        self.answer_by[number] = answer_by
        self.gone_by.pop(number, None)

    def ended(self, number: int, generation: int) -> None:
        """The node says that it runs nothing of `generation` or before."""
        if self.running.get(number, generation) <= generation:
            self._clear(number)
            self.node(number).stuck = False

    def lost(self, number: int, *, certain: bool, gone_by: float) -> None:
        """The node is out of touch."""
        node = self.node(number)
        node.joined = node.ready = node.stuck = False
        if certain:
            self._clear(number)
        elif number in self.running:
            self.answer_by.pop(number, None)
            self.gone_by.setdefault(number, gone_by)

    def expire(self, now: float, fence_s: float) -> tuple[list[int], list[int]]:
        """Nodes that have fenced themselves by now, and nodes whose answer is overdue: those count as lost."""
        gone = [n for n, at in self.gone_by.items() if at <= now]
        for number in gone:
            self._clear(number)
        overdue = [n for n, at in self.answer_by.items() if at <= now]
        for number in overdue:
            # Its agent is in touch and has had the time to kill: what is left there runs no more code of ours.
            del self.answer_by[number]
            self.gone_by[number] = now + fence_s
            self.node(number).stuck = True
        return gone, overdue

    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min((*self.answer_by.values(), *self.gone_by.values()), default=None)

    def _clear(self, number: int) -> None:
        self.running.pop(number, None)
        self.answer_by.pop(number, None)
        self.gone_by.pop(number, None)

    def assign(self, before: Mapping[int, int], count: int) -> dict[int, int]:
        """Nodes for `count` slots: who had a slot keeps it, the lowest number that is ready takes an empty one."""
        usable = set(self.usable())
        slots = {slot: node for slot, node in before.items() if slot < count and node in usable}
        rest = iter(sorted(usable.difference(slots.values()), key=lambda n: (not self.nodes[n].ready, n)))
        for slot in range(count):
            if slot not in slots:
                slots[slot] = next(rest)
        return dict(sorted(slots.items()))

    def to_memory(self) -> dict[str, Any]:
        """What another coordinator must know. Who is here it sees for itself, and its clock is another one."""
        return {
            "nodes": [
                [number, node.out, node.cause, node.blames, node.blamed_in]
                for number, node in self.nodes.items()
            ],
            "running": [[number, generation] for number, generation in self.running.items()],
        }

    @classmethod
    def from_memory(cls, memory: Mapping[str, Any]) -> Roster:
        """The inverse of `to_memory`."""
        roster = cls()
        for number, out, cause, blames, blamed_in in memory["nodes"]:
            roster.nodes[number] = Node(out=out, cause=cause, blames=blames, blamed_in=blamed_in)
        roster.running = dict(memory["running"])
        return roster
