"""The check of a whole cluster: nodes by themselves, pairs in rounds, groups, and the suspected causes.

The rounds: one within the leaf switches, one between them with all nodes sending, one or two more of those if uplinks
are in doubt; then suspects with nodes known to be good, until each is cleared or blamed; then all-reduces over 4,
8, 16, ... all remaining nodes. Only the last kind grows with the number of nodes, logarithmically. Nothing here
measures: a `Bench` does, real or simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Protocol

import numpy as np

from seatrial.check.blame.blame import Blame, Case, blame, excused, suspects
from seatrial.check.blame.infer import Layout, PairRounds, Readings, State, Thresholds, nic_bound
from seatrial.check.blame.nodes import (
    SUSPECT,
    Bools,
    Floats,
    Ints,
    NodeStage,
    doubtful,
    judge_nodes,
    settle,
)
from seatrial.check.blame.rounds import (
    GroupRound,
    Round,
    across,
    blocks_of,
    group_sizes,
    groups,
    neighbours,
    with_good,
)
from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.outputs.topology import Topology, judge_topology

# Times that a doubtful node measures again, and as many times more if doubts remain; the median counts.
_AGAIN = 2
_MISSES = 2  # consecutive times that a node must fail to answer before it counts as dead
_LOADED = 3  # maximum number of rounds between leaves
_FEW = 4  # up to this many nodes all pairs are measured: with fewer pairs one end could be in all of them
_TRIES = 3  # for groups of one size
_EXTRA_ROUNDS = 8  # more rounds of pairs if hosts share a machine: a busy one disturbs many flows
_USUAL = Thresholds()


@dataclass(frozen=True)
class GroupReadings:
    """Results of a round of groups: busbw, (K,), GB/s, NaN: none; nodes that answered, (N,), True if not asked."""

    busbw: Floats
    answered: Bools


class Bench(Protocol):
    """The measuring backend. Nodes are given by their position."""

    def nodes(self, which: Ints) -> NodeStage:
        """Run the node stage on these nodes; rows in this order."""
        ...

    def pairs(self, round_: Round) -> Readings:
        """One round of pairs."""
        ...

    def groups(self, round_: GroupRound) -> GroupReadings:
        """One round of all-reduces."""
        ...

    def answer(self, which: Ints) -> Bools:
        """Whether each of these nodes answers now; nothing is measured."""
        ...


@dataclass(frozen=True)
class Rounds:
    """How much was measured: node stages, rounds of pairs, rounds of groups."""

    node: int
    pair: int
    group: int


@dataclass(frozen=True)
class Report:
    """The result of a check. `findings` are all findings, those of the blames last."""

    findings: tuple[Finding, ...]
    blames: tuple[Blame, ...]
    rounds: Rounds
    unsettled: tuple[str, ...]  # suspects that could be neither cleared nor blamed
    # The knowledge at the end; None if no pair was measured.
    case: Case | None = field(default=None, compare=False)


def most_pair_rounds(nodes: int) -> int:
    """Upper limit on the rounds of pairs.

    With few nodes few readings are clear, so that more of the others are needed as proof.
    """
    return _LOADED + 4 + ceil(log2(max(nodes, 2))) + (_FEW if nodes <= _FEW else 0)


def localise(
    bench: Bench,
    names: Sequence[str],
    topology: Topology | None = None,
    rate_gbit_s: float | None = None,
    *,
    thresholds: Thresholds = _USUAL,
    stages: Sequence[str] = ("node", "pair", "all"),
) -> Report:
    """Check the nodes `names` on `bench`. `rate_gbit_s` is the nominal rate of the fabric's ports; None if unknown.

    `stages` without "pair" and "all" measures no pairs, without "all" no groups. The node stage always runs, for the
    nodes' inventory; without "node" its measurements are not judged.
    """
    return _Check(bench, names, topology, rate_gbit_s, thresholds, frozenset(stages)).run()


@dataclass
class _Check:
    bench: Bench
    names: Sequence[str]
    topology: Topology | None
    rate: float | None
    thresholds: Thresholds
    stages: frozenset[str]
    asked: int = 0
    group_rounds: int = 0
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> Report:
        self._node_stage()
        if self.stages & {"pair", "all"}:
            self._pair_stage()
        state = self.rounds.state() if self.rounds.rounds else None
        unsettled = self._unsettled(state) if state else []
        if state and "all" in self.stages:
            self._group_stage(state, self._blames(state))
        # Nodes may have died since they last answered.
        for _ in range(_MISSES):
            living = np.flatnonzero(self.alive)
            answered = np.ones(len(self.names), dtype=bool)
            answered[living] = self.bench.answer(living)
            self._record_answers(answered, living[~answered[living]])
        # Also without pairs: nodes that do not answer, and the nodes' own findings.
        state = state or self.rounds.initial()
        blames = self._blames(state)
        self.findings += [b.finding() for b in blames]
        return Report(
            tuple(self.findings),
            tuple(blames),
            Rounds(self.asked, len(self.rounds.rounds), self.group_rounds),
            tuple(unsettled),
            self._case(state) if self.rounds.rounds else None,
        )

    # -- nodes

    def _node_stage(self) -> None:
        everyone = np.arange(len(self.names))
        first = self.bench.nodes(everyone)
        self.asked = 1
        again: list[tuple[Ints, NodeStage]] = []
        self.stage = first
        for part in range(2):
            doubts = doubtful(self.stage)
            if part:  # a node that never answered is not asked again
                doubts = doubts[self.stage.answered[doubts]]
            if not len(doubts):
                break
            for _ in range(_AGAIN):
                again.append((doubts, self.bench.nodes(doubts)))
                self.asked += 1
            self.stage = settle(first, again)
        judged = judge_nodes(self.stage)
        # Nodes that do not answer are reported in any case.
        self.findings += judged if "node" in self.stages else [f for f in judged if f.code == "MSR011"]
        if self.topology is not None and self.topology.links:
            self.findings += judge_topology(self.topology)
        self.alive = self.stage.answered.copy()
        self.misses = np.zeros(len(self.names), dtype=np.int64)
        leaves, self.leaf_names = _number(self.topology, self.names, self.stage.devices)
        able = np.ones(len(self.names), dtype=bool) if self.stage.able is None else self.stage.able
        usable = self.stage.port_up & (self.alive & able)[:, None]
        excuses = excused(self.stage, self.findings)
        if self.thresholds.shared:
            excuses[:] = True
        ranks = max(1, len(self.stage.slots))
        self.able = able
        self.layout = Layout(leaves, usable, excuses, ranks, self.rate, self.thresholds)
        self.whole: Bools = np.logical_and(self.stage.present.all(axis=1), able)
        self.blocks = blocks_of(leaves)
        self.rounds = PairRounds(self.layout)

    # -- pairs

    def _pair_stage(self) -> None:
        if self._measurable().size < 2:
            return
        self._measure_pairs("neighbours", neighbours(self.blocks, self._measurable()), loaded=False)
        for variant in range(_LOADED):
            living = self._measurable()
            many = len(np.unique(self.blocks[living])) > 1
            pairs = (
                across(self.blocks, living, variant) if many else neighbours(self.blocks, living, variant + 1)
            )
            self._measure_pairs("across", pairs, loaded=many)
            state = self.rounds.state()
            # A second round must confirm what one round shows about uplinks.
            if not (state.hints or (state.uplinks and variant == 0) or len(living) <= _FEW):
                break
        most = most_pair_rounds(len(self.names)) + (_EXTRA_ROUNDS if self.thresholds.shared else 0)
        for variant in range(most - len(self.rounds.rounds)):
            state = self.rounds.state()
            suspected, good = self._suspected(state)
            if not suspected.any():
                return
            self._measure_pairs(
                "suspects",
                with_good(suspected, good, self.layout.leaves, self.rounds.measured(), variant),
                loaded=False,
            )

    def _measurable(self) -> Ints:
        return np.flatnonzero(self.alive & self.able)

    def _suspected(self, state: State) -> tuple[Bools, Bools]:
        """Suspected and cleared, (N, R + 2): by rail, by all-reduce, by a missing answer."""
        ports, nodes = suspects(self.layout, state, self.alive)
        silent: Bools = np.logical_and(self.alive, self.misses > 0)
        suspected: Bools = np.column_stack([ports, nodes, silent])
        good: Bools = np.column_stack([state.good, state.together, ~silent])
        able = (self.alive & self.able)[:, None]
        return np.logical_and(suspected, able), np.logical_and(good, able)

    def _measure_pairs(self, purpose: str, pairs: Ints, *, loaded: bool) -> None:
        if not len(pairs):
            return
        a, b = pairs[:, 0], pairs[:, 1]
        rails = self.layout.usable[a] & self.layout.usable[b]
        together = self.whole[a] & self.whole[b]
        if self.thresholds.shared and self.rounds.rounds:
            together[:] = False  # measured once: nothing is judged by it
        round_ = Round(len(self.rounds.rounds) + 1, purpose, pairs, rails, together, loaded)
        readings = self.bench.pairs(round_)
        self.rounds.add(round_, readings)
        answered = np.ones(len(self.names), dtype=bool)
        answered[pairs] = readings.answered
        self._record_answers(answered, pairs.reshape(-1))

    def _record_answers(self, answered: Bools, asked: Ints) -> None:
        self.misses[asked] = np.where(answered[asked], 0, self.misses[asked] + 1)
        gone = self.alive & (self.misses >= _MISSES)
        for node in np.flatnonzero(gone):
            name = self.names[int(node)]
            self.findings.append(
                Finding("MSR011", "FAIL", Target(node=name), f"{name} stopped responding, asked twice")
            )
        self.alive &= ~gone

    def _unsettled(self, state: State) -> list[str]:
        suspected, _ = self._suspected(state)
        left = []
        for node in map(int, np.flatnonzero(suspected.any(axis=1))):
            rails = [d for d, bad in zip(self.stage.devices, suspected[node], strict=False) if bad]
            left.append(f"{self.names[node]} {' '.join(rails)}".strip())
            self.findings.append(self._unsettled_finding(node, left[-1], state, suspected[node]))
        return left

    def _unsettled_finding(self, node: int, what: str, state: State, suspected: Bools) -> Finding:
        """Slow rails are a fact, although the culprit could be the other end; without a reading nothing is known."""
        rails = suspected[: len(self.stage.devices)]
        shares = state.share[node][rails]
        why = "no known-good node was left to pair it with, or its readings are inconsistent"
        target = Target(node=self.names[node])
        if np.isnan(shares).all():
            text = f"{what}: no reading, or slow in the all-reduce only"
            return Finding("PAI001", "UNJUDGED", target, text, why_unjudged=why)
        share = float(np.nanmin(shares))
        if self.thresholds.shared:
            why = "the hosts share a machine that was too busy for consistent readings"
            text = f"{what}: {share:.0%} of the others' rate at best"
            return Finding("PAI001", "UNJUDGED", target, text, share, why_unjudged=why)
        text = f"{what}: {share:.0%} of the rate at best, and it is undecided which end is at fault: {why}"
        source = "the project's reference targets"
        expected = Expected(self.thresholds.suspect, "of the rate", source, "one direction")
        verdict: Verdict = "FAIL" if share < self.thresholds.broken else "WARN"
        return Finding("PAI001", verdict, target, text, share, "", expected)

    def _case(self, state: State) -> Case:
        return Case(self.stage, self.findings, self.layout, self.leaf_names, state, self.alive)

    def _blames(self, state: State) -> list[Blame]:
        return blame(self._case(state))

    # -- groups

    def _group_stage(self, state: State, blames: Sequence[Blame]) -> None:
        """All-reduces over 4, 8, ... all nodes that are not blamed; reports groups that are slow only together."""
        blamed = {b.node for b in blames}
        switches = {b.leaf or b.rail for b in blames if b.kind == "leaf"}
        below = [
            [(self.leaf_names[leaf] or rail) in switches for rail, leaf in enumerate(row)]
            for row in self.layout.leaves
        ]
        fit = (
            np.array([name not in blamed for name in self.names]) & self.whole & ~np.array(below).any(axis=1)
        )
        everyone = np.flatnonzero(self.alive & fit)
        order = everyone[np.argsort(self.blocks[everyone], kind="stable")]
        entries: list[set[int]] = []
        usual = 1.0  # share of the possible rate that groups of the previous size reached
        for size in group_sizes(len(order)):
            members = groups(order, size)
            possible = np.array([_possible(len(group), state, self.layout) for group in members])
            best = np.full(len(members), np.nan)
            for _ in range(_TRIES):
                wanted = 0.0 if self.thresholds.shared else SUSPECT * _usual(best, usual)
                open_ = [k for k in range(len(members)) if not best[k] >= wanted]
                if not open_:
                    break
                asked = tuple(members[k][self.alive[members[k]]] for k in open_)
                self.group_rounds += 1
                readings = self.bench.groups(GroupRound(self.group_rounds, size, asked))
                best[open_] = np.fmax(best[open_], readings.busbw / possible[open_])
                self._record_answers(readings.answered, np.concatenate(asked))
            reference = _usual(best, usual)
            for k, group in enumerate(members):
                nodes = set(map(int, group))
                if np.isnan(best[k]) and self.alive[group].sum() > 1:
                    self.findings.append(_no_group([self.names[int(n)] for n in group]))
                # Hosts that share processors get slower the more they are, whatever their links do.
                slow = best[k] < SUSPECT * reference and not self.thresholds.shared
                if slow and not any(t <= nodes for t in entries):
                    entries.append(nodes)
                    names = [self.names[int(n)] for n in group]
                    self.findings.append(_slow_group(names, best[k] * possible[k], reference * possible[k]))
            usual = reference


def _possible(size: int, state: State, layout: Layout) -> float:
    """The busbw that the NVLinks (as in pairs) and the rails allow over `size` nodes."""
    a_gpu = state.reading * state.rate * layout.leaves.shape[1] / layout.gpus
    return float(np.fmin(state.inside, nic_bound(a_gpu, layout.gpus, size)))


def _usual(best: Floats, before: float) -> float:
    """The share of the possible rate usual for a size: the median, or with fewer than three that of the size before."""
    measured = best[~np.isnan(best)]
    return float(np.median(measured)) if len(measured) >= 3 else before


def _no_group(names: list[str]) -> Finding:
    text = (
        f"the all-reduce of {len(names)} nodes, {names[0]} to {names[-1]}, gave no result in {_TRIES} tries"
    )
    return Finding(
        "GRP001", "UNJUDGED", Target(), text, why_unjudged="no result, although all of them responded"
    )


def _slow_group(names: list[str], measured: float, reference: float) -> Finding:
    text = f"{len(names)} nodes, {names[0]} to {names[-1]}, are slow as a group: {measured:.0f} GB/s busbw"
    expected = Expected(
        SUSPECT * reference,
        "GB/s",
        "groups of the same size, or the bound of the rails",
        "",
        "all-reduce busbw",
    )
    return Finding("GRP001", "WARN", Target(), text, measured, "GB/s", expected, reference)


def _number(
    topology: Topology | None, names: Sequence[str], devices: Sequence[str]
) -> tuple[Ints, list[str | None]]:
    """Leaf numbers, (N, R), and leaf names. Ports of unknown leaf: one nameless leaf per rail."""
    numbers: dict[tuple[str | None, int], int] = {}
    table: list[list[str | None]] = (
        topology.table(names, [d.partition("/")[0] for d in devices])
        if topology is not None
        else [[None] * len(devices)] * len(names)
    )
    leaves = np.zeros((len(names), len(devices)), dtype=np.int64)
    for node, row in enumerate(table):
        for rail, name in enumerate(row):
            key = (name, -1) if name is not None else (None, rail)
            leaves[node, rail] = numbers.setdefault(key, len(numbers))
    return leaves, [name for name, _ in numbers]
