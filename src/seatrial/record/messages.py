"""Every message between the processes of a run: read this before `control`.

Coordinator and agents, an agent and its ranks, its fork server, its telemetry process and its launcher, two agents that
copy a snapshot. They are declared here because `control` and `train`, which exchange some of them, never import each
other; codec.py is how they travel. All processes of a run are of one version, so nothing is optional on the wire but a
field with a default, and `decode` refuses whatever is not exactly one of the expected messages.

Times are unix seconds where a comment does not say otherwise. Numbers of ranks are those of the layout; `local` is a
rank's number on its node, from 0. `told` is a mark by which a coordinator records a resent message only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from seatrial.record.alerting import Alert
from seatrial.record.alive import Beat as Lease
from seatrial.record.codec import Message, decode, encode
from seatrial.record.events import Event
from seatrial.record.failure import Failure, RankError

__all__ = ["Message", "decode", "encode"]  # for those who import this module as `msg`

# Values that another module has typed: it makes them and reads them.
SnapshotValues = dict[str, Any]  # checkpoint/memory.py: `Snapshot.summary`, or `to_message` with its index
HeldValues = dict[str, Any]  # control/snapshots/snapshot_buffers.py: `SnapshotBuffers.held`
LayoutValues = dict[str, Any]  # job/layout.py: `Layout.as_dict`
EvidenceValues = dict[str, Any]  # control/hangs/evidence.py: `Evidence.as_dict`

# Why a rank leaves before the last step, with its state saved: the layout changes, or the machine is preempted.
Leaving = Literal["yielded", "preempted"]
Ending = Literal["done", "yielded", "preempted"]  # how a generation ended for a rank
Why = Literal["preempt", "interrupt", "now"]  # how the user or a scheduler wants the run to end


@dataclass(frozen=True, kw_only=True)
class Marked(Message):
    """A message that may be sent to several coordinators; see control/agent/journal.py."""

    told: str | None = None


@dataclass(frozen=True)
class _NamesSnapshot(Message):
    """The fields of `Snapshot.summary`."""

    rank: int
    step: int
    generation: int
    layout: str
    bytes: int
    hash: str


# -- coordinator -> agent


@dataclass(frozen=True)
class AgentAddress:
    """The address of the agent of `node`."""

    node: int
    address: str
    port: int


@dataclass(frozen=True)
class Fetch:
    """A snapshot that local rank `local` needs, and the agent that has it."""

    local: int
    snapshot: SnapshotValues
    source: AgentAddress


@dataclass(frozen=True)
class Start(Message):
    """Start this node's ranks of a generation, once what they need has been fetched."""

    op = "start"
    generation: int
    slot: int  # the node's place in the layout
    slots: int
    ranks: list[int]  # by local number
    world_size: int
    layout: LayoutValues
    master_addr: str  # of the process-group store
    master_port: int
    in_place: bool  # parked ranks continue in their processes
    again: bool  # it follows a generation of the same start of the run
    inputs: dict[str, str]  # file -> digest: what the ranks must read
    buddy: AgentAddress | None  # the node that gets copies of its snapshots
    guards: list[int]  # ranks of which it keeps copies
    fetch: list[Fetch]


@dataclass(frozen=True)
class Idle(Message):
    """A generation starts without this node."""

    op = "idle"
    generation: int


@dataclass(frozen=True)
class Stop(Message):
    """Stop a generation and all older ones; answered by `Stopped`."""

    op = "stop"
    generation: int
    grace_s: float  # after it, ranks that have not parked or exited are killed
    park: bool  # False: they exit
    kill: list[int] = field(default_factory=list)  # ranks that no longer respond: killed at once


@dataclass(frozen=True)
class Yield(Message):
    """Save and leave a generation at the end of a step; answered by `GenerationLeft`."""

    op = "yield"
    generation: int
    how: Leaving


@dataclass(frozen=True)
class Distrust(Message):
    """Snapshots of this generation and older ones after `step` may be corrupt."""

    op = "distrust"
    generation: int
    step: int


@dataclass(frozen=True)
class RolledBack(Message):
    """The ranks of this generation rolled back to `step` without a new generation."""

    op = "forget"
    generation: int
    step: int


@dataclass(frozen=True)
class Inspect(Message):
    """Ask the ranks what they wait for; answered by `Inspected`."""

    op = "inspect"
    id: int
    seconds: float  # the time for their answers


@dataclass(frozen=True)
class ResetGpu(Message):
    """Reset a GPU, then test the node; answered by `Requalified`."""

    op = "reset_gpu"
    gpu: str | None  # its PCI address; None: all that this node uses
    cause: str


@dataclass(frozen=True)
class Requalify(Message):
    """Test the node; answered by `Requalified`."""

    op = "requalify"


@dataclass(frozen=True)
class Drain(Message):
    """Drain this host: the scheduler starts nothing more on it."""

    op = "drain"
    cause: str


@dataclass(frozen=True)
class Flush(Message):
    """Write snapshots as parts of a checkpoint; one `Part` answers for each."""

    op = "flush"
    step: int
    generation: int  # the one that publishes it
    snapshots: list[SnapshotValues]  # with "replica": [rank, owns] where it is written for another rank
    place: str  # URL
    read_back: bool


@dataclass(frozen=True)
class Settled(Message):
    """The answer to `Settle`."""

    op = "settled"
    local: int
    pid: int
    count: int
    errno: int | None  # why the events could not be written to disk; None: they are there


@dataclass(frozen=True)
class Outcome(Message):
    """The run is over."""

    op = "outcome"
    exit_code: int
    term: int
    failure: Failure | None


@dataclass(frozen=True)
class ReleaseAgent(Message):
    """Releases a leaving node: its agent may exit."""

    op = "go"


@dataclass(frozen=True)
class Replaced(Message):
    """Another agent has joined with this node's number."""

    op = "replaced"


@dataclass(frozen=True)
class BeatReturned(Message):
    """The answer to `Beat`, which extends the agent's right to run ranks."""

    op = "beat"
    number: int
    proof_age_s: float  # when the beat arrived: how old the last proof of the coordinator's own lease was


ToAgent = (
    Start
    | Idle
    | Stop
    | Yield
    | Distrust
    | RolledBack
    | Inspect
    | ResetGpu
    | Requalify
    | Drain
    | Flush
    | Settled
    | Outcome
    | ReleaseAgent
    | Replaced
    | BeatReturned
)


# -- agent -> coordinator


@dataclass(frozen=True)
class Beat(Message):
    """The node's ranks as they are now, every `heartbeat_s`; answered by `BeatReturned`."""

    op = "beat"
    number: int
    generation: int  # the one that runs here
    step: int  # the last one that all of them have done, 0: none
    failed: int  # how many have failed
    validating: int = 0  # the batch of a validation after that step that all of them have begun, 0: none


@dataclass(frozen=True)
class Ready(Message):
    """Ranks can be started here."""

    op = "ready"


@dataclass(frozen=True)
class HeldSnapshots(Message):
    """The snapshots in this node's memory."""

    op = "held"
    snapshots: list[HeldValues]


@dataclass(frozen=True)
class NodeLeaving(Marked):
    """The agent got a signal: its node leaves."""

    op = "leaving"
    signal: str  # "SIGTERM"
    grace_s: float  # until the agent exits in any case


@dataclass(frozen=True)
class EndRequested(Message):
    """The launcher wants the run to end."""

    op = "asked"
    why: Why


@dataclass(frozen=True)
class RankStarted(Message):
    """A rank has a process."""

    op = "worker_started"
    generation: int
    rank: int
    local: int
    pid: int | None  # None: its fork server has yet to report it
    in_place: bool  # it is the process of an earlier generation


@dataclass(frozen=True)
class RankParked(Marked):
    """A rank has lost its peers and waits for the next generation."""

    op = "worker_parked"
    generation: int
    rank: int
    local: int
    step: int  # the one whose state it has, -1: none
    message: str


@dataclass(frozen=True)
class RankFinding(Marked):
    """A rank has found a problem with a step."""

    op = "worker_finding"
    generation: int
    rank: int
    local: int
    signal: str  # a key of the policy
    step: int
    message: str
    data: dict[str, Any]
    blamed: list[int]  # ranks


@dataclass(frozen=True)
class RankStopped(Marked):
    """A rank at work makes no progress, because a signal has stopped its process."""

    op = "worker_stopped"
    generation: int
    rank: int
    local: int
    message: str


@dataclass(frozen=True)
class RankExited(Marked):
    """A rank's process has ended."""

    op = "worker_exited"
    generation: int
    rank: int
    local: int
    pid: int | None  # None: it never existed
    status: int  # exit code, or minus the number of the signal
    time: float
    signalled: float | None  # when its agent first sent it a signal, unix seconds
    oom_killed: bool | None  # by the kernel; None: unknown
    ran: bool  # it was at work
    never_began: bool
    log: str = ""  # path
    tail: str = ""  # its last lines
    error: RankError | None = None


@dataclass(frozen=True)
class ForkServerExited(Marked):
    """The process that forks a node's ranks has exited, and so have its ranks."""

    op = "fork_server_exited"
    # What only a rank has; so both kinds of exit can be judged alike.
    rank: ClassVar[None] = None
    signalled: ClassVar[None] = None
    error: ClassVar[None] = None
    pid: int
    status: int  # as of `RankExited`
    time: float
    oom_killed: bool | None
    generation: int = 0  # of its node
    log: str = ""
    tail: str = ""


@dataclass(frozen=True)
class HardwareSignal(Marked):
    """A report of a node's hardware: `Signal` of control/hardware/sources.py."""

    op = "signal"
    signal: str  # a key of the policy
    gpu: str | None  # PCI address
    port: str | None  # "mlx5_0/1"
    message: str
    evidence: dict[str, Any]
    time: float  # monotonic clock


@dataclass(frozen=True)
class Stopped(Marked):
    """Nothing of a generation that was to stop is running here."""

    op = "stopped"
    generation: int
    parked: int  # ranks
    offer_port: int  # free for a process-group store


@dataclass(frozen=True)
class GenerationLeft(Marked):
    """All ranks of this node have left a generation cleanly."""

    op = "left"
    generation: int
    how: Ending
    offer_port: int


@dataclass(frozen=True)
class Part(Message):
    """A rank's part of a checkpoint was written from memory, or could not be."""

    op = "part"
    rank: int
    step: int
    place: str
    ok: bool
    message: str


@dataclass(frozen=True)
class Inspected(Message):
    """What the ranks of a node wait for, by rank."""

    op = "inspected"
    id: int
    left: list[int]  # ranks that have finished
    dumps: dict[str, dict[str, Any]]  # answers: train/supervision/flight.py
    evidence: dict[str, EvidenceValues]  # of ranks that did not answer


@dataclass(frozen=True)
class Requalified(Marked):
    """The result of a node's test."""

    op = "requalified"
    ok: bool
    checks: dict[str, Any]
    message: str


@dataclass(frozen=True)
class ExternalEvent(Marked):
    """An event outside the run: a GPU was reset, a node drained, a process stopped."""

    op = "external"
    kind: str  # of the event
    message: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Record(Event, Marked):
    """An event of another process of this node, to be written to events.jsonl."""

    op = "record"


@dataclass(frozen=True)
class Settle(Marked):
    """Confirm by `Settled` that everything recorded before it is on disk."""

    op = "settle"
    local: int
    pid: int  # of the rank that asks
    count: int  # of its events so far


# Those that control/agent/journal.py keeps, to resend them to the next coordinator.
Journalled = (
    RankParked
    | RankFinding
    | RankStopped
    | RankExited
    | ForkServerExited
    | HardwareSignal
    | Stopped
    | GenerationLeft
    | Requalified
    | ExternalEvent
    | Record
    | Settle
)
FromAgent = (
    Beat | Ready | HeldSnapshots | NodeLeaving | EndRequested | RankStarted | Part | Inspected | Journalled
)


# -- agent -> rank


@dataclass(frozen=True)
class RankSpec(Message):
    """Run this rank in a generation: what `GenerationSpec` of train/generation.py is made from."""

    op = "rank_spec"
    generation: int
    rank: int
    local_rank: int
    node: int
    slot: int  # the node's place in the layout
    slots: int
    world_size: int
    layout: LayoutValues
    master_addr: str  # of the process-group store
    master_port: int
    again: bool  # it follows a generation of the same start of the run
    inputs: dict[str, str]  # file -> digest: what the rank must read
    snapshots: list[dict[str, Any]]  # in its memory files: `SnapshotBuffers.entries_for`
    log: str  # path


@dataclass(frozen=True)
class Abandon(Message):
    """Leave this generation and older ones at once; answered by `Parked`."""

    op = "abandon"
    generation: int


@dataclass(frozen=True)
class RankYield(Message):
    """Save and leave this generation at the end of a step; answered by `Finished`."""

    op = "yield"
    generation: int
    how: Leaving


@dataclass(frozen=True)
class RankSettled(Message):
    """The answer to `RankSettle`. A rank ignores that of the process before it, by `pid`."""

    op = "settled"
    pid: int
    count: int
    errno: int | None  # as of `Settled`


@dataclass(frozen=True)
class AskDump(Message):
    """Report what you are waiting for; answered by `Dump`."""

    op = "dump"
    id: int


@dataclass(frozen=True)
class Exit(Message):
    """No other generation follows: exit with `code`. The connection is closed then."""

    op = "exit"
    code: int


ToRank = RankSpec | Abandon | RankYield | RankSettled | AskDump | Exit


# -- rank -> agent


@dataclass(frozen=True)
class RankHello(Message):
    """The first message: whose connection this is."""

    op = "hello"
    pid: int
    token: str  # from its environment


@dataclass(frozen=True)
class RankBeat(Message):
    """A step is done."""

    op = "beat"
    generation: int
    step: int
    seconds: float  # it took
    first: bool  # of this generation


@dataclass(frozen=True)
class RankValidating(Message):
    """A batch of the validation after its last step begins."""

    op = "validating"
    generation: int
    batch: int  # from 1


@dataclass(frozen=True)
class Parked(Message):
    """It has lost its peers, keeps its state, and waits for the next generation."""

    op = "parked"
    generation: int
    step: int  # the one whose state it has, -1: none
    message: str


@dataclass(frozen=True)
class Finished(Message):
    """It has left its generation cleanly."""

    op = "finished"
    generation: int
    how: Ending
    step: int


@dataclass(frozen=True)
class StepFinding(Message):
    """A rank's problem with a step."""

    op = "finding"
    generation: int
    signal: str  # a key of the policy
    step: int
    message: str
    data: dict[str, Any]
    blamed: list[int]  # ranks


@dataclass(frozen=True)
class RankRecord(Event, Message):
    """An event, to be written to events.jsonl whatever happens to this process."""

    op = "record"


@dataclass(frozen=True)
class RankSettle(Message):
    """Confirm by `RankSettled` that everything recorded before it is on disk."""

    op = "settle"
    pid: int
    count: int  # of its events so far


@dataclass(frozen=True)
class SnapshotFilled(_NamesSnapshot):
    """One of its two memory files is complete."""

    op = "snapshot"
    slot: int  # 0 or 1
    index: dict[str, Any]
    seconds: float  # writing took


@dataclass(frozen=True)
class Dump(Message):
    """The state of its main thread: train/supervision/flight.py."""

    op = "dump"
    id: int
    generation: int | None
    step: int
    time: float
    flight: list[dict[str, Any]]  # by process group
    at: dict[str, Any] | None = None
    python: str = ""  # stacks
    error: str = ""  # why the rest is not there


FromRank = (
    RankHello
    | RankBeat
    | RankValidating
    | Parked
    | Finished
    | StepFinding
    | RankRecord
    | RankSettle
    | SnapshotFilled
    | Dump
)


# -- agent -> fork server


@dataclass(frozen=True)
class Fork(Message):
    """Fork a rank; answered by `Forked`."""

    op = "fork"
    rank: int
    log: str  # path
    env: dict[str, str]  # added to its environment
    argv: list[str]
    token: str
    cpus: list[int]  # that it is bound to; none: not bound


@dataclass(frozen=True)
class Ping(Message):
    """Answered by `Pong`."""

    op = "ping"


ToForkServer = Fork | Ping


# -- fork server -> agent


@dataclass(frozen=True)
class ForkServerReady(Message):
    """The worker module is imported."""

    op = "ready"


@dataclass(frozen=True)
class Pong(Message):
    """It is responsive."""

    op = "pong"


@dataclass(frozen=True)
class Forked(Message):
    """A rank has a process."""

    op = "forked"
    rank: int
    pid: int
    token: str


@dataclass(frozen=True)
class ForkedExited(Message):
    """The process of a rank has ended."""

    op = "exited"
    rank: int
    pid: int
    status: int  # as of `RankExited`
    time: float


FromForkServer = ForkServerReady | Pong | Forked | ForkedExited


# -- coordinator -> monitor


@dataclass(frozen=True)
class EndMonitor(Message):
    """The run is over: deliver what is pending, and exit."""

    op = "end"
    within_s: float


# -- monitor -> coordinator


@dataclass(frozen=True)
class MonitorAlert(Alert, Message):
    """An alert that starts to fire, is resolved, or has new nodes: to be written to events.jsonl."""

    op = "alert"


@dataclass(frozen=True)
class MonitorFailed(Message):
    """Something that the monitor does for the run fails, and is given up or tried again later: a warning event."""

    op = "failed"
    kind: str  # of the event
    message: str
    data: dict[str, Any]


FromMonitor = MonitorAlert | MonitorFailed


# -- agent -> its telemetry process


@dataclass(frozen=True)
class Readings(Message):
    """What a probe has read: replaces all that this source had before."""

    op = "readings"
    source: str
    values: dict[str, float]  # by series: record/series.py


@dataclass(frozen=True)
class Coordinates(Message):
    """Whether its agent coordinates."""

    op = "coordinates"
    coordinates: bool


ToTelemetry = Readings | Coordinates


# -- telemetry process -> agent


@dataclass(frozen=True)
class TelemetryFailed(Message):
    """Something that it does for the run fails: a warning event."""

    op = "failed"
    what: str  # "record" or "serve"
    message: str


FromTelemetry = TelemetryFailed


# -- launcher -> agent


@dataclass(frozen=True)
class EndRun(Message):
    """End the run."""

    op = "stop"
    why: Why


@dataclass(frozen=True)
class LauncherRecord(Event, Marked):
    """An event, to be passed on to the coordinator: another agent has died."""

    op = "record"


@dataclass(frozen=True)
class LauncherAlive(Message):
    """A launcher's heartbeat over a network, see control/agent/launcher_link.py; answered by `AgentAlive`."""

    op = "alive"


FromLauncher = EndRun | LauncherRecord | LauncherAlive


# -- agent -> launcher


@dataclass(frozen=True)
class AgentStarted(Message):
    """The first message."""

    op = "agent_started"
    node: int
    pid: int


@dataclass(frozen=True)
class AgentAlive(Message):
    """The agent's heartbeat."""

    op = "alive"


@dataclass(frozen=True)
class RunOver(Message):
    """The coordinator's `Outcome`."""

    op = "outcome"
    exit_code: int
    term: int
    failure: Failure | None


@dataclass(frozen=True)
class AgentFinished(Message):
    """The last message: nothing of this node is left."""

    op = "bye"


ToLauncher = AgentStarted | AgentAlive | RunOver | AgentFinished


# -- the first message to an agent's port, with the purpose of the connection (the "hello" of control/net/wire.py)


@dataclass(frozen=True)
class AgentJoins(Message):
    """An agent, to the coordinator: the connection for all messages between the two."""

    op = "agent"
    term: int
    node: int
    address: str  # where the agent listens
    port: int
    pid: int
    incarnation: str  # differs for each agent process with this node number
    order: str  # sort key for the first assignment of slots
    leaving: NodeLeaving | None
    told: str  # the name of its journal
    ready: bool
    running: int | None  # the generation of its ranks; None: none is alive
    left: GenerationLeft | None
    offer_port: int
    held: list[HeldValues]


@dataclass(frozen=True)
class Probe(Message):
    """A probe: the accepted connection is the answer. `lease`: that of a new coordinator."""

    op = "probe"
    lease: Lease | None


@dataclass(frozen=True)
class GivesSnapshot(_NamesSnapshot):
    """An agent that has a copy for this node: `SnapshotHeader` and the bytes follow."""

    op = "snapshot"


@dataclass(frozen=True)
class WantsSnapshot(_NamesSnapshot):
    """An agent that lacks a snapshot: it is answered by `SnapshotHeader` and the bytes."""

    op = "fetch"


Hello = AgentJoins | Probe | GivesSnapshot | WantsSnapshot


# -- agent -> agent, on a connection for one snapshot


@dataclass(frozen=True)
class SnapshotHeader(Message):
    """From the sender. The snapshot's bytes follow at once; None: it no longer has it."""

    op = "snapshot"
    snapshot: SnapshotValues | None  # with its index


FromGiver = SnapshotHeader


@dataclass(frozen=True)
class SnapshotTaken(Message):
    """From the receiver: all bytes have arrived and match the hash."""

    op = "ok"


FromTaker = SnapshotTaken
