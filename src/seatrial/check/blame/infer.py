"""Infers the state of ports, leaf switches and nodes from measured pairs. Pure: rounds in, states out.

The reasoning rests on one fact: interference only ever makes a flow slower. So one good reading clears everything on
its path, and a slow one makes all of it suspect. A port is blamed by slow readings with partners that other readings
have cleared: by at least three, and by as many as needed to rule out that disturbed flows meet in one port by chance
(`PairRounds._needed`); how often flows are disturbed is measured between good ends. A leaf switch is blamed if at
least three quarters of its ports (at least three ports) never had a good reading; its ports are then judged by what the
others below it reach. Uplinks are blamed if traffic within the leaf is good and at least three quarters of the
traffic that leaves it is slow while all nodes send.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log

import numpy as np

from seatrial.check.blame.nodes import BROKEN, SUSPECT, Bools, Floats, Ints
from seatrial.check.blame.rounds import Round

MOST = 0.75  # share of a leaf's ports, its flows, a node's rails that blames the leaf, its uplinks, the node
FEWEST = 3  # and the minimum number of them
PROOF = 3  # minimum number of slow readings with good partners
_CHANCE = 1e-3  # ports of a cluster that may be blamed by chance in one check, on average
_READ = 3  # readings of a port before its leaf is judged by it
_UPPER = 75  # percentile: the usual value if a minority is worse


@dataclass(frozen=True)
class Thresholds:
    """Thresholds for a reading of a pair.

    Between ports of a fabric 92 and 80 % of their rate. Hosts that share one machine's processors vary more and get
    lower thresholds; with `shared`, no all-reduce is judged by its speed.
    """

    suspect: float = SUSPECT
    broken: float = BROKEN
    shared: bool = False


@dataclass(frozen=True)
class Readings:
    """Results of a round of pairs. NaN: no reading, 0: nothing got through. busbw in GB/s as in nccl-tests."""

    gbit_s: Floats  # (P, R), one direction
    busbw: Floats  # (P,)
    answered: Bools  # (P, 2)


@dataclass(frozen=True)
class Layout:
    """What is known of the cluster before pairs are measured: N nodes, R rails, G GPUs per node.

    `leaves` has the number of the leaf of each port. Where no topology is known, all ports of a rail count as one leaf.
    `rate_gbit_s` is the ports' nominal rate; None takes the median of the ports' best readings for 97 % of it, which is
    what healthy links read (95 to 99 %, published measurements). `gpus` is the number of ranks per node in an all-reduce, 1 for
    a node without GPUs.
    """

    leaves: Ints
    usable: Bools  # (N, R), ports that are up
    excused: Bools  # (N,), nodes whose slow collectives are explained by their own findings
    gpus: int
    rate_gbit_s: float | None
    thresholds: Thresholds = Thresholds()


@dataclass
class State:
    """The knowledge after some rounds. Ports are (N, R)."""

    share: Floats  # the best reading as a share of the nominal rate; NaN without one
    good: Bools
    proof: Ints  # number of slow readings with a good partner
    level: dict[int, float]  # slow leaf -> the share that its ports reach
    uplinks: dict[
        int, tuple[float, tuple[int, ...]]
    ]  # leaf -> the share that flows reach, other leaves that fit as well
    hints: set[int]  # leaves with suspect uplinks
    together: Bools  # (N,), whether a node's all-reduce was good
    together_share: Floats  # the best all-reduce of a node as a share of what was possible
    together_proof: Ints
    needed: int  # slow readings that count as proof here
    rate: float = 0.0
    reading: float = 0.97  # the usual share
    inside: float = np.nan  # GB/s busbw that pairs with good rails reach


@dataclass
class PairRounds:
    """All rounds so far."""

    layout: Layout
    rounds: list[tuple[Round, Readings]] = field(default_factory=list)

    def add(self, round_: Round, readings: Readings) -> None:
        """Add a round. Raises AssertionError if shapes do not match."""
        shape = round_.rails.shape
        assert readings.gbit_s.shape == shape, "a reading for every pair and rail"
        assert readings.busbw.shape == (shape[0],), "an all-reduce for every pair"
        self.rounds.append((round_, readings))

    def measured(self) -> set[tuple[int, int]]:
        """The pairs measured so far."""
        return {(int(a), int(b)) for r, _ in self.rounds for a, b in r.pairs}

    def initial(self) -> State:
        """The state if no pair was measured."""
        shape = self.layout.leaves.shape
        never = np.zeros(shape, dtype=np.int64)
        return State(
            share=np.full(shape, np.nan),
            good=np.zeros(shape, dtype=bool),
            proof=never,
            level={},
            uplinks={},
            hints=set(),
            together=np.ones(shape[0], dtype=bool),
            together_share=np.full(shape[0], np.nan),
            together_proof=never[:, 0] if shape[1] else np.zeros(shape[0], dtype=np.int64),
            needed=PROOF,
        )

    def state(self) -> State:
        """The state that follows from all rounds together."""
        a, b, share, loaded, rate = self._columns()
        suspect = self.layout.thresholds.suspect
        leaves, usable = self.layout.leaves, self.layout.usable
        rails = np.arange(leaves.shape[1])
        best, count = np.full(leaves.shape, np.nan), np.zeros(leaves.shape, dtype=np.int64)
        for end in (a, b):
            np.fmax.at(best, (end[:, None], rails), share)
            np.add.at(count, (end[:, None], rails), ~np.isnan(share))
        level = self._slow_leaves(best, count)
        levels = np.ones(leaves.max(initial=0) + 1)
        for leaf, value in level.items():
            levels[leaf] = value
        at = levels[leaves]
        good = usable & (np.nan_to_num(best) >= suspect * at)
        reach = np.minimum(at[a], at[b])
        slow = share < suspect * reach
        uplinks, hints = self._uplinks(a, b, share, slow, loaded, good)
        # Traffic over blamed uplinks proves nothing against a port.
        over = np.zeros(slow.shape, dtype=bool)
        blamed = [leaf for first, (_, others) in uplinks.items() for leaf in (first, *others)]
        for leaf in {*blamed, *hints}:
            over |= (leaves[a] == leaf) != (leaves[b] == leaf)
        proof = np.zeros(leaves.shape, dtype=np.int64)
        against = slow & ~over
        np.add.at(proof, (a[:, None], rails), against & good[b])
        np.add.at(proof, (b[:, None], rails), against & good[a])
        healthy = share[share >= suspect]
        usual = float(np.median(healthy)) if len(healthy) else 0.97
        # A slow flow between good ports over no suspect uplink was disturbed once. It does not bound the all-reduce.
        lasting = np.where(slow & good[a] & good[b] & ~over, usual, share)
        together, together_share, together_proof, inside = self._collectives(lasting, rate)
        clear = good[a] & good[b] & ~over & ~np.isnan(share)
        needed = self._needed(int((slow & clear).sum()), int(clear.sum()))
        return State(
            *(
                best,
                good,
                proof,
                level,
                uplinks,
                hints,
                together,
                together_share,
                together_proof,
                needed,
            ),
            rate=rate,
            reading=usual,
            inside=inside,
        )

    def _needed(self, slow: int, of: int) -> int:
        """Slow readings needed as proof, if `slow` of `of` readings between good ports were disturbed.

        k readings in a row are disturbed with probability p**k: k such that less than `_CHANCE` ports are expected.
        """
        ports = int(self.layout.usable.sum())
        chance = min(0.5, (slow + 1) / (of + 1))
        return max(PROOF, ceil(log(_CHANCE / max(ports, 1)) / log(chance))) if of >= ports / 2 else PROOF

    def _columns(self) -> tuple[Ints, Ints, Floats, Bools, float]:
        pairs = np.concatenate([r.pairs for r, _ in self.rounds])
        readings = np.concatenate([np.where(r.rails, x.gbit_s, np.nan) for r, x in self.rounds])
        loaded = np.concatenate([np.full(len(r.pairs), r.loaded) for r, _ in self.rounds])
        rate = self.layout.rate_gbit_s
        if rate is None:
            rate = self._usual_rate(pairs, readings)
        return pairs[:, 0], pairs[:, 1], readings / rate, loaded, rate

    def _usual_rate(self, pairs: Ints, readings: Floats) -> float:
        """The nominal rate if none is given: the median of the ports' best readings counts as 97 % of it."""
        best = np.full(self.layout.leaves.shape, np.nan)
        rails = np.arange(self.layout.leaves.shape[1])
        for end in (pairs[:, 0], pairs[:, 1]):
            np.fmax.at(best, (end[:, None], rails), readings)
        known = best[best > 0]
        return float(np.median(known)) / 0.97 if len(known) else 1.0

    def _slow_leaves(self, best: Floats, count: Ints) -> dict[int, float]:
        leaves, usable = self.layout.leaves, self.layout.usable
        tested = usable & (count >= _READ)
        size = leaves.max(initial=0) + 1
        of = np.bincount(leaves[tested], minlength=size)
        never = np.bincount(leaves[tested & (best < self.layout.thresholds.suspect)], minlength=size)
        found = {}
        for leaf in np.flatnonzero((never >= FEWEST) & (never >= MOST * np.maximum(of, 1))):
            found[int(leaf)] = float(np.percentile(best[tested & (leaves == leaf)], _UPPER))
        return found

    def _uplinks(
        self, a: Ints, b: Ints, share: Floats, slow: Bools, loaded: Bools, good: Bools
    ) -> tuple[dict[int, tuple[float, tuple[int, ...]]], set[int]]:
        leaves = self.layout.leaves
        counts = loaded[:, None] & (leaves[a] != leaves[b]) & good[a] & good[b] & ~np.isnan(share)
        row, rail = np.nonzero(counts)
        one, other = leaves[a][row, rail], leaves[b][row, rail]
        late, value = slow[row, rail], share[row, rail]
        size = leaves.max(initial=0) + 1
        rest = np.ones(len(row), dtype=bool)
        blamed: dict[int, tuple[float, tuple[int, ...]]] = {}
        hints: set[int] = set()
        while True:
            all_ = np.bincount(one[rest], minlength=size) + np.bincount(other[rest], minlength=size)
            bad = rest & late
            lates = np.bincount(one[bad], minlength=size) + np.bincount(other[bad], minlength=size)
            part = np.where(lates >= FEWEST, lates / np.maximum(all_, 1), 0.0)
            if not blamed:
                hints = {
                    int(leaf) for leaf in np.flatnonzero((part >= 0.5) | ((lates >= 2) & (lates == all_)))
                }
            worst = int(np.argmax(part)) if size else 0
            if not size or part[worst] < MOST:
                return blamed, hints - set(blamed)
            mine = bad & ((one == worst) | (other == worst))
            # A leaf that took part in exactly these flows fits as well.
            same = [
                int(leaf)
                for leaf in np.flatnonzero(part >= MOST)
                if leaf != worst and np.array_equal(mine, bad & ((one == leaf) | (other == leaf)))
            ]
            blamed[worst] = (float(np.median(value[mine])), tuple(same))
            rest &= ~((one == worst) | (other == worst))

    def _collectives(self, share: Floats, rate: float) -> tuple[Bools, Floats, Ints, float]:
        nodes = len(self.layout.leaves)
        pairs = np.concatenate([r.pairs for r, _ in self.rounds])
        busbw = np.concatenate([np.where(r.collective, x.busbw, np.nan) for r, x in self.rounds])
        rails = np.concatenate([np.where(r.rails, 1, 0) for r, _ in self.rounds])
        bound = np.full(len(pairs), np.inf)
        some = rails.any(axis=1) & ~np.isnan(share).all(axis=1)
        slowest = np.nanmin(np.where(np.isnan(share[some]), np.inf, share[some]), axis=1)
        # NCCL skips ports that are down: the others carry their traffic.
        up = self.layout.usable[pairs[:, 0]] & self.layout.usable[pairs[:, 1]]
        a_gpu = up[some].sum(axis=1) / self.layout.gpus
        bound[some] = nic_bound(slowest * rate * a_gpu, self.layout.gpus, 2)
        excused = self.layout.excused[pairs].any(axis=1)
        # What pairs with good rails reach is what their NVLinks allow.
        clear = np.zeros(len(pairs), dtype=bool)
        clear[some] = slowest >= self.layout.thresholds.suspect
        measured = ~excused & ~np.isnan(busbw)
        inside = busbw[measured & clear] if (measured & clear).any() else busbw[measured]
        # With few pairs half may be slow, and none is ever too fast.
        usually = float(np.percentile(inside, _UPPER)) if len(inside) else np.nan
        with np.errstate(invalid="ignore"):
            part = busbw / np.minimum(bound, usually)
        best = np.full(nodes, np.nan)
        for end in (0, 1):
            np.fmax.at(best, pairs[:, end], part)
        good = np.nan_to_num(best) >= SUSPECT
        proof = np.zeros(nodes, dtype=np.int64)
        slow = part < SUSPECT
        np.add.at(proof, pairs[:, 0], slow & good[pairs[:, 1]])
        np.add.at(proof, pairs[:, 1], slow & good[pairs[:, 0]])
        return good, best, proof, usually


def nic_bound(gbit_s: Floats | float, gpus: int, nodes: int) -> Floats:
    """The busbw in GB/s that `gbit_s` of NIC rate per GPU allow over k nodes: rate x (n-1)/(k-1), published measurements."""
    n = gpus * nodes
    return np.asarray(gbit_s) / 8 * (n - 1) / (nodes - 1)
