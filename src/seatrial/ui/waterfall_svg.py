"""The waterfall as SVG: text is text, every bar says its share, and the whole is told in a sentence."""

from __future__ import annotations

import textwrap

from seatrial.plan.waterfall import WORDS, Bar, Waterfall
from seatrial.ui.svg import TITLE, box, framed, line, shortened, text
from seatrial.ui.waterfall import seconds

WIDTH = 960.0
_ROW, _BAR = 30.0, 20.0
_LEFT, _RIGHT = 316.0, 156.0  # names; values beside the longest bar
_SHARE = 66.0  # what a share takes before the time begins
_WRAP = 120  # letters of a line of small text
_LETTER = 7.0  # the width of a letter, as the widest of the usual fonts has it


def waterfall_svg(
    shown: Waterfall, *, title: str, subtitle: str = "", name: str = "waterfall", alone: bool = True
) -> str:
    """The picture of `shown`; as a file of its own, or for a page that has the pictures' style (`svg.style`)."""
    top = 74.0 if subtitle else 52.0
    body = _ROW * len(shown.bars)
    legend, y = _legend(shown, top + body + 46)
    parts = [text(16, 28, shortened(title, TITLE), "st-title")]
    if subtitle:
        parts.append(text(16, 49, shortened(subtitle, _WRAP), "st-soft"))
    parts += _axis(top, body)
    for i, bar in enumerate(shown.bars):
        parts += _bar(bar, top + i * _ROW)
    parts += _joints(shown, top)
    parts += legend
    for told in textwrap.wrap(shown.too_small, _WRAP):
        y += 20
        parts.append(text(16, y, told, "st-soft"))
    return framed(
        parts, width=WIDTH, height=y + 18, title=title, sentence=shown.sentence, name=name, alone=alone
    )


def _x(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _axis(top: float, body: float) -> list[str]:
    """Lines at every fifth of the peak, with their share below."""
    parts = []
    for i in range(6):
        x = _x(i / 5)
        parts.append(line(x, top - 4, x, top + body + 2, "st-grid"))
        parts.append(text(x, top + body + 18, f"{i * 20} %", "st-soft st-num", "middle"))
    return parts


def _bar(bar: Bar, y: float) -> list[str]:
    """Name, bar, and its value right of it: there is always room, as a bar ends where the one before it began."""
    middle = y + _BAR / 2 + 4.5
    x, end = _x(bar.low), _x(bar.high)
    hint = f"{bar.name}: {bar.words} of the peak, {seconds(bar.seconds)}"
    value = max(end, x + 1.5) + 8
    return [
        text(_LEFT - 12, middle, bar.name, "", "end"),
        box(x, y, max(1.5, end - x), _BAR, f"st-{bar.kind}", hint, 1.5),
        text(value, middle, bar.words.replace("-", "\N{MINUS SIGN}"), "st-num"),
        text(value + _SHARE, middle, seconds(bar.seconds), "st-soft st-num"),
    ]


def _joints(shown: Waterfall, top: float) -> list[str]:
    """What is left after each bar leads to the next one."""
    parts = []
    left = 1.0
    for i, bar in enumerate(shown.bars[:-1]):
        left -= bar.share if bar.kind != "peak" else 0.0
        y = top + i * _ROW + _BAR
        parts.append(line(_x(left), y, _x(left), y + _ROW - _BAR, "st-step", "2 2"))
    return parts


def _legend(shown: Waterfall, y: float) -> tuple[list[str], float]:
    """The kinds of losses, in as many lines as they take; and where the last one stands."""
    parts: list[str] = []
    x = 16.0
    for kind in shown.losses:
        words = WORDS[kind]
        wide = 17 + _LETTER * len(words) + 18
        if x + wide > WIDTH:
            x, y = 16.0, y + 20
        parts += [box(x, y - 10, 11, 11, f"st-{kind}", "", 2), text(x + 17, y, words, "st-soft")]
        x += wide
    return parts, y
