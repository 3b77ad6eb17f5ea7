"""Derive the suspected cause, one GPU, NVLink, NIC, node or leaf switch, from node findings and pairs. Pure.

The larger component is blamed where it explains the smaller ones: a leaf switch rather than its ports, a node rather
than its rails or its GPUs, an NVLink rather than its GPU's slow copies. Each is blamed once, with all its evidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from seatrial.check.blame.infer import FEWEST, MOST, Layout, State
from seatrial.check.blame.nodes import Bools, NodeStage
from seatrial.check.judging.check_run import Blamed
from seatrial.check.judging.findings import Finding, Target, Verdict

Kind = Literal["gpu", "nvlink", "nic", "node", "leaf"]

_CODES: dict[Kind, str] = {
    "gpu": "BLM001",
    "nvlink": "BLM002",
    "nic": "BLM003",
    "node": "BLM004",
    "leaf": "BLM005",
}
_NVLINK = ("MSR004", "MSR005", "MSR006", "NVL")
# These make a node's collectives slow, or exclude it from them: then the collectives are no further evidence.
_EXCUSES = ("GPU001", "MSR011", *_NVLINK)


@dataclass(frozen=True)
class Blame:
    """One culprit. What does not apply is None; `link` also if all links of the GPU are down and none is named.

    `leaf` None with `rail` set means all of that rail, if no topology is known. `instead` names leaf switches that fit
    the evidence as well.
    """

    kind: Kind
    node: str | None = None
    gpu: int | None = None
    link: int | None = None
    rail: int | None = None
    leaf: str | None = None
    verdict: Verdict = "FAIL"
    why: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    pci: str | None = None
    port: str | None = None

    @property
    def culprit(self) -> tuple[object, ...]:
        """The blamed part, for comparison."""
        return (self.kind, self.node, self.gpu, self.link, self.rail, self.leaf)

    def __str__(self) -> str:
        if self.kind == "leaf":
            return f"leaf switch {self.leaf}" if self.leaf else f"rail {self.rail}, all of it"
        return str(self.target)

    @property
    def target(self) -> Target:
        """The blamed part as a finding's target; a switch is in the field `peer`."""
        return Target(self.node, self.gpu, self.pci, self.link, self.port, self.leaf)

    def finding(self) -> Finding:
        """The blame as a finding, with its evidence in the message."""
        also = f"; equally likely: {' or '.join(self.instead)}" if self.instead else ""
        return Finding(
            _CODES[self.kind],
            self.verdict,
            self.target,
            f"{self}: {'; '.join(self.why)}{also}",
            evidence=self.why,
        )

    def record(self) -> Blamed:
        """The blame for a report."""
        code = _CODES[self.kind]
        return Blamed(
            *(code, self.kind, str(self), self.verdict, self.target, self.rail, self.why, self.instead)
        )


@dataclass(frozen=True)
class Case:
    """Everything the verdict is based on. `alive`: the nodes that still answered at the end."""

    stage: NodeStage
    findings: Sequence[Finding]
    layout: Layout
    leaf_names: Sequence[str | None]  # by the numbers of Layout.leaves
    state: State
    alive: Bools


def excused(stage: NodeStage, findings: Iterable[Finding]) -> Bools:
    """The nodes, (N,), whose slow collectives are explained by their own findings."""
    place = {name: i for i, name in enumerate(stage.names)}
    found = np.zeros(len(place), dtype=bool)
    for finding in findings:
        if finding.verdict in ("FAIL", "WARN") and finding.code.startswith(_EXCUSES):
            node = finding.target.node
            if node is not None and node in place:
                found[place[node]] = True
    return found


def blame(case: Case) -> list[Blame]:
    """The culprits, the widest first. Empty if there is none."""
    found: list[Blame] = []
    found += _leaves(case)
    nodes = list(_nodes(case))
    found += nodes
    whole = {b.node for b in nodes}
    found += [b for b in _ports(case) if b.node not in whole]
    dead = {case.stage.names[i] for i in np.flatnonzero(~case.alive)}
    common = _on_most_gpus(case)
    found += [b for b in _gpus(case) if b.node not in dead and b.node not in common]
    return found


def _on_most_gpus(case: Case) -> dict[str, list[str]]:
    """Node -> codes that nearly all its GPUs have: then the node is blamed."""
    on: dict[tuple[str, str], set[int]] = defaultdict(set)
    for f in case.findings:
        if f.verdict in ("FAIL", "WARN") and f.target.gpu is not None and f.target.node is not None:
            on[f.target.node, f.code].add(f.target.gpu)
    found: dict[str, list[str]] = defaultdict(list)
    for (node, code), gpus in sorted(on.items()):
        if len(gpus) >= FEWEST and len(gpus) >= MOST * len(case.stage.slots):
            found[node].append(code)
    return found


def _name(case: Case, leaf: int) -> tuple[str | None, int | None]:
    """The leaf's name, and its rail if it serves only one."""
    rails = np.flatnonzero((case.layout.leaves == leaf).any(axis=0))
    return case.leaf_names[leaf], int(rails[0]) if len(rails) == 1 else None


def _leaf(case: Case, leaf: int, share: float, why: str, instead: tuple[str, ...] = ()) -> Blame:
    name, rail = _name(case, leaf)
    verdict: Verdict = "FAIL" if share < case.layout.thresholds.broken else "WARN"
    return Blame("leaf", rail=rail, leaf=name, verdict=verdict, why=(why,), instead=instead)


def _down(case: Case) -> dict[int, int]:
    """Leaves with nearly all their ports down, and how many are."""
    leaves = case.layout.leaves
    heard = np.broadcast_to(case.stage.answered[:, None], leaves.shape)
    of = np.bincount(leaves[heard], minlength=len(case.leaf_names))
    down = np.bincount(leaves[heard & ~case.stage.port_up], minlength=len(case.leaf_names))
    return {
        int(leaf): int(down[leaf])
        for leaf in np.flatnonzero((down >= FEWEST) & (down >= MOST * np.maximum(of, 1)))
    }


def _leaves(case: Case) -> Iterator[Blame]:
    down = _down(case)
    short = {f.target.peer for f in case.findings if f.code == "TOP001" and f.verdict in ("FAIL", "WARN")}
    for leaf, count in down.items():
        yield _leaf(case, leaf, 0.0, f"{count} ports below it are down")
    for leaf, level in case.state.level.items():
        if leaf not in down:
            ports = int(((case.layout.leaves == leaf) & case.layout.usable).sum())
            yield _leaf(
                case,
                leaf,
                level,
                f"its {ports} ports reach {level:.0%} of their rate with any partner",
            )
    for leaf, (share, others) in case.state.uplinks.items():
        if leaf not in down and leaf not in case.state.level:
            why = f"flows that leave it reach {share:.0%} of the rate while all nodes send, those within it the full rate"
            # A leaf that lacks uplinks according to the topology is blamed before others that fit as well.
            first, *rest = sorted((leaf, *others), key=lambda o: _name(case, o)[0] not in short)
            instead = tuple(name for o in rest if (name := _name(case, o)[0]) is not None)
            yield _leaf(case, first, share, why, () if _name(case, first)[0] in short else instead)


def _bad_ports(case: Case) -> Bools:
    return case.layout.usable & ~case.state.good & (case.state.proof >= case.state.needed)


def _nodes(case: Case) -> Iterator[Blame]:
    bad, usable = _bad_ports(case), case.layout.usable
    common = _on_most_gpus(case)
    for node, name in enumerate(case.stage.names):
        if not case.alive[node]:
            when = "from the start" if not case.stage.answered[node] else "since the middle of the check"
            yield Blame("node", name, why=(f"does not answer {when}, asked twice",))
            continue
        why = []
        rails = int(bad[node].sum())
        if rails >= FEWEST and rails >= MOST * int(usable[node].sum()):
            share = float(np.nanmedian(case.state.share[node][bad[node]]))
            why.append(f"{rails} of its rails reach {share:.0%} of their rate with good partners")
        why += [f"all GPUs or nearly all have {code}" for code in common.get(name, ())]
        if not why and _only_together(case, node):
            share = float(case.state.together_share[node])
            why.append(
                f"its all-reduce with good partners reaches {share:.0%} of what its rails and its peers allow, "
                "while its rails and its NVLinks are good"
            )
        if why:
            yield Blame("node", name, why=tuple(why))


def _only_together(case: Case, node: int) -> bool:
    state = case.state
    return not (
        state.together[node]
        or state.together_proof[node] < state.needed
        or case.layout.excused[node]
        or _bad_ports(case)[node].any()
    )


def _ports(case: Case) -> Iterator[Blame]:
    bad = _bad_ports(case)
    place = {name: i for i, name in enumerate(case.stage.names)}
    rails = {device: rail for rail, device in enumerate(case.stage.devices)}
    why: dict[tuple[int, int], list[str]] = defaultdict(list)
    verdicts: dict[tuple[int, int], Verdict] = {}
    for node, rail in np.argwhere(bad):
        share = case.state.share[node, rail]
        times = case.state.proof[node, rail]
        text = (
            f"{share:.0%} of its rate at best, slow {times} times with good partners"
            if share
            else f"no data gets through it, tried {times} times with good partners"
        )
        why[int(node), int(rail)].append(text)
        verdicts[int(node), int(rail)] = "FAIL" if share < case.layout.thresholds.broken else "WARN"
    down = _down(case)
    for finding in case.findings:
        where = (place.get(finding.target.node or ""), rails.get(finding.target.port or ""))
        if finding.verdict != "FAIL" or where[0] is None or where[1] is None:
            continue
        if finding.code == "MSR009" and int(case.layout.leaves[where[0], where[1]]) in down:
            continue
        why[where[0], where[1]].append(finding.message)
        verdicts[where[0], where[1]] = "FAIL"
    for (node, rail), reasons in sorted(why.items()):
        if case.alive[node]:
            yield Blame(
                "nic",
                case.stage.names[node],
                rail=rail,
                verdict=verdicts[node, rail],
                why=tuple(reasons),
                port=case.stage.devices[rail],
            )


def _gpus(case: Case) -> Iterator[Blame]:
    on: dict[tuple[str, int], list[Finding]] = defaultdict(list)
    for finding in case.findings:
        target = finding.target
        if finding.verdict in ("FAIL", "WARN") and target.node is not None and target.gpu is not None:
            on[target.node, target.gpu].append(finding)
    for (node, gpu), found in sorted(on.items()):
        fabric = [f for f in found if f.code.startswith(_NVLINK) or f.target.link is not None]
        other = [f for f in found if f not in fabric]
        links = sorted({f.target.link for f in fabric if f.target.link is not None})
        pci = next((f.target.pci for f in found if f.target.pci), None)
        for kind, reasons in (("nvlink", fabric), ("gpu", other)):
            # A lost or damaged GPU takes its links with it: its slow copies are not the links' fault.
            if not reasons or (kind == "nvlink" and other and not links):
                continue
            worst: Verdict = "FAIL" if any(f.verdict == "FAIL" for f in reasons) else "WARN"
            why = tuple(f.message for f in reasons)
            if kind == "gpu":
                yield Blame("gpu", node, gpu, verdict=worst, why=why, pci=pci)
                continue
            named: list[int | None] = [*links] or [None]
            for link in named:
                yield Blame("nvlink", node, gpu, link, verdict=worst, why=why, pci=pci)


def suspects(layout: Layout, state: State, alive: Bools) -> tuple[Bools, Bools]:
    """Ports, (N, R), and nodes by their all-reduce, (N,), that are neither cleared nor blamed yet."""
    ports = layout.usable & alive[:, None] & ~state.good & (state.proof < state.needed)
    nodes = alive & ~layout.excused & ~state.together & (state.together_proof < state.needed)
    # A node with bad rails needs no further evidence.
    bad = layout.usable & ~state.good & (state.share < layout.thresholds.suspect)
    return ports, nodes & ~bad.any(axis=1)
