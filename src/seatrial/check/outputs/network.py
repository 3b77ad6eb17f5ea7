"""Shared by the judges of network outputs: limits, context from other sources, and damage as a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.judging.floors import nics, shares
from seatrial.check.outputs.tool import Context

BROKEN = shares().broken
SUSPECT = shares().suspect
TARGET_SOURCE = f"reference target: broken below {BROKEN:.0%} of the rate, suspect below {SUSPECT:.0%}"

# Rates of one port, one direction.
FABRIC_RATES_GBIT_S = tuple(sorted({nic.gbit_s for nic in nics()}))


@dataclass(frozen=True)
class NetworkContext(Context):
    """`Context` plus what other sources say about the node's ports."""

    # device -> rate of its port, one direction.
    rates_gbit_s: Mapping[str, float] = field(default_factory=dict)
    port_gbit_s: float | None = None  # rate that every fabric port must have, given by the user
    fabric_ports: int | None = None  # number that the node must have, by the plan or its siblings


def port_rate(context: Context, device: str | None) -> tuple[float, str] | None:
    """The rate of a device's port in Gb/s, one direction, and its source; None if unknown."""
    if not isinstance(context, NetworkContext):
        return None
    if context.port_gbit_s is not None:
        return context.port_gbit_s, "--port-gbit-s"
    if device is not None and device in context.rates_gbit_s:
        return context.rates_gbit_s[device], f"rate of {device} as reported by its port"
    return None


def damaged(problems: Sequence[tuple[str, int | None]], file: str, tool: str) -> list[Finding]:
    """One finding for all damage in a file; none if there is no damage. `problems`: description and line of each."""
    if not problems:
        return []
    text = "; ".join(dict.fromkeys(p for p, _ in problems[:4]))
    if len(problems) > 4:
        text += f"; and {len(problems) - 4} more"
    why = "the output is damaged, so its missing parts are unknown"
    places = tuple(at(file, line) for _, line in problems[:4])
    return [Finding("FILE003", "UNJUDGED", Target(), f"{tool}: {text}", why_unjudged=why, evidence=places)]


def at(file: str, line: int | None) -> str:
    """A place as "FILE:LINE", or the file alone if there is no line."""
    return file if line is None else f"{file}:{line}"


def gbit(value: float) -> str:
    """392.34 -> "392.3", 400.0 -> "400"."""
    return f"{value:.1f}".removesuffix(".0")
