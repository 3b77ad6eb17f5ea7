"""What the network's judges share: the limits, what is known beside an output, and damage as a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seatrial.check.findings import Finding, Target, Verdict
from seatrial.check.floors import nics, shares
from seatrial.check.tool import Context

BROKEN = shares().broken
SUSPECT = shares().suspect
TARGET_SOURCE = f"reference target: broken below {BROKEN:.0%} of the rate, suspect below {SUSPECT:.0%}"

# Rates of one port, one direction.
FABRIC_RATES_GBIT_S = tuple(sorted({nic.gbit_s for nic in nics()}))


@dataclass(frozen=True)
class NetworkContext(Context):
    """`Context` and what is known of the node's ports from elsewhere."""

    rates_gbit_s: Mapping[str, float] = field(
        default_factory=dict
    )  # "mlx5_0" -> rate of the port, one direction
    port_gbit_s: float | None = None  # that every fabric port must have, by the user's word
    fabric_ports: int | None = None  # that the node must have, by the plan or its siblings


def port_rate(context: Context, device: str | None) -> tuple[float, str] | None:
    """The rate of a device's port in Gb/s, one direction, and who says so; None if nobody does."""
    if not isinstance(context, NetworkContext):
        return None
    if context.port_gbit_s is not None:
        return context.port_gbit_s, "--port-gbit-s"
    if device is not None and device in context.rates_gbit_s:
        return context.rates_gbit_s[device], f"rate of {device} as its port shows it"
    return None


def banded(ratio: float) -> Verdict:
    """The verdict on a share of what is expected."""
    if ratio < BROKEN:
        return "FAIL"
    return "WARN" if ratio < SUSPECT else "PASS"


def damaged(problems: Sequence[tuple[str, int | None]], file: str, tool: str) -> list[Finding]:
    """One finding for all that is torn in a file; none where nothing is. `problems`: what, and in which line."""
    if not problems:
        return []
    told = "; ".join(dict.fromkeys(p for p, _ in problems[:4]))
    if len(problems) > 4:
        told += f"; and {len(problems) - 4} more"
    return [
        Finding(
            "FILE003",
            "UNJUDGED",
            Target(),
            f"{tool}: {told}",
            why_unjudged="the output is damaged, so what is missing in it is not known",
            evidence=tuple(at(file, line) for _, line in problems[:4]),
        )
    ]


def at(file: str, line: int | None) -> str:
    """ "FILE:LINE"."""
    return file if line is None else f"{file}:{line}"


def gbit(value: float) -> str:
    """392.34 -> "392.3", 400.0 -> "400"."""
    return f"{value:.1f}".removesuffix(".0")
