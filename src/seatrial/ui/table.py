"""Rows under headings, on a terminal or as plain lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.ui.figures import printable
from seatrial.ui.out import Out

VERDICT_STYLES = {"PASS": "green", "FAIL": "bold red", "UNJUDGED": "yellow"}


def print_table(
    out: Out,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print `rows`, with a cell for each of `columns`. `styles`: text of a cell -> its style on a terminal."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if out.styled:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=box.SIMPLE_HEAD)
        for row in rows:
            # The last column may be a path, which must stay whole for copying.
            table.add_row(*(Text(cell, style=(styles or {}).get(cell, ""), overflow="fold") for cell in row))
        out.rendered(table)
        return
    widths = [max(len(cells[i]) for cells in (columns, *rows)) for i in range(len(columns))]
    for cells in (columns, *rows):
        out.line("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
