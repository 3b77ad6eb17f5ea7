"""The wait-for graph of a hang, built from the ranks' own answers. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from seatrial.control.hangs.evidence import Evidence
from seatrial.job.layout import Layout

MANY = 8  # ranks that a text lists individually


@dataclass(frozen=True)
class Sighting:
    """What is known of one rank."""

    rank: int
    answer: dict[str, Any] | None  # to a dump, as made by train/supervision/flight.py; None if none arrived
    evidence: Evidence | None = None  # of its process, from its own node; None if it was not observed


@dataclass(frozen=True)
class Operation:
    """The operation that other ranks wait in."""

    name: str  # all_reduce, ..., "send or receive", or "" if not known
    group: str  # "shard group of ranks 0, 4"
    sequence: int | None  # counts the collectives of the group; None where they are not numbered
    waiting: tuple[int, ...]  # ranks in it

    def __str__(self) -> str:
        number = "" if self.sequence is None else f" number {self.sequence}"
        return f"{self.name or 'an operation'}{number} of the {self.group}"


@dataclass
class Group:
    """One process group, as all its members' answers show it."""

    name: str
    members: tuple[int, ...]
    last: dict[int, int] = field(default_factory=dict)  # rank -> number of the last collective it entered
    pending: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def missing(self, rank: int) -> tuple[int, dict[str, Any], list[int]] | None:
        """(number, operation, members that have not entered it) of the first operation that `rank` waits in."""
        for operation in self.pending.get(rank, ()):
            absent = [m for m in self.members if self.last.get(m, 0) < operation["seq"]]
            if absent:
                return operation["seq"], operation, absent
        return None


class WaitGraph:
    """All ranks and groups of a hang, and which rank waits for which."""

    def __init__(self, seen: dict[int, Sighting], layout: Layout | None) -> None:
        self.seen = dict(sorted(seen.items()))
        self.layout = layout
        self.groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        for rank, sighting in self.seen.items():
            for state in (sighting.answer or {}).get("flight", ()):
                if state["ranks"] is None:
                    continue  # of a world that no longer exists
                # Groups with equal names and different members are distinct: the name alone is no key.
                members = tuple(state["ranks"])
                key = (state["group"], tuple(sorted(members)))
                group = self.groups.setdefault(key, Group(state["group"], members))
                group.last[rank] = state["last"]
                group.pending[rank] = state["pending"]
        self.of: dict[int, list[Group]] = defaultdict(list)
        for group in self.groups.values():
            for member in group.members:
                self.of[member].append(group)

    def at(self, rank: int) -> dict[str, Any]:
        answer = self.seen[rank].answer or {}
        at = answer.get("at")
        return (
            at if isinstance(at, dict) else {"in": "unknown", "frame": answer.get("error", ""), "peers": None}
        )

    def unfinished(self, rank: int) -> set[int]:
        """Ranks that have not entered an unfinished operation that `rank` has entered."""
        found: set[int] = set()
        for group in self.of[rank]:
            missing = group.missing(rank)
            if missing is not None:
                found |= set(missing[2])
        for state in (self.seen[rank].answer or {}).get("flight", ()):
            found |= {o["peer"] for o in state.get("p2p", ()) if o["peer"] is not None}
        return found - {rank}

    def waits_for(self, rank: int) -> set[int]:
        """The ranks that `rank` waits for; empty if it is working itself."""
        at = self.at(rank)
        if at["in"] not in ("communication", "device"):
            return set()
        found = self.unfinished(rank) | (set(at["peers"] or ()) - {rank})
        if found or at["in"] == "device" or self.stuck_with_all(rank):
            return found & set(self.seen)
        return set(self.seen) - {rank}  # in a store or a rendezvous: it may wait for any rank

    def stuck_with_all(self, rank: int) -> bool:
        """Whether `rank` is in an operation that every member has entered."""
        return any(g.pending.get(rank) and g.missing(rank) is None for g in self.of[rank])

    def describe(self, members: Sequence[int]) -> str:
        members = tuple(sorted(members))
        if self.layout is None:
            return f"group of {name_ranks(members)}"
        return f"{dimension(self.layout, members)} of {name_ranks(members)}"

    def waits_of_others(self, ranks: Sequence[int]) -> Operation | None:
        """The operation in which others have waited longest for `ranks`: members enter operations in the same order,
        so it is the next one that `ranks` have to enter."""
        wanted = set(ranks)
        found: list[tuple[float, Operation]] = []
        for group in self.groups.values():
            if not wanted & set(group.members):
                continue
            in_it: dict[int, list[int]] = defaultdict(list)
            operations: dict[int, dict[str, Any]] = {}
            for rank in group.members:
                missing = group.missing(rank) if rank not in wanted else None
                if missing is not None and wanted & set(missing[2]):
                    in_it[missing[0]].append(rank)
                    if missing[1]["age_s"] > operations.get(missing[0], {"age_s": -1.0})["age_s"]:
                        operations[missing[0]] = missing[1]
            name = self.describe(group.members)
            for number, inside in in_it.items():
                operation = Operation(operations[number]["op"], name, number, tuple(sorted(inside)))
                found.append((operations[number]["age_s"], operation))
        if found:
            return max(found, key=lambda f: (f[0], len(f[1].waiting)))[1]
        direct = tuple(r for r in self.seen if r not in wanted and wanted & set(self.at(r)["peers"] or ()))
        if not direct:
            return None
        members = next(
            (g.members for g in self.groups.values() if {*direct, *wanted} <= set(g.members)), None
        )
        return Operation("send or receive", self.describe(members or (*direct, *wanted)), None, direct)


def dimension(layout: Layout, ranks: Sequence[int]) -> str:
    """The name of a group of global ranks in `layout`: "tensor group", ..., "world"."""
    if len(ranks) == layout.world_size:
        return "world"
    at = [layout.coordinates(r) for r in ranks]
    axes = [n for n in ("tensor", "shard", "replicate", "pipeline") if len({getattr(a, n) for a in at}) > 1]
    inner, size = ("expert", layout.expert) if layout.expert > 1 else ("context", layout.context)
    if axes == ["shard"] and len({a.shard // size for a in at}) == 1:
        axes = [inner if size < layout.shard else f"{inner} or shard"]
    return f"{axes[0]} group" if len(axes) == 1 else "group"


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:MANY]))
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    return f"ranks {shown}{more}"
