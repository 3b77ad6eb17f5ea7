"""How a check went that measured: stages, rounds, who is to blame, and the rates that a planner reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from seatrial.check.findings import Target, Verdict
from seatrial.check.measured import of_nodes
from seatrial.check.report import Report

if TYPE_CHECKING:  # blame.py loads numpy, which a report does not need
    from seatrial.check.blame.blame import Blame
    from seatrial.check.blame.localise import Report as Localised
    from seatrial.check.blame.localise import Rounds
    from seatrial.check.live.conductor import LiveResult

ROUNDS = ("node", "pair", "group")


@dataclass(frozen=True)
class Blamed:
    """One culprit, for the outputs. `why` is its evidence; `instead` names what the evidence fits as well."""

    code: str  # "BLM003"
    kind: str  # "gpu", "nvlink", "nic", "node", "leaf"
    what: str  # "node7 mlx5_3/1", "leaf switch leaf-a"
    verdict: Verdict
    target: Target
    rail: int | None
    why: tuple[str, ...]
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class Course:
    """What was done to come to a report.

    `nodes` were asked; `seconds` are of wall time, by stage, "total" among them; `rounds` by kind of round. `unsettled`
    could be neither cleared nor found guilty. `measured` is JSON: rates, as docs/check.md lists them.
    """

    nodes: tuple[str, ...]
    rounds: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    blames: tuple[Blamed, ...] = ()
    unsettled: tuple[str, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    simulated: str = ""  # the file of a simulated cluster; empty where the nodes are real

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
        """(stage, how long and how many rounds), in their order; a stage that was not made is left out."""
        told = []
        for stage, rounds in zip(("node", "pair", "all"), ROUNDS, strict=True):
            words = []
            if stage in self.seconds:
                words.append(f"{self.seconds[stage]:.1f} s")
            if n := self.rounds.get(rounds, 0):
                words.append(f"{n} round{'s' * (n != 1)}")
            if words:
                told.append((stage, ", ".join(words)))
        return told


def of_live(result: LiveResult, nodes: Sequence[str]) -> Report:
    """The report of a check that measured `nodes`."""
    course = Course(
        tuple(nodes),
        _rounds(result.rounds),
        result.seconds,
        tuple(map(_blamed, result.blames)),
        result.unsettled,
        {**result.measured, **({"node": alone} if (alone := of_nodes(result.report.findings)) else {})},
    )
    return replace(result.report, course=course)


def of_simulated(found: Localised, nodes: Sequence[str], file: str, seconds: float) -> Report:
    """The report of a simulated cluster. `seconds` is our own time; the rates that it measured are invented, so none is told."""
    course = Course(
        tuple(nodes),
        _rounds(found.rounds),
        {"total": seconds},
        tuple(map(_blamed, found.blames)),
        found.unsettled,
        {},
        file,
    )
    return Report((), found.findings, course)


def _rounds(rounds: Rounds) -> dict[str, int]:
    return dict(zip(ROUNDS, (rounds.node, rounds.pair, rounds.group), strict=True))


def _blamed(blame: Blame) -> Blamed:
    return Blamed(
        blame.finding().code,
        blame.kind,
        str(blame),
        blame.verdict,
        blame.target,
        blame.rail,
        blame.why,
        blame.instead,
    )
