"""A scaling measurement as one self-contained HTML file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from seatrial.base.page import render
from seatrial.plan.report.waterfall import waterfall_of
from seatrial.scale.heat import heat
from seatrial.scale.report import columns, lines, row, split_rows, waterfall_rows
from seatrial.scale.results import Measured, Results
from seatrial.scale.sizes import in_words
from seatrial.ui.scale_heat_svg import heat_svg
from seatrial.ui.scale_svg import scale_svg
from seatrial.ui.svg import style, svg_text
from seatrial.ui.waterfall_svg import waterfall_svg

LEGEND = (
    "Intervals are 95 %, over runs. efficiency: tokens/s/GPU relative to the first size; of half: relative to half the nodes. "
    "predicted: tokens/s by seatrial plan. GPU s/Mtok: GPU seconds per million tokens."
)


def page(results: Results) -> str:
    """The HTML page."""
    job, options = results.measurement.job, results.measurement.options
    where = f"{options.mode} scaling, {options.steps} steps per run, {time.strftime('%Y-%m-%d %H:%M')}; in the job {job.layout}"
    split_columns, splits = split_rows(results)
    part_columns, parts = waterfall_rows(results)
    return render(
        "ui/scale.html",
        picture_style=style(),
        name=job.name,
        tone="bad" if results.failed else "",
        where=where,
        picture=svg_text(scale_svg(results, title="Tokens/s/GPU relative to the first size", alone=False)),
        columns=columns(results),
        rows=[row(size, results) for size in results.sizes],
        legend=LEGEND,
        split_columns=split_columns,
        splits=splits,
        part_columns=part_columns,
        parts=parts,
        pictures=[picture for size in results.sizes for picture in _pictures(size)],
        lines=list(lines(results)),
        changes=list(_changes(results)),
    )


def _pictures(size: Measured) -> Iterator[str]:
    """The step waterfall of one size, measured and predicted, and the heat map of its ranks."""
    fall, nodes = size.waterfall, size.size.nodes
    if fall is None or size.steps is None:
        return
    for predicted in (False, True) if fall.predicted_step_s is not None else (False,):
        how = "predicted" if predicted else "measured"
        svg = waterfall_svg(
            waterfall_of(fall.shares(predicted=predicted), fall.whole),
            title=f"{in_words(nodes)}: where the {fall.whole} goes, {how}",
            subtitle=f"share of {'the dense peak' if fall.mfu is not None else 'a step; dense peak unknown'}",
            name=f"{how}-{nodes}",
            alone=False,
        )
        yield svg_text(svg)
    if (found := heat(size.steps.observed)) is not None:
        title = f"{in_words(nodes)}: own work of each {found.unit} against its peers"
        yield svg_text(heat_svg(found, fall.step_s, title=title, name=f"heat-{nodes}", alone=False))


def _changes(results: Results) -> Iterator[tuple[str, ...]]:
    """Rows of changed keys, each with the sizes that have the value."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for size in results.measurement.sizes:
        for c in size.changes:
            if c.key != "name":
                found.setdefault((c.key, _value(c.job), _value(c.copy), c.why), []).append(size.nodes)
    for cells, nodes in found.items():
        yield ", ".join(map(str, nodes)), *cells


def _value(value: Any) -> str:
    return "not set" if value is None else str(value)
