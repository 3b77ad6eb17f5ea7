"""Record of a check that measured: stages, rounds, blames, and the rates that the planner reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from seatrial.check.judging.findings import Target, Verdict

ROUNDS = ("node", "pair", "group")


@dataclass(frozen=True)
class Blamed:
    """One culprit, for the outputs. `why` is the evidence; `instead` names other causes that fit it."""

    code: str  # "BLM003"
    kind: str  # "gpu", "nvlink", "nic", "node", "leaf"
    what: str  # "node7 mlx5_3/1", "leaf switch leaf-a"
    verdict: Verdict
    target: Target
    rail: int | None
    why: tuple[str, ...]
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckRun:
    """What was done to produce a report.

    `nodes` are the nodes that were asked; `seconds` is wall time by stage, including "total"; `rounds` is by kind of
    round. `unsettled` could be neither cleared nor blamed. `measured` is JSON: rates, as listed in docs/check.md.
    """

    nodes: tuple[str, ...]
    rounds: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    blames: tuple[Blamed, ...] = ()
    unsettled: tuple[str, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    simulated: str = ""  # file of the simulated cluster; empty if the nodes are real

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "simulated": self.simulated or None,
            "measured_nodes": list(self.nodes),
            "seconds": dict(self.seconds),
            "rounds": dict(self.rounds),
            "blames": [{**asdict(b), "why": list(b.why), "instead": list(b.instead)} for b in self.blames],
            "unsettled": list(self.unsettled),
            "measured": dict(self.measured),
        }

    def stages(self) -> list[tuple[str, str]]:
        """(stage, duration and number of rounds), in order; stages that did not run are omitted."""
        entries = []
        for stage, rounds in zip(("node", "pair", "all"), ROUNDS, strict=True):
            words = []
            if stage in self.seconds:
                words.append(f"{self.seconds[stage]:.1f} s")
            if n := self.rounds.get(rounds, 0):
                words.append(f"{n} round{'s' * (n != 1)}")
            if words:
                entries.append((stage, ", ".join(words)))
        return entries
