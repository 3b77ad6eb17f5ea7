"""Made-up hangs: the programs of all ranks of a layout, run until nothing moves."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from seatrial.control.hangs.blame import Sighting
from seatrial.control.hangs.evidence import Evidence
from seatrial.job.layout import Coordinates, Layout

LARGE = Layout(pipeline=4, replicate=2, shard=8, tensor=4)  # 256 ranks

Instruction = tuple[str, Any]


def group_of(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    at = vars(layout.coordinates(rank))
    return tuple(layout.rank(Coordinates(**{**at, axis: i})) for i in range(getattr(layout, axis)))


def program(layout: Layout, rank: int) -> list[Instruction]:
    """Two training steps of a rank: weights gathered ahead of their use, a pipeline, sums over every group."""
    pipeline = group_of(layout, rank, "pipeline")
    stage = pipeline.index(rank)
    before = pipeline[stage - 1] if stage else None
    after = pipeline[stage + 1] if stage + 1 < len(pipeline) else None

    def both(axis: str, op: str) -> list[Instruction]:
        return [("enter", (axis, op)), ("wait", axis)]

    one: list[Instruction] = [("work", "read a batch")]
    for source, target, op in ((before, after, "all_gather"), (after, before, "reduce_scatter")):
        for _ in range(2):
            one += [("enter", ("shard", op))]  # asynchronous: waited for below
            one += [("receive", source)] if source is not None else []
            one += [("wait", "shard"), ("work", "a layer"), *both("tensor", "all_reduce")]
            one += [("send", target)] if target is not None else []
    for axis in ("tensor", "shard", "replicate", "pipeline"):
        one += both(axis, "all_reduce")
    return [i for i in 2 * one if i[0] != "enter" or getattr(layout, i[1][0]) > 1]


class Hang:
    """All ranks run their programs until nothing moves; `stops` says at which instruction some of them stop."""

    def __init__(self, layout: Layout, stops: dict[int, int]) -> None:
        self.layout, self.stops = layout, stops
        world = range(layout.world_size)
        self.programs = {r: program(layout, r) for r in world}
        self.at = dict.fromkeys(world, 0)
        self.clock = 0
        # group -> rank -> what it entered, and when
        self.entered: dict[tuple[int, ...], dict[int, list[tuple[str, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        self.received: dict[tuple[int, int], int] = defaultdict(int)
        while sum(self._run(r) for r in world):
            pass

    def _run(self, rank: int) -> bool:
        moved = False
        while self.at[rank] < len(self.programs[rank]) and self.at[rank] != self.stops.get(rank):
            kind, what = self.programs[rank][self.at[rank]]
            if kind == "enter":
                self.entered[group_of(self.layout, rank, what[0])][rank].append((what[1], self.clock))
            elif kind == "wait" and not self._complete(rank, group_of(self.layout, rank, what)):
                break
            elif kind == "send":
                self.sent[rank, what] += 1
            elif kind == "receive":
                if self.sent[what, rank] == self.received[what, rank]:
                    break
                self.received[what, rank] += 1
            self.at[rank] += 1
            self.clock += 1
            moved = True
        return moved

    def _complete(self, rank: int, group: tuple[int, ...]) -> bool:
        mine = len(self.entered[group][rank]) if len(group) > 1 else 0
        return all(len(self.entered[group][m]) >= mine for m in group)

    def answer(self, rank: int) -> dict[str, Any]:
        flight = []
        for group, entered in self.entered.items():
            if rank not in group or rank not in entered:
                continue
            ended = min(len(entered[m]) for m in group)
            pending = [
                {"seq": i + 1, "op": op, "state": "scheduled", "sizes": [[64]], "age_s": self.clock - when}
                for i, (op, when) in enumerate(entered[rank])
                if i >= ended
            ]
            name = "g" + ".".join(map(str, group))
            last = len(entered[rank])
            flight.append(
                {"group": name, "ranks": list(group), "last": last, "op": "", "pending": pending, "p2p": []}
            )
        at: dict[str, Any] = {"in": "python", "frame": "model.py:7 in f", "caller": "model.py:7 in f"}
        at["peers"] = None
        if rank not in self.stops:
            kind, what = self.programs[rank][self.at[rank]]
            at |= {"in": "communication", "peers": [what] if kind == "receive" else None}
        return {"flight": flight, "at": at, "python": ""}

    def sightings(self) -> list[Sighting]:
        return [Sighting(r, self.answer(r)) for r in self.programs]


def evidence(**changes: Any) -> Evidence:
    values: dict[str, Any] = {
        "pid": 77,
        "state": "S",
        "waited_s": 1.0,
        "cpu_s": 0.0,
        "threads": 9,
        "waits_in": "",
        "blocked": "",
        "tracer": "",
        "asked": True,
        "stack": "",
    }
    return Evidence(**{**values, **changes})


def places(seed: int, n: int, layout: Layout = LARGE) -> dict[int, int]:
    """`n` ranks that stop somewhere in their first step."""
    chance = random.Random(seed)
    ranks = chance.sample(range(layout.world_size), n)
    return {r: chance.randrange(len(program(layout, r)) // 2) for r in ranks}
