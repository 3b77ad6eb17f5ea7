"""Efficiency over the number of GPUs as SVG: weak and strong scaling, distinguished by colour, dashes and marks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from seatrial.plan.search.scaling import Point, Scaling
from seatrial.ui.svg import WIDTH, box, framed, line, text

HEIGHT = 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 150.0, 52.0, 62.0
_LOOKS: dict[str, tuple[str, str]] = {
    "weak scaling": ("st-kernels", ""),
    "strong scaling": ("st-communication", "6 4"),
    "best layouts": ("st-result", "2 3"),
}


def scaling_svg(scalings: Sequence[Scaling], *, title: str, alone: bool = True) -> Element:
    """Tokens/s/GPU relative to the first point, on a log axis of GPUs. An impossible size is marked with a cross."""
    sizes = sorted({p.gpus for s in scalings for p in s.points})
    if not sizes:
        raise ValueError("no points to draw")
    most = max([1.0, *(p.efficiency for s in scalings for p in s.known if p.efficiency is not None)])
    top = math.ceil(most * 10) / 10 if most > 1.02 else 1.0
    frame = Frame(math.log2(sizes[0]), math.log2(sizes[-1]), top)
    parts = [*axes(frame, sizes)]
    if any(p.efficiency is None for s in scalings for p in s.points):
        detail = "crosses: impossible or unknown"
        parts.append(text(WIDTH - _RIGHT, HEIGHT - 18, detail, "st-soft", "end"))
    ends: list[float] = []
    for shown in scalings:
        parts += _line(frame, shown, ends)
    return framed(
        parts, height=HEIGHT, title=title, sentence=_sentence(scalings), name="scaling", alone=alone
    )


class Frame:
    """Maps figures to picture coordinates."""

    def __init__(self, low: float, high: float, top: float) -> None:
        self.low, self.high, self.top = low, max(high, low + 1), top

    def x(self, gpus: float) -> float:
        """The place of a size."""
        share = (math.log2(gpus) - self.low) / (self.high - self.low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, efficiency: float) -> float:
        """The place of an efficiency, 1 for 100 %."""
        return HEIGHT - _BOTTOM - efficiency / self.top * (HEIGHT - _TOP - _BOTTOM)


def axes(frame: Frame, sizes: Sequence[int]) -> Iterator[Element]:
    """Grid and numbers: efficiency in per cent, sizes in GPUs."""
    for i in range(0, round(frame.top * 10) + 1, 2):
        y = frame.y(i / 10)
        yield line([(_LEFT, y), (WIDTH - _RIGHT, y)], "st-grid")
        yield text(_LEFT - 8, y + 4, f"{i * 10} %", "st-soft st-num", "end")
    last = -math.inf
    for gpus in sizes:
        # Of sizes too close together for both numbers only the first is labelled.
        if frame.x(gpus) - last >= 34:
            yield text(frame.x(gpus), HEIGHT - _BOTTOM + 18, f"{gpus:,}", "st-soft st-num", "middle")
            last = frame.x(gpus)
    yield text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 18, "GPUs", "st-soft", "middle")


def _line(frame: Frame, shown: Scaling, ends: list[float]) -> Iterator[Element]:
    kind, dashes = _LOOKS[shown.name]
    known = shown.known
    places = [(frame.x(p.gpus), frame.y(p.efficiency)) for p in known if p.efficiency is not None]
    if len(places) > 1:
        yield line(places, kind, dashes, 2.2)
    for (x, y), point in zip(places, known, strict=True):
        yield box(x - 4, y - 4, 8, 8, kind, _hint(shown, point), 4 if shown.mode == "weak" else 0)
    for point in shown.points:
        if point.efficiency is None:
            x, y = frame.x(point.gpus), frame.y(0) - 7 - 13 * list(_LOOKS).index(shown.name)
            cross = [(x - 4, y - 4), (x + 4, y + 4), (x, y), (x + 4, y - 4), (x - 4, y + 4)]
            yield line(cross, kind, width=2, hint=_hint(shown, point))
    if places:
        x, y = places[-1]
        # Labels of curves that end at the same height are placed one below the other.
        while any(abs(y - other) < 17 for other in ends):
            y += 17
        ends.append(y)
        yield text(x + 12, y + 4, shown.name)


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
