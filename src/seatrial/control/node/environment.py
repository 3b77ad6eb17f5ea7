"""The environment of the ranks of a node: each variable with the reason for its value. Pure.

Variables set by the user are kept and listed as "yours", except where a rank could not work with them.

CUDA_DEVICE_MAX_CONNECTIONS is left alone: 1 orders Megatron's kernels on Hopper and older, but it makes the collectives
of sharded data parallel wait for compute (docs.nvidia.com/megatron-core, Megatron-FSDP User Guide: unset it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from seatrial.hardware.topology import Gpu, Ports, cpu_list


@dataclass(frozen=True)
class Variable:
    """One variable of a rank, and why it has this value."""

    name: str
    value: str
    reason: str
    source: Literal["chosen", "yours"] = "chosen"


def assignments(variables: Sequence[Variable]) -> dict[str, str]:
    """Name -> value."""
    return {v.name: v.value for v in variables}


@dataclass(frozen=True)
class Facts:
    """The inputs of the choice."""

    device: str  # "cpu" or "cuda"
    ranks: int  # on this node
    cores: int  # that this node may use
    address: str
    interface: str | None
    route_reason: str  # why this address and interface
    collective_timeout_s: int
    dumps: str  # path of the flight recorder's files, to which the rank's number is appended
    ports: Ports
    deterministic: bool = False


@dataclass(frozen=True)
class NodeEnvironment:
    """What every rank of a node gets beyond the agent's own environment, and where each rank is bound."""

    variables: Sequence[Variable]
    gpus: Sequence[Gpu] = ()  # local rank n has the n-th; none on CPU
    facts: Sequence[str] = ()  # reported, not set

    def as_dict(self) -> dict[str, Any]:
        """The content of environment.json."""
        ranks = [
            asdict(gpu) | {"local_rank": n, "cpus": cpu_list(gpu.cpus)} for n, gpu in enumerate(self.gpus)
        ]
        return {"variables": list(map(asdict, self.variables)), "binding": ranks, "facts": list(self.facts)}


# torch and NCCL read these names too: if the user has set one of them, it is kept.
_OTHER_NAMES = {
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_TIMING": "NCCL_ENABLE_TIMING",
}

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ONE_THREAD = (
    "ranks share the cores, a process that forks must have no second thread, and sums in another order "
    "would not be bit-equal"
)


def node_variables(facts: Facts, yours: Mapping[str, str]) -> list[Variable]:
    """The variables of every rank of a node; `yours` is the environment that they are added to."""
    chosen = [Variable("SEATRIAL_DEVICE", facts.device, "the device that was chosen for this node")]
    if facts.device == "cpu":
        for name in THREADS:
            instead = f"; overrides your {yours[name]}" if yours.get(name, "1") != "1" else ""
            chosen.append(Variable(name, "1", _ONE_THREAD + instead))
    for name, value, reason in _defaults(facts):
        theirs = next((n for n in (name, _OTHER_NAMES.get(name, name)) if n in yours), None)
        if theirs is None:
            chosen.append(Variable(name, value, reason))
        else:
            instead = f"set by you; Seatrial would set {name}={value}"
            chosen.append(Variable(theirs, yours[theirs], instead, "yours"))
    return chosen


def _defaults(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """(name, value, reason)"""
    reason = f"{facts.interface} has {facts.address}: {facts.route_reason}"
    yield "PYTHONUNBUFFERED", "1", "unbuffered output: a rank's log is always up to date"
    yield (
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "size of the flight recorder, from which the rank that causes a hang is determined",
    )
    if facts.interface is not None:
        yield "GLOO_SOCKET_IFNAME", facts.interface, reason
    if facts.device == "cpu":
        return
    if facts.interface is not None:
        yield "NCCL_SOCKET_IFNAME", f"={facts.interface}", reason
    if ":" in facts.address:
        yield "NCCL_SOCKET_FAMILY", "AF_INET6", f"{facts.address} is an IPv6 address"
    if facts.ports.chosen:
        yield "NCCL_IB_HCA", "=" + ",".join(facts.ports.chosen), facts.ports.reason
    threads = max(1, facts.cores // facts.ranks)
    yield "OMP_NUM_THREADS", str(threads), f"{facts.cores} usable cores, {facts.ranks} ranks"
    late = "longer than resilience.first_step_s: Seatrial detects a hang first and determines its cause"
    yield "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(facts.collective_timeout_s), late
    ends = "a rank whose collective failed exits without waiting for NCCL, and its agent reports it"
    yield "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", ends
    yield "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "a collective that times out dumps the flight recorder"
    yield "TORCH_FR_DUMP_TEMP_FILE", facts.dumps, "in the run folder, with the rank's number appended"
    yield "TORCH_NCCL_ENABLE_TIMING", "1", "the flight recorder includes the duration of each collective"
    yield (
        "TORCH_NCCL_HIGH_PRIORITY",
        "1",
        "collectives that overlap compute get SMs before the next compute blocks",
    )
    if facts.deterministic:
        yield (
            "NCCL_ALGO",
            "Ring",
            "train.deterministic: in trees and in the switch (NVLS) the order of a sum may vary",
        )
        yield (
            "CUBLAS_WORKSPACE_CONFIG",
            ":4096:8",
            "train.deterministic: cuBLAS computes a product in the same way each time",
        )
        yield (
            "TORCHINDUCTOR_DETERMINISTIC",
            "1",
            "train.deterministic: compiled kernels are chosen by their sizes, not by how fast they were when tried",
        )
    expandable = "freed memory of one size can be reused for another: less fragmentation"
    yield "PYTORCH_ALLOC_CONF", "expandable_segments:True", expandable
