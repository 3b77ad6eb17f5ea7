"""Evidence of a drilled run: the records in its folder, and what the drill itself observed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seatrial.base.batches import BatchSizes
from seatrial.base.errors import RunFailed
from seatrial.drill.injection import Injection
from seatrial.drill.weights import Difference
from seatrial.job.layout import Layout
from seatrial.record.events import Event, read_events
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import read_numbered
from seatrial.record.ledger import LedgerRecord, read_ledger
from seatrial.record.metrics import NOUN, MetricsRecord
from seatrial.record.typed import decode_all

Losses = Mapping[int, tuple[float, float]]  # step -> (loss, gradient norm)


@dataclass(frozen=True)
class Replay:
    """An undisturbed run that trained the same steps in the same layouts."""

    losses: Losses
    weights: Difference  # last checkpoint of the drilled run against its last one


@dataclass(frozen=True)
class Evidence:
    """Everything by which a run is judged."""

    events: Sequence[Event]
    metrics: Sequence[MetricsRecord]  # all of them, in file order
    ledger: Sequence[LedgerRecord]
    problems: Sequence[str]  # record lines that could not be decoded
    injections: Sequence[Injection]
    exits: Sequence[int]  # exit codes of the run's processes, negative for a signal
    left: Sequence[str]  # processes that were still alive afterwards
    overdue: bool = False  # the drill had to stop it
    weights: Difference | None = None  # last checkpoint against the reference's; None if either is missing
    weights_problem: str = ""
    replay: Replay | None = None  # of a run that changed its layout; None if it could not be made
    replay_problem: str = ""

    def shrunk_at(self) -> float:
        """When the run first continued with fewer replicas; infinity if it never did."""
        return min((e.time for e in self.events if e.kind == "shrunk"), default=math.inf)

    def layouts(self) -> list[tuple[Layout, int]]:
        """The layouts in which the steps that count were trained, each with its last step, in order.

        Raises RunFailed if the events do not say a layout.
        """
        started = {
            e.generation: Layout.from_dict(e.data["layout"])
            for e in self.events
            if e.kind == "generation_started" and e.data and isinstance(e.data.get("layout"), dict)
        }
        found: list[tuple[Layout, int]] = []
        for step, record in sorted(self.final().items()):
            layout = started.get(record.generation)
            if layout is None:
                raise RunFailed(f"no event says in which layout generation {record.generation} trained")
            if found and found[-1][0] == layout:
                found.pop()
            found.append((layout, step))
        return found

    def final(self) -> dict[int, MetricsRecord]:
        """The record that counts for each step: the last one of its last generation."""
        last: dict[int, MetricsRecord] = {}
        for record in self.metrics:
            known = last.get(record.step)
            if known is None or record.generation >= known.generation:
                last[record.step] = record
        return last

    def late_checkpoints(self) -> list[int]:
        """By how many steps each delayed checkpoint was late, or at least, if the run failed before it began."""
        found = []
        for late in self.events:
            if late.kind != "checkpoint_late" or not late.data:
                continue
            due, generation = int(late.data["step"]), late.generation
            saved = [
                int(e.data["step"])
                for e in self.events
                if e.kind == "checkpoint_saved" and e.generation == generation and e.data
            ]
            newest = max((r.step for r in self.metrics if r.generation == generation), default=due)
            found.append(min((step for step in saved if step > due), default=newest) - due)
        return found

    def superseded(self) -> list[MetricsRecord]:
        """Records that no longer count because their steps were redone."""
        final = self.final()
        return [r for r in self.metrics if r is not final[r.step]]


@dataclass(frozen=True)
class Criteria:
    """What a run is judged against."""

    steps: int
    batches: BatchSizes
    snapshot_every: int
    checkpoint_every: int
    reference: Losses = field(default_factory=dict)
    # (step, "loss", "gradient norm" or "weights") -> relative difference allowed in the same layout; missing: none
    tolerance: Mapping[tuple[int, str], float] = field(default_factory=dict)
    # Whether a run that trained in another layout stays near the reference: with fp32.
    stays_near: bool = True


def relative(ours: float, theirs: float) -> float:
    """|ours - theirs| / |theirs|; infinity where one of them is not finite."""
    apart = abs(ours - theirs) / abs(theirs) if theirs else abs(ours - theirs)
    return 0.0 if ours == theirs else apart if math.isfinite(apart) else math.inf


def read_metrics_of(folder: RunFolder) -> tuple[list[MetricsRecord], list[str]]:
    """Every metrics record in file order, also superseded ones; and the problems of lines that could not be decoded."""
    numbered, problems = read_numbered(folder.metrics, NOUN)
    records, wrong = decode_all(MetricsRecord, numbered, file=folder.metrics.name, noun=NOUN)
    return records, [str(p) for p in (*problems, *wrong)]


def losses_of(records: Sequence[MetricsRecord]) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm), from the last record of each step."""
    return {r.step: (r.loss, r.grad_norm) for r in records}


def read_evidence(
    folder: RunFolder,
    injections: Sequence[Injection],
    *,
    exits: Sequence[int],
    left: Sequence[str],
    overdue: bool = False,
    weights: Difference | None = None,
    weights_problem: str = "",
) -> Evidence:
    """Read the records of `folder` and add what only the drill knows."""
    events, wrong_events = read_events(folder)
    metrics, wrong = read_metrics_of(folder)
    ledger, wrong_ledger = read_ledger(folder)
    wrong += [str(p) for p in (*wrong_events, *wrong_ledger)]
    return Evidence(
        events=events,
        metrics=metrics,
        ledger=ledger,
        problems=wrong,
        injections=injections,
        exits=exits,
        left=left,
        overdue=overdue,
        weights=weights,
        weights_problem=weights_problem,
    )
