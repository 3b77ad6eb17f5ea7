"""The clock of a node: whether it is synchronised, and its offset from the conductor's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.node.run_tool import Order, run_tools
from seatrial.hardware.clock import kernel_clock

_TIMEOUT_S = 2.0
_ENOUGH = 3  # clocks needed for a meaningful median
# From here on the logs of two nodes cannot be merged by time.
SUSPECT_S = 1.0
# MUNGE_DEFAULT_TTL of munge (src/libcommon/munge_defs.h): from here on Slurm's credentials are rejected.
BROKEN_S = 300.0
_SOURCE = "suspect from 1 s: chosen here; from 300 s munge rejects Slurm's credentials (MUNGE_DEFAULT_TTL)"


def read_clock() -> dict[str, Any]:
    """Whether this clock is synchronised, by the kernel and by the time services. Seconds; None is unknown."""
    chrony, systemd = run_tools(
        [
            Order("chronyc -c tracking", ("chronyc", "-c", "tracking"), _TIMEOUT_S),
            Order("timedatectl", ("timedatectl", "show", "-p", "NTPSynchronized", "--value"), _TIMEOUT_S),
        ]
    )
    kernel = kernel_clock()
    return {
        "kernel": None if kernel is None else asdict(kernel),
        "chrony": parse_chrony(chrony.out) if chrony.ok else None,
        "timedatectl": {"yes": True, "no": False}.get(systemd.out.strip()) if systemd.ok else None,
        "no_answer": [r.facts() for r in (chrony, systemd) if r.ended not in ("ok", "absent")],
    }


def parse_chrony(text: str) -> dict[str, Any] | None:
    """Parse the output of `chronyc -c tracking`: 14 values and commas; None if it is something else."""
    parts = text.strip().split(",")
    if len(parts) != 14 or not re.fullmatch(r"-?[0-9.]+", parts[4]):
        return None
    return {"source": parts[1], "stratum": int(parts[2]), "offset_s": float(parts[4]), "leap": parts[13]}


def judge_clock(facts: Mapping[str, Any], node: str) -> Finding:
    """Whether the clock is synchronised. If not, it is suspect; in a container it may be impossible to know."""
    kernel, chrony, systemd = facts["kernel"], facts["chrony"], facts["timedatectl"]
    target = Target(node=node)
    entries = []
    if chrony is not None:
        entries.append(("chrony", chrony["leap"] != "Not synchronised"))
    if kernel is not None:
        entries.append(("the kernel", kernel["synchronised"]))
    if systemd is not None:
        entries.append(("timedatectl", systemd))
    if not entries:
        why = "neither adjtimex, chrony nor timedatectl is available"
        return Finding("NOD010", "UNJUDGED", target, f"clock: {why}", why_unjudged=why)
    who, kept = next(((w, k) for w, k in entries if k), entries[0])
    text = (
        f"clock synchronised, by {who}"
        if kept
        else f"clock not synchronised, by {', '.join(w for w, _ in entries)}"
    )
    offset = chrony["offset_s"] if chrony is not None else kernel["offset_s"] if kernel is not None else None
    verdict: Verdict = "PASS" if kept else "WARN"
    return Finding("NOD010", verdict, target, text, offset, "s off" if offset is not None else "")


def _short_time(seconds: float) -> str:
    """Format a time that may be very short: "12 µs", "4.0 s"."""
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    value = seconds / size
    return f"{value:.1f} {unit}" if value < 10 else f"{value:,.0f} {unit}"


@dataclass(frozen=True)
class Offset:
    """How far a clock is ahead of ours, in seconds, and the error bound: half of the shortest round trip."""

    offset_s: float
    error_s: float


def offset_of(trips: Sequence[tuple[float, float, float]]) -> Offset | None:
    """The offset by the shortest round trip (sent, the node's time.time() in its pong, received); None without any.

    Cristian's algorithm: the answer was written between sending and receiving, so half of the trip bounds the error
    (Cristian 1989, Probabilistic clock synchronization).
    """
    good = [(received - sent, sent, there) for sent, there, received in trips if received >= sent]
    if not good:
        return None
    trip, sent, there = min(good)
    return Offset(there - (sent + trip / 2), trip / 2)


def judge_offsets(offsets: Mapping[str, Offset | None]) -> list[Finding]:
    """One finding per node, against the median of three or more, else against the clock of the conductor.

    None is a node that has not answered in time: UNJUDGED.
    """
    known = [o.offset_s for o in offsets.values() if o is not None]
    middle, whose = (median(known), "the others") if len(known) >= _ENOUGH else (0.0, "the conductor")
    found = []
    for node, offset in offsets.items():
        target = Target(node=node)
        if offset is None:
            why = "no round trip to its agent, so its clock offset is unknown"
            found.append(Finding("NOD011", "UNJUDGED", target, why, why_unjudged=why))
            continue
        off = offset.offset_s - middle
        least = max(0.0, abs(off) - offset.error_s)  # the offset that is certain
        verdict: Verdict = "FAIL" if least >= BROKEN_S else "WARN" if least >= SUSPECT_S else "PASS"
        text = f"clock {_short_time(abs(off))} {'ahead of' if off > 0 else 'behind'} {whose}, ± {_short_time(offset.error_s)}"
        expected = Expected(f"within {SUSPECT_S:g} s", "s", _SOURCE)
        # Not "s": a clock ahead of its siblings' is not slower than theirs.
        found.append(Finding("NOD011", verdict, target, text, round(off, 6), "s off", expected))
    return found
