"""Determine which ranks block a hung run, from each rank's answer, or from its silence. Pure.

1. A rank that does not answer is suspected before all that do; the kernel's view of its process shows why it is silent.
2. Otherwise every rank reports where it is and which collectives of which groups it has entered. A waiting rank waits
   for those members of its group that have not entered the same operation. A rank that is waited for and does not wait
   itself blocks the rest, through however many groups.
3. If that rule finds no rank, none is blamed: all have arrived and the data does not move, or the ranks wait for each
   other in a cycle.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from seatrial.control.hangs.evidence import Evidence
from seatrial.control.hangs.waits import MANY, Group, Operation, Sighting, WaitGraph, name_ranks
from seatrial.job.layout import Layout

__all__ = ["Blame", "Kind", "Operation", "Sighting", "find_blame", "why_silent"]

Kind = Literal["stopped", "gil_held", "not_arrived", "uninterruptible", "dead", "unknown"]

_ORDER: tuple[Kind, ...] = ("dead", "stopped", "uninterruptible", "gil_held", "unknown")


@dataclass(frozen=True)
class Blame:
    """The ranks that block the run, and the evidence for it."""

    ranks: tuple[int, ...]  # empty if no rank can be blamed
    kind: Kind
    evidence: tuple[str, ...]  # sentences, the conclusion first
    operation: Operation | None = None

    def __str__(self) -> str:
        return "; ".join(self.evidence)


def find_blame(sightings: Iterable[Sighting], layout: Layout | None = None) -> Blame:
    """Analyse a hang from one sighting of each rank. `layout` is used to name the groups."""
    world = WaitGraph({s.rank: _late(s) for s in sightings}, layout)
    silent = [s for s in world.seen.values() if s.answer is None]
    if silent:
        return _judge_silent(silent, world)
    return _judge_answers(world)


# -- ranks that do not answer


def why_silent(evidence: Evidence | None) -> Kind:
    """Why a process does not answer, according to the kernel's view of it."""
    if evidence is None:
        return "unknown"
    if not evidence.alive:
        return "dead"
    if evidence.stopped:
        return "stopped"
    if evidence.state == "D" or evidence.blocked:
        return "uninterruptible"
    # Its signal handler ran, or it computes: it is alive, but its supervisor client cannot acquire the GIL.
    return "gil_held" if evidence.stack or evidence.busy else "unknown"


_SILENT_TEXT: dict[Kind, str] = {
    "dead": "has ended",
    "stopped": "is stopped",
    "uninterruptible": "waits in the kernel for a device or file system, and cannot be interrupted",
    "gil_held": "is in native code that holds the GIL",
    "unknown": "does not answer",
}


def _judge_silent(silent: list[Sighting], world: WaitGraph) -> Blame:
    kinds = {s.rank: why_silent(s.evidence) for s in silent}
    kind = min(kinds.values(), key=_ORDER.index)
    ranks = tuple(sorted(r for r, k in kinds.items() if k == kind))
    verb = "" if len(ranks) == 1 else " each"
    texts = [f"{name_ranks(ranks)}{verb} {_SILENT_TEXT[kind]}"]
    for sighting in silent:
        if sighting.evidence is not None:
            texts.append(f"rank {sighting.rank}: {sighting.evidence}")
            if sighting.evidence.stack:
                texts.append(f"rank {sighting.rank} was at {_innermost(sighting.evidence.stack)}")
    others = tuple(sorted(set(kinds) - set(ranks)))
    if others:
        texts.append(f"{name_ranks(others)} did not answer either")
    operation = world.waits_of_others(ranks)
    if operation is not None:
        texts.append(f"{name_ranks(operation.waiting)} waited for it in {operation}")
    return Blame(ranks, kind, tuple(texts), operation)


def _late(sighting: Sighting) -> Sighting:
    """Count a silent rank as waiting if its stack shows it in a collective: it does not hold the GIL there, so it is
    only slow to answer, and waits like the others."""
    if sighting.answer is not None or sighting.evidence is None or not sighting.evidence.alive:
        return sighting
    frame = _innermost(sighting.evidence.stack) if sighting.evidence.stack else ""
    if "/torch/distributed/" not in frame:
        return sighting
    at = {"in": "communication", "frame": frame, "peers": None}
    return Sighting(sighting.rank, {"flight": [], "at": at}, sighting.evidence)


def _innermost(stack: str) -> str:
    """The innermost Python frame of the main thread, which faulthandler writes last."""
    main = next((b for b in reversed(stack.split("\n\n")) if "File " in b), stack)
    frames = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    return frames[0] if frames else main.strip().splitlines()[0]


# -- ranks that answer


def _judge_answers(world: WaitGraph) -> Blame:
    edges = {rank: world.waits_for(rank) for rank in world.seen}
    waiters = _waiters(edges)
    roots = [r for r in world.seen if not edges[r] and not _in_vain(world, r)]
    waited_for = [r for r in roots if waiters[r]]
    # A rank that could not report its position is blamed only if no other rank can be.
    waited_for = [r for r in waited_for if world.at(r)["in"] != "unknown"] or waited_for
    if not waited_for:
        if len(world.seen) == 1 and roots:
            return _blame_roots(tuple(roots), world, {roots[0]: set()}, edges)
        return _judge_nobody(world, edges)
    if len(waited_for) > 1:
        waited_for = _hold_up_the_others(waited_for, world)
    return _blame_roots(tuple(waited_for), world, waiters, edges)


def _in_vain(world: WaitGraph, rank: int) -> bool:
    """Whether it is in an operation that all members have entered: it waits, but for no rank."""
    return world.at(rank)["in"] != "python" and world.stuck_with_all(rank)


def _waiters(edges: dict[int, set[int]]) -> dict[int, set[int]]:
    """For each rank, all ranks that wait for it, directly or transitively."""
    back: dict[int, set[int]] = defaultdict(set)
    for rank, targets in edges.items():
        for target in targets:
            back[target].add(rank)
    found = {}
    for rank, targets in edges.items():
        reached: set[int] = set()
        if not targets:  # only needed for ranks that wait for none
            queue = deque([rank])
            while queue:
                new = back[queue.popleft()] - reached
                reached |= new
                queue.extend(new)
        found[rank] = reached
    return found


def _hold_up_the_others(roots: list[int], world: WaitGraph) -> list[int]:
    """Of ranks that seem to be working, those that do not wait for another one of them in an unfinished operation.

    A rank that reads a value from its device, or waits for a collective by a call of its own, seems to be working; the
    operations that it has entered show that it waits.
    """
    held_up = {r for r in roots if world.unfinished(r) & (set(roots) - {r})}
    return [r for r in roots if r not in held_up] or roots


def _blame_roots(
    roots: tuple[int, ...], world: WaitGraph, waiters: dict[int, set[int]], edges: dict[int, set[int]]
) -> Blame:
    stuck = [r for r in roots if (e := world.seen[r].evidence) is not None and (e.state == "D" or e.blocked)]
    if stuck:
        roots = tuple(stuck)
    operation = world.waits_of_others(roots)
    goal = f"did not enter {operation}" if operation is not None else "did not arrive where the others wait"
    texts = [f"{name_ranks(roots)} {goal}"]
    for rank in roots[:MANY]:
        at = world.at(rank)
        where = at.get("caller") or at["frame"]
        texts.append(f"rank {rank} is at {where}" if where else f"rank {rank} did not report its position")
        if rank in stuck:
            texts.append(f"rank {rank}: {world.seen[rank].evidence}")
    if operation is not None:
        texts.append(f"{name_ranks(operation.waiting)} wait{'s' * (len(operation.waiting) == 1)} there")
    everybody = set().union(*(waiters[r] for r in roots))
    further = len(everybody) - (len(operation.waiting) if operation is not None else 0)
    if further > 0:
        texts.append(f"{further} more wait through others: {_chain(roots[0], everybody, edges)}")
    return Blame(roots, "uninterruptible" if stuck else "not_arrived", tuple(texts), operation)


def _chain(root: int, waiting: set[int], edges: dict[int, set[int]]) -> str:
    """One of the longest among the shortest wait paths to `root`, as "7 for 3 for 1"."""
    nearer: dict[int, int] = {}
    queue, last = deque([root]), root
    while queue:
        last = queue.popleft()
        for rank in sorted(waiting):
            if rank not in nearer and last in edges[rank]:
                nearer[rank] = last
                queue.append(rank)
    chain = [last]
    while chain[-1] != root:
        chain.append(nearer[chain[-1]])
    return "rank " + " for ".join(map(str, chain))


def _judge_nobody(world: WaitGraph, edges: dict[int, set[int]]) -> Blame:
    """Every rank that is waited for waits itself: report what was seen, blame no rank."""
    for group in world.groups.values():
        blame = _judge_complete(group, world)
        if blame is not None:
            return blame
    cycle = _cycle(edges)
    if cycle:
        chain = " for ".join(map(str, [*cycle, cycle[0]]))
        texts = [f"ranks wait for each other in a cycle: rank {chain}"]
    else:
        texts = ["no rank waits for another: all of them are working"]
    ranks = cycle or list(world.seen)
    texts += [
        f"rank {r} is at {at.get('caller') or at['frame']}" for r in ranks[:MANY] if (at := world.at(r))
    ]
    return Blame((), "unknown", tuple(texts))


def _judge_complete(group: Group, world: WaitGraph) -> Blame | None:
    """The result if all members are in the operation of `group` with the same number and it does not end; else None."""
    if not group.pending.keys() >= set(group.members):
        return None
    first = {m: next(iter(group.pending[m]), None) for m in group.members}
    present = {m: o for m, o in first.items() if o is not None}
    numbers = {o["seq"] for o in present.values()}
    if len(present) < len(group.members) or len(numbers) != 1:
        return None
    members = tuple(sorted(group.members))
    operation = Operation(present[members[0]]["op"], world.describe(members), min(numbers), members)
    asked = {(o["op"], str(o.get("sizes"))) for o in present.values()}
    if len(asked) > 1:
        what = [f"rank {m} entered {present[m]['op']} with {present[m].get('sizes')}" for m in members]
        text = f"the members of the {operation.group} entered different operations as number {min(numbers)}"
        return Blame((), "unknown", (text, *what[:MANY]), operation)
    age = min(o.get("age_s", 0.0) for o in present.values())
    text = f"all {len(members)} members are in {operation} and it does not end"
    why = f"the last of them entered it {age:.0f} s ago: look at the network between them"
    return Blame((), "unknown", (text, why), operation)


def _cycle(edges: dict[int, set[int]]) -> list[int]:
    """Ranks that wait for each other in a cycle; empty if there is none."""
    done: set[int] = set()
    for start in edges:
        chain: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in done:
            if rank in chain:
                return chain[chain.index(rank) :]
            chain.append(rank)
            ahead = sorted(edges.get(rank, set()) - done)
            rank = ahead[0] if ahead else None
        done |= set(chain)
    return []
