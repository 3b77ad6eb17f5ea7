"""Measured efficiency over the number of GPUs as SVG, with intervals, beside the prediction and what the fit gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from seatrial.scale.report import share
from seatrial.scale.results import Results
from seatrial.ui.scaling_svg import HEIGHT, Frame, axes
from seatrial.ui.svg import WIDTH, box, framed, line, text

_CAP = 5.0  # half the width of an interval's ends
_RIGHT, _LABEL = 138.0, 17.0


@dataclass(frozen=True)
class _Mark:
    """One efficiency, with its interval if it has one."""

    gpus: float
    value: float
    low: float
    high: float
    hint: str


def scale_svg(results: Results, *, title: str, alone: bool = True) -> Element:
    """Tokens/s/GPU over the first size's on a log axis of GPUs; the bars are 95 % intervals."""
    curves = [curve for curve in _curves(results) if curve[3]]
    marks = [mark for *_, found in curves for mark in found]
    sizes = sorted({size.size.gpus for size in results.sizes} | {round(mark.gpus) for mark in marks})
    most = max([1.0, *(mark.high for mark in marks)])
    top = math.ceil(most * 10) / 10 if most > 1.02 else 1.0
    frame = Frame(math.log2(sizes[0]), math.log2(sizes[-1]), top)
    parts = [*axes(frame, sizes)]
    ends: list[float] = []
    for name, kind, dashes, found in curves:
        parts += _curve(frame, name, kind, dashes, found, ends)
    return framed(
        parts, height=HEIGHT, title=title, sentence=_sentence(results), name="measured", alone=alone
    )


def _curves(results: Results) -> Iterator[tuple[str, str, str, list[_Mark]]]:
    """(name, class, dashes, marks) of each curve."""
    measured, predicted = [], []
    for i, size in enumerate(results.sizes):
        at, found = size.size.gpus, size.efficiency
        if i == 0 and size.tokens_per_s is not None:
            measured.append(_Mark(at, 1.0, 1.0, 1.0, f"measured, {at} GPUs: the first size"))
        if found is not None:
            low, high = found.low or found.mean, found.high or found.mean
            measured.append(_Mark(at, found.mean, low, high, f"measured, {at} GPUs: {share(found)}"))
        point = size.predicted
        if point is not None and point.efficiency is not None:
            told = f"predicted, {at} GPUs: {point.efficiency * 100:.1f} %"
            predicted.append(_Mark(at, point.efficiency, point.efficiency, point.efficiency, told))
    yield "measured", "st-kernels", "", measured
    yield "predicted", "st-communication", "6 4", predicted
    first = results.sizes[0].size.gpus
    looks = (("st-result", "2 3"), ("st-recomputation", "1 4"))
    for fit, (kind, dashes) in zip(results.fits, looks, strict=False):
        name = "Amdahl" if fit.law == "Amdahl" else "scalability law"
        marks = [
            _Mark(n * first, r.value, r.low, r.high, f"{fit.law}, {n * first:g} GPUs: {r.value * 100:.0f} %")
            for n, r in fit.efficiency
        ]
        yield name, kind, dashes, marks


def _curve(
    frame: Frame, name: str, kind: str, dashes: str, marks: list[_Mark], ends: list[float]
) -> Iterator[Element]:
    places = [(frame.x(mark.gpus), frame.y(mark.value)) for mark in marks]
    if len(places) > 1:
        yield line(places, kind, dashes, 2.2)
    for (x, y), mark in zip(places, marks, strict=True):
        if mark.low < mark.high:
            low, high = frame.y(max(mark.low, 0.0)), frame.y(mark.high)
            ends_of = [
                (x - _CAP, low),
                (x + _CAP, low),
                (x, low),
                (x, high),
                (x - _CAP, high),
                (x + _CAP, high),
            ]
            yield line(ends_of, kind, width=1.4, hint=mark.hint)
        yield box(x - 4, y - 4, 8, 8, kind, mark.hint, 4)
    x, y = places[-1]
    # Labels of curves that end at the same height are placed one below the other.
    while any(abs(y - other) < _LABEL for other in ends):
        y += _LABEL
    ends.append(y)
    yield text(min(x + 12, WIDTH - _RIGHT), y + 4, name)


def _sentence(results: Results) -> str:
    known = [size for size in results.sizes if size.efficiency is not None]
    if not known:
        return "No size beside the first was measured."
    last = known[-1]
    return f"From {results.sizes[0].size.gpus} to {last.size.gpus} GPUs the efficiency is {share(last.efficiency)}."
