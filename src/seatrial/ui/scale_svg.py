"""Measured efficiency over the number of GPUs as SVG, with intervals, prediction and fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.etree.ElementTree import Element

from seatrial.scale.report import share
from seatrial.scale.results import Results
from seatrial.ui.scaling_svg import HEIGHT, Frame, Mark, axes, curve
from seatrial.ui.svg import framed


def scale_svg(results: Results, *, title: str, alone: bool = True) -> Element:
    """Tokens/s/GPU relative to the first size on a log axis of GPUs, with 95 % intervals."""
    curves = [curve for curve in _curves(results) if curve[3]]
    marks = [mark for *_, found in curves for mark in found]
    sizes = sorted({size.size.gpus for size in results.sizes} | {round(mark.gpus) for mark in marks})
    most = max([1.0, *(max(mark.high, mark.value) for mark in marks)])
    top = math.ceil(most * 10) / 10 if most > 1.02 else 1.0
    frame = Frame(math.log2(sizes[0]), math.log2(sizes[-1]), top)
    parts = [*axes(frame, sizes)]
    ends: list[float] = []
    for name, kind, dashes, found in curves:
        parts += curve(frame, name, kind, dashes, found, ends)
    return framed(
        parts, height=HEIGHT, title=title, sentence=_sentence(results), name="measured", alone=alone
    )


def _curves(results: Results) -> Iterator[tuple[str, str, str, list[Mark]]]:
    """(name, class, dashes, marks) of each curve."""
    measured, predicted = [], []
    for i, size in enumerate(results.sizes):
        at, found = size.size.gpus, size.efficiency
        if i == 0 and size.tokens_per_s is not None:
            measured.append(Mark(at, 1.0, f"measured, {at} GPUs: the first size"))
        if found is not None:
            low, high = found.low or found.mean, found.high or found.mean
            measured.append(Mark(at, found.mean, f"measured, {at} GPUs: {share(found)}", low, high))
        point = size.predicted
        if point is not None and point.efficiency is not None:
            label = f"predicted, {at} GPUs: {point.efficiency * 100:.1f} %"
            predicted.append(Mark(at, point.efficiency, label))
    yield "measured", "st-kernels", "", measured
    yield "predicted", "st-communication", "6 4", predicted
    first = results.sizes[0].size.gpus
    looks = (("st-result", "2 3"), ("st-recomputation", "1 4"))
    for fit, (kind, dashes) in zip(results.fits, looks, strict=False):
        name = "Amdahl" if fit.law == "Amdahl" else "scalability law"
        marks = [
            Mark(n * first, r.value, f"{fit.law}, {n * first:g} GPUs: {r.value * 100:.0f} %", r.low, r.high)
            for n, r in fit.efficiency
        ]
        yield name, kind, dashes, marks


def _sentence(results: Results) -> str:
    known = [size for size in results.sizes if size.efficiency is not None]
    if not known:
        return "Only the first size was measured."
    last = known[-1]
    return f"From {results.sizes[0].size.gpus} to {last.size.gpus} GPUs the efficiency is {share(last.efficiency)}."
