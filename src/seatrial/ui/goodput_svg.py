"""Wall-clock time by group of causes, as an SVG bar."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from seatrial.base import units
from seatrial.ui.svg import WIDTH, box, framed, text

_SIDE, _TOP, _HEIGHT, _COLUMNS = 16.0, 46.0, 34.0, 3

# A colour each: (words, class, causes).
_GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("productive", "result", ("productive",)),
    ("slowed (stragglers, fewer nodes)", "schedule", ("straggler", "shrunk")),
    ("checkpoints, validation", "extra", ("checkpoint", "validation")),
    ("failures", "run", ("detection", "recovery", "redone", "waiting")),
    ("starting", "kernels", ("start", "warm_up")),
    ("planned changes, shutdown", "communication", ("reshape", "ending")),
    ("queue", "recomputation", ("queue",)),
    ("stopped", "peak", ("stopped",)),
    ("unknown", "rest", ("unknown",)),
)


def goodput_svg(seconds: Mapping[str, float], *, title: str) -> Element:
    """The bar, for a page that includes `svg.style`. `seconds`: by cause."""
    sums = [
        (words, kind, sum(seconds.get(cause, 0.0) for cause in causes)) for words, kind, causes in _GROUPS
    ]
    shown = [each for each in sums if each[2] > 0]
    whole = sum(s for *_, s in shown)
    scale = (WIDTH - 2 * _SIDE) / whole if whole else 0.0
    parts, x = [], _SIDE
    for words, kind, s in shown:
        parts.append(box(x, _TOP, s * scale, _HEIGHT, f"st-{kind}", f"{words}: {units.duration(s)}"))
        x += s * scale
    y, each = _TOP + _HEIGHT + 32, (WIDTH - 2 * _SIDE) / _COLUMNS
    for i, (words, kind, s) in enumerate(shown):
        left, base = _SIDE + i % _COLUMNS * each, y + i // _COLUMNS * 22
        parts.append(box(left, base - 10, 11, 11, f"st-{kind}", "", 2))
        label = f"{words} {units.duration(s)} ({100 * s / whole:.1f} %)"
        parts.append(text(left + 17, base, label, "st-soft st-num"))
    height = y + max(0, len(shown) - 1) // _COLUMNS * 22 + 16
    sentence = "; ".join(f"{words}: {100 * s / whole:.1f} %" for words, _, s in shown) or "No time."
    return framed(parts, height=height, title=title, sentence=sentence, name="goodput", alone=False)
