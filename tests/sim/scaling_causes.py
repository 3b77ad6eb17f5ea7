"""A training step on many ranks, simulated pass by pass, with a planted fault: the input for `find_causes`.

Every collective and every send is a wait for those that take part. What a rank is late, the others wait, in whichever
group they meet it first: nothing is written into the stage that the judge will read, but what the clock of a rank there
would count. A fault changes the speed of a GPU, a link, a store, or a number; its size is chosen for the wanted
slow-down of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seatrial.hardware.counters import Port
from seatrial.job.layout import Layout
from seatrial.job.schedules import schedule_named
from seatrial.record.stages import (
    BACKWARD,
    DATA,
    FORWARD,
    HOST,
    OPTIMIZER,
    PIPELINE,
    REPLICATE,
    SAVE,
    SHARD,
    STAGES,
    STEP_SUM,
    TENSOR,
)
from seatrial.scale.counters import NodeCounters, new_faults, of_node
from seatrial.scale.observed import Observed

KINDS = ("slow rail", "straggler", "bubble", "data", "small messages", "congestion", "bad clock", "save")
GPUS = 8  # of a node
STEPS = 20
_USUAL_MHZ = 1980.0
_LATENCY_S = 10e-6  # of a hop, in a healthy network
_BYTES_S = 40e9  # of one rail
_HIDDEN = 0.8  # share of a collective that overlaps with compute


@dataclass(frozen=True)
class Job:
    """What is the same at both sizes. Times are for the whole step of a rank at the first size, in seconds."""

    layout: Layout
    microbatches: int
    compute_s: float = 1.0
    data_s: float = 0.01
    host_s: float = 0.03
    optimizer_s: float = 0.03
    save_s: float = 0.0  # on a step that saves, one in five
    tensor_s: float = 0.05
    shard_bytes: float = 4e9  # of one pass's collectives of a rail, whole buffers together
    shard_calls: int = 16
    replicate_bytes: float = 4e9
    latency_s: float = _LATENCY_S
    send_s: float = 0.001


@dataclass(frozen=True)
class Fault:
    """Factors and additions, in the shape (pipeline, replicate, shard, tensor); as planted."""

    compute: NDArray[np.float64]  # times as long
    data_s: NDArray[np.float64]  # in the steps in which it stalls
    transfer: NDArray[np.float64]  # times as long, of each rank's rail; a ring is as slow as its slowest
    stalls: float = 1.0  # share of the steps

    @staticmethod
    def none(layout: Layout) -> Fault:
        shape = shape_of(layout)
        return Fault(np.ones(shape), np.zeros(shape), np.ones(shape))


@dataclass(frozen=True)
class Draw:
    """Both sizes, and what was planted."""

    kind: str
    base: Observed
    here: Observed
    rank: int | None = None
    node: int | None = None
    one_node: bool = False  # a slow rail: whether timings or counters show which node has it


def shape_of(layout: Layout) -> tuple[int, int, int, int]:
    return layout.pipeline, layout.replicate, layout.shard, layout.tensor


def ring_s(job: Job, n: int, size: float, calls: int) -> float:
    """Exposed seconds of `calls` reduce-scatters or all-gathers that together move `size` bytes, in a ring of `n`."""
    if n == 1:
        return 0.0
    return (1 - _HIDDEN) * ((n - 1) / n * size / _BYTES_S + calls * (n - 1) * job.latency_s)


def simulate(job: Job, fault: Fault, rng: np.random.Generator, noise: float) -> NDArray[np.float64]:
    """Steps x ranks x STAGES."""
    layout, shape = job.layout, shape_of(job.layout)
    full = (STEPS, *shape)
    spent = np.zeros((len(STAGES), *full))
    clock = np.zeros(full)

    def vary(seconds: Any, share: float = noise) -> Any:
        return seconds * rng.lognormal(0.0, share, full)

    def own(stage: int, seconds: Any) -> None:
        spent[stage] += seconds
        clock[...] += seconds

    def meet(stage: int, axes: tuple[int, ...], seconds: Any, at: Any = slice(None)) -> None:
        """A collective along `axes` of the ranks `at` (of the pipeline's dimension)."""
        now = clock[:, at]
        end = now.max(axis=axes, keepdims=True) + seconds
        spent[stage][:, at] += end - now
        clock[:, at] = end

    # A GPU is a little faster or slower than others, always; and every rank in every step.
    speed = fault.compute * rng.lognormal(0.0, 0.005, shape)
    pace = vary(speed)
    # Now and then a step is disturbed by something else.
    for step in np.flatnonzero(rng.random(STEPS) < 0.02):
        pace[step].ravel()[rng.integers(layout.world_size)] *= rng.uniform(1.5, 3.0)
    stalled = (rng.random(STEPS) < fault.stalls)[:, None, None, None, None]
    own(DATA, vary(job.data_s, 0.1) + vary(fault.data_s * stalled, 0.1))
    own(HOST, vary(job.host_s, 0.05))

    m, p = job.microbatches, layout.pipeline
    slow = {axis: fault.transfer.max(axis=axis, keepdims=True) for axis in (1, 2)}
    shard_s = ring_s(job, layout.shard, job.shard_bytes, job.shard_calls) * slow[2] / m
    part_s = job.compute_s / m
    orders = [schedule_named(layout.schedule).order(p, 1, m, r) for r in range(p)]
    # Of each stage and microbatch: when its output has left, forward and backward.
    left: dict[tuple[str, int, int], Any] = {}
    at = [0] * p
    while any(at[r] < len(orders[r]) for r in range(p)):
        for r in range(p):
            while at[r] < len(orders[r]):
                kind, _, i = orders[r][at[r]]
                source = (kind, r - 1 if kind == "F" else r + 1, i)
                if 0 <= source[1] < p:
                    if source not in left:
                        break
                    link = np.maximum(fault.transfer[r], fault.transfer[source[1]])
                    arrived = left.pop(source) + job.send_s * link
                    late = np.maximum(arrived - clock[:, r], 0.0)
                    spent[PIPELINE][:, r] += late
                    clock[:, r] += late
                stage, share = (FORWARD, 1 / 3) if kind == "F" else (BACKWARD, 2 / 3)
                one = slice(r, r + 1)
                jitter = rng.lognormal(0.0, noise, (STEPS, *shape[1:]))
                for half in range(2):
                    work = part_s * share / 2 * pace[:, r] * jitter
                    spent[stage][:, r] += work
                    clock[:, r] += work
                    if layout.tensor > 1:
                        meet(TENSOR, (4,), job.tensor_s / m * share / 2, one)
                    if half == 0 and layout.shard > 1:
                        meet(SHARD, (3,), vary(shard_s * share, 0.03)[:, one].max(axis=3, keepdims=True), one)
                left[kind, r, i] = clock[:, r].copy()
                at[r] += 1
    if layout.replicate > 1:
        seconds = 2 * ring_s(job, layout.replicate, job.replicate_bytes, 4) * slow[1]
        meet(REPLICATE, (2,), vary(seconds, 0.03).max(axis=2, keepdims=True))
    own(OPTIMIZER, vary(job.optimizer_s) * speed)
    saves = np.arange(STEPS) % 5 == 0
    own(SAVE, vary(job.save_s, 0.1) * saves[:, None, None, None, None])
    meet(STEP_SUM, (1, 2, 3, 4), 0.002)
    return spent.reshape(len(STAGES), STEPS, -1).transpose(1, 2, 0)


def observed(
    job: Job, fault: Fault, rng: np.random.Generator, noise: float, tokens: float, **known: Any
) -> Observed:
    size = {"shard": job.shard_bytes / job.shard_calls, "replicate": job.replicate_bytes / 4}
    calls = {"shard": job.shard_calls, "replicate": 8}
    return Observed(
        simulate(job, fault, rng, noise), job.layout, GPUS, tokens, job.microbatches, size, calls, **known
    )


def counted(
    nodes: int, grown: dict[tuple[int, int], dict[str, float]], rng: np.random.Generator
) -> list[NodeCounters]:
    """Readings of all ports 30 s apart: about half of the rate sent, waiting for 1 %; `grown`: (node, rail) -> what is added.

    Of port_xmit_wait that is a share of the time.
    """
    seconds, bytes_s, every = 30.0, 400e9 / 8, []
    for n in range(nodes):
        first, last = {}, {}
        for rail in range(GPUS):
            more = dict(grown.get((n, rail), {}))
            wait = rng.uniform(0.005, 0.02) + more.pop("port_xmit_wait", 0.0)
            counts = {"port_xmit_data": bytes_s * seconds * rng.uniform(0.4, 0.6) / 4}
            counts |= {"port_xmit_wait": wait * bytes_s * seconds / 8, "packet_seq_err": 0, "symbol_error": 1}
            port = Port(f"mlx5_{rail}", 1, None, "ACTIVE", "InfiniBand", 400.0, dict.fromkeys(counts, 7))
            first[port.name] = port
            now = {c: 7 + int(v + more.get(c, 0)) for c, v in counts.items()}
            last[port.name] = replace(port, counters=now)
        every.append(of_node(n, first, last, seconds, None))
    return every


def draw(kind: str, seed: int, *, ranks: int | None = None) -> Draw:
    """A healthy pair of sizes (kind "healthy"), or one whose larger size has the fault."""
    rng = np.random.default_rng([seed, *kind.encode()])
    ranks = ranks or int(2 ** rng.integers(4, 11))
    nodes = ranks // GPUS
    pipeline = int(rng.choice([p for p in (1, 2, 4) if nodes >= 4 * p or (p == 1 and nodes >= 2)]))
    if kind == "bubble":
        pipeline = max(2, pipeline) if nodes >= 8 else 2
    data = nodes // pipeline
    first = max(1, data // 2)
    shards = [s for s in (1, 2, 4, 8, 16, 32, 64, 128) if s <= first]
    shard = first if rng.random() < 0.4 else int(rng.choice(shards))
    if kind == "small messages":
        shard = first
    grows = kind == "small messages" or (
        shard == first and rng.random() < 0.7
    )  # sharded further, else replicated
    old = Layout(pipeline, first // shard, shard, GPUS)
    new = replace(old, shard=shard * (data // first)) if grows else replace(old, replicate=data // shard)
    noise = rng.uniform(0.01, 0.03)
    slower = float(min(1.0, 0.1 + rng.exponential(0.246)))  # Greyhound: jobs were slowed by 34.6 % on average
    m = int(rng.choice([8, 16])) * pipeline if pipeline > 1 else int(rng.choice([1, 2, 4]))
    # Where a dimension is new at the larger size, a healthy job hides nearly all of its collectives.
    part = rng.uniform(0.01, 0.02) if first == 1 else rng.uniform(0.05, 0.2)
    size = part * _BYTES_S / (1 - _HIDDEN)
    sums = rng.uniform(0.005, 0.01) if old.replicate == 1 else part / 2
    job = Job(old, m, shard_bytes=size, replicate_bytes=sums * _BYTES_S / (1 - _HIDDEN))
    base_tokens = float(old.world_size)
    tokens = float(new.world_size)
    here = replace(job, layout=new)
    fault = Fault.none(new)
    total = job.compute_s * (1 + (pipeline - 1) / m) + 0.15 + part
    added = slower * total
    rank = int(rng.integers(new.world_size))
    node = rank // GPUS
    at = new.coordinates(rank)
    place = (at.pipeline, at.replicate, at.shard, at.tensor)
    found: dict[tuple[int, int], dict[str, float]] = {}  # (node, rail) -> what its counters have more
    clocks = rng.normal(_USUAL_MHZ, 8.0, new.world_size)
    one_node = False
    with_counters = bool(rng.random() < 0.5)
    if rng.random() < 0.1:  # what is found on healthy nodes too
        found[int(rng.integers(nodes)), 3] = {"packet_seq_err": 40}
    match kind:
        case "straggler" | "bad clock":
            fault.compute[place] = 1 + added / job.compute_s
            if kind == "bad clock":
                clocks[rank] /= fault.compute[place]
        case "data":
            stalls = float(rng.choice([1.0, 0.5]))
            fault = replace(fault, stalls=stalls)
            where = rng.random()
            if where < 0.4:  # the store is too slow for so many
                fault.data_s[...] = added / stalls
                rank = node = -1
            else:  # one node's disk
                fault.data_s[place[:3]] = added / stalls
        case "save":
            job, here = replace(job, save_s=0.05), replace(here, save_s=0.05 + added * 5)
        case "slow rail":
            exposed = ring_s(here, new.shard, here.shard_bytes, here.shard_calls)
            exposed += 2 * ring_s(here, new.replicate, here.replicate_bytes, 4)
            fault.transfer[place] = 1 + added / exposed
            members = [r // GPUS for r in range(new.world_size) if new.coordinates(r).pipeline == at.pipeline]
            # By timings where it is in two slow groups: in each the excess must be seen.
            seen = [
                ring_s(here, n, b, c)
                for n, b, c in (
                    (new.shard, here.shard_bytes, here.shard_calls),
                    (new.replicate, 2 * here.replicate_bytes, 4),
                )
            ]
            one_node = with_counters or min(seen) * added / exposed > 0.06 * (total + added)
            if with_counters:
                found[node, at.tensor] = {"symbol_error": 900}
                sender = int(rng.choice([n for n in sorted(set(members)) if n != node]))
                found[sender, at.tensor] = {"port_xmit_wait": 0.3}
        case "congestion":
            exposed = ring_s(here, new.shard, here.shard_bytes, here.shard_calls)
            exposed += 2 * ring_s(here, new.replicate, here.replicate_bytes, 4)
            fault.transfer[...] = 1 + added / exposed * rng.uniform(0.7, 1.0, fault.transfer.shape)
            with_counters = True
            crowded = rng.choice(nodes, max(2, int(nodes * rng.uniform(0.4, 1.0))), replace=False)
            for n in crowded:
                for rail in rng.choice(GPUS, int(rng.integers(2, GPUS)), replace=False):
                    found[int(n), int(rail)] = {"port_xmit_wait": 0.2}
        case "small messages":
            # As many bytes in far more collectives: the latency of each hop decides.
            hops = new.shard - 1 - (old.shard - 1)
            calls = int(added / (1 - _HIDDEN) / hops / _LATENCY_S)
            job, here = (replace(j, shard_calls=calls, shard_bytes=calls * 1e6) for j in (job, here))
            while here.shard_bytes / calls / new.shard > 128 * 1024:
                job, here = (replace(j, shard_bytes=j.shard_bytes / 2) for j in (job, here))
        case "bubble":
            # Fewer microbatches: larger ones, or (strong scaling) the same batch over more replicas.
            times = new.world_size // old.world_size
            if times > 1 and rng.random() < 0.5:
                idle = slower * times / max(0.1, times - 1 - slower)
                few = max(1, int((pipeline - 1) / idle))
                job = replace(
                    job, microbatches=few * times, host_s=0.01, optimizer_s=0.01, replicate_bytes=size / 20
                )
                here = replace(
                    job,
                    layout=new,
                    microbatches=few,
                    compute_s=job.compute_s / times,
                    tensor_s=job.tensor_s / times,
                    data_s=job.data_s / times,
                )
                tokens = base_tokens
            else:
                idle = slower + (1 + slower) * (pipeline - 1) / m
                here = replace(here, microbatches=max(1, int((pipeline - 1) / idle)))
    then = observed(job, Fault.none(old), rng, noise, base_tokens)
    faults = None
    if with_counters:
        traffic = np.random.default_rng([seed, 1])  # of its own: whatever is read, the steps are the same
        quiet = counted(old.world_size // GPUS, {}, traffic)
        faults = new_faults(quiet, counted(nodes, found, traffic))
    now = observed(here, fault, rng, noise, tokens, faults=faults, clocks_mhz=clocks)
    return Draw(kind, then, now, rank if rank >= 0 else None, node if node >= 0 else None, one_node)
