"""Pipeline schedules: the properties that Seatrial needs of one, those built in, and those of other packages. Without torch.

A pass is forward ("F"), backward ("B"), or one half of backward: for the input ("I") or the weights ("W"). A stage's
forward waits for the stage before, its backward for the stage after; a rank runs its passes one at a time, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from seatrial.base.registry import Registry

Kind = Literal["F", "B", "I", "W"]


class Pass(NamedTuple):
    kind: Kind
    stage: int
    microbatch: int


class Times(NamedTuple):
    """Seconds of one microbatch in one stage: forward, backward, and the share of backward for weight gradients."""

    forward: float
    backward: float
    weight_share: float = 0.5


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule. One of your own gives `order`; the rest is derived from it, unless a closed form is known.

    Rank r of a pipeline of `ranks` holds the stages r, r + ranks, ... (`Layout.stage_indices`).
    """

    name: str
    torch_class: str  # "module:Class", a schedule of torch.distributed.pipelining; empty: not in this version
    several_stages: bool = False  # on each rank; else one. Microbatches are then a multiple of the ranks.
    split_backward: bool = False  # into passes for input and for weight gradients

    def order(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> list[Pass]:
        """The passes of one pipeline rank, as executed by torch."""
        raise NotImplementedError(f'the schedule "{self.name}" has no order of passes')

    def in_flight(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> int:
        """The most (microbatch, stage) pairs whose activations `rank` holds at once."""
        last = "W" if self.split_backward else "B"
        return _most(self, ranks, per_rank, microbatches, rank, "F", last)

    def deferred(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> int:
        """The most backward passes of `rank` whose weight gradients are still to be computed, the current one aside."""
        if not self.split_backward:
            return 0
        return max(0, _most(self, ranks, per_rank, microbatches, rank, "I", "W") - 1)

    def span(self, ranks: int, per_rank: int, microbatches: int, times: Sequence[Times]) -> float:
        """The result of `replay`, without replaying every microbatch.

        The first microbatches are replayed, and each later one costs the slowest rank's work.
        """
        work = _work(ranks, times)
        few = min(microbatches, 2 * ranks)
        return replay(self, ranks, per_rank, few, times) + (microbatches - few) * max(work)


@dataclass(frozen=True)
class GPipe(PipelineSchedule):
    """All forward, then all backward (arXiv:1811.06965)."""

    def order(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> list[Pass]:
        forward = [Pass("F", rank, i) for i in range(microbatches)]
        return forward + [Pass("B", rank, i) for i in range(microbatches)]

    def in_flight(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> int:
        return microbatches * per_rank

    def span(self, ranks: int, per_rank: int, microbatches: int, times: Sequence[Times]) -> float:
        return _filled_and_drained(ranks, microbatches, times)


@dataclass(frozen=True)
class OneForwardOneBackward(PipelineSchedule):
    """1F1B, plain and interleaved (arXiv:2104.04473 section 2.2)."""

    def order(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> list[Pass]:
        m = microbatches
        total = m * per_rank
        block = ranks * per_rank

        def nth(index: int, *, backward: bool) -> tuple[int, int]:
            """(stage, microbatch) of a rank's index-th pass: `ranks` microbatches through each of its stages in turn."""
            chunk = index % block // ranks
            if backward:
                chunk = per_rank - 1 - chunk
            return rank + chunk * ranks, index // block * ranks + index % ranks

        assert per_rank == 1 or m % ranks == 0, "interleaving works on whole groups of microbatches"
        warm = min(total, self._warm_up(ranks, per_rank, rank))
        ahead = [nth(i, backward=False) if per_rank > 1 else (rank, i) for i in range(total)]
        back = [nth(i, backward=True) if per_rank > 1 else (rank, i) for i in range(total)]
        passes = [Pass("F", *ahead[i]) for i in range(warm)]
        split = self.split_backward
        owed: list[tuple[int, int]] = []
        for i in range(total):
            if warm + i < total:
                passes.append(Pass("F", *ahead[warm + i]))
            passes.append(Pass("I" if split else "B", *back[i]))
            if split:
                owed.append(back[i])
                # Weight gradients are deferred by as many passes as this rank would idle, and no more: they hold memory.
                if len(owed) > rank:
                    passes.append(Pass("W", *owed.pop(0)))
        return passes + [Pass("W", *at) for at in owed]

    def in_flight(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> int:
        return min(microbatches * per_rank, self._warm_up(ranks, per_rank, rank) + 1)

    def span(self, ranks: int, per_rank: int, microbatches: int, times: Sequence[Times]) -> float:
        return _filled_and_drained(ranks, microbatches, times)

    def _warm_up(self, ranks: int, per_rank: int, rank: int) -> int:
        """Forward passes of a rank before its first backward pass, given unlimited microbatches."""
        if per_rank == 1:
            return ranks - rank - 1
        factor = 1 if self.split_backward else 2
        return (per_rank - 1) * ranks + factor * (ranks - 1 - rank)


@dataclass(frozen=True)
class ZeroBubble(OneForwardOneBackward):
    """Weight gradients fill idle time (arXiv:2401.10241), in torch's interleaved form."""

    def in_flight(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> int:
        # Deferred weight gradients keep their layer's input.
        return min(microbatches * per_rank, self._warm_up(ranks, per_rank, rank) + 1 + rank)

    def deferred(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> int:
        return min(rank, microbatches * per_rank)

    def span(self, ranks: int, per_rank: int, microbatches: int, times: Sequence[Times]) -> float:
        # Its idle time has no simple form.
        return PipelineSchedule.span(self, ranks, per_rank, microbatches, times)


_TORCH = "torch.distributed.pipelining.schedules"
SCHEDULES = Registry(
    "pipeline schedule",
    "seatrial.schedules",
    {
        schedule.name: schedule
        for schedule in (
            GPipe("gpipe", f"{_TORCH}:ScheduleGPipe"),
            OneForwardOneBackward("1f1b", f"{_TORCH}:Schedule1F1B"),
            OneForwardOneBackward(
                "interleaved-1f1b", f"{_TORCH}:ScheduleInterleaved1F1B", several_stages=True
            ),
            ZeroBubble(
                "zero-bubble",
                f"{_TORCH}:ScheduleInterleavedZeroBubble",
                several_stages=True,
                split_backward=True,
            ),
            PipelineSchedule("zbv", "", split_backward=True),
            PipelineSchedule("dualpipe-v", "", split_backward=True),
        )
    },
    of=PipelineSchedule,
)
# Cached: a search asks for every layout, and looking for other packages takes milliseconds.
schedule_named = cache(SCHEDULES.named)


def replay(
    schedule: PipelineSchedule, ranks: int, per_rank: int, microbatches: int, times: Sequence[Times]
) -> float:
    """Seconds until every rank has done its passes; `times` by stage. Linear in the number of passes."""
    stages = ranks * per_rank
    orders = [schedule.order(ranks, per_rank, microbatches, r) for r in range(ranks)]
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
        assert moved or not waiting, f"{schedule.name}: no rank can continue"
    return max(clock)


def _filled_and_drained(ranks: int, microbatches: int, times: Sequence[Times]) -> float:
    """The slowest rank's work, plus filling and draining the pipeline once.

    Exact where all stages are equal, approximate where they differ.
    """
    work = _work(ranks, times)
    slowest = max(range(ranks), key=lambda r: work[r])
    # A microbatch passes the first group of stages before the last rank has work; the last group drains.
    fill = sum(t.forward for r, t in enumerate(times[:ranks]) if r != slowest)
    drain = sum(t.backward for r, t in enumerate(times[-ranks:]) if r != slowest)
    return microbatches * work[slowest] + fill + drain


def _work(ranks: int, times: Sequence[Times]) -> list[float]:
    """Seconds of one microbatch in all stages of each rank."""
    return [sum(sum(times[s][:2]) for s in range(r, len(times), ranks)) for r in range(ranks)]


@cache
def _most(
    schedule: PipelineSchedule, ranks: int, per_rank: int, microbatches: int, rank: int, up: Kind, down: Kind
) -> int:
    """The most passes of kind `up` that at any moment were begun and whose pass of kind `down` was not."""
    held = most = 0
    for kind, _, _ in schedule.order(ranks, per_rank, microbatches, rank):
        held += (kind == up) - (kind == down)
        most = max(most, held)
    return most
