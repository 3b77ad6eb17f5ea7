"""A picture as PNG, by matplotlib (extra `plots`), imported only here."""

from __future__ import annotations

import io
from typing import Any
from xml.etree.ElementTree import Element

from seatrial.base.errors import InputError
from seatrial.ui.svg import COLOURS, INK, LINE, PAGE, SOFT

_DPI = 160
_UNITS = 100  # picture units per inch
_POINT = 72 / _UNITS
_FONT = "DejaVu Sans"  # ships with matplotlib, so that the picture is the same everywhere
# The classes of `svg.style`, on light.
_COLOUR = {f"st-{kind}": colours[0] for kind, colours in COLOURS.items()}
_COLOUR |= {"st-grid": LINE[0], "st-step": SOFT[0], "st-soft": SOFT[0], "st-page": PAGE[0]}
_SIZE = {"st-title": 17, "st-soft": 12}
_ALIGNED = {"middle": "center", "end": "right"}


def png(picture: Element) -> bytes:
    """The file's bytes, the same for the same picture. InputError (exit 2) without matplotlib, with what to install.

    Draws what `svg.text`, `svg.box` and `svg.line` make.
    """
    figure_class, canvas_class = _matplotlib()
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    figure = figure_class(figsize=(width / _UNITS, height / _UNITS), dpi=_DPI)
    # Not pyplot: it would look for a display and keep the figure for ever.
    canvas_class(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for order, part in enumerate(picture):  # matplotlib would draw every line above every box
        kind = part.get("class", "").partition(" ")[0]
        colour = _COLOUR.get(kind, INK[0])
        x, y, wide, high = (float(part.get(name, 0)) for name in ("x", "y", "width", "height"))
        if part.tag == "text":
            words: dict[str, Any] = {"family": _FONT, "fontsize": _SIZE.get(kind, 13) * _POINT}
            words["fontweight"] = "bold" if kind == "st-title" else "normal"
            words["ha"] = _ALIGNED.get(part.get("text-anchor", ""), "left")
            axes.text(x, y, part.text, color=colour, zorder=order, parse_math=False, **words)
        elif part.tag == "rect":
            axes.fill_between((x, x + wide), y, y + high, color=colour, linewidth=0, zorder=order)
        elif part.tag == "polyline":
            points = [tuple(map(float, point.split(","))) for point in part.get("points", "").split()]
            dashes = part.get("stroke-dasharray")
            line = (0, [float(n) for n in dashes.split()]) if dashes else "solid"
            thick = float(part.get("stroke-width", 1)) * _POINT
            looks = {"color": colour, "linewidth": thick, "linestyle": line, "zorder": order}
            axes.plot(*zip(*points, strict=True), **looks)
    out = io.BytesIO()
    # Without the matplotlib version, which is written by default: the same figures give the same file.
    metadata = {"Software": None, "Description": picture.findtext("desc")}
    figure.savefig(out, format="png", metadata=metadata)
    return out.getvalue()


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"pictures as PNG need matplotlib, which cannot be loaded: {error}",
            hint="pip install 'seatrial[plots]', or write SVG instead, which needs no package",
        ) from error
    matplotlib.rcdefaults()  # ignore a matplotlibrc in the current folder, which could start programs (usetex)
    return Figure, FigureCanvasAgg
