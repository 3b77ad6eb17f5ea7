"""What the control machine is told, what it answers, and its settings. Times are seconds on one clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

How = Literal["done", "yielded", "preempted"]
Why = Literal["preempt", "interrupt", "now"]
Ending = Literal["done", "failed", "preempted", "interrupted"]
Severity = Literal["info", "warning", "error"]

# -- events


@dataclass(frozen=True, slots=True)
class Joined:
    """A node's agent has connected, for the first time or again. `running`: the generation that it still runs."""

    time: float
    node: int
    ready: bool
    running: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """A node that joined can start ranks at once from now on."""

    time: float
    node: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A node is gone. `certain`: nothing of the run is alive there; otherwise see `Settings.fence_s`."""

    time: float
    node: int
    certain: bool
    cause: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Every rank of the generation has completed `step`."""

    time: float
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Something is wrong on a node. `signal` is a key of the policy; `step` the last one completed."""

    time: float
    generation: int
    node: int
    rank: int | None
    signal: str
    cause: str
    step: int
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The node runs nothing of `generation` or an older one any more. Parked processes count as stopped."""

    time: float
    generation: int
    node: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Every rank of the node left in order."""

    time: float
    generation: int
    node: int
    how: How


@dataclass(frozen=True, slots=True)
class Flushed:
    """The answer to Flush. Not `ok`: there was nothing in memory to write, or not all of it."""

    time: float
    step: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Requalified:
    """The answer to ResetGpu and to Requalify: whether the node passed its test."""

    time: float
    node: int
    ok: bool


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A person or the scheduler wants the run to end: "preempt" after a save, the others at once."""

    time: float
    why: Why


@dataclass(frozen=True, slots=True)
class Tick:
    """`Machine.deadline` has come."""

    time: float


Event = (
    Joined | Ready | Lost | Progress | Failed | Stopped | Finished | Flushed | Requalified | StopAsked | Tick
)

# -- actions


@dataclass(frozen=True, slots=True)
class Start:
    """Start a generation. Write `Machine.memory` before acting on it.

    `shape` is an index into `Settings.shapes`. `in_place`: parked processes may go on with what they hold. A node that
    is not in `slots` has no use for its parked processes.
    """

    generation: int
    slots: dict[int, int]  # slot -> node
    shape: int
    in_place: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End whatever the nodes run of this generation or an older one; each answers with Stopped, also if it runs none."""

    generation: int
    nodes: tuple[int, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class Yield:
    """Ask the ranks to save and leave at a step boundary; may come twice."""

    generation: int
    how: Literal["yielded", "preempted"]


@dataclass(frozen=True, slots=True)
class Flush:
    """Write what the nodes hold of this generation in memory as a checkpoint; answer with Flushed."""

    generation: int


@dataclass(frozen=True, slots=True)
class ResetGpu:
    """Reset a GPU (all of the node's where `gpu` is None) if the job allows it, then test the node; answer with
    Requalified in any case. The node runs nothing of the run but perhaps parked processes, which must go."""

    node: int
    gpu: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class Requalify:
    """Test a node that came back while it was out for a reset; answer with Requalified."""

    node: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Tell the scheduler that the node is bad, if the job allows it."""

    node: int
    cause: str


@dataclass(frozen=True, slots=True)
class Evict:
    """The node is out for the rest of this run; comes again whenever it joins again."""

    node: int
    cause: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something to record as an event."""

    kind: str
    message: str
    severity: Severity = "info"
    node: int | None = None
    rank: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """The run ends. Nothing but notes comes after it; a machine made from the memory of a finished one repeats it."""

    how: Ending
    message: str


Action = Start | Stop | Yield | Flush | ResetGpu | Requalify | Drain | Evict | Note | Finish

# -- settings

MOST_GRACES = 3.0  # times `Settings.stop_grace_s`: what an agent allows ranks that wait for a processor


@dataclass(frozen=True)
class Settings:
    """What a job allows. Node ids from `slots` on are spares at first."""

    slots: int
    shapes: tuple[int, ...]  # slot counts, largest first; the first one is `slots`
    spares: int = 0
    first_generation: int = 1
    max_restarts: int = 100  # recoveries; 0: the first failure ends the run
    max_same_failure: int = 3
    join_wait_s: float = 600.0
    """The first start waits so long for all nodes, then shrinks. Too few nodes for any shape end the run after so long.
    0: waits for ever."""
    node_wait_s: float = 0.0  # a recovery waits so long for a node before it shrinks
    silence_s: float = 3.0  # a node that has not been heard of for so long is lost
    fence_s: float = 1.0
    """How long after Lost, where that is not certain, a node may still run workers. Whoever sends Lost must hold this:
    an agent stops its workers of its own accord `silence_s` after it last knew that it was heard."""
    stop_grace_s: float = (
        1.0  # for ranks to let go of each other; an agent may make it `MOST_GRACES` of it, see grace.py
    )
    flush_wait_s: float = 60.0
    preempt_grace_s: float = 60.0  # for the ranks to save and leave
    burst_s: float = 5.0  # the same signal of a node counts once within this time
    in_place: bool = True
    shrink: bool = True
    grow: bool = True
    evict_after: int = 2  # failures blamed on a node

    def __post_init__(self) -> None:
        assert self.shapes[0] == self.slots, "the first shape is the whole run"
        assert list(self.shapes) == sorted(set(self.shapes), reverse=True), "shapes grow smaller"
        assert self.shapes[-1] >= 1, "a shape has nodes"

    @property
    def stop_within_s(self) -> float:
        """A node that is told to stop and has not by then is lost."""
        return MOST_GRACES * self.stop_grace_s + self.silence_s

    @property
    def least(self) -> int:
        """Nodes without which the run cannot go on."""
        return self.shapes[-1] if self.shrink else self.slots
