"""The waterfall as PNG, by matplotlib: the extra `plots`, loaded only here."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

from seatrial.base.errors import InputError
from seatrial.plan.waterfall import WORDS, Waterfall
from seatrial.ui.svg import COLOURS, INK, LINE, PAGE, SOFT, TITLE, shortened
from seatrial.ui.waterfall import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 160
_LETTER = 0.0067  # of a letter of the legend, as a share of the picture's width
_WRAP = 130  # letters of a line of small text
_FONT = "DejaVu Sans"  # comes with matplotlib, so that the picture is the same everywhere


def waterfall_png(shown: Waterfall, *, title: str, subtitle: str = "") -> bytes:
    """The file's bytes, the same for the same figures. InputError (exit 2) without matplotlib, with what to install."""
    figure_class, canvas_class = _matplotlib()
    body = 0.34 * len(shown.bars)  # inches
    small = textwrap.wrap(shown.too_small, _WRAP)
    foot = 0.75 + 0.17 * len(small)
    height = body + foot + 0.68
    figure = figure_class(figsize=(9.6, height), dpi=_DPI, facecolor=PAGE[0])
    # Not pyplot: it would look for a display and keep the figure for ever.
    canvas_class(figure)
    _draw(figure.add_axes((0.33, foot / height, 0.50, body / height)), shown)
    words: dict[str, Any] = {"va": "center", "family": _FONT}
    figure.text(
        0.02,
        1 - 0.24 / height,
        shortened(title, TITLE),
        fontsize=12,
        fontweight="bold",
        color=INK[0],
        **words,
    )
    if subtitle:
        figure.text(0.02, 1 - 0.46 / height, shortened(subtitle, _WRAP), fontsize=9, color=SOFT[0], **words)
    x, y = 0.02, (0.23 + 0.17 * len(small)) / height
    for kind in shown.losses:
        figure.text(x, y, "■", color=COLOURS[kind][0], fontsize=10, **words)
        figure.text(x + 0.017, y, WORDS[kind], color=SOFT[0], fontsize=8, **words)
        x += 0.017 + _LETTER * len(WORDS[kind]) + 0.02
    for i, told in enumerate(reversed(small)):
        figure.text(0.02, (0.15 + 0.17 * i) / height, told, color=SOFT[0], fontsize=8, **words)
    out = io.BytesIO()
    # Without the version of matplotlib, which it writes otherwise: the same figures give the same file.
    figure.savefig(out, format="png", metadata={"Software": None, "Description": shown.sentence})
    return out.getvalue()


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"pictures as PNG need matplotlib, which cannot be loaded: {error}",
            hint="pip install 'seatrial[plots]', or write SVG instead, which needs nothing",
        ) from error
    matplotlib.rcdefaults()  # ignore a matplotlibrc in the current folder, which could start programs (usetex)
    return Figure, FigureCanvasAgg


def _draw(axes: Axes, shown: Waterfall) -> None:
    rows = len(shown.bars)
    axes.set_xlim(0, 1)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks(range(rows), [b.name for b in shown.bars], fontsize=9, color=INK[0], family=_FONT)
    ticks = [i / 5 for i in range(6)]
    axes.set_xticks(ticks, [f"{t * 100:.0f} %" for t in ticks], fontsize=8, color=SOFT[0], family=_FONT)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(axis="x", color=LINE[0], linewidth=0.8)
    axes.set_axisbelow(True)
    left = 1.0
    for i, bar in enumerate(shown.bars):
        width = max(bar.high - bar.low, 0.002)
        axes.barh(i, width, left=bar.low, height=0.66, color=COLOURS[bar.kind][0])
        end = max(bar.high, bar.low + width) + 0.015
        share = bar.words.replace("-", "\N{MINUS SIGN}")
        words: dict[str, Any] = {"va": "center", "family": _FONT, "clip_on": False}
        axes.text(end, i, share, fontsize=9, color=INK[0], **words)
        axes.text(end + 0.125, i, seconds(bar.seconds), fontsize=8, color=SOFT[0], **words)
        if bar.kind != "peak":
            left -= bar.share
        if i < rows - 1:
            axes.plot([left, left], [i + 0.33, i + 0.67], color=SOFT[0], linewidth=0.8, linestyle=":")
