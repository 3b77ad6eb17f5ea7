"""Events, actions and settings of the control machine. Times are seconds on one clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from seatrial.record.events import Severity
from seatrial.record.messages import Ending, Why

RunEnding = Literal["done", "failed", "preempted", "interrupted"]

# -- events


@dataclass(frozen=True, slots=True)
class Joined:
    """A node's agent has connected, for the first time or again. `running`: the generation that it still runs.

    `order`: sort key by which nodes get slots at the first start. `leaving`: as `Leaving.grace_s` if the node is
    leaving. `replaces`: a new agent for this node; the old agent's ranks may be alive until that agent fences itself.
    """

    time: float
    node: int
    ready: bool
    running: int | None
    order: str = ""
    leaving: float | None = None
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """A joined node can start ranks without delay from now on."""

    time: float
    node: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A node is lost. `certain`: no process of the run is alive there; otherwise see `Settings.fence_s`.

    `heard`: not detected by silence, so its agent may continue for `Settings.silence_s` before it fences itself.
    """

    time: float
    node: int
    certain: bool
    cause: str
    heard: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Every rank of the generation has completed `step`."""

    time: float
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure or warning on a node. `signal` is a key of the policy; `step` is the last one completed.

    No `Failure` of record/failure.py, which ends the run: whether the run survives this is decided from it.
    """

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
    """The node no longer runs `generation` or an older one. Parked processes count as stopped."""

    time: float
    generation: int
    node: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Every rank of the node exited cleanly."""

    time: float
    generation: int
    node: int
    how: Ending


@dataclass(frozen=True, slots=True)
class Flushed:
    """The answer to Flush. Not `ok`: memory held no state to write, or only part of one."""

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
    """A user or the scheduler requests the end of the run: "preempt" after a save, the others at once."""

    time: float
    why: Why


@dataclass(frozen=True, slots=True)
class Leaving:
    """The node's agent was signalled: the node will be unavailable in `grace_s`, possibly earlier."""

    time: float
    node: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """`Machine.deadline` has passed."""

    time: float


Event = (
    Joined
    | Ready
    | Lost
    | Progress
    | Failed
    | Stopped
    | Finished
    | Flushed
    | Requalified
    | StopAsked
    | Leaving
    | Tick
)

# -- actions


@dataclass(frozen=True, slots=True)
class Start:
    """Start a generation. Write `Machine.memory` before acting on it.

    `shape` is an index into `Settings.shapes`. `in_place`: parked processes may continue with their state. A node
    that is not in `slots` no longer needs its parked processes.
    """

    generation: int
    slots: dict[int, int]  # slot -> node
    shape: int
    in_place: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop this generation and older ones on the nodes; each node answers with Stopped, even if it runs nothing."""

    generation: int
    nodes: tuple[int, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class Yield:
    """Ask the ranks to save and exit at a step boundary; may be sent twice."""

    generation: int
    how: Literal["yielded", "preempted"]


@dataclass(frozen=True, slots=True)
class Flush:
    """Write this generation's in-memory snapshots as a checkpoint; answer with Flushed."""

    generation: int


@dataclass(frozen=True, slots=True)
class ResetGpu:
    """Reset a GPU (all of the node's if `gpu` is None) if the job allows it, then test the node; answer with
    Requalified in any case. Of this run, the node has at most parked processes, which must be killed."""

    node: int
    gpu: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class Requalify:
    """Test a node that rejoined while it was excluded for a reset; answer with Requalified."""

    node: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Report the node as bad to the scheduler, if the job allows it."""

    node: int
    cause: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Exclude the node for the rest of this run; repeated whenever it rejoins."""

    node: int
    cause: str


@dataclass(frozen=True, slots=True)
class Release:
    """The run no longer needs a leaving node: its agent may exit."""

    node: int


@dataclass(frozen=True, slots=True)
class Note:
    """An event to record."""

    kind: str
    message: str
    severity: Severity = "info"
    node: int | None = None
    rank: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """The run ends. Only notes follow; a machine restored from the memory of a finished one repeats it."""

    how: RunEnding
    message: str


Action = Start | Stop | Yield | Flush | ResetGpu | Requalify | Drain | Evict | Release | Note | Finish

# -- settings

MOST_GRACES = 3.0  # times `Settings.stop_grace_s`: the longest grace period for ranks that wait for a CPU


@dataclass(frozen=True)
class Settings:
    """Limits and timeouts of a job. Node ids from `slots` on are spares at first; there may be more than `spares`."""

    slots: int
    shapes: tuple[int, ...]  # slot counts, largest first; the first one is `slots`
    spares: int = 0
    first_generation: int = 1
    max_restarts: int = 100  # recoveries; 0: the first failure ends the run
    max_same_failure: int = 3
    join_wait_s: float = 600.0
    """How long the first start waits for all nodes before it shrinks. With too few nodes for any shape, the run ends
    after this time. 0: no limit."""
    node_wait_s: float = 0.0  # how long a recovery waits for a node before it shrinks
    silence_s: float = 3.0  # heartbeat timeout: a node that has been silent for this long is lost
    fence_s: float = 1.0
    """How long a node may still run workers after a Lost that is not certain. The sender of Lost must guarantee this:
    an agent stops its workers by itself `silence_s` after it last knew that the coordinator received it."""
    # For ranks to abandon their peers; an agent may extend it `MOST_GRACES` times, see grace.py.
    stop_grace_s: float = 1.0
    flush_wait_s: float = 60.0
    preempt_grace_s: float = 60.0  # for the ranks to save and exit
    # How long to wait for more nodes to announce that they leave, after the first one did.
    leaving_s: float = 3.0
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
        """Timeout for a node's answer to Stop; after it the node counts as lost."""
        return MOST_GRACES * self.stop_grace_s + self.silence_s

    @property
    def least(self) -> int:
        """Minimum number of nodes with which the run can continue."""
        return self.shapes[-1] if self.shrink else self.slots
