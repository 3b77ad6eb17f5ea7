"""Current state of a run, followed through its folder: steps, where ranks are, what was detected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seatrial.record import events, metrics
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Tail
from seatrial.record.metrics import MetricsRecord
from seatrial.record.typed import decode_all


@dataclass(frozen=True)
class RankPlace:
    """Node and process of a rank."""

    node: int
    pid: int


class RunState:
    """Follows one run. `poll` reads new records; everything else answers from what was read."""

    def __init__(self, folder: RunFolder, steps: int) -> None:
        """`steps`: total number of steps of the run."""
        self.folder = folder
        self.steps = steps
        self.events: list[Event] = []
        self.metrics: list[MetricsRecord] = []
        self.ranks: dict[int, RankPlace] = {}
        self.agents: dict[int, int] = {}  # node -> pid
        self.coordinator: int | None = None  # node
        self.present: set[int] = set()  # nodes that train, or wait as spares
        self._started: list[Event] = []  # rank_started
        self._events = Tail(folder.events, events.NOUN)
        self._metrics = Tail(folder.metrics, metrics.NOUN)

    @property
    def step(self) -> int:
        """The step of the latest metrics record; 0 if there is none."""
        return self.metrics[-1].step if self.metrics else 0

    @property
    def generation(self) -> int:
        """The generation of the latest metrics record; 0 if there is none."""
        return self.metrics[-1].generation if self.metrics else 0

    @property
    def furthest(self) -> int:
        """The highest step ever recorded."""
        return max((m.step for m in self.metrics), default=0)

    def poll(self) -> None:
        """Read what was written since the last call."""
        records, _ = decode_all(
            MetricsRecord, self._metrics.poll_numbered(), file="metrics", noun=metrics.NOUN
        )
        self.metrics += records
        happened, _ = decode_all(Event, self._events.poll_numbered(), file="events", noun=events.NOUN)
        for event in happened:
            self._on_event(event)
        self.events += happened

    def _on_event(self, event: Event) -> None:
        pid = (event.data or {}).get("pid")
        if event.kind == "rank_started" and event.rank is not None and event.node is not None:
            self._started.append(event)
            if isinstance(pid, int):
                self.ranks[event.rank] = RankPlace(event.node, pid)
        elif event.kind == "agent_started" and event.node is not None and isinstance(pid, int):
            self.agents[event.node] = pid
        elif event.kind == "coordinator_elected" and event.node is not None:
            self.coordinator = event.node
            self.present.clear()  # all nodes join the new one
        elif event.kind == "generation_started":
            self.ranks.clear()  # `rank_started` follows for each rank that takes part
        elif event.kind == "node_joined" and event.node is not None:
            self.present.add(event.node)
        elif event.kind in ("node_lost", "node_left") and event.node is not None:
            self.present.discard(event.node)

    def node_of(self, rank: int, time: float) -> int | None:
        """The node that `rank` was on at `time`."""
        known = [e.node for e in self._started if e.rank == rank and e.time <= time]
        return known[-1] if known else None

    def since(self, time: float, kinds: tuple[str, ...]) -> Event | None:
        """The first event of `kinds` from `time` on."""
        return next((e for e in self.events if e.time >= time and e.kind in kinds), None)

    def training_nodes(self) -> list[int]:
        """The nodes that have ranks now."""
        return sorted({place.node for place in self.ranks.values()})


def kernel_log(folder: Path, node: int | str) -> Path:
    """The file that node `node` reads instead of the kernel's log."""
    return folder / f"kernel-{node}.log"
