"""The waterfall as SVG, with a share on every bar and a text alternative."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from seatrial.plan.report.waterfall import WORDS, Bar, Waterfall
from seatrial.ui.svg import WIDTH, box, framed, line, shortened, text
from seatrial.ui.waterfall import seconds

_ROW, _BAR, _NAME = 30.0, 20.0, 18.0  # heights, the last of a name above its bar in a narrow picture
# Names; values right of the longest bar; margin of a narrow picture.
_LEFT, _RIGHT, _SIDE = 316.0, 156.0, 16.0
_SHARE = 66.0  # width of a share, before the time begins
_WRAP = 120  # letters per line of small text
_LETTER = 7.0  # width of a letter in the widest of the usual fonts


def waterfall_svg(
    shown: Waterfall,
    *,
    title: str,
    subtitle: str = "",
    alone: bool = True,
    name: str = "waterfall",
    width: float = WIDTH,
) -> Element:
    """The picture of `shown`, as a separate file or for a page that includes `svg.style`.

    `name` makes ids unique if there are several on a page.
    """
    top, at = 74.0 if subtitle else 52.0, _Frame(width)
    body, wrap = at.row * len(shown.bars), round(_WRAP * width / WIDTH)
    legend, y = _legend(shown, top + body + 46, width)
    parts = [text(16, 49, shortened(subtitle, wrap), "st-soft")] if subtitle else []
    parts += _axis(at, top, body)
    for i, bar in enumerate(shown.bars):
        parts += _bar(at, bar, top + i * at.row)
    parts += _joints(at, shown, top)
    parts += legend
    for wrapped in textwrap.wrap(shown.too_small, wrap):
        y += 20
        parts.append(text(16, y, wrapped, "st-soft"))
    return framed(
        parts, height=y + 18, title=title, sentence=shown.sentence, name=name, alone=alone, width=width
    )


@dataclass(frozen=True)
class _Frame:
    width: float

    @property
    def narrow(self) -> bool:
        return self.width < WIDTH

    @property
    def row(self) -> float:
        return _ROW + _NAME * self.narrow

    def x(self, share: float) -> float:
        left = _SIDE if self.narrow else _LEFT
        return left + share * (self.width - left - _RIGHT)


def _axis(at: _Frame, top: float, body: float) -> Iterator[Element]:
    """Lines at every fifth of the peak, labelled with their share."""
    for i in range(6):
        x = at.x(i / 5)
        yield line([(x, top - 4), (x, top + body + 2)], "st-grid")
        yield text(x, top + body + 18, f"{i * 20} %", "st-soft st-num", "middle")


def _bar(at: _Frame, bar: Bar, y: float) -> Iterator[Element]:
    """Name, bar, and its value to the right: there is always room, as a bar ends where the previous one began."""
    y += _NAME * at.narrow
    middle = y + _BAR / 2 + 4.5
    x, end = at.x(bar.low), at.x(bar.high)
    hint = f"{bar.name}: {bar.words}, {seconds(bar.seconds)}"
    value = max(end, x + 1.5) + 8
    if at.narrow:
        yield text(_SIDE, y - 5, bar.name)
    else:
        yield text(_LEFT - 12, middle, bar.name, "", "end")
    yield box(x, y, max(1.5, end - x), _BAR, f"st-{bar.kind}", hint, 1.5)
    yield text(value, middle, bar.words.replace("-", "\N{MINUS SIGN}"), "st-num")
    yield text(value + _SHARE, middle, seconds(bar.seconds), "st-soft st-num")


def _joints(at: _Frame, shown: Waterfall, top: float) -> Iterator[Element]:
    """Lines that carry the remainder after each bar down to the next one."""
    left = 1.0
    for i, bar in enumerate(shown.bars[:-1]):
        left -= bar.share if bar.kind != "peak" else 0.0
        y = top + i * at.row + _NAME * at.narrow + _BAR
        yield line([(at.x(left), y), (at.x(left), y + at.row - _BAR)], "st-step", "2 2")


def _legend(shown: Waterfall, y: float, width: float) -> tuple[list[Element], float]:
    """The kinds of losses, in as many lines as needed; and the position of the last line."""
    parts: list[Element] = []
    x = 16.0
    for kind in shown.losses:
        words = WORDS[kind]
        wide = 17 + _LETTER * len(words) + 18
        if x + wide > width:
            x, y = 16.0, y + 20
        parts += [box(x, y - 10, 11, 11, f"st-{kind}", "", 2), text(x + 17, y, words, "st-soft")]
        x += wide
    return parts, y
