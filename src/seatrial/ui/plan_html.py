"""A plan as one self-contained HTML file: no external script, font or picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from xml.etree.ElementTree import Element

from seatrial.base import units
from seatrial.base.page import render
from seatrial.job.job import Job
from seatrial.plan.cost.predict import Prediction
from seatrial.plan.report.advice import Suggestion, short
from seatrial.plan.report.answer import Answer
from seatrial.plan.report.waterfall import waterfall_of
from seatrial.plan.search.fit import Account, Fit, account
from seatrial.plan.search.scaling import Point, Scaling
from seatrial.plan.search.search import Choice
from seatrial.ui import figures
from seatrial.ui.account_svg import account_svg
from seatrial.ui.plan_estimate import spanned
from seatrial.ui.plan_fit import as_sold
from seatrial.ui.plan_words import (
    INTERVAL,
    TIGHT,
    batches,
    cluster,
    data,
    marked,
    mfu_span,
    percent,
    rate_span,
    seconds,
    settings,
    span,
    too_large,
    unlisted_sure,
    why,
)
from seatrial.ui.scaling_svg import scaling_svg
from seatrial.ui.svg import NARROW, WIDTH, svg_text
from seatrial.ui.svg import style as picture_style
from seatrial.ui.waterfall_svg import waterfall_svg

_ROWS = 12  # maximum number of layouts

Row = tuple[str | None, Sequence[str]]  # of a table: its class, its cells


def page(
    answer: Answer,
    fits: Sequence[Fit] = (),
    *,
    verdict: str = "",
    tone: str = "",
    wishes: Sequence[str] = (),
) -> str:
    """The HTML page.

    `verdict`: the plan's verdict, `tone` its colour: "good", "warn" or "bad". `wishes`: the targets, and whether
    they are within reach. `fits`: the smallest clusters, if they were requested.
    """
    job, own = answer.job, answer.own
    held = account(job.architecture, own.recipe, stack=answer.stack)
    scalings = [s for s in (answer.weak, answer.strong, answer.best_scaled) if s is not None]
    return render(
        "ui/plan.html",
        picture_style=picture_style(),
        name=job.name,
        tone=tone,
        where=f"{cluster(answer.place)} · {job.layout}; {batches(own.recipe)}",
        verdict=verdict,
        wishes=wishes,
        big=list(_big(answer)),
        layouts=_layouts(answer),
        waterfall=_waterfall(answer),
        changes=[] if answer.advice is None else [_change(way) for way in answer.advice.suggestions],
        memory=_memory(held, own.available, f"{held.headline}."),
        scaling_picture=_scaling_picture(scalings),
        scalings=[_scaling(s) for s in scalings],
        network=list(_network(answer)),
        fits=list(_fits(fits)),
        provenance=answer.provenance,
    )


def fit_page(job: Job, held: Account, available: float | None, fits: Sequence[Fit]) -> str:
    """Memory needs of a job's model, and the smallest clusters that satisfy them; `available` as in `account_svg`."""
    return render(
        "ui/fit.html",
        picture_style=picture_style(),
        name=job.name,
        memory=_memory(held, available, f"With the job's own layout, {job.layout}:"),
        fits=list(_fits(fits)),
    )


def _big(answer: Answer) -> Iterator[tuple[str, str]]:
    """Figures, each with its unit and its interval; a value that ends with the mark of a tight layout gets a badge."""
    own, p = answer.own, answer.own.prediction
    if p is None:
        yield "unknown", f"speed: {own.why_unknown}"
    else:
        rate, _, interval = rate_span(p).partition(" ")
        yield rate, interval.replace("(", f"; {INTERVAL} ").replace(" ;", ";").removesuffix(")")
        yield seconds(p.step_s), f"per step; {span(p.low_s, p.high_s)}"
        if p.mfu is not None:
            yield percent(p.mfu, 1), f"MFU; {mfu_span(p).partition('(')[2].removesuffix(')')}"
    needs = own.memory.reserved if own.available is not None else own.memory.allocated
    of = "per rank" if own.available is None else f"per GPU, of {figures.memory(own.available)}"
    tight = ""
    if own.verdict is not None and own.verdict.why:
        of, tight = f"{of}; {own.verdict.why}", f" {TIGHT}"
    yield figures.memory(needs) + tight, of
    if answer.forecast is not None:
        f = answer.forecast.finish
        yield units.duration(f.wall_s), f"to the end; {units.duration(f.low_s)} to {units.duration(f.high_s)}"
        hours = spanned(f.gpu_hours, f, " GPU hours")
        cost = "" if answer.forecast.cost is None else spanned(answer.forecast.cost, f)
        value, _, interval = (cost or hours).partition(" ")
        yield value, f"cost {interval}; {hours}" if cost else interval


def _layouts(answer: Answer) -> dict[str, object] | None:
    found = answer.found
    if found is None:
        return None
    legal = f"{found.tried:,} are legal, {found.too_large:,} of them do not fit"
    beyond = "" if answer.beyond is None else too_large(answer.beyond)
    if not found.choices:
        return {"legal": legal, "rows": [], "least": figures.memory(found.least_bytes), "too_large": beyond}
    shown, best = found.choices[:_ROWS], found.choices[0].prediction
    safe = unlisted_sure(found, shown)
    more = {"with margin: ": safe, "the job's own: ": found.own}
    return {
        "legal": legal,
        "rows": [_choice(c, best) for c in shown]
        + [_choice(c, best, name) for name, c in more.items() if c is not None],
        "too_large": beyond,
    }


def _choice(choice: Choice, best: Prediction, name: str = "") -> Row:
    """`name`: of a row below those of the best layouts."""
    p = choice.prediction
    slower = p.step_s / best.step_s - 1
    return "own" if name else None, [
        name + marked(choice.recipe, p),
        settings(choice.recipe),
        seconds(p.step_s),
        figures.rate(p.tokens_per_s_per_gpu),
        figures.mfu(p.mfu),
        figures.memory(p.memory.reserved),
        "" if slower < 5e-4 else percent(slower),
        why(p, best),
    ]


def _waterfall(answer: Answer) -> str:
    if answer.waterfall is None:
        return ""
    shown = waterfall_of(answer.waterfall)
    title = f"Where the FLOPs of {'a step' if answer.forecast is None else 'the run'} go"
    return _svg_text(partial(waterfall_svg, shown, title=title, subtitle="share of the GPUs' dense peak"))


def _change(way: Suggestion) -> Row:
    p = way.prediction
    return None, [
        way.what,
        f"{short(way.recipe)}, {settings(way.recipe)}" + f" {TIGHT}" * (p.verdict.word == "tight"),
        figures.rate(p.tokens_per_s_per_gpu),
        figures.mfu(p.mfu),
        f"{way.gain * 100:+.0f} %",
        "" if way.built else "other software, or another cluster",
    ]


def _memory(held: Account, available: float | None, before: str) -> dict[str, object]:
    """`before`: text above the picture, which an account without a layout does not have."""
    rows: list[Row] = []
    for li in held.lines:
        each = "" if li.per_parameter is None else f"{li.per_parameter:g}"
        once = "" if li.once is None else data(li.once)
        gpu = "" if li.gpu is None else figures.memory(li.gpu)
        whole = "" if li.cluster is None else data(li.cluster)
        rows.append((None, [li.name, each, once, gpu, whole, li.note]))
    picture = ""
    if held.gpu_bytes is not None:
        picture = _svg_text(partial(account_svg, held, available, title="On the most loaded GPU"))
        if held.cluster_bytes is not None:
            sums = [figures.memory(held.gpu_bytes), data(held.cluster_bytes)]
            rows.append(("own", ["total", "", "", *sums, ""]))
    weights = ", ".join(f"{name} {data(n)}" for name, n in held.weights)
    return {"headline": held.headline, "before": before, "picture": picture, "weights": weights, "rows": rows}


def _scaling_picture(scalings: Sequence[Scaling]) -> str:
    title = "Tokens/s/GPU, smallest = 100 %"
    return _svg_text(partial(scaling_svg, scalings, title=title)) if scalings else ""


def _svg_text(picture: Callable[..., Element]) -> str:
    """A picture in two widths, of which a page shows one."""
    return "".join(svg_text(picture(alone=False, width=width)) for width in (WIDTH, NARROW))


def _scaling(shown: Scaling) -> dict[str, object]:
    at, worst = shown.shows_at, shown.worst
    return {
        "name": shown.name.capitalize(),
        "grows": shown.grows,
        "worst": ""
        if worst is None
        else f"{percent(worst.doubling)}, from {worst.gpus // 2:,} to {worst.gpus:,} GPUs",
        "shows_at": "" if at is None else f"{at.gpus:,} GPUs{f': {at.costs}' if at.costs else ''}",
        "rows": [_point(p, best=shown.best) for p in shown.points],
        "assumes": shown.assumes,
    }


def _point(p: Point, *, best: bool) -> Row:
    """The row of one size; with the layout's name if the curve takes the best layout of each size."""
    speed = [""] * 5
    if p.tokens_per_s is not None and p.speedup is not None:
        doubling = "" if p.doubling is None else percent(p.doubling)
        speed = [
            figures.rate(p.tokens_per_s),
            f"{p.speedup:.2f}",
            percent(p.efficiency),
            doubling,
            percent(p.exposed),
        ]
    entries = [p.why_not or p.costs or ""]
    if best and p.recipe is not None:
        entries.insert(0, f"{short(p.recipe)}, {settings(p.recipe)}")
    batch = "" if p.global_batch is None else f"{p.global_batch:,}"
    off = None if p.why_not is None else "off"
    return off, [f"{p.gpus:,}", batch, *speed, "; ".join(filter(None, entries))]


def _network(answer: Answer) -> Iterator[Row]:
    c = answer.network_demand
    if not answer.place.shape.several_domains:
        return
    yield None, [f"sent out of the {answer.place.enclosure} per step and GPU", data(c.a_gpu)]
    if c.a_card is not None:
        yield None, ["the same per network card", data(c.a_card)]
    if c.mean is not None:
        yield None, ["needed on average", f"{data(c.mean)}/s per node, {data(c.mean * c.nodes)}/s in total"]
    if c.enough is not None:
        yield (
            None,
            [
                "rate at which a step is 5 % longer than with an unlimited network",
                f"{data(c.enough)}/s per node",
            ],
        )
    there = "unknown"
    if c.capacity is not None:
        there = f"{data(c.capacity)}/s per node, {data(c.capacity * c.nodes)}/s in total"
    yield None, ["capacity, one direction", there]


def _fits(fits: Sequence[Fit]) -> Iterator[Row]:
    for fit in (f for main in fits for f in (main, main.safe) if f is not None):
        r, p = fit.recipe, fit.prediction
        tight = f"tight, {fit.verdict.why}" if fit.verdict.why else ""
        notes = [fit.why_unknown] if r is None else [tight, as_sold(fit), fit.why_unknown]
        yield (
            "off" if r is None else None,
            [
                fit.gpu.name,
                f"{fit.gpus:,}",
                str(fit.cluster.nodes),
                "none" if r is None else f"{short(r)}, {settings(r)}",
                figures.memory(fit.needs) if fit.needs < float("inf") else "unknown",
                figures.memory(fit.available),
                "unknown" if p is None else figures.rate(p.tokens_per_s_per_gpu),
                "; ".join(filter(None, notes)),
            ],
        )
