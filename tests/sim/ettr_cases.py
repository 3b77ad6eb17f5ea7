"""Cases to simulate: what a run is equipped with, the causes of its failures, and recovery times that a benchmark measured."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ettr_simulation import Case

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import parse_json, read_named
from seatrial.plan.cost.ettr import DAY_S, Branch, Remedy
from seatrial.plan.cost.finish import COMMUNICATORS_S_PER_GPU, NEW_PROCESS_S
from seatrial.record.interval import young


@dataclass(frozen=True)
class Cause:
    """One row of a table of causes, with our reading of it: what it needs, and whether it shows as a hang."""

    name: str
    count: int
    remedy: Remedy
    hangs: bool = False


# Llama 3's 419 interruptions (arXiv:2407.21783, table 5). The remedies are our reading: a faulty GPU loses its
# node, memory and its controller need a reset (NVIDIA's advice for Xid 48, 95, 119), software new processes.
CAUSES = (
    Cause("faulty GPU, with NVLink", 148, "node"),
    Cause("HBM3", 72, "reset"),
    Cause("software", 54, "process"),
    Cause("switch or cable", 35, "node", hangs=True),
    Cause("host maintenance", 32, "node"),
    Cause("SRAM", 19, "reset"),
    Cause("GPU system processor", 17, "reset"),
    Cause("NIC", 7, "node", hangs=True),
    Cause("NCCL watchdog", 7, "process", hangs=True),
    Cause("silent corruption", 6, "node"),
    Cause("thermal", 6, "node"),
    Cause("SSD", 3, "node"),
    Cause("power supply", 3, "node"),
    Cause("chassis, IO board, CPU, memory: 2 each", 8, "node"),
    Cause("dependency", 2, "process"),
)


def _cost(default: float, unit: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Costs:
    """A real cluster that trains a 72B model (1.15 TB of state at 16 bytes a parameter). Fields carry unit and source."""

    gpus_per_node: int = _cost(8, "GPUs", "the nodes of all four rates")
    step_s: float = _cost(10.0, "s", "assumption, at every size: the batch grows with the nodes")
    disk_stall_s: float = _cost(
        5.0,
        "s",
        "assumption: 9 GB a GPU at 128 GPUs is 0.4 s to the host at 25 GB/s, the rest is waiting for all",
    )
    disk_lag_s: float = _cost(60.0, "s", "assumption: 1.15 TB at 20 GB/s, written in the background")
    disk_load_s: float = _cost(
        120.0,
        "s",
        "assumption; Amazon's GEMINI authors saw 10 to 20 min from remote storage (amazon.science)",
    )
    memory_load_s: float = _cost(
        10.0, "s", "assumption: the 72 GB of a node (16 nodes) take 1.5 s over one 400 Gb/s port"
    )
    memory_lag_s: float = _cost(10.0, "s", "assumption: the same 72 GB, slowed to stay out of training's way")
    new_process_s: float = _cost(
        NEW_PROCESS_S, "s", "assumption: Python, CUDA context, compiled code from its cache, first step"
    )
    communicators_s_per_gpu: float = _cost(
        COMMUNICATORS_S_PER_GPU,
        "s",
        "2.5 min above some thousands of GPUs, NVIDIA/nccl#1156; linear from there is an assumption",
    )
    hang_steps: float = _cost(5.0, "steps", "resilience.hang_factor, where that is more than was measured")
    replica_nodes: int = _cost(2, "nodes", "one replica of 16 GPUs: TP 8 x PP 2")
    replacement_s: float = _cost(1800.0, "s", "assumption: until a person or scheduler gives another node")
    repair_s: float = _cost(DAY_S, "s", "assumption, exponential; decides how many spares are needed")
    reset_s: float = _cost(900.0, "s", "assumption: drain, GPU reset, requalification")
    spare_quantile: float = _cost(0.99, "", "spares cover the nodes away at once with this probability")
    human_s: float = _cost(
        1800.0, "s", "assumption: until a person has seen it and started again, with good nodes"
    )
    torchrun_restart_s: float = _cost(3.75, "s", "middle of 2.8 to 4.7 s, torchrun with its fix, 8 CPU ranks")
    torchrun_spare_s: float = _cost(14.7, "s", "a spare third agent, torchrun with its fix, 8 CPU ranks")
    torchrun_works: float = _cost(1 / 6, "", "torchrun as it comes: 5 of 6 restarts failed")
    collective_timeout_s: float = _cost(
        600.0, "s", "torch's default for NCCL groups; nothing else ends a hang"
    )

    def table(self) -> list[tuple[str, float, str, str]]:
        """(name, value, unit, source) of every field."""
        return [
            (f.name, getattr(self, f.name), f.metadata["unit"], f.metadata["source"]) for f in fields(self)
        ]


@dataclass(frozen=True)
class Measured:
    """Times from the fault to the next finished step, as a benchmark measured them on a virtual cluster; seconds."""

    rank_killed_in_place_s: float
    rank_killed_restart_s: float
    node_lost_spare_s: float
    coordinator_lost_s: float
    hang_detect_s: float
    """From the moment a rank hangs to the decision: it comes on top of the recovery."""
    snapshot_overhead: float
    """Step time with snapshots divided by step time without, minus 1, at this interval:"""
    snapshot_every_steps: float
    machine: str = ""
    date: str = ""

    @classmethod
    def read(cls, path: Path) -> Measured:
        """From a JSON file {"measured": {...}, "machine": text, "date": text}; InputError names all that is missing."""
        file, hint = str(path), "write it with bench/recovery.py, on the machine whose times you want"
        try:
            document = parse_json(read_named(path))
        except (OSError, ValueError) as error:
            raise InputError(Diagnostic(f"cannot be read: {error}", file=file, hint=hint)) from error
        if not isinstance(document, dict) or not isinstance(document.get("measured"), dict):
            raise InputError(Diagnostic('has no object "measured"', file=file, hint=hint))
        given, problems = document["measured"], []
        names = [f.name for f in fields(cls) if f.default is MISSING]
        for name in names:
            value = given.get(name)
            if value is None:
                problems.append(f"measured.{name} is missing")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                problems.append(f"measured.{name} is not a number: {value!r}")
            elif not math.isfinite(value) or value < 0 or (name == "snapshot_every_steps" and value < 1):
                problems.append(f"measured.{name} cannot be {value!r}")
        for name in ("machine", "date"):
            if not isinstance(document.get(name), str) or not document[name]:
                problems.append(f"{name} is missing")
        if problems:
            raise InputError([Diagnostic(p, file=file, hint=hint) for p in problems])
        numbers = {name: float(given[name]) for name in names}
        return cls(**numbers, machine=document["machine"], date=document["date"])


@dataclass(frozen=True)
class Scenario:
    """What a run is equipped with. Intervals in steps, or "young" for the optimum of that many nodes."""

    name: str
    label: str
    restart: Literal["seatrial", "torchrun", "torchrun-fixed"] = "seatrial"
    disk: int | Literal["young"] = 500
    memory: int | Literal["young", "off"] = "off"
    replica: bool = False  # a living replica holds the state: at most the step under way is redone
    spares: bool = False
    shrink: bool = False


SCENARIOS = (
    Scenario("torchrun", "torchrun as it comes, disk every 500 steps", restart="torchrun"),
    Scenario(
        "torchrun-fixed",
        "torchrun with its fix, spare agents, disk (Young)",
        "torchrun-fixed",
        "young",
        spares=True,
    ),
    Scenario("disk-500", "disk every 500 steps, no spares"),
    Scenario("disk", "disk (Young), no spares", disk="young"),
    Scenario("disk-spares", "disk (Young), spares", disk="young", spares=True),
    Scenario("memory", "RAM every 10 steps, no spares", memory=10),
    Scenario("memory-shrink", "RAM every 10 steps, no spares, shrinks", memory=10, shrink=True),
    Scenario("memory-spares", "RAM every 10 steps, spares", memory=10, spares=True),
    Scenario("memory-young-spares", "RAM (Young), spares", memory="young", spares=True),
    Scenario("replica-spares", "a living replica, spares", replica=True, spares=True),
)


def make_case(scenario: Scenario, nodes: int, per_node_day: float, measured: Measured, costs: Costs) -> Case:
    """All numbers of one run of `scenario` on `nodes` nodes that fail `per_node_day` times a day each."""
    rate = per_node_day / DAY_S
    mttf = 1 / (nodes * rate) if rate else math.inf
    in_memory = scenario.memory != "off"
    snapshot_stall = measured.snapshot_overhead * measured.snapshot_every_steps * costs.step_s
    memory_interval = _interval(scenario.memory, snapshot_stall, mttf, costs) if in_memory else 0.0
    if scenario.replica:
        memory_interval, snapshot_stall = costs.step_s, 0.0
    survives = in_memory or scenario.replica
    branches = _branches(scenario, nodes, measured, costs, survives)
    reload_s = costs.disk_lag_s + costs.disk_load_s  # another layout: written out as a checkpoint, read back
    spares = 0
    if scenario.spares:
        share = {r: sum(b.share for b in branches if b.remedy == r) for r in ("node", "reset")}
        away = (share["node"] * costs.repair_s + share["reset"] * costs.reset_s) / mttf
        spares = max(1, spares_for(away, costs.spare_quantile))
    return Case(
        nodes=nodes,
        failures_per_node_s=rate,
        branches=branches,
        disk_interval_s=_interval(scenario.disk, costs.disk_stall_s, mttf, costs),
        disk_stall_s=costs.disk_stall_s,
        disk_lag_s=costs.disk_lag_s,
        memory_interval_s=memory_interval,
        memory_stall_s=snapshot_stall if survives else 0.0,
        memory_lag_s=costs.memory_lag_s if in_memory else 0.0,
        disk_extra_s=costs.disk_load_s - costs.memory_load_s if survives else 0.0,
        spares=spares,
        # A person brings a good node along; that time is in the branches.
        replacement_s=0.0 if scenario.restart == "torchrun" else costs.replacement_s,
        repair_s=costs.repair_s,
        reset_s=costs.reset_s,
        shrink=scenario.shrink,
        replica_nodes=costs.replica_nodes,
        shrink_extra_s=reload_s,
        grow_s=measured.rank_killed_restart_s + _rebuild(nodes, costs) + reload_s,
    )


def _interval(steps: int | str, stall_s: float, mttf_s: float, costs: Costs) -> float:
    """An interval in seconds of work: whole steps; without failures, as "young" has none, a day."""
    if isinstance(steps, int):
        return steps * costs.step_s
    best = min(young(stall_s, mttf_s), DAY_S) if stall_s else 0.0
    return max(1, round(best / costs.step_s)) * costs.step_s


def _rebuild(nodes: int, costs: Costs) -> float:
    """What every recovery on GPUs needs beyond what was measured on CPU ranks."""
    return costs.new_process_s + costs.communicators_s_per_gpu * nodes * costs.gpus_per_node


def _branches(
    scenario: Scenario, nodes: int, measured: Measured, costs: Costs, survives: bool
) -> tuple[Branch, ...]:
    """The causes as (share, remedy, seconds), alike ones added up."""
    total = sum(c.count for c in CAUSES)
    fixed = _rebuild(nodes, costs) + (costs.memory_load_s if survives else costs.disk_load_s)
    found: dict[tuple[Remedy, float], float] = {}
    for cause in CAUSES:
        hang = 0.0
        if cause.hangs:
            ours = max(measured.hang_detect_s, costs.hang_steps * costs.step_s)
            hang = ours if scenario.restart == "seatrial" else costs.collective_timeout_s
        for share, seconds in _restarts(scenario, cause.remedy, nodes, measured, costs, survives):
            key = (cause.remedy, seconds + hang + fixed)
            found[key] = found.get(key, 0.0) + share * cause.count / total
    return tuple(Branch(share, remedy, down) for (remedy, down), share in found.items() if share)


def _restarts(
    scenario: Scenario, remedy: Remedy, nodes: int, measured: Measured, costs: Costs, survives: bool
) -> list[tuple[float, float]]:
    """(probability, seconds until training processes run again) for one remedy."""
    if scenario.restart == "torchrun":
        # As it comes, a node that is replaced ends the job: the new agent times out.
        works = costs.torchrun_works if remedy == "process" else 0.0
        return [(works, costs.torchrun_restart_s), (1 - works, costs.human_s)]
    if scenario.restart == "torchrun-fixed":
        if remedy == "process":
            return [(1.0, costs.torchrun_restart_s)]
        # The node with the store ends the job.
        return [(1 - 1 / nodes, costs.torchrun_spare_s), (1 / nodes, costs.human_s)]
    if remedy == "process":
        return [(1.0, measured.rank_killed_in_place_s if survives else measured.rank_killed_restart_s)]
    if remedy == "reset":  # the node leaves for it, but its agent lives, the coordinator's too
        return [(1.0, measured.node_lost_spare_s)]
    return [(1 - 1 / nodes, measured.node_lost_spare_s), (1 / nodes, measured.coordinator_lost_s)]


def spares_for(mean_away: float, quantile: float = 0.99) -> int:
    """The fewest spares that cover the nodes away for repair with this probability.

    Nodes away at once are Poisson with mean N r x (mean time away), whatever the repair time's distribution (M/G/infinity).
    """
    term = total = math.exp(-mean_away)
    spares = 0
    while total < quantile:
        spares += 1
        term *= mean_away / spares
        total += term
    return spares
