"""Efficiency over the number of GPUs as SVG: weak and strong scaling, told apart by colour, dashes and marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from seatrial.plan.scaling import Point, Scaling
from seatrial.ui.svg import TITLE, box, framed, line, shortened, text

WIDTH, HEIGHT = 960.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 150.0, 52.0, 62.0
_LOOKS: dict[str, tuple[str, str]] = {
    "weak scaling": ("kernels", ""),
    "strong scaling": ("communication", "6 4"),
    "best layouts": ("result", "2 3"),
}


def scaling_svg(scalings: Sequence[Scaling], *, title: str, name: str = "scaling", alone: bool = True) -> str:
    """Tokens/s/GPU over that of the first point, on a logarithmic axis of GPUs. A size that cannot be is marked with a cross."""
    sizes = sorted({p.gpus for s in scalings for p in s.points})
    if not sizes:
        raise ValueError("no points to draw")
    most = max([1.0, *(p.efficiency for s in scalings for p in s.known if p.efficiency is not None)])
    top = math.ceil(most * 10) / 10 if most > 1.02 else 1.0
    frame = _Frame(math.log2(sizes[0]), math.log2(sizes[-1]), top)
    parts = [text(16, 28, shortened(title, TITLE), "st-title"), *_axes(frame, sizes)]
    if any(p.efficiency is None for s in scalings for p in s.points):
        told = "crosses: sizes that cannot be, or are not known"
        parts.append(text(WIDTH - _RIGHT, HEIGHT - 18, told, "st-soft", "end"))
    ends: list[float] = []
    for shown in scalings:
        parts += _line(frame, shown, ends)
    return framed(
        parts, width=WIDTH, height=HEIGHT, title=title, sentence=_sentence(scalings), name=name, alone=alone
    )


class _Frame:
    """Where figures stand in the picture."""

    def __init__(self, low: float, high: float, top: float) -> None:
        self.low, self.high, self.top = low, max(high, low + 1), top

    def x(self, gpus: int) -> float:
        share = (math.log2(gpus) - self.low) / (self.high - self.low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, efficiency: float) -> float:
        return HEIGHT - _BOTTOM - efficiency / self.top * (HEIGHT - _TOP - _BOTTOM)


def _axes(frame: _Frame, sizes: Sequence[int]) -> list[str]:
    parts = []
    for i in range(0, round(frame.top * 10) + 1, 2):
        y = frame.y(i / 10)
        parts.append(line(_LEFT, y, WIDTH - _RIGHT, y, "st-grid"))
        parts.append(text(_LEFT - 8, y + 4, f"{i * 10} %", "st-soft st-num", "end"))
    last = -math.inf
    for gpus in sizes:
        # Sizes that stand too near each other for both numbers: the first is told.
        if frame.x(gpus) - last >= 34:
            parts.append(text(frame.x(gpus), HEIGHT - _BOTTOM + 18, f"{gpus:,}", "st-soft st-num", "middle"))
            last = frame.x(gpus)
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(text(middle, HEIGHT - 18, "GPUs", "st-soft", "middle"))
    return parts


def _line(frame: _Frame, shown: Scaling, ends: list[float]) -> list[str]:
    kind, dashes = _LOOKS[shown.name]
    parts = []
    known = shown.known
    places = [(frame.x(p.gpus), frame.y(p.efficiency)) for p in known if p.efficiency is not None]
    if len(places) > 1:
        course = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        cut = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(
            f'<polyline points="{course}" class="st-{kind}" style="fill:none" stroke-width="2.2"{cut}/>'
        )
    for (x, y), point in zip(places, known, strict=True):
        parts.append(
            box(x - 4, y - 4, 8, 8, f"st-{kind}", _hint(shown, point), 4 if shown.mode == "weak" else 0)
        )
    for point in shown.points:
        if point.efficiency is None:
            parts.append(_cross(frame.x(point.gpus), frame.y(0), shown, point))
    if places:
        x, y = places[-1]
        # Two lines that end at the same height are told one below the other.
        while any(abs(y - other) < 17 for other in ends):
            y += 17
        ends.append(y)
        parts.append(text(x + 12, y + 4, shown.name))
    return parts


def _cross(x: float, y: float, shown: Scaling, point: Point) -> str:
    kind, _ = _LOOKS[shown.name]
    y -= 7 + 13 * list(_LOOKS).index(shown.name)
    hint = escape(_hint(shown, point))
    return (
        f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" class="st-{kind}" stroke-width="2" style="fill:none">'
        f"<title>{hint}</title></path>"
    )


def _hint(shown: Scaling, point: Point) -> str:
    if point.efficiency is None:
        return f"{shown.name}, {point.gpus} GPUs: {point.why_not}"
    return f"{shown.name}, {point.gpus} GPUs: {point.efficiency * 100:.0f} %"


def _sentence(scalings: Sequence[Scaling]) -> str:
    told = []
    for shown in scalings:
        if shown.known:
            first, last = shown.known[0], shown.known[-1]
            told.append(
                f"{shown.name} from {first.gpus} to {last.gpus} GPUs keeps {(last.efficiency or 0) * 100:.0f} % of the "
                "first point's tokens/s/GPU"
            )
        else:
            told.append(f"{shown.name}: not known at any size")
    return "; ".join(told) + "."
