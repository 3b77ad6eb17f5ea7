"""Reads a live run's folder for the alert rules, incrementally."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from seatrial.job import Job
from seatrial.record.alerting import Alert, last_alerts
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord
from seatrial.record.nodes import Nodes
from seatrial.record.saved import CheckpointInfo, read_checkpoints
from seatrial.record.telemetry import Sample, read_latest
from seatrial.record.view import RunReader
from seatrial.watch.alerts.situation import Situation

_STEPS = 1000  # kept for baselines
_EVENTS_S = 86_400.0
_FILES_S = 5.0  # between two reads of telemetry and checkpoints: many small files
_GROWTH_S = 600.0
_COUNTED = ("gpu_pcie_replays_total",)
# Kept for the whole start, however old: they give the state of each node, and what is saved.
_ALSO = (
    *("node_joined", "node_lost", "node_evicted", "node_left", "node_requalified", "gpu_reset"),
    *("checkpoint_saved", "checkpoint_set_aside", "checkpoint_interval", "waiting_for_nodes"),
)


_NOTHING = Event(0.0, 0, "", "", "")


class SituationReader:
    """Reads one run into a `Situation`."""

    def __init__(self, folder: RunFolder, job: Job) -> None:
        self._folder, self._job = folder, job
        self._steps: deque[MetricsRecord] = deque(maxlen=_STEPS)
        self._reader = RunReader(folder, self._take, brief=True, also=_ALSO)
        self._reader.poll()
        self._growth = CounterGrowth()
        self._samples: dict[int, Sample] = {}
        self._checkpoint: CheckpointInfo | None = None
        self._files_at = 0.0
        # Derived from this start's events; recomputed when there are more.
        self._known_to: tuple[int, int] | None = None
        self._own: list[Event] = []
        self._recent: list[Event] = []
        self._nodes = Nodes([])
        self._idle: dict[int, str] = {}
        self._untested: list[int] = []

    def alerts(self) -> list[Alert]:
        """The latest recorded alert of each key."""
        return last_alerts(self._reader.events)

    def look(self, now: float) -> Situation:
        """Read what is new; the run at `now` (unix seconds)."""
        self._reader.poll()
        if not now < self._files_at:
            self._files_at = now + _FILES_S
            self._samples = read_latest(self._folder)
            self._growth.take(self._samples)
            _, self._checkpoint = read_checkpoints(self._folder, self._reader.events)
        if self._known_to != (known_to := (self._reader.start, len(self._reader.events))):
            self._known_to = known_to
            self._own = [e for e in self._reader.events if e.generation >= known_to[0]]
            self._nodes = Nodes(self._own)
            self._idle, self._untested = idle(self._own, self._nodes), untested(self._own, self._nodes)
            self._recent = [e for e in self._own if e.time > now - _EVENTS_S]
        nodes, cluster = self._nodes, self._job.cluster
        return Situation(
            now=now,
            run=str(self._folder.path),
            job=str(self._folder.job_toml),
            started=self._own[0].time if self._own else now,
            events=self._recent,
            steps=list(self._steps),
            samples=self._samples,
            grown=self._growth.by_node,
            training=[n for n in nodes.training if n not in nodes.gone],
            spares=nodes.spares if nodes.training else [],
            idle=self._idle,
            untested=self._untested,
            wanted_spares=cluster.spares,
            wanted_nodes=cluster.nodes,
            checkpoint=self._checkpoint,
            checkpoint_steps=self._interval(),
            total_steps=self._job.train.steps,
            batches=self._job.train.batches,
        )

    def _interval(self) -> int | None:
        every = self._job.checkpoint.every_steps
        if every != "auto":
            return every
        chosen = (e for e in reversed(self._own) if e.kind == "checkpoint_interval")
        steps = (next(chosen, _NOTHING).data or {}).get("steps")
        return steps if isinstance(steps, int) else None

    def _take(self, record: MetricsRecord | Event) -> None:
        if isinstance(record, MetricsRecord):
            while self._steps and self._steps[-1].step >= record.step:
                self._steps.pop()  # redone after a recovery
            self._steps.append(record)


class CounterGrowth:
    """CounterGrowth of counters over the last ten minutes. A reset counter starts again from its new value."""

    def __init__(self) -> None:
        self._readings: dict[int, deque[tuple[float, dict[str, float]]]] = {}

    def take(self, samples: Mapping[int, Sample]) -> None:
        """Add the latest samples; those already seen are ignored."""
        for node, sample in samples.items():
            readings = self._readings.setdefault(node, deque())
            if not readings or sample.time > readings[-1][0]:
                counted = {k: v for k, v in sample.values.items() if k.partition("{")[0] in _COUNTED}
                readings.append((sample.time, counted))
            while readings[0][0] < readings[-1][0] - _GROWTH_S:
                readings.popleft()

    @property
    def by_node(self) -> dict[int, dict[str, float]]:
        """CounterGrowth as {node: {counter: growth}}."""
        found: dict[int, dict[str, float]] = {}
        for node, readings in self._readings.items():
            grown = found[node] = {}
            before: dict[str, float] = {}
            for _, counted in readings:
                for series, value in counted.items():
                    grown[series] = grown.get(series, 0.0) + max(0.0, value - before.get(series, value))
                before = before | counted
        return found


def idle(events: Iterable[Event], nodes: Nodes) -> dict[int, str]:
    """Nodes that the run holds but cannot use, each with the reason."""
    found = {
        n: "excluded from this start, its agent still runs"
        for n, how in nodes.gone.items()
        if how == "evicted"
    }
    waiting = False
    for event in events:
        waiting = event.kind == "waiting_for_nodes" or (waiting and event.kind != "generation_started")
    if waiting:
        found |= dict.fromkeys(nodes.present, "waiting for other nodes")
    return found


def untested(events: Iterable[Event], nodes: Nodes) -> list[int]:
    """Participating nodes that were lost or had a GPU reset, and have not passed the run's node test since."""
    broken: set[int] = set()
    for event in events:
        if event.node is None:
            continue
        if event.kind in ("node_lost", "node_evicted") or (event.kind == "gpu_reset" and _done(event)):
            broken.add(event.node)
        elif event.kind == "node_left" or (event.kind == "node_requalified" and (event.data or {}).get("ok")):
            broken.discard(event.node)
    return sorted(n for n in broken if n in nodes.present)


def _done(event: Event) -> bool:
    return bool((event.data or {}).get("done"))
