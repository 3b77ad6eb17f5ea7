"""Why a size is less efficient than the first: causes with the seconds of a step that each explains. Pure.

Three kinds of evidence. Own work that takes longer on some ranks than on their peers points to those ranks. A collective that
takes longer in some groups of a dimension than in others points to a link that only these groups use. What has grown
everywhere since the first size points to no rank and no link.

Timings cannot show which member of a group has the slow link, because all of them wait alike. If a rank is in
several slow groups along different dimensions, these have one node in common; otherwise only counters can name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from seatrial.base import units
from seatrial.check.ranges import listed
from seatrial.hardware.counters import CONGESTION_SIGNALS, PortFault
from seatrial.job.schedules import Times, schedule_named
from seatrial.scale.observed import NORMAL, OWN_WORK, Groups, Observed, lower_median

Kind = Literal[
    "network",
    "straggler",
    "data",
    "host",
    "save",
    "compute",
    "bubble",
    "small messages",
    "communication",
    "congestion",
    "variation",
    "unexplained",
]

# Minimum share of a step for a cause: of some ranks or groups only, and of all of them. Some growth
# is always everywhere. A gate of 80 % leaves room for several causes.
LEAST, LEAST_EVERYWHERE = 0.03, 0.05
# Standard deviations from the peers; the largest of 1,024 normal values exceeds 5 once in 1,700 runs.
_SPREADS = 5.0
_ERRORS = 3.0  # standard errors of the step times that a loss must exceed
# Bytes per ring step: at 400 Gb/s these take 5 us, no longer than the latency of a hop.
_SMALL_BYTES = 256 * 1024
_LONGEST_HOP_S = 1e-3  # TCP round trips take 0.1 ms, RDMA 0.01 ms: anything longer is not latency
_SLOWER = (
    1.3  # factor over the time expected for a ring of this size, beyond which bandwidth is considered lower
)
_SAME = ("tensor", "context", "expert", "pipeline")  # sizes of which otherwise ranks would do different work
_BETWEEN_NODES = ("expert", "context", "shard", "replicate", "pipeline", "step_sum")
_OF_A_LINK = ("link_down", "link_errors", "slow_link", "retransmissions")


@dataclass(frozen=True)
class Gain:
    """Predicted gain of a change to the job file, as a share of tokens/s; None: unknown, with the reason in `basis`."""

    change: str
    gain: float | None
    basis: str

    @property
    def words(self) -> str:
        """One line."""
        reported = "gain unknown:" if self.gain is None else f"{round(self.gain * 100):+d} % tokens/s,"
        return f"{self.change}: {reported} {self.basis}"


@dataclass(frozen=True)
class Cause:
    """One cause. No `ranks`: all ranks alike. Several `nodes`: one of these, unknown which."""

    kind: Kind
    seconds: float  # seconds of a step that it explains
    share: float  # of a step of this size
    stage: str | None
    dimensions: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    link: str | None  # a port by its name, or a rail by its number
    evidence: tuple[str, ...]
    remove_node: int | None  # excluding this node would remove the cause
    tries: tuple[str, ...]
    gains: tuple[Gain, ...] = ()


@dataclass(frozen=True)
class _Part:
    """A cause before its text is written."""

    kind: Kind
    seconds: float
    stage: str | None = None
    dimensions: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    link: str | None = None
    evidence: tuple[str, ...] = ()


def find_causes(base: Observed, here: Observed) -> tuple[Cause, ...]:
    """Why `here` is less efficient than `base`, largest cause first; none if the difference is noise.

    Raises ValueError if their tensor, context, expert or pipeline sizes differ. What remains is "unexplained", if it is at least LEAST_EVERYWHERE.
    """
    if any(getattr(base.layout, d) != getattr(here.layout, d) for d in _SAME):
        raise ValueError(
            "the sizes differ in tensor, context, expert or pipeline parallelism: their ranks do different work"
        )
    times = here.tokens_per_rank / base.tokens_per_rank  # factor of work per rank
    loss = here.step_s - times * base.step_s
    limit, wide = LEAST * here.step_s, LEAST_EVERYWHERE * here.step_s
    if loss < max(limit, _ERRORS * float(np.hypot(here.step_error_s, times * base.step_error_s))):
        return ()
    every = [*_own_work(base, here, times, limit), *_waiting(base, here, times, limit)]
    every.append(_Part("save", here.save_s - times * base.save_s, "save"))
    varied = here.variation_s - times * base.variation_s
    reported = "step times vary per rank, and a different rank is the slowest in each step"
    every.append(_Part("variation", varied, evidence=(reported,)))
    parts = sorted((p for p in every if p.seconds >= (limit if p.ranks else wide)), key=lambda p: -p.seconds)
    rest = loss - sum(p.seconds for p in parts)
    if rest >= wide:
        small = sorted((p for p in every if 0 < p.seconds < wide), key=lambda p: -p.seconds)[:3]
        also = ", ".join(f"{' '.join((p.kind, *p.dimensions))} {units.duration(p.seconds)}" for p in small)
        evidence = (f"including parts below {LEAST_EVERYWHERE:.0%} of a step: {also}",) if also else ()
        parts.append(_Part("unexplained", rest, evidence=evidence))
    return tuple(_with_text(part, here, loss) for part in parts)


# -- own work


def _own_work(base: Observed, here: Observed, times: float, limit: float) -> Iterator[_Part]:
    for name in OWN_WORK:
        now, then = here.work(name), times * base.work(name)
        ahead, spread = _ahead(now)
        ranks = np.flatnonzero(ahead.ravel() >= max(limit, _SPREADS * spread, ahead.max() / 2))
        if ranks.size and ranks.size <= ahead.size // 2:
            seconds = float(ahead.max() - max(0.0, _ahead(then)[0].max()))
            yield _slow_ranks(name, here, seconds, tuple(int(r) for r in ranks), now, ahead)
        grown = float((lower_median(now) - lower_median(then)).max())
        if grown > 0:
            text = f"{name} takes {_factor(lower_median(now).max(), lower_median(then).max())} on the median rank"
            kind: Kind = "data" if name == "data" else "host" if name == "host" else "compute"
            yield _Part(kind, grown, name, evidence=(text,))


def _ahead(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """(deviation of `values` from the median of their row, its standard deviation)."""
    above = values - lower_median(values)
    return above, NORMAL * float(lower_median(np.abs(above).ravel())[0])


def _slow_ranks(
    name: str,
    here: Observed,
    seconds: float,
    ranks: tuple[int, ...],
    now: NDArray[np.float64],
    ahead: NDArray[np.float64],
) -> _Part:
    worst = int(ahead.argmax())
    own, peers = now.ravel()[worst], now.ravel()[worst] - ahead.ravel()[worst]
    evidence = [f"rank {worst}: {name} takes {_factor(own, peers)} as on its peers"]
    if len(ranks) > 1:
        evidence.append(f"{len(ranks)} ranks in total")
    if "tensor" in here.not_separated and name == "compute":
        evidence.append(
            "which rank of its tensor group is unknown: waiting inside the group counts as compute"
        )
    if here.clocks_mhz is not None and name == "compute":
        clock, usual = float(here.clocks_mhz[worst]), float(np.median(here.clocks_mhz))
        low = clock < usual * (1 - (own / peers - 1) / 3)
        evidence.append(
            f"its device's clock is {'low' if low else 'normal'}: {clock:.0f} MHz, median {usual:.0f}"
        )
    kind: Kind = "data" if name == "data" else "host" if name == "host" else "straggler"
    nodes = tuple(sorted({r // here.gpus_per_node for r in ranks}))
    return _Part(kind, seconds, name, (), ranks, nodes, None, tuple(evidence))


# -- waiting for others


def _waiting(base: Observed, here: Observed, times: float, limit: float) -> Iterator[_Part]:
    dimensions = here.dimensions()
    now = {d: here.groups(d) for d in dimensions}
    then = {d: times * base.groups(d).seconds for d in dimensions if base.members(d) > 1}
    signals = _Signals(base, here)
    slow = {d: found for d in dimensions if d != "step_sum" and (found := _slow_groups(now[d], limit))}
    excess = {
        d: found - max(0.0, _ahead(then[d])[0].max() if d in then else 0.0) for d, (found, _) in slow.items()
    }
    slow = {d: value for d, value in slow.items() if excess[d] >= limit}
    grown = {
        d: float((lower_median(now[d].seconds) - (lower_median(then[d]) if d in then else 0.0)).max())
        for d in dimensions
        if d != "pipeline"
    }
    if "pipeline" in dimensions:
        grown["pipeline"] = here.idle_s - times * base.idle_s - max(0.0, grown["step_sum"])
        bubble, follows = _bubble(base, here, times, grown)
        yield _bubble_part(base, here, min(bubble, grown["pipeline"]))
        grown["pipeline"] -= bubble + follows
    outside = {d: s for d, s in grown.items() if d in _BETWEEN_NODES}
    nodes = _nodes_of([now[d].ranks[slow[d][1]] for d in slow if d in outside], here)
    if signals.congested and not signals.of(nodes):
        for d in (d for d in slow if d in outside):
            outside[d] += excess[d]
        yield from _congestion(outside, signals, limit)
    else:
        if between := {d: slow[d][1] for d in slow if d in outside}:
            yield _slow_link(between, {d: excess[d] for d in between}, now, here, signals)
        for d, seconds in outside.items():
            yield _grown(d, seconds, base, here, times, signals)
    if "tensor" in slow:
        members = now["tensor"].ranks[slow["tensor"][1]]
        yield _inside_a_node(excess["tensor"], members, here)
    if "tensor" in grown:
        yield _Part(
            "communication", grown["tensor"], "tensor", ("tensor",), evidence=("equally in all groups",)
        )


def _nodes_of(members: Sequence[NDArray[np.int64]], here: Observed) -> list[int]:
    """The nodes common to all groups of `members` (rows of ranks); if there is none, the nodes of all groups."""
    every = [np.unique(group // here.gpus_per_node) for groups in members for group in groups]
    if not every:
        return []
    common = reduce(np.intersect1d, every)
    return [int(n) for n in (common if common.size else np.unique(np.concatenate(every)))]


def _slow_groups(groups: Groups, limit: float) -> tuple[float, NDArray[np.bool_]] | None:
    """(seconds above the other groups of the row, mask of slow groups) if a minority is slow."""
    ahead, spread = _ahead(groups.seconds)
    which = ahead >= max(limit, _SPREADS * spread, ahead.max() / 2)
    if not which.any() or (which.sum(axis=1) > which.shape[1] // 2).any():
        return None
    return float(ahead.max()), which


class _Signals:
    """Counter faults at this size that did not occur at the first size."""

    def __init__(self, base: Observed, here: Observed) -> None:
        self.read = here.faults is not None
        old = {(n, f.signal, f.where) for n, every in (base.faults or {}).items() for f in every}
        every = [(n, f) for n, found in sorted((here.faults or {}).items()) for f in found]
        new = [(n, f) for n, f in every if (n, f.signal, f.where) not in old]
        self.crowded = [(n, f) for n, f in new if f.signal in CONGESTION_SIGNALS]
        nodes = {n for n, _ in self.crowded}
        ports = {(n, f.where) for n, f in self.crowded}
        total = here.layout.world_size // here.gpus_per_node
        # A slow link delays the one or two nodes that send to it, which is not congestion.
        self.congested = len(nodes) > 1 and (
            len(nodes) == total or (len(ports) > 2 and len(nodes) >= total / 4)
        )
        self._links = [(n, f) for n, f in new if f.signal in _OF_A_LINK]

    def of(self, nodes: Sequence[int]) -> list[tuple[int, PortFault]]:
        """Link faults, if exactly one of `nodes` has any. The peers of a bad link also retransmit."""
        found = [(n, f) for n, f in self._links if n in nodes]
        found = [(n, f) for n, f in found if f.signal != "retransmissions"] or found
        return found if len({n for n, _ in found}) == 1 else []


def _slow_link(
    which: Mapping[str, NDArray[np.bool_]],
    excess: Mapping[str, float],
    now: Mapping[str, Groups],
    here: Observed,
    signals: _Signals,
) -> _Part:
    members = [now[d].ranks[which[d]] for d in which]
    per_node = here.gpus_per_node
    every = np.unique(np.concatenate([groups.ravel() for groups in members]))
    nodes = _nodes_of(members, here)
    several = any(not np.isin(nodes, group // per_node).all() for groups in members for group in groups)
    rails = np.unique(every % per_node)
    link = f"rail {rails[0]}" if len(rails) == 1 and per_node > 1 else None
    evidence = [
        f"{d}: {int(which[d].sum())} of {which[d].size} groups take {units.duration(excess[d])} per step "
        f"longer than the others, equally on all members"
        for d in which
    ]
    if reported := signals.of(nodes):
        nodes = [reported[0][0]]
        link = reported[0][1].where or link
        evidence += [f.message for _, f in reported]
    elif len(nodes) == 1:
        evidence.append(f"node {nodes[0]} is the only one in all slow groups")
    elif len(nodes) > 1:
        counters = (
            "counters do not show a fault of exactly one of them"
            if signals.read
            else "counters were not read"
        )
        evidence.append(f"all members wait equally, so timings do not show which node; {counters}")
    if several:
        evidence.append("the slow groups have no node in common: several links")
    ranks = tuple(int(r) for r in every if r // per_node in nodes)
    total = sum(excess.values())
    return _Part(
        "network", total, max(excess, key=lambda d: excess[d]), tuple(which), ranks,
        tuple(nodes), link, tuple(evidence),
    )  # fmt: skip


def _inside_a_node(seconds: float, members: NDArray[np.int64], here: Observed) -> _Part:
    ranks = tuple(int(r) for r in np.unique(members))
    nodes = tuple(sorted({r // here.gpus_per_node for r in ranks}))
    text = f"tensor: the groups of {listed(nodes)} take {units.duration(seconds)} per step longer than the others"
    return _Part("network", seconds, "tensor", ("tensor",), ranks, nodes, None, (text,))


def _congestion(outside: Mapping[str, float], signals: _Signals, limit: float) -> Iterator[_Part]:
    grown = {d: s for d, s in outside.items() if s > 0}
    if not grown:
        return
    nodes = sorted({n for n, _ in signals.crowded})
    ports = sorted({f.where for _, f in signals.crowded if f.where})
    first = signals.crowded[0]
    evidence = (
        f"counters of {len(nodes)} nodes{f' on {listed(ports)}' if ports else ''} show congestion that the first "
        f"size did not have; node {first[0]}: {first[1].message}",
    )
    where = max(grown, key=lambda d: grown[d])
    dimensions = tuple(d for d in grown if grown[d] >= limit) or (where,)
    rail = ports[0] if len(ports) == 1 else None
    yield _Part("congestion", sum(grown.values()), where, dimensions, (), tuple(nodes), rail, evidence)


def _grown(d: str, seconds: float, base: Observed, here: Observed, times: float, signals: _Signals) -> _Part:
    """A cause for a dimension in which all groups take longer than at the first size."""
    members, before = here.members(d), base.members(d)
    evidence = [
        f"{d}: collectives of {members} ranks (first size: {before}) take longer, equally in all groups"
    ]
    if reported := signals.of(range(here.layout.world_size // here.gpus_per_node)):
        node, fault = reported[0]
        alone = here.groups(d).seconds.shape[1] == 1
        if alone or len(reported) > 1:  # otherwise only some groups would be slow
            evidence.append(f"node {node}: {fault.message}")
            ranks = tuple(range(node * here.gpus_per_node, (node + 1) * here.gpus_per_node))
            return _Part("network", seconds, d, (d,), ranks, (node,), fault.where, tuple(evidence))
    size = here.message_bytes.get(d)
    if size is None:
        evidence.append("latency or bandwidth: unknown, because message sizes are unknown")
        return _Part("communication", seconds, d, (d,), evidence=tuple(evidence))
    if d in ("pipeline", "expert", "step_sum"):
        # Not rings: point-to-point sends, all-to-all, and a sum that waits for the last rank.
        evidence.append(f"{units.memory(size)} per message on average")
        return _Part("communication", seconds, d, (d,), evidence=tuple(evidence))
    part, took = size / members, float(lower_median(here.groups(d).seconds).max())
    evidence.append(f"{units.memory(size)} per collective on average, {units.memory(part)} per ring step")
    hop_s = took / calls / (members - 1) if (calls := here.calls.get(d)) else None
    if hop_s is not None:
        evidence.append(f"{calls:,.0f} collectives per step, waiting {units.duration(hop_s)} per hop")
    if part <= _SMALL_BYTES and (hop_s is None or hop_s <= _LONGEST_HOP_S):
        evidence.append(
            f"below {units.memory(_SMALL_BYTES)}, where at 400 Gb/s latency dominates, which "
            "grows with the number of ranks"
        )
        return _Part("small messages", seconds, d, (d,), evidence=tuple(evidence))
    if before > 1 and _nodes_of_a_group(base, d) > 1:
        # Sums over replicas happen once per step, however few tokens it has; those over shards may happen per microbatch.
        usual = max(1.0, times) * lower_median(base.groups(d).seconds).max()
        usual *= ((members - 1) / members) / ((before - 1) / before)
        if took > _SLOWER * usual > 0:
            evidence.append(
                f"{took / usual:.1f} times as long as a ring of this size at the first size's bandwidth; "
                "a slow link, or less overlap: timings do not show which, nor the node"
            )
            return _Part("network", seconds, d, (d,), evidence=tuple(evidence))
    return _Part("communication", seconds, d, (d,), evidence=tuple(evidence))


def _nodes_of_a_group(size: Observed, d: str) -> int:
    return len(np.unique(size.groups(d).ranks[0, 0] // size.gpus_per_node))


# -- pipeline


def _bubble(base: Observed, here: Observed, times: float, grown: Mapping[str, float]) -> tuple[float, float]:
    """Extra seconds of filling and draining: (from fewer microbatches, from longer passes).

    Passes include their collectives. With unknown microbatches the two are not separated.
    """
    now, then = idle_share(here), idle_share(base)
    if now is None or then is None:
        return max(0.0, grown["pipeline"]), 0.0
    inside = [d for d in ("tensor", "expert", "context", "shard") if getattr(here.layout, d) > 1]
    passes = float(lower_median(here.work("compute")).max())
    passes += sum(float(lower_median(here.groups(d).seconds).max()) for d in inside)
    work = float((lower_median(here.work("compute")) - times * lower_median(base.work("compute"))).max())
    longer = max(0.0, work) + sum(max(0.0, grown[d]) for d in inside)
    return max(0.0, (now - then) * passes), then * longer


def idle_share(size: Observed) -> float | None:
    """Idle time of a rank as a share of its work, assuming equal stages."""
    layout, microbatches = size.layout, size.microbatches
    if microbatches is None:
        return None
    part = 1 / layout.stages_per_rank
    schedule = schedule_named(layout.schedule)
    each = [Times(part / 3, part * 2 / 3)] * layout.stages
    return schedule.span(layout.pipeline, layout.stages_per_rank, microbatches, each) / microbatches - 1


def _bubble_part(base: Observed, here: Observed, seconds: float) -> _Part:
    text = (
        "waiting for other pipeline stages; the number of microbatches is unknown, so sends may be included"
    )
    if (now := idle_share(here)) is not None and (then := idle_share(base)) is not None:
        text = (
            f"with {here.microbatches} microbatches over {here.layout.pipeline} pipeline ranks each is idle for "
            f"{now:.0%} of its work; {base.microbatches} at the first size: {then:.0%}"
        )
    return _Part("bubble", seconds, "pipeline", ("pipeline",), evidence=(text,))


# -- texts


def _factor(now: float, before: float) -> str:
    return f"{now / before:.2f} times as long" if before > 0 else f"{units.duration(now)} instead of 0 s,"


def _with_text(part: _Part, here: Observed, loss: float) -> Cause:
    one = part.nodes[0] if len(part.nodes) == 1 and part.ranks else None
    return Cause(
        part.kind, part.seconds, part.seconds / here.step_s, part.stage, part.dimensions, part.ranks, part.nodes,
        part.link, part.evidence, one, tuple(_tries(part, one, here)),
    )  # fmt: skip


def _tries(part: _Part, node: int | None, here: Observed) -> Iterator[str]:
    """Suggested actions."""
    if node is not None and part.kind in ("network", "straggler", "data", "host"):
        yield f"repeat this size without node {node}: exclude it from the allocation (slurm.exclude)"
    match part.kind:
        case "network" | "straggler" | "compute":
            yield "run seatrial check JOB, which measures nodes and pairs of nodes and names the faulty part"
        case "data":
            yield "prepare the data on the nodes' own disks (seatrial data prepare), or set a larger data.cache_gb"
        case "host":
            yield "look for other processes on these nodes: seatrial check JOB --stage node"
        case "save":
            yield 'a larger checkpoint.every_steps (or "auto"), or a faster checkpoint.folder'
        case "bubble":
            yield "more microbatches: a larger train.global_batch, or a smaller train.microbatch"
            yield f'parallel.schedule = "interleaved-1f1b" or a pipeline smaller than {here.layout.pipeline}'
        case "small messages":
            yield "fewer, larger messages: a larger train.microbatch or global_batch"
            yield "smaller groups: move a factor of parallel.shard to parallel.replicate"
        case "communication":
            yield "smaller groups: move a factor of parallel.shard to parallel.replicate; seatrial plan JOB compares layouts"
            yield "more work between collectives: a larger train.global_batch"
        case "congestion":
            yield "use nodes below one leaf switch (slurm.switches, slurm.segment), then check the fabric's routing, PFC and ECN settings"
        case "variation":
            yield "look for other processes on the nodes: seatrial check JOB --stage node"
        case "unexplained":
            yield "more --steps and --repeats; seatrial plan JOB shows what this size should take"


def lines(causes: Sequence[Cause]) -> Iterator[tuple[str, str]]:
    """Pairs of label and text, largest cause first."""
    for n, cause in enumerate(causes):
        where = []
        if cause.dimensions:
            where.append(f"on {', '.join(cause.dimensions)}")
        if cause.nodes:
            some = "node" if len(cause.nodes) == 1 else "one of nodes" if cause.kind == "network" else "nodes"
            where.append(f"{some} {listed(cause.nodes)}")
        if cause.ranks and len(cause.ranks) <= 8:
            where.append(f"rank{'s' * (len(cause.ranks) > 1)} {listed(cause.ranks)}")
        if cause.link:
            where.append(cause.link)
        head = f"{cause.kind}{' ' * bool(where)}{', '.join(where)}"
        cost = f"{units.duration(cause.seconds)} of a step ({cause.share:.0%})"
        yield ("cause" if n == 0 else "also"), "; ".join((f"{head}: {cost}", *cause.evidence))
        for text in cause.tries if n == 0 else ():
            yield "try", text
        for gain in cause.gains if n == 0 else ():
            yield "plan", gain.words
