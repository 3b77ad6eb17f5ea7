"""A scaling measurement as one self-contained HTML file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from seatrial.base.page import render
from seatrial.scale.report import columns, lines, row, split_rows
from seatrial.scale.results import Results
from seatrial.ui.scale_svg import scale_svg
from seatrial.ui.svg import style, written

LEGEND = (
    "Intervals are 95 %, over runs. efficiency: tokens/s/GPU over the first size's; of half: over that at half the nodes. "
    "predicted: tokens/s by seatrial plan. GPU s/Mtok: GPU seconds that a million tokens take."
)


def page(results: Results) -> str:
    """The whole document."""
    job, terms = results.measurement.job, results.measurement.terms
    where = f"{terms.mode} scaling, {terms.steps} steps a run, {time.strftime('%Y-%m-%d %H:%M')}; in the job {job.layout}"
    split_columns, splits = split_rows(results)
    return render(
        "ui/scale.html",
        picture_style=style(),
        name=job.name,
        tone="bad" if results.failed else "",
        where=where,
        picture=written(scale_svg(results, title="Tokens/s/GPU over the first size's", alone=False)),
        columns=columns(results),
        rows=[row(size, results) for size in results.sizes],
        legend=LEGEND,
        split_columns=split_columns,
        splits=splits,
        lines=list(lines(results)),
        changes=list(_changes(results)),
    )


def _changes(results: Results) -> Iterator[tuple[str, ...]]:
    """Each changed key once, with the sizes that have that value."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for size in results.measurement.sizes:
        for c in size.changes:
            if c.key != "name":
                found.setdefault((c.key, _value(c.job), _value(c.copy), c.why), []).append(size.nodes)
    for cells, nodes in found.items():
        yield ", ".join(map(str, nodes)), *cells


def _value(value: Any) -> str:
    return "not set" if value is None else str(value)
