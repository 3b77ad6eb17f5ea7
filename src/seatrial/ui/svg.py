"""Shared by all pictures: colours for light and dark mode, elements, frame and text alternative.

A picture is an `<svg>` element: `svg_text` serialises it, `png.png` renders it.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif"

# Kinds of the waterfall, and one more: (on light, on dark): Okabe and Ito's colours, distinguishable with colour
# blindness, each lightened or darkened to a contrast of 3 to 1 with its page (WCAG 2.2, 1.4.11).
COLOURS: dict[str, tuple[str, str]] = {
    "peak": ("#7a838d", "#8b949e"),
    "kernels": ("#0072b2", "#4ea8de"),
    "recomputation": ("#b8568c", "#e08bbb"),
    "communication": ("#b97a00", "#e69f00"),
    "schedule": ("#2a8fbd", "#7cc7ee"),
    "run": ("#c24a00", "#f08a4b"),
    "rest": ("#59636e", "#9aa4af"),
    "result": ("#00805c", "#2fbf94"),
    "extra": ("#8a7400", "#d6c24a"),
}
WIDTH, NARROW = 960.0, 360.0  # of a picture: the usual one, and one whose text can be read on a telephone
_TITLE = 84  # characters that fit into a title
INK, SOFT, LINE, PAGE = (
    ("#1b1f24", "#e8eaed"),
    ("#59636e", "#9aa4af"),
    ("#dfe3e8", "#31373e"),
    ("#ffffff", "#1d2126"),
)


def style() -> str:
    """CSS rules for every class used in the pictures. A page that embeds a picture may repeat them: they agree."""
    light, dark = _rules(0), _rules(1)
    return (
        f".st-pic text{{font-family:{FONT};font-size:13px;fill:{INK[0]}}}.st-pic .st-soft{{font-size:12px}}"
        ".st-pic .st-title{font-size:17px;font-weight:600}.st-pic .st-num{font-variant-numeric:tabular-nums}"
        f"{light}@media (prefers-color-scheme:dark){{.st-pic text{{fill:{INK[1]}}}{dark}}}"
    )


def _rules(mode: int) -> str:
    kinds = "".join(f".st-pic .st-{kind}{{fill:{c[mode]};stroke:{c[mode]}}}" for kind, c in COLOURS.items())
    return (
        f"{kinds}.st-pic .st-soft{{fill:{SOFT[mode]}}}.st-pic .st-page{{fill:{PAGE[mode]}}}"
        f".st-pic .st-grid{{stroke:{LINE[mode]}}}.st-pic .st-step{{stroke:{SOFT[mode]}}}"
    )


def framed(
    parts: Iterable[Element],
    *,
    height: float,
    title: str,
    sentence: str,
    name: str,
    alone: bool,
    width: float = WIDTH,
) -> Element:
    """The whole `<svg>`. `name` keeps ids apart if several share a page; `alone`: a separate file, with background."""
    kind = "st-pic"
    if width < WIDTH:
        name, kind = f"{name}-narrow", "st-pic st-narrow"
    ids = f"{name}-t {name}-d"
    root = _element("svg", xmlns="http://www.w3.org/2000/svg", class_=kind, role="img", aria_labelledby=ids)
    root.set("viewBox", f"0 0 {width:g} {height:g}")
    root.append(_element("title", title, id=f"{name}-t"))
    root.append(_element("desc", sentence, id=f"{name}-d"))
    if alone:
        root.set("width", f"{width:g}")
        root.set("height", f"{height:g}")
        root.extend([_element("style", style()), box(0, 0, width, height, "st-page")])
    else:
        root.set("style", "width:100%;height:auto")
    root.append(text(16, 28, shortened(title, round(_TITLE * width / WIDTH)), "st-title"))
    root.extend(parts)
    return root


def svg_text(picture: Element) -> str:
    """As text, one element per line."""
    ElementTree.indent(picture, "")
    return ElementTree.tostring(picture, encoding="unicode") + "\n"


def shortened(words: str, letters: int) -> str:
    """`words` cut to `letters` characters in the middle, since names differ at either end."""
    if len(words) <= letters:
        return words
    end = letters // 3
    return words[: letters - end - 1] + "…" + words[-end:]


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> Element:
    """A line of text; `y` is its baseline."""
    return _element("text", words, x=x, y=y, class_=kind, text_anchor=anchor)


def box(
    x: float, y: float, width: float, height: float, kind: str, hint: str = "", round_: float = 0
) -> Element:
    """A filled rectangle; `hint` is its tooltip."""
    shape = _element("rect", x=x, y=y, width=width, height=height, rx=round_, class_=kind, stroke="none")
    return _hinted(shape, hint)


def line(
    points: Iterable[tuple[float, float]], kind: str, dashes: str = "", width: float = 1, hint: str = ""
) -> Element:
    """A line from point to point."""
    course = " ".join(f"{x:g},{y:g}" for x, y in points)
    shape = _element("polyline", points=course, class_=kind, stroke_width=width, stroke_dasharray=dashes)
    shape.set("style", "fill:none")  # a style, as the class also fills
    return _hinted(shape, hint)


def _hinted(shape: Element, hint: str) -> Element:
    if hint:
        shape.append(_element("title", hint))
    return shape


def _element(tag: str, content: str = "", **attributes: str | float) -> Element:
    """Empty attributes are left out; `class_` and `text_anchor` are class and text-anchor."""
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value != ""}
    element = Element(tag, {k: v if isinstance(v, str) else f"{v:g}" for k, v in named.items()})
    element.text = content or None
    return element
