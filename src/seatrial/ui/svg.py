"""What all pictures share: colours that hold in light and dark, the frame of an SVG with its words for those who do not see it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif"

# Kinds of the waterfall, and one more: (on light, on dark): Okabe and Ito's colours, which people with colour blindness tell apart, each lightened or darkened until it
# has a contrast of 3 to 1 with its page (WCAG 2.2, 1.4.11).
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
TITLE = 84  # letters that a title has room for
INK, SOFT, LINE, PAGE = (
    ("#1b1f24", "#e8eaed"),
    ("#59636e", "#9aa4af"),
    ("#dfe3e8", "#31373e"),
    ("#ffffff", "#1d2126"),
)


def style() -> str:
    """Rules for every class that the pictures use. The page that a picture stands in may have the same ones: they agree."""
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
    parts: Sequence[str], *, width: float, height: float, title: str, sentence: str, name: str, alone: bool
) -> str:
    """The whole `<svg>`. `name` keeps ids apart where several stand on one page; `alone`: a file of its own, with background."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="st-pic" role="img" viewBox="0 0 {width:g} {height:g}" '
        f'aria-labelledby="{name}-t {name}-d"'
    )
    head += f' width="{width:g}" height="{height:g}">' if alone else ' style="width:100%;height:auto">'
    told = f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(sentence)}</desc>'
    before = [f"<style>{style()}</style>", box(0, 0, width, height, "st-page")] if alone else []
    return "\n".join([head, told, *before, *parts, "</svg>", ""])


def shortened(words: str, letters: int) -> str:
    """At most `letters` of it: the beginning and the end, as names differ at either."""
    if len(words) <= letters:
        return words
    end = letters // 3
    return words[: letters - end - 1] + "…" + words[-end:]


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text; `y` is its baseline."""
    named = f' class="{kind}"' if kind else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{at}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, hint: str = "", round_: float = 0) -> str:
    """A filled rectangle; `hint` shows under the pointer."""
    corner = f' rx="{round_:g}"' if round_ else ""
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"{corner} class="{kind}" stroke="none"'
    return f"{shape}><title>{escape(hint)}</title></rect>" if hint else f"{shape}/>"


def line(x1: float, y1: float, x2: float, y2: float, kind: str, dashes: str = "") -> str:
    """A hairline."""
    cut = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" class="{kind}"{cut}/>'
