"""The parts that a page is made of; static/blocks.js draws each kind. A value is text, a number, or a time that it keeps up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Block = dict[str, Any]
Tone = str  # "", "good", "warn", "bad", "dim"


def ago(time: float | None) -> Any:
    """The age of a unix time."""
    return None if time is None else {"ago": time}


def at(time: float | None) -> Any:
    """A unix time as date and clock."""
    return None if time is None else {"at": time}


def toned(value: Any, tone: Tone) -> Any:
    """`value` in a colour that says what it means; the words must say it too."""
    return {"v": value, "tone": tone}


def code(text: str) -> Any:
    """A command to copy."""
    return {"code": text}


def facts(title: str, rows: Sequence[tuple[str, Any]]) -> Block:
    """Labels with their values; those without a value are left out."""
    return {
        "kind": "facts",
        "title": title,
        "rows": [[label, value] for label, value in rows if value is not None and value != ""],
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, note: str = "") -> Block:
    """Columns whose name begins with "#" hold numbers."""
    return {"kind": "table", "title": title, "columns": list(columns), "rows": list(rows), "note": note}


def bars(title: str, rows: Sequence[Block], *, note: str = "") -> Block:
    """Rows of `label`, `text`, `value`, and optionally `planned` with `planned_text`; all to one scale."""
    return {"kind": "bars", "title": title, "rows": list(rows), "note": note}


def text(title: str, content: str) -> Block:
    """Lines as they are."""
    return {"kind": "text", "title": title, "text": content}


def note(content: str, tone: Tone = "dim") -> Block:
    """A sentence: what is missing, or how to read what is shown."""
    return {"kind": "note", "text": content, "tone": tone}


def chart(
    title: str, x: Sequence[float], series: Sequence[tuple[str, Sequence[float | None]]], **more: Any
) -> Block:
    """Lines over `x`: a step, or unix seconds with time=True."""
    return {
        "kind": "chart",
        "title": title,
        "x": list(x),
        "series": [{"name": n, "y": list(y)} for n, y in series],
        **more,
    }
