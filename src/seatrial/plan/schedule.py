"""Pipeline schedules: the order of passes on each rank, a replay of it, and the closed form that predictions use.

A pass is forward ("F"), backward ("B"), or backward's two halves: for the input ("I") and for the weights ("W"). A stage's
forward waits for the stage before, its backward for the stage after; a rank does its passes one by one, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Pass(NamedTuple):
    kind: Kind
    stage: int
    microbatch: int


class Times(NamedTuple):
    """Seconds of one microbatch in one stage: forward, backward, and the share of backward that makes weight gradients."""

    forward: float
    backward: float
    weight_share: float = 0.5


def order(schedule: str, ranks: int, per_rank: int, microbatches: int, rank: int) -> list[Pass]:
    """The passes of one pipeline rank, whose stages are rank, rank + ranks, ...

    gpipe: all forward, then all backward. 1f1b and interleaved-1f1b: arXiv:2104.04473 section 2.2. zero-bubble: weight
    gradients fill what would be idle (arXiv:2401.10241), in the interleaved form that torch has.
    """
    m = microbatches
    if schedule == "gpipe":
        forward = [Pass("F", rank, i) for i in range(m)]
        return forward + [Pass("B", rank, i) for i in range(m)]
    total = m * per_rank
    block = ranks * per_rank

    def nth(index: int, *, backward: bool) -> tuple[int, int]:
        """(stage, microbatch) of a rank's index-th pass: `ranks` microbatches through each of its stages in turn."""
        chunk = index % block // ranks
        if backward:
            chunk = per_rank - 1 - chunk
        return rank + chunk * ranks, index // block * ranks + index % ranks

    assert per_rank == 1 or m % ranks == 0, "interleaving works on whole groups of microbatches"
    warm = min(total, warm_up(schedule, ranks, per_rank, rank))
    ahead = [nth(i, backward=False) if per_rank > 1 else (rank, i) for i in range(total)]
    back = [nth(i, backward=True) if per_rank > 1 else (rank, i) for i in range(total)]
    passes = [Pass("F", *ahead[i]) for i in range(warm)]
    split = schedule == "zero-bubble"
    owed: list[tuple[int, int]] = []
    for i in range(total):
        if warm + i < total:
            passes.append(Pass("F", *ahead[warm + i]))
        passes.append(Pass("I" if split else "B", *back[i]))
        if split:
            owed.append(back[i])
            # Weight gradients wait for as many passes as this rank would idle, and no longer: they hold memory.
            if len(owed) > rank:
                passes.append(Pass("W", *owed.pop(0)))
    return passes + [Pass("W", *at) for at in owed]


def replay(schedule: str, ranks: int, per_rank: int, microbatches: int, times: Sequence[Times]) -> float:
    """Seconds until every rank has done its passes; `times` by stage. Linear in the number of passes."""
    stages = ranks * per_rank
    orders = [order(schedule, ranks, per_rank, microbatches, r) for r in range(ranks)]
    clock, at = [0.0] * ranks, [0] * ranks
    done: dict[tuple[bool, int, int], float] = {}
    waiting = list(range(ranks))
    while waiting:
        moved = False
        for rank in waiting:
            while at[rank] < len(orders[rank]):
                kind, stage, i = orders[rank][at[rank]]
                needs: list[tuple[bool, int, int]] = []
                if kind == "F" and stage > 0:
                    needs = [(True, stage - 1, i)]
                elif kind in "BI":
                    needs = [(True, stage, i)] + ([(False, stage + 1, i)] if stage < stages - 1 else [])
                if any(n not in done for n in needs):
                    break
                start = max([clock[rank], *(done[n] for n in needs)])
                t = times[stage]
                whole = t.forward if kind == "F" else t.backward
                part = {"I": 1 - t.weight_share, "W": t.weight_share}.get(kind, 1.0)
                clock[rank] = start + whole * part
                if kind != "W":
                    done[kind == "F", stage, i] = clock[rank]
                at[rank] += 1
                moved = True
        waiting = [r for r in waiting if at[r] < len(orders[r])]
        assert moved or not waiting, f"{schedule}: no rank can go on"
    return max(clock)


def span(schedule: str, ranks: int, per_rank: int, microbatches: int, times: Sequence[Times]) -> float:
    """What `replay` gives, without playing every microbatch.

    The slowest rank's work, and filling and draining the pipeline once: exact where all stages are alike (gpipe, 1f1b,
    interleaved-1f1b), near where they differ. What zero-bubble leaves idle has no simple form: its first microbatches are
    replayed, and each later one costs the slowest rank's work.
    """
    work = [sum(sum(times[s][:2]) for s in range(r, len(times), ranks)) for r in range(ranks)]
    if ranks == 1:
        return microbatches * work[0]
    slowest = max(range(ranks), key=lambda r: work[r])
    if schedule == "zero-bubble":
        few = min(microbatches, 2 * ranks)
        return replay(schedule, ranks, per_rank, few, times) + (microbatches - few) * work[slowest]
    # The first group of stages is what a microbatch passes before the last rank has work; the last group drains.
    fill = sum(t.forward for r, t in enumerate(times[:ranks]) if r != slowest)
    drain = sum(t.backward for r, t in enumerate(times[-ranks:]) if r != slowest)
    return microbatches * work[slowest] + fill + drain


def in_flight(schedule: str, ranks: int, per_rank: int, microbatches: int, rank: int) -> int:
    """The most (microbatch, stage) pairs whose activations `rank` holds at once."""
    total = microbatches * per_rank
    if ranks == 1:
        return per_rank
    if schedule == "gpipe":
        return total
    most = warm_up(schedule, ranks, per_rank, rank) + 1
    if schedule == "zero-bubble":
        most += rank  # weight gradients that wait keep their layer's input
    return min(total, most)


def warm_up(schedule: str, ranks: int, per_rank: int, rank: int) -> int:
    """Forward passes of a rank before its first backward pass, were there microbatches without end."""
    if per_rank == 1:
        return ranks - rank - 1
    factor = 1 if schedule == "zero-bubble" else 2
    return (per_rank - 1) * ranks + factor * (ranks - 1 - rank)
