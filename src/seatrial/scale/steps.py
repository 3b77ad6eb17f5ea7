"""Step time breakdown at one size, from the records of the ranks in the run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.check.outputs.topology import Topology
from seatrial.record.collectives import Issued, of_a_step, read_collectives
from seatrial.record.connections import read_connections
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import Account, account
from seatrial.record.stages import read_generation
from seatrial.scale.cause import Cause, find_causes
from seatrial.scale.counters import NodeCounters, clocks_mhz, counters_of, leaf_switches, new_faults
from seatrial.scale.links import SlowLink, slow_link
from seatrial.scale.observed import Observed, steady_steps
from seatrial.scale.sizes import Size
from seatrial.scale.trial import Trial

_MOST_OF_IT = 0.5  # minimum share of a wait that a slow link must explain to be its cause
_OF_NETWORK = ("network", "communication", "small messages", "congestion")


@dataclass(frozen=True)
class Steps:
    """The steady steps of one run of a size."""

    account: Account
    observed: Observed
    slow_link: SlowLink | None  # `excess_s` per step
    collectives: Mapping[str, Issued]  # dimension -> per rank and step; empty if a rank has no record
    counters: tuple[NodeCounters, ...]  # by node


def steps_of(root: Path, size: Size, trials: Sequence[Trial]) -> Steps | None:
    """The steps of the run in `root` with the median speed among `trials`; None if its ranks' records are unusable."""
    known = sorted((t.figures.tokens_per_s, i) for i, t in enumerate(trials) if t.figures is not None)
    if not known:
        return None
    trial = trials[known[len(known) // 2][1]]
    assert trial.figures is not None
    folder = RunFolder(root / trial.folder)
    stages, _ = read_generation(folder, 1)
    found = account(stages, first_step=trial.figures.warm_up + 1)
    seconds = steady_steps(stages, trial.figures.warm_up)
    if found is None or seconds is None:
        return None
    job, ranks_per_node = size.job, size.gpus // size.nodes
    issued, _ = read_collectives(folder, 1)
    collectives = of_a_step(issued, found.first_step, found.last_step) if len(issued) == size.gpus else {}
    observed = Observed(
        seconds,
        job.layout,
        ranks_per_node,
        size.tokens_per_step,
        microbatches=job.microbatches,
        message_bytes={name: each.message_bytes for name, each in collectives.items()},
        calls={name: each.calls for name, each in collectives.items()},
        not_separated=found.not_separated,
    )
    # A measured run has no spares, so its nodes hold consecutive ranks.
    connections, _ = read_connections(folder, 1)
    link = slow_link(connections, {rank: rank // ranks_per_node for rank in range(size.gpus)})
    if link is not None:
        count = max(len(each.steps) for each in stages.values())
        link = replace(link, busy_s=link.busy_s / count, excess_s=link.excess_s / count)
    counters = counters_of(folder, connections, size.nodes, ranks_per_node, trial.hosts)
    observed = replace(observed, clocks_mhz=clocks_mhz(counters, stages, ranks_per_node))
    return Steps(found, observed, link, collectives, counters)


def causes(base: Steps, here: Steps, topology: Topology | None = None) -> tuple[Cause, ...]:
    """Why `here` is less efficient than `base`, largest cause first; network waits name the node with the slow link, if found."""
    faults = new_faults(base.counters, here.counters)
    switches = "" if topology is None else leaf_switches(topology, here.counters, faults or {})
    note = (f"leaf switches of congested ports: {switches}",) if switches else ()
    found = find_causes(base.observed, replace(here.observed, faults=faults))
    found = tuple(replace(c, evidence=c.evidence + note) if c.kind == "congestion" else c for c in found)
    return tuple(_with_link(cause, here) for cause in found)


def _with_link(cause: Cause, here: Steps) -> Cause:
    link = here.slow_link
    if link is None or cause.kind not in _OF_NETWORK or link.excess_s < _MOST_OF_IT * cause.seconds:
        return cause
    where = f"of node {link.node}" if link.peer is None else f"between nodes {link.node} and {link.peer}"
    note = (
        f"TCP connections {where} carry at most {_rate(link.bytes_per_s)} while they have data to send, "
        f"all others at least {_rate(link.others)}"
    )
    return replace(
        cause,
        kind="network",
        nodes=link.nodes,
        remove_node=link.node if link.peer is None else None,
        evidence=(note, *cause.evidence),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"
