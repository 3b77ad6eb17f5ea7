"""The waterfall on a terminal: one line per part, each bar starting where the previous one ended."""

from __future__ import annotations

from seatrial.base import units
from seatrial.plan.report.waterfall import Bar, Kind, Waterfall

STYLES: dict[Kind, str] = {
    "peak": "dim",
    "kernels": "blue",
    "recomputation": "magenta",
    "communication": "yellow",
    "schedule": "cyan",
    "run": "red",
    "rest": "white",
    "result": "bold green",
}
_FULL, _PART = "█", "▐"
# Narrower bars are unreadable.
_LEAST_WIDTH = 12


def waterfall_lines(shown: Waterfall, width: int) -> list[str]:
    """A line per bar: name, share, time, and the bar itself if there is room for one."""
    names = max(len(b.name) for b in shown.bars)
    times = [seconds(b.seconds) for b in shown.bars]
    longest = max(map(len, times))
    room = width - names - longest - len("  -00.0 %    ") - 2
    lines = []
    for bar, time in zip(shown.bars, times, strict=True):
        line = f"  {bar.name:<{names}}  {bar.words:>7}  {time:>{longest}}"
        if room >= _LEAST_WIDTH:
            line += "  " + _drawn(bar, min(room, 60))
        lines.append(line.rstrip())
    return lines


def _drawn(bar: Bar, width: int) -> str:
    """Draw whole cells; a bar thinner than one is drawn as half a cell, so that none is invisible."""
    start, end = round(bar.low * width), round(bar.high * width)
    if end > start:
        return " " * start + _FULL * (end - start)
    return " " * min(start, width - 1) + _PART


def seconds(value: float) -> str:
    """Milliseconds below a second, two decimals up to a minute: parts of a step differ by little."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 60 else units.duration(value)
