"""The waterfall as SVG, with a share on every bar and a text alternative."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from xml.etree.ElementTree import Element

from seatrial.plan.report.waterfall import WORDS, Bar, Waterfall
from seatrial.ui.svg import WIDTH, box, framed, line, shortened, text
from seatrial.ui.waterfall import seconds

_ROW, _BAR = 30.0, 20.0
_LEFT, _RIGHT = 316.0, 156.0  # names; values right of the longest bar
_SHARE = 66.0  # width of a share, before the time begins
_WRAP = 120  # letters per line of small text
_LETTER = 7.0  # width of a letter in the widest of the usual fonts


def waterfall_svg(
    shown: Waterfall, *, title: str, subtitle: str = "", alone: bool = True, name: str = "waterfall"
) -> Element:
    """The picture of `shown`, as a separate file or for a page that includes `svg.style`.

    `name` makes ids unique if there are several on a page.
    """
    top = 74.0 if subtitle else 52.0
    body = _ROW * len(shown.bars)
    legend, y = _legend(shown, top + body + 46)
    parts = [text(16, 49, shortened(subtitle, _WRAP), "st-soft")] if subtitle else []
    parts += _axis(top, body)
    for i, bar in enumerate(shown.bars):
        parts += _bar(bar, top + i * _ROW)
    parts += _joints(shown, top)
    parts += legend
    for wrapped in textwrap.wrap(shown.too_small, _WRAP):
        y += 20
        parts.append(text(16, y, wrapped, "st-soft"))
    return framed(parts, height=y + 18, title=title, sentence=shown.sentence, name=name, alone=alone)


def _x(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _axis(top: float, body: float) -> Iterator[Element]:
    """Lines at every fifth of the peak, labelled with their share."""
    for i in range(6):
        x = _x(i / 5)
        yield line([(x, top - 4), (x, top + body + 2)], "st-grid")
        yield text(x, top + body + 18, f"{i * 20} %", "st-soft st-num", "middle")


def _bar(bar: Bar, y: float) -> Iterator[Element]:
    """Name, bar, and its value to the right: there is always room, since bars end where the previous one began."""
    middle = y + _BAR / 2 + 4.5
    x, end = _x(bar.low), _x(bar.high)
    hint = f"{bar.name}: {bar.words}, {seconds(bar.seconds)}"
    value = max(end, x + 1.5) + 8
    yield text(_LEFT - 12, middle, bar.name, "", "end")
    yield box(x, y, max(1.5, end - x), _BAR, f"st-{bar.kind}", hint, 1.5)
    yield text(value, middle, bar.words.replace("-", "\N{MINUS SIGN}"), "st-num")
    yield text(value + _SHARE, middle, seconds(bar.seconds), "st-soft st-num")


def _joints(shown: Waterfall, top: float) -> Iterator[Element]:
    """Connectors from the end of each bar to the next one."""
    left = 1.0
    for i, bar in enumerate(shown.bars[:-1]):
        left -= bar.share if bar.kind != "peak" else 0.0
        y = top + i * _ROW + _BAR
        yield line([(_x(left), y), (_x(left), y + _ROW - _BAR)], "st-step", "2 2")


def _legend(shown: Waterfall, y: float) -> tuple[list[Element], float]:
    """The kinds of losses, in as many lines as needed; and the position of the last line."""
    parts: list[Element] = []
    x = 16.0
    for kind in shown.losses:
        words = WORDS[kind]
        wide = 17 + _LETTER * len(words) + 18
        if x + wide > WIDTH:
            x, y = 16.0, y + 20
        parts += [box(x, y - 10, 11, 11, f"st-{kind}", "", 2), text(x + 17, y, words, "st-soft")]
        x += wide
    return parts, y
