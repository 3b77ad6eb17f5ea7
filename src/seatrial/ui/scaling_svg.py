"""Efficiency over the number of GPUs as SVG: weak and strong scaling, distinguished by colour, dashes and marks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from seatrial.plan.search.scaling import Point, Scaling
from seatrial.ui.svg import WIDTH, box, framed, line, text

HEIGHT = 380.0
_TOP, _BOTTOM = 52.0, 62.0
_SIDES, _NARROW_SIDES = (64.0, 150.0), (48.0, 104.0)  # left of the curves for shares, right of them for names
_CAP, _LABEL = 5.0, 17.0  # half-width of an interval's caps; minimum distance of two labels
_LOOKS: dict[str, tuple[str, str]] = {
    "weak scaling": ("st-kernels", ""),
    "strong scaling": ("st-communication", "6 4"),
    "best layouts": ("st-result", "2 3"),
}


def scaling_svg(
    scalings: Sequence[Scaling], *, title: str, alone: bool = True, width: float = WIDTH
) -> Element:
    """Tokens/s/GPU relative to the first point, on a log axis of GPUs. An impossible size is marked with a cross."""
    sizes = sorted({p.gpus for s in scalings for p in s.points})
    if not sizes:
        raise ValueError("no points to draw")
    most = max([1.0, *(p.efficiency for s in scalings for p in s.known if p.efficiency is not None)])
    top = math.ceil(most * 10) / 10 if most > 1.02 else 1.0
    frame = Frame(math.log2(sizes[0]), math.log2(sizes[-1]), top, width)
    parts = [*axes(frame, sizes)]
    if any(p.efficiency is None for s in scalings for p in s.points):
        detail = "crosses: impossible or unknown"
        parts.append(text(width - 16, HEIGHT - 18, detail, "st-soft", "end"))
    ends: list[float] = []
    for shown in scalings:
        parts += _line(frame, shown, ends)
    sentence = _sentence(scalings)
    return framed(
        parts, height=HEIGHT, title=title, sentence=sentence, name="scaling", alone=alone, width=width
    )


class Frame:
    """Maps figures to picture coordinates."""

    def __init__(self, low: float, high: float, top: float, width: float = WIDTH) -> None:
        self.low, self.high, self.top = low, max(high, low + 1), top
        self.left, right = _SIDES if width >= WIDTH else _NARROW_SIDES
        self.right = width - right

    def x(self, gpus: float) -> float:
        """The x coordinate of a size."""
        share = (math.log2(gpus) - self.low) / (self.high - self.low)
        return self.left + share * (self.right - self.left)

    def y(self, efficiency: float) -> float:
        """The y coordinate of an efficiency, 1 for 100 %."""
        return HEIGHT - _BOTTOM - efficiency / self.top * (HEIGHT - _TOP - _BOTTOM)


def axes(frame: Frame, sizes: Sequence[int]) -> Iterator[Element]:
    """Grid and numbers: efficiency in per cent, sizes in GPUs."""
    for i in range(0, round(frame.top * 10) + 1, 2):
        y = frame.y(i / 10)
        yield line([(frame.left, y), (frame.right, y)], "st-grid")
        yield text(frame.left - 8, y + 4, f"{i * 10} %", "st-soft st-num", "end")
    last = -math.inf
    for gpus in sizes:
        # Of sizes too close together for both numbers only the first is labelled.
        if frame.x(gpus) - last >= 34:
            yield text(frame.x(gpus), HEIGHT - _BOTTOM + 18, f"{gpus:,}", "st-soft st-num", "middle")
            last = frame.x(gpus)
    yield text(frame.left, HEIGHT - 18, "GPUs", "st-soft")


@dataclass(frozen=True)
class Mark:
    """One efficiency, with its interval if it has one."""

    gpus: float
    value: float
    hint: str
    low: float = 0.0
    high: float = 0.0
    round: bool = True


def curve(
    frame: Frame, name: str, kind: str, dashes: str, marks: Sequence[Mark], ends: list[float]
) -> Iterator[Element]:
    """Marks with intervals, a line through them, and the name. `ends`: heights of the labels so far."""
    places = [(frame.x(mark.gpus), frame.y(mark.value)) for mark in marks]
    if len(places) > 1:
        yield line(places, kind, dashes, 2.2)
    for (x, y), mark in zip(places, marks, strict=True):
        if mark.low < mark.high:
            low, high, left, right = frame.y(max(mark.low, 0.0)), frame.y(mark.high), x - _CAP, x + _CAP
            bar = [(left, low), (right, low), (x, low), (x, high), (left, high), (right, high)]
            yield line(bar, kind, width=1.4, hint=mark.hint)
        yield box(x - 4, y - 4, 8, 8, kind, mark.hint, 4 if mark.round else 0)
    if places:
        x, y = places[-1]
        # Labels of curves that end at the same height are placed one below the other.
        while any(abs(y - other) < _LABEL for other in ends):
            y += _LABEL
        ends.append(y)
        yield text(min(x + 12, frame.right + 12), y + 4, name)


def _line(frame: Frame, shown: Scaling, ends: list[float]) -> Iterator[Element]:
    kind, dashes = _LOOKS[shown.name]
    marks = []
    for point in shown.points:
        hint = _hint(shown, point)
        if point.efficiency is not None:
            marks.append(Mark(point.gpus, point.efficiency, hint, round=shown.mode == "weak"))
        else:
            x, y = frame.x(point.gpus), frame.y(0) - 7 - 13 * list(_LOOKS).index(shown.name)
            cross = [(x - 4, y - 4), (x + 4, y + 4), (x, y), (x + 4, y - 4), (x - 4, y + 4)]
            yield line(cross, kind, width=2, hint=hint)
    yield from curve(frame, shown.name, kind, dashes, marks, ends)


def _hint(shown: Scaling, point: Point) -> str:
    if point.efficiency is None:
        return f"{shown.name}, {point.gpus} GPUs: {point.why_not}"
    return f"{shown.name}, {point.gpus} GPUs: {point.efficiency * 100:.0f} %"


def _sentence(scalings: Sequence[Scaling]) -> str:
    entries = []
    for shown in scalings:
        if shown.known:
            first, last = shown.known[0], shown.known[-1]
            entries.append(
                f"{shown.name} from {first.gpus} to {last.gpus} GPUs keeps {(last.efficiency or 0) * 100:.0f} % of the "
                "first point's tokens/s/GPU"
            )
        else:
            entries.append(f"{shown.name}: unknown at any size")
    return "; ".join(entries) + "."
