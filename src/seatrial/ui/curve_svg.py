"""Line charts over steps, such as loss and validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from seatrial.ui.svg import WIDTH, box, framed, line, text

_LEFT, _RIGHT, _TOP, _BODY = 70.0, 24.0, 48.0, 250.0
_TICKS = 5
Points = Sequence[tuple[int, float]]


def curve_svg(curves: Sequence[tuple[str, str, Points]], *, title: str, name: str) -> Element:
    """`curves`: (label, class, points by step), at least one of them with a point; values are finite."""
    points = [point for *_, found in curves for point in found]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    span, height = max(1, last - first), (high - low) or 1.0

    def x(step: float) -> float:
        return _LEFT + (step - first) / span * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / height * _BODY

    parts = []
    for i in range(_TICKS):
        value, step = low + i / (_TICKS - 1) * height, first + i / (_TICKS - 1) * (last - first)
        parts.append(line([(_LEFT, y(value)), (WIDTH - _RIGHT, y(value))], "st-grid"))
        parts.append(text(_LEFT - 8, y(value) + 4, f"{value:.4g}", "st-soft st-num", "end"))
        anchor = "end" if i == _TICKS - 1 else "middle" if i else ""
        parts.append(text(x(step), _TOP + _BODY + 20, f"{step:,.0f}", "st-soft st-num", anchor))
    at = _LEFT
    for label, kind, found in curves:
        if not found:
            continue
        parts.append(box(at, _TOP + _BODY + 32, 11, 11, kind, "", 2))
        parts.append(text(at + 17, _TOP + _BODY + 42, label, "st-soft"))
        at += 30 + 8 * len(label)
        if len(found) == 1:
            parts.append(box(x(found[0][0]) - 3, y(found[0][1]) - 3, 6, 6, kind, f"{found[0][1]:.4f}", 3))
        parts.append(line([(x(step), y(value)) for step, value in found], kind, width=2))
    ends = [f"{label} from {found[0][1]:.4f} to {found[-1][1]:.4f}" for label, _, found in curves if found]
    sentence = f"Steps {first:,} to {last:,}: {'; '.join(ends)}."
    return framed(parts, height=_TOP + _BODY + 58, title=title, sentence=sentence, name=name, alone=False)
