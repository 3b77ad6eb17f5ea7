"""Goodput of a run as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.record.view import RunView
from seatrial.ui.out import Pair

if TYPE_CHECKING:
    from seatrial.record.goodput import Goodput
    from seatrial.record.mtbf import Mtbf
    from seatrial.record.straggling import Straggling

_SHOWN = 5  # causes


def goodput_of(view: RunView, now: float, *, sample: bool = False) -> Goodput:
    """The goodput of the whole run; `sample`: with stragglers' excess time, which needs the ranks' records."""
    # numpy takes longer to import than the rest of a view.
    from seatrial.record.goodput import goodput
    from seatrial.record.straggling import straggling

    return goodput(view, now, straggling=straggling(view.folder, view.log) if sample else None)


def goodput_pairs(view: RunView, now: float) -> list[Pair]:
    """ETTR and the largest losses; empty before the first step."""
    if view.last is None:
        return []
    found = goodput_of(view, now)
    losses = sorted(((s, cause) for cause, s in found.seconds.items() if s > 0), reverse=True)
    words = [f"{cause.replace('_', ' ')} {units.duration(s)}" for s, cause in losses[:_SHOWN]]
    text = f"ETTR {percent(found.ettr)} of {units.duration(found.held_s)}: {', '.join(words)}"
    return [Pair("goodput", text)]


def percent(share: float | None) -> str:
    """A percentage with one decimal, or "unknown"."""
    return "unknown" if share is None else f"{100 * share:.1f} %"


def mtbf_words(found: Mtbf) -> str:
    """Mean with interval, or the known lower bound."""
    if found.low_s is None:
        return "unknown: nothing has run yet"
    if found.mean_s is None or found.high_s is None:
        return f"no failure in {units.duration(found.exposure_s)}: more than {units.duration(found.low_s)} (95 %)"
    return (
        f"{units.duration(found.mean_s)} (95 % interval {units.duration(found.low_s)} to {units.duration(found.high_s)}; "
        f"{found.failures} in {units.duration(found.exposure_s)})"
    )


def straggling_words(found: Straggling) -> str:
    """The stragglers' share of step time, and the sample it was measured on."""
    error = "" if found.error is None else f" (standard error {100 * found.error:.2f})"
    return (
        f"{100 * found.share:.2f} % of step time{error}, measured on {found.steps:,} of {found.of_steps:,} steps; "
        f"rank {found.rank} was the slowest in {found.rank_steps:,} of them"
    )
