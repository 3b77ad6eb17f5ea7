"""The nodes of a run: which are connected, which are excluded, and which may still run an earlier generation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Node:
    """State of one node."""

    joined: bool = False
    ready: bool = False
    stuck: bool = False  # it did not answer a Stop in time
    out: str | None = None  # "evicted" or "resetting": why it may not run anything
    cause: str = ""  # of its exclusion
    blames: int = 0
    blamed_in: int = -1  # last generation that blamed it; each counts once
    order: str = ""  # sort key among the nodes at the first start
    leave_by: float | None = None  # its agent was signalled, and will exit at this time
    released: bool = False  # it has been released


class Roster:
    """All nodes, and what each may be running.

    `running` contains a node from the Start that uses it until it is known to run nothing: it reported so, is certainly
    dead, or was unreachable long enough to have fenced itself. No generation may start before `running` is empty.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.running: dict[int, int] = {}  # node -> generation
        self.answer_by: dict[int, float] = {}  # node that was sent a Stop -> when its answer is overdue
        self.gone_by: dict[int, float] = {}  # unreachable node -> when it certainly runs nothing
        self.fenced: set[int] = set()  # nodes with ranks of a replaced agent, which the new agent cannot stop

    def node(self, number: int) -> Node:
        """Return the node, creating its entry if needed."""
        found = self.nodes.get(number)
        if found is None:
            found = self.nodes[number] = Node()
        return found

    def usable(self) -> list[int]:
        """Nodes that a generation can start on."""
        return [
            number
            for number, node in self.nodes.items()
            if node.joined
            and node.out is None
            and not node.stuck
            and node.leave_by is None
            and number not in self.running
        ]

    def leaving(self) -> dict[int, float]:
        """Nodes that are about to leave and are not released yet -> when they will leave."""
        return {
            number: node.leave_by
            for number, node in self.nodes.items()
            if node.joined and node.leave_by is not None and not node.released
        }

    def staying(self) -> int:
        """Number of nodes that a generation could use once everything has stopped."""
        return sum(
            node.joined and node.out is None and not node.stuck and node.leave_by is None
            for node in self.nodes.values()
        )

    def ready_spares(self, members: Collection[int]) -> int:
        """Number of nodes that could replace one of `members` without delay."""
        return sum(self.nodes[n].ready for n in self.usable() if n not in members)

    def started(self, generation: int, nodes: Collection[int]) -> None:
        """Record that these nodes may run `generation` from now on."""
        assert not self.running, f"generation {generation} starts beside {self.running}"
        self.running = dict.fromkeys(nodes, generation)

    def may_run(self, number: int, generation: int) -> None:
        """Record that the node runs, or must be assumed to run, this generation."""
        self.running[number] = max(generation, self.running.get(number, generation))

    def stop_sent(self, number: int, answer_by: float) -> None:
        """Record a Stop sent to a connected node: it will not fence itself, so only its answer counts."""
        self.answer_by[number] = answer_by
        self.gone_by.pop(number, None)

    def stopped(self, number: int, generation: int) -> None:
        """The node reported that it runs nothing of `generation` or an older one."""
        if number not in self.fenced and self.running.get(number, generation) <= generation:
            self._clear(number)
            self.node(number).stuck = False

    def lost(self, number: int, *, certain: bool, gone_by: float) -> None:
        """The node has become unreachable."""
        node = self.node(number)
        node.joined = node.ready = node.stuck = node.released = False
        node.leave_by = None  # announced again if it rejoins
        if certain and number not in self.fenced:
            self._clear(number)
        elif number in self.running:
            self.answer_by.pop(number, None)
            self.gone_by.setdefault(number, gone_by)

    def expire(self, now: float, fence_s: float) -> tuple[list[int], list[int]]:
        """Return nodes that have fenced themselves by now, and nodes whose answer is overdue: these count as lost."""
        gone = [n for n, at in self.gone_by.items() if at <= now]
        for number in gone:
            self._clear(number)
        overdue = [n for n, at in self.answer_by.items() if at <= now]
        for number in overdue:
            # Its agent is connected and has had time to kill: a process left there no longer executes our code.
            del self.answer_by[number]
            self.gone_by[number] = now + fence_s
            self.node(number).stuck = True
        return gone, overdue

    def deadline(self) -> float | None:
        """When `expire` is due next."""
        return min((*self.answer_by.values(), *self.gone_by.values()), default=None)

    def _clear(self, number: int) -> None:
        self.running.pop(number, None)
        self.answer_by.pop(number, None)
        self.gone_by.pop(number, None)
        self.fenced.discard(number)

    def assign(self, before: Mapping[int, int], count: int) -> dict[int, int]:
        """Assign nodes to `count` slots: a node keeps its slot; empty slots go to ready nodes first, then by number."""
        usable = set(self.usable())
        slots = {slot: node for slot, node in before.items() if slot < count and node in usable}
        rest = iter(sorted(usable.difference(slots.values()), key=lambda n: (not self.nodes[n].ready, n)))
        for slot in range(count):
            if slot not in slots:
                slots[slot] = next(rest)
        return dict(sorted(slots.items()))

    def in_order(self, slots: Mapping[int, int]) -> dict[int, int]:
        """Reassign the same nodes to slots sorted by `order`; ties keep their slot order."""
        nodes = sorted((node for _, node in sorted(slots.items())), key=lambda n: self.nodes[n].order)
        return dict(enumerate(nodes))

    def to_memory(self) -> dict[str, Any]:
        """State for the next coordinator, without connections, which it sees itself, or times, as its clock differs."""
        return {
            "nodes": [
                [number, node.out, node.cause, node.blames, node.blamed_in, node.released]
                for number, node in self.nodes.items()
            ],
            "running": [[number, generation] for number, generation in self.running.items()],
            "fenced": sorted(self.fenced),
        }

    @classmethod
    def from_memory(cls, memory: Mapping[str, Any]) -> Roster:
        """The inverse of `to_memory`."""
        roster = cls()
        for number, out, cause, blames, blamed_in, released in memory["nodes"]:
            roster.nodes[number] = Node(
                out=out, cause=cause, blames=blames, blamed_in=blamed_in, released=released
            )
        roster.running, roster.fenced = dict(memory["running"]), set(memory["fenced"])
        return roster
