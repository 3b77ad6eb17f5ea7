"""The blocks of a page, drawn by static/blocks.js. A value is text, a number, or a time whose age is kept up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Block = dict[str, Any]
Tone = str  # "", "good", "warn", "bad", "dim"


def rounded(value: float | None) -> str | None:
    """A whole number with separators; nothing for no value."""
    return None if value is None else f"{value:,.0f}"


def ago(time: float | None) -> Any:
    """A unix time, shown as age."""
    return None if time is None else {"ago": time}


def at(time: float | None) -> Any:
    """A unix time, shown as date and time."""
    return None if time is None else {"at": time}


def toned(value: Any, tone: Tone) -> Any:
    """`value` in a colour; the text must carry the meaning too."""
    return {"v": value, "tone": tone}


def code(text: str) -> Any:
    """A command with a copy button."""
    return {"code": text}


def facts(title: str, rows: Sequence[tuple[str, Any]]) -> Block:
    """Labels with values; rows without a value are left out."""
    return {
        "kind": "facts",
        "title": title,
        "rows": [[label, value] for label, value in rows if value is not None and value != ""],
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, note: str = "") -> Block:
    """A table. Columns whose name starts with "#" are numeric."""
    return {"kind": "table", "title": title, "columns": list(columns), "rows": list(rows), "note": note}


def bars(title: str, rows: Sequence[Block], *, note: str = "") -> Block:
    """Bars on one scale: rows of `label`, `text`, `value`, and optionally `planned` with `planned_text`."""
    return {"kind": "bars", "title": title, "rows": list(rows), "note": note}


def text(title: str, content: str) -> Block:
    """Preformatted text."""
    return {"kind": "text", "title": title, "text": content}


def note(content: str, tone: Tone = "dim") -> Block:
    """A paragraph, such as how to read a chart."""
    return {"kind": "note", "text": content, "tone": tone}


def chart(
    title: str, x: Sequence[float], series: Sequence[tuple[str, Sequence[float | None]]], **more: Any
) -> Block:
    """Lines over `x`: steps, or unix seconds with time=True."""
    return {
        "kind": "chart",
        "title": title,
        "x": list(x),
        "series": [{"name": n, "y": list(y)} for n, y in series],
        **more,
    }
