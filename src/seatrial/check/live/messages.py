"""Every message between the processes of a live check: read this before the rest of this folder.

The conductor (agent_pool.py), the agent on each host (agent.py), an agent's fork server (fork_server.py) and its ranks
(probe_pair.py). They are declared like those of a run (record/messages.py) and travel like them (record/codec.py).

The conductor sends each order in an `Ask` with a number. It is answered once, with the same number: by `Done` with an
answer of the class that the order's base names, or by `Failed`, also if the agent does not know the order. Orders and
answers are decoded exactly. What they travel in is not, between conductor and agent: an agent of another version must
still be able to name its version, and to refuse an order.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from seatrial.record.codec import Message, decode, encode

__all__ = ["Message", "decode", "encode"]  # for those who import this module as `msg`

# Values that another module has typed: it makes them and reads them.
NodeOptionsValues = dict[str, Any]  # check/node/node_stage.py: `NodeOptions`
NodeFacts = dict[str, Any]  # check/node/node_stage.py: `measure`, and its readers; JSON in the report's files

Answer = TypeVar("Answer", bound=Message, covariant=True)


class Order(Message, Generic[Answer]):
    """Base of all orders, with the class of its answer."""

    @classmethod
    def answer(cls, values: dict[str, Any]) -> Answer:
        """Decode what `Done` brings; errors as of `decode`."""
        (base,) = typing.cast(Any, cls).__orig_bases__
        answer: Answer = decode(values, typing.get_args(base)[0])
        return answer


@dataclass(frozen=True)
class Endpoint:
    """Where a process listens for TCP connections."""

    address: str
    port: int


# -- orders to an agent, each below its answer


@dataclass(frozen=True)
class Clock(Message):
    """The host's clock."""

    op = "clock"
    clock: float  # unix seconds


@dataclass(frozen=True)
class Ping(Order[Clock]):
    """Answer at once."""

    op = "ping"


@dataclass(frozen=True)
class Ports(Message):
    """TCP ports that are currently unused."""

    op = "ports"
    ports: list[int]


@dataclass(frozen=True)
class FindPorts(Order[Ports]):
    """Find so many of them."""

    op = "port"
    count: int


@dataclass(frozen=True)
class Reached(Message):
    """Which of the targets were reached, in their order."""

    op = "reached"
    reached: list[bool]
    why: list[str]  # not; "": reached


@dataclass(frozen=True)
class Reach(Order[Reached]):
    """Connect to other agents, all at once."""

    op = "reach"
    targets: list[Endpoint]


@dataclass(frozen=True)
class NodeMeasured(Message):
    """What a node has measured of itself."""

    op = "node_measured"
    facts: NodeFacts


@dataclass(frozen=True)
class MeasureNode(Order[NodeMeasured]):
    """The node stage, in a process of its own."""

    op = "node"
    options: NodeOptionsValues
    # Without an interface in `options`: that with the route to this address; None: unknown.
    toward: str | None


@dataclass(frozen=True)
class ToolResult(Message):
    """How a tool ended."""

    op = "tool_result"
    rc: int | None  # exit code, or minus the number of the signal; None: it is not installed
    out: str = ""
    err: str = ""  # the end
    seconds: float = 0.0

    @property
    def absent(self) -> bool:
        """Whether it is not installed."""
        return self.rc is None


@dataclass(frozen=True)
class RunTool(Order[ToolResult]):
    """Run a tool to its end."""

    op = "run"
    argv: list[str]
    listen: int | None = None  # the port that it will listen on: `Listening` says when it does


@dataclass(frozen=True)
class Prepared(Message):
    """Ranks can be forked."""

    op = "prepared"
    torch: str  # version


@dataclass(frozen=True)
class Prepare(Order[Prepared]):
    """Start the fork server for ranks, which imports torch. Executed by it, as `RunRanks`."""

    op = "prepare"


@dataclass(frozen=True)
class Flow:
    """One flow, as measured by its receiver."""

    sender: int
    receiver: int
    gbit_s: float
    message_bytes: int


@dataclass(frozen=True)
class AllReduces:
    """All-reduces of one size, as one rank has seen them."""

    size_bytes: int
    seconds: list[float]  # of each, without the first
    wrong: int  # elements


@dataclass(frozen=True)
class Measured(Message):
    """From a rank: all that it has measured so far, of what it takes part in."""

    op = "measured"
    flows: list[Flow] = field(default_factory=list)
    all_reduce: list[AllReduces] = field(default_factory=list)
    whole: bool = False  # nothing is missing


@dataclass(frozen=True)
class RankResult:
    """A rank that has ended."""

    rank: int
    measured: Measured
    failed: str  # why it is not whole; "": it is
    nccl: list[str]  # lines of NCCL_DEBUG: nccl_lines.py


@dataclass(frozen=True)
class RanksEnded(Message):
    """The ranks of a host."""

    op = "ranks_ended"
    ranks: list[RankResult]


@dataclass(frozen=True)
class Durations:
    """How long ranks measure."""

    flow_s: float  # a flow lasts
    sum_s: float  # the all-reduces of one size may take
    stall_s: float  # longest time without a message from the ranks of a host; then they are killed


@dataclass(frozen=True)
class RunRanks(Order[RanksEnded]):
    """This host's ranks of a pair or a group; see probe_pair.py. Rank 0's host sends `Listening` first."""

    op = "ranks"
    ranks: list[int]  # their numbers
    gpus: list[int]  # the CUDA device of each
    world_size: int  # of all hosts
    device: Literal["cpu", "cuda"]
    backend: str  # of torch.distributed: "gloo" or "nccl"
    store: Endpoint | None  # of rank 0; None: it is one of `ranks`
    listen: str  # the address for that store
    interface: str | None  # network device; None: the one with the route to `toward`
    toward: str  # address of another host
    # [sender, receiver, direction]: those of a direction at once, one direction after the other.
    flows: list[list[int]]
    sizes: list[int]  # bytes of an all-reduce
    durations: Durations
    hca: str | None  # the RDMA device ("mlx5_0:1") that NCCL must use; None: its own choice


AnyOrder = Ping | FindPorts | Reach | MeasureNode | RunTool | Prepare | RunRanks


# -- conductor -> agent -> its fork server


@dataclass(frozen=True)
class Ask(Message):
    """An order."""

    op = "ask"
    id: int
    limit_s: float  # after it, what the order has started is killed, and it fails
    order: dict[str, Any]  # of `AnyOrder`, encoded


@dataclass(frozen=True)
class Cancel(Message):
    """Kill everything that an order has started."""

    op = "cancel"
    id: int


ToAgent = Ask | Cancel


# -- fork server -> agent -> conductor


@dataclass(frozen=True)
class Hello(Message):
    """An agent's first message: what must be known of a host before anything is measured."""

    op = "hello"
    version: str
    python: str
    pid: int
    host: str  # its own name
    machine: str  # the same for hosts that share one kernel: containers, network namespaces, virtual hosts
    port: int  # where the agent listens, for `Reach`
    gpus: int
    rdma: list[str]  # devices


@dataclass(frozen=True)
class Listening(Message):
    """Others may connect now: to a tool, or to the store of rank 0. The order goes on."""

    op = "listening"
    id: int
    port: int


@dataclass(frozen=True)
class Done(Message):
    """The order is executed."""

    op = "done"
    id: int
    answer: dict[str, Any]  # encoded; `Order.answer` decodes it


@dataclass(frozen=True)
class Failed(Message):
    """The order is not executed, or was killed."""

    op = "failed"
    id: int
    why: str


FromAgent = Hello | Listening | Done | Failed


# -- rank -> fork server: also `Measured`, again whenever there is more


@dataclass(frozen=True)
class StoreServed(Message):
    """Rank 0 serves the store of its ranks."""

    op = "store"
    port: int


@dataclass(frozen=True)
class RankFailed(Message):
    """It cannot go on."""

    op = "failed"
    why: str


FromRank = StoreServed | Measured | RankFailed
