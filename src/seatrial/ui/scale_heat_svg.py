"""A heat map as SVG: own work of each rank minus that of its peers, as colour and number."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from seatrial.scale.heat import Heat
from seatrial.ui.svg import WIDTH, box, framed, text
from seatrial.ui.waterfall import seconds

_LEFT, _TOP, _ROW, _RIGHT = 100.0, 78.0, 18.0, 16.0
_LEAST = 0.03  # minimum share of a step for the full colour, so that noise stays pale
_PALEST, _DARKEST = 0.06, 0.5  # opacity: cells visible, numbers readable


def heat_svg(heat: Heat, step_s: float, *, title: str, name: str, alone: bool = True) -> Element:
    """Orange: slower than the peers; blue: faster. `name` makes ids unique if there are several on a page."""
    most = max(float(abs(heat.values).max()), _LEAST * step_s)
    wide = (WIDTH - _LEFT - _RIGHT) / len(heat.stages)
    legend = f"above (orange) or below (blue) the median of the peers; full colour: {seconds(most)}, {most / step_s:.0%} of a step"
    if heat.left_out:
        legend += f"; {heat.left_out} {heat.unit}s that deviate less are not shown"
    parts = [text(16, 49, legend, "st-soft")]
    parts += [
        text(_LEFT + (i + 0.5) * wide, _TOP - 8, stage, "st-soft", "middle")
        for i, stage in enumerate(heat.stages)
    ]
    for n, row in enumerate(heat.rows):
        y = _TOP + n * _ROW
        parts.append(text(_LEFT - 10, y + 13, f"{heat.unit} {row}", "st-soft st-num", "end"))
        for i, stage in enumerate(heat.stages):
            value = float(heat.values[n, i])
            signed = ("+" if value > 0 else "\N{MINUS SIGN}") + seconds(abs(value))
            kind = "st-run" if value > 0 else "st-kernels"
            cell = box(
                _LEFT + i * wide + 1, y + 1, wide - 2, _ROW - 2, kind, f"{heat.unit} {row}, {stage}: {signed}"
            )
            cell.set("style", f"stroke:none;fill-opacity:{_PALEST + _DARKEST * abs(value) / most:.2f}")
            parts.append(cell)
            if abs(value) >= most / 4:
                parts.append(text(_LEFT + (i + 0.5) * wide, y + 13, signed, "st-num", "middle"))
    worst, most_at = divmod(int(abs(heat.values).argmax()), len(heat.stages))
    sentence = (
        f"{heat.unit} {heat.rows[worst]} deviates most from its peers, in {heat.stages[most_at]}, by "
        f"{seconds(abs(float(heat.values[worst, most_at])))} of a step of {seconds(step_s)}."
    )
    height = _TOP + len(heat.rows) * _ROW + 12
    return framed(parts, height=height, title=title, sentence=sentence, name=name, alone=alone)
