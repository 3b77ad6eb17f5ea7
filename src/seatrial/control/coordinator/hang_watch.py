"""Detect that no step completes any more, and determine which ranks block it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seatrial.base.batches import BatchSizes
from seatrial.control.coordinator.links import SlowLink
from seatrial.control.coordinator.recorder import Recorder
from seatrial.control.hangs.blame import Blame, Kind, Sighting, find_blame
from seatrial.control.hangs.deadline import StepDeadline
from seatrial.control.hangs.evidence import Evidence
from seatrial.control.machine.world import World
from seatrial.job.schema import ResilienceSection
from seatrial.record import messages as msg

_ASK_S = 1.5  # for the ranks to answer
_ANSWER_S = 3.0  # for all agents to forward the answers

# The policy's signal for each kind.
_SIGNALS: dict[Kind, str] = {
    "stopped": "stopped",
    "gil_held": "gil_held",
    "not_arrived": "hang",
    "uninterruptible": "hang",
    "dead": "hang",
    "unknown": "hang",
}


@dataclass(frozen=True)
class Culprit:
    """A rank that blocks the others; rank None: no rank can be blamed, and the node is only a guess."""

    node: int
    rank: int | None
    signal: str
    cause: str


class HangWatch:
    """Watches the steps of a run, each with its own deadline."""

    def __init__(
        self,
        resilience: ResilienceSection,
        send: Callable[[int, msg.ToAgent], bool],
        recorder: Recorder,
        *,
        last_step: int,
        batches: BatchSizes,
    ) -> None:
        """`last_step`: after it no step is expected, only a last save and rank 0's sample."""
        self._deadline = StepDeadline(
            min_s=resilience.hang_min_s,
            factor=resilience.hang_factor,
            first_step_s=resilience.first_step_s,
            batches=batches,
        )
        self._send, self._recorder = send, recorder
        self.step = 0  # the last one that all ranks have completed in this run
        self._last_step = last_step
        self._waits_after = 0  # the step after which the ranks wait for a checkpoint to be written
        self._done = 0  # the last one completed by all ranks in this generation: lower after a rollback
        self._validating = (0, 0)  # the batch of a validation that all ranks began last: step, batch
        self._validated = False  # one was begun in this generation
        self._number = 0  # of the current inspection
        self._until: float | None = None
        self._missing: set[int] = set()  # nodes that have not answered
        self._dumps: dict[int, dict[str, Any]] = {}
        self._evidence: dict[int, Evidence] = {}
        self._left: set[int] = set()  # ranks that have exited cleanly, and block no other

    @property
    def deadline(self) -> float | None:
        return self._until if self._until is not None else self._deadline.at()

    @property
    def watching(self) -> bool:
        """Whether a step is expected."""
        return self.deadline is not None

    def generation_started(self, now: float, *, whole: bool = False) -> None:
        """Expect steps of a new generation. `whole`: new processes, or an unknown state: they get all of `first_step_s`."""
        self._until, self._done, self._validated = None, 0, False
        self._deadline.begin(now, whole=whole)

    def generation_ended(self) -> None:
        """No step is expected any more."""
        self._until = None
        self._deadline.end()

    def progress(self, step: int, now: float) -> bool:
        """Record that all ranks have completed `step`; return whether that is news."""
        if step <= 0 or step == self._done or self._deadline.at() is None:
            return False
        if step < self._done:
            self._deadline.begin(now)  # a rollback to an earlier state: repeated steps are progress too
        self._deadline.progress(now, step)
        self.step, self._done, self._until = step, step, None
        if step >= self._last_step or step == self._waits_after:
            # What follows may take as long as what comes before the first step.
            self._deadline.begin(now, whole=True)
        return True

    def validating(self, done: tuple[int, int], now: float) -> None:
        """All ranks began a batch of a validation: `done` is the step before it and its number, 0 for none.

        A batch takes less than a step. The first of a generation may be compiled, and after the last step the last save
        follows: these get `first_step_s`.
        """
        if not done[1] or done == self._validating or not self.watching:
            return
        self._validating, self._until = done, None
        self._deadline.extend(now, whole=not self._validated or done[0] >= self._last_step)
        self._validated = True

    def waits_for_storage(self, step: int, now: float) -> None:
        """After `step` the ranks wait until a checkpoint is written. Progress to `step` may be reported after this."""
        self._waits_after = step
        if self._done >= step and self.watching:
            self._until = None
            self._deadline.begin(now, whole=True)

    def inspected(self, node: int, found: msg.Inspected) -> None:
        """Store what the ranks of `node` answered."""
        if self._until is None or found.id != self._number:
            return
        self._missing.discard(node)
        self._left |= set(found.left)
        self._dumps |= {int(rank): dump for rank, dump in found.dumps.items()}
        self._evidence |= {int(rank): Evidence.from_dict(values) for rank, values in found.evidence.items()}

    def stopped(self, node: int, report: msg.RankStopped) -> list[Culprit]:
        """An agent reports that its rank was stopped by a signal: that rank blocks the others."""
        rank, message = report.rank, report.message
        self._recorder.event(
            "hang_blamed",
            f"rank {rank}: {message}",
            severity="error",
            node=node,
            rank=rank,
            data={"ranks": [rank], "kind": "stopped", "evidence": [message], "told": report.told},
        )
        return [Culprit(node, rank, _SIGNALS["stopped"], message)]

    def tick(self, now: float, world: World | None, slow: SlowLink | None) -> list[Culprit]:
        """Query the ranks when a step is overdue; judge when all have answered or timed out.

        `slow`: the one node with a slow network, if there is one.
        """
        if world is None:
            return []
        if self._until is None:
            waited = self._deadline.overdue(now)
            if waited is not None:
                self._ask(now, waited, world)
            return []
        if self._missing and now < self._until:
            return []
        return self._judge(world, slow)

    def _ask(self, now: float, waited: float, world: World) -> None:
        limit = self._deadline.limit_s
        self._recorder.event(
            "step_overdue",
            f"no step has completed for {waited:.1f} s since step {self.step}: querying all ranks",
            severity="warning",
            data={"step": self.step, "waited_s": waited, "deadline_s": limit},
        )
        self._number += 1
        self._until = now + _ANSWER_S
        self._missing = set(world.nodes)
        self._dumps, self._evidence, self._left = {}, {}, set()
        for node in world.nodes:
            if not self._send(node, msg.Inspect(self._number, _ASK_S)):
                self._missing.discard(node)

    def _judge(self, world: World, slow: SlowLink | None) -> list[Culprit]:
        self._until = None
        self._deadline.end()  # the result restarts the ranks in a new generation, or ends the run
        ranks = range(world.shape.layout.world_size)
        seen = [Sighting(r, self._dumps.get(r), self._evidence.get(r)) for r in ranks if r not in self._left]
        blame = find_blame(seen, world.shape.layout)
        first = blame.ranks[0] if blame.ranks else None
        node = world.node_of(first) if first is not None else None
        self._recorder.event(
            "hang_blamed",
            str(blame) or "no rank can be blamed",
            severity="error",
            node=node,
            rank=first,
            data=_evidence(blame),
        )
        if first is None and slow is not None and slow.node in world.nodes:
            return [Culprit(slow.node, None, "network_error", f"{slow}; {blame}")]
        if first is None:
            # All have arrived, or wait in a cycle: data does not move. No node may be excluded for that.
            return [Culprit(world.nodes[0], None, "collective_timeout", str(blame))]
        culprits = []
        for rank in blame.ranks:
            at = world.node_of(rank)
            if at is not None:
                culprits.append(Culprit(at, rank, _SIGNALS[blame.kind], str(blame)))
        return culprits


def _evidence(blame: Blame) -> dict[str, Any]:
    return {
        "ranks": list(blame.ranks),
        "kind": blame.kind,
        "evidence": list(blame.evidence),
        "operation": None if blame.operation is None else str(blame.operation),
    }
