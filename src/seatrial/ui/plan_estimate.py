"""The job's own layout in a plan: memory, speed, duration, network and storage demand, scaling."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.base import units
from seatrial.job.schema import TrainSection
from seatrial.plan.cost.finish import Finish
from seatrial.plan.cost.kernels import ATTENTION
from seatrial.plan.cost.step import Sent
from seatrial.plan.report.answer import ENOUGH, Answer, RunForecast
from seatrial.plan.search.caution import too_short
from seatrial.plan.search.scaling import Point, Scaling
from seatrial.ui.plan_words import (
    HEAD,
    INTERVAL,
    Line,
    batches,
    data,
    figure,
    gib,
    held,
    many,
    mfu_span,
    pair,
    percent,
    rate_span,
    seconds,
    span,
)

_KINDS_SHOWN = 5
MUCH = 0.05  # of the time lost to failures and checkpoints: from there on it is explained


def own(answer: Answer, width: int, *, full: bool) -> Iterator[Line]:
    """Lines about the job's own layout. `full`: every kind of memory and traffic."""
    mine = answer.own
    r = mine.recipe
    auto = answer.job.chosen is not None
    yield 'the layout chosen by parallel = "auto"' if auto else "the job's own layout", HEAD
    yield from pair("layout", f"{answer.job.layout}; {batches(r)}", width)
    if answer.job.chosen is not None and (answer.best is None or answer.best.recipe != r):
        yield from pair("chosen", answer.job.chosen["reasons"][mine.prediction is None], width)
    kinds = held(mine.memory, gpu=mine.fits is not None, most=None if full else _KINDS_SHOWN)
    if mine.fits is None:
        yield from pair("memory", f"{gib(mine.memory.allocated)} per rank: {kinds}", width)
    else:
        assert mine.available is not None
        verdict = mine.verdict
        assert verdict is not None
        text = f"{verdict.word}: {gib(mine.memory.reserved)} of {gib(mine.available)} per GPU: {kinds}"
        gpu = answer.place.gpu
        if gpu is not None and gpu.architecture not in ATTENTION:
            text += "\nthe runtime's memory and the margin are those of NVIDIA's GPUs"
        style = {"fits": "", "tight": "yellow", "does not fit": "bold red"}[verdict.word]
        yield from pair("memory", f"{text}\n{verdict.why}" if verdict.why else text, width, style)
    if mine.why_accumulate and (full or r.accumulate == "sharded"):
        yield from pair("gradients", f"{r.accumulate}: {mine.why_accumulate}", width)
    p = mine.prediction
    if p is None:
        yield from pair("speed", f"unknown: {mine.why_unknown}", width, "yellow")
    else:
        whole = units.count(p.tokens_per_s_per_gpu * r.world)
        known = "" if p.pace.kind == "calibrated" else f" ({p.pace.kind})"
        if mine.fits is False:
            yield from pair("speed", f"if it fitted: {rate_span(p)}, {seconds(p.step_s)} per step", width)
            return
        yield from pair("step", f"{seconds(p.step_s)}, {INTERVAL} {span(p.low_s, p.high_s)}{known}", width)
        yield from pair("speed", f"{rate_span(p)}, {whole} tokens/s in total", width)
        yield from pair("MFU", mfu_span(p), width)
        if short := too_short(answer.job.architecture, r, p):
            yield from pair("caution", short, width, "yellow")
    if answer.forecast is not None:
        yield from _ending(answer.forecast, width, full=full)
        yield from _validation(answer.job.train, width)
    yield from pair("network", _network(answer, full=full), width)
    if not full and answer.weak is not None and answer.strong is not None:
        yield from pair("scaling", _brief(answer.weak, answer.strong, answer.best_scaled), width)


def _network(answer: Answer, *, full: bool) -> str:
    """Network demand compared with supply. Inside one NVLink domain nothing uses the network."""
    c, t, place = answer.network_demand, answer.own.traffic, answer.place
    who = "a rank" if place.gpu is None else "a GPU"
    sent = f"{who} sends {_dimensions(t)}"
    if not place.shape.several_domains:
        return sent + (f", all inside the {place.enclosure}" if t.sent >= 0.5 else "")
    entries = []
    if full or c.mean is None:
        share = f"; {place.enclosure}s send each other {_dimensions(t.leaving)} per GPU"
        if c.a_card is not None:
            share += f", {data(c.a_card)} per network card"
        entries.append(sent + share)
    if c.capacity is not None:
        entries.append(
            f"capacity {data(c.capacity * c.nodes)}/s: {c.nodes:,} nodes x {data(c.capacity)}/s in one direction"
        )
    if c.mean is not None:
        share = "" if c.capacity is None else f", {percent(c.mean / c.capacity, 1)} of it"
        text = f"needed {data(c.mean * c.nodes)}/s averaged over a step{share}"
        if c.enough is not None:
            text += f"; {data(c.enough * c.nodes)}/s would limit its cost to {percent(ENOUGH)} of a step"
        entries.append(text)
    return "\n".join(entries)


def _dimensions(sent: Sent) -> str:
    kinds = (
        ("tensor", sent.tensor),
        ("pipeline", sent.pipeline),
        ("data", sent.data),
        ("context", sent.context),
        ("expert", sent.expert),
    )
    by = ", ".join(f"{name} {data(n)}" for name, n in kinds if n >= 0.5)
    return f"{data(sent.sent)} per step ({by})" if by else "nothing"


def _ending(e: RunForecast, width: int, *, full: bool) -> Iterator[Line]:
    f = e.finish
    failures = "less than one failure" if f.failures < 0.95 else f"about {many(round(f.failures), 'failure')}"
    lost = 1 - f.ettr
    text = f"{units.duration(f.wall_s)} ({units.duration(f.low_s)} to {units.duration(f.high_s)}); {failures} expected, "
    text += f"{lost * 100:.2g} % lost to failures and checkpoints"
    if full or lost > MUCH:
        text += (
            f"\na failure every {units.duration(f.wall_s / f.failures)}; training again after {units.duration(f.down_s)}, "
            f"{units.duration(f.joining_s)} of it for NCCL's communicators (assumed to grow with the GPUs) and the rest to "
            f"start processes and to read the checkpoint from storage of {e.storage_gb_s:g} GB/s ({e.storage_source}); copies in memory, which avoid that, are not counted"
        )
    yield from pair("finish", text, width)
    cost = "unknown without --price"
    if e.price is not None:
        cost = f"{spanned(f.gpu_hours * e.price, f)} at {e.price:g} each"
    yield from pair("cost", f"{spanned(f.gpu_hours, f, ' GPU hours')}: {cost}", width)
    more = f.wall_s / e.best.wall_s - 1
    best = f"every {e.best.interval.steps:,} steps ({units.duration(e.best.every_s)})"
    if e.best.interval.limited_by:
        best += f", limited by {e.best.interval.limited_by}"
    text = f"{data(f.checkpoint_bytes)} every {e.every_steps:,} steps ({units.duration(f.every_s)}); "
    if e.every_steps == e.best.interval.steps:
        text += "the best interval"
    elif more < 5e-4:
        text += f"as good as the optimum, {best}"
    else:
        text += f"{percent(more, 1)} longer than with the best, {best}"
    if full:
        slower = e.slow.wall_s / f.wall_s - 1
        text += (
            f"\nstorage of {e.storage_gb_s:g} GB/s ({e.storage_source}); with a tenth of that a run takes "
            f"{percent(slower, 1)} longer. A save stops training for {seconds(f.stall_s)}"
        )
    yield from pair("checkpoints", text, width)


def spanned(value: float, f: Finish, unit: str = "") -> str:
    """A figure that grows with the run's time, and its interval."""
    shown = units.count if value >= 1e6 else figure
    low, high = (shown(value * at / f.wall_s) for at in (f.low_s, f.high_s))
    return f"{shown(value)}{unit} ({low} to {high})"


def _validation(train: TrainSection, width: int) -> Iterator[Line]:
    """The time that validation adds. Its forward passes are about a third of a step's FLOPs."""
    every = train.validate_every_steps
    if every is None:
        return
    most = -(-train.validation_samples(1 << 62) // train.global_batch)
    text = f"not in these times: at most {many(most, 'global batch', 'global batches')} every {every:,} steps"
    yield from pair("validation", f"{text}, about {percent(most / 3 / every, 1)} longer", width)


def _brief(weak: Scaling, strong: Scaling, best: Scaling | None) -> str:
    if weak.unknown:
        return f"known at one size only; {weak.unknown}"
    first, last = weak.known[0], weak.known[-1]
    text = f"from {first.gpus:,} to {last.gpus:,} GPUs {percent(last.efficiency)} efficient with a growing batch (weak)"
    if len(strong.known) > 1:
        end = strong.known[-1]
        text += f", {percent(end.efficiency)} with the same (strong" + (
            f", to {end.gpus:,})" if end.gpus != last.gpus else ")"
        )
    shows = [(name, c.shows_at) for name, c in (("weak", weak), ("strong", strong))]
    seen = [f"from {p.gpus:,} on ({name})" for name, p in shows if p is not None]
    text += (
        f"; communication becomes significant {', '.join(seen)}"
        if seen
        else "; communication is not significant"
    )
    if sizes := sorted({p.gpus for c in (weak, strong) for p in c.known if _tight(p)}):
        text += f"; may run out of memory on {', '.join(f'{n:,}' for n in sizes)} GPUs"
    if best is not None and len(best.known) > 1:
        one, all_ = best.known[0], best.known[-1]
        text += f"\nwith the best layout at each size: {all_.speedup:.1f} times from {one.gpus:,} to {all_.gpus:,} GPUs"
    return text


def _tight(point: Point) -> bool:
    return point.prediction is not None and point.prediction.verdict.word == "tight"


def scaling(answer: Answer, width: int) -> Iterator[Line]:
    """Both scaling curves, size by size, with their assumptions."""
    if answer.weak is None or answer.strong is None or answer.own.fits is False:
        return
    yield "scaling of this layout: tokens/s/GPU relative to the smallest cluster, by GPUs", HEAD
    yield from _curve("weak", answer.weak, width)
    yield from _curve("strong", answer.strong, width)
    if answer.best_scaled is not None:
        yield from _curve("best layouts", answer.best_scaled, width)
    curves = (c for c in (answer.weak, answer.strong, answer.best_scaled) if c is not None)
    doubts = [(p.gpus, p.prediction.verdict.why) for c in curves for p in c.known if p.prediction is not None]
    for doubt in dict.fromkeys(why for _, why in doubts if why):
        sizes = dict.fromkeys(f"{n:,}" for n, why in sorted(doubts) if why == doubt)
        yield from pair("", f"{', '.join(sizes)} GPUs: tight, {doubt}", width, "dim")
    lost = [p for p in (*answer.weak.points, *answer.strong.points) if p.efficiency is None]
    for why in dict.fromkeys(p.why_not for p in lost):
        sizes = dict.fromkeys(f"{p.gpus:,}" for p in lost if p.why_not == why)
        yield from pair("", f"{', '.join(sizes)} GPUs: {why}", width, "dim")
    yield from pair("assumed", "; ".join(answer.weak.assumes), width, "dim")


def _curve(name: str, curve: Scaling, width: int) -> Iterator[Line]:
    # Keep figures that belong together on one line.
    points = [
        "\N{NO-BREAK SPACE}".join((f"{p.gpus:,}:", *percent(p.efficiency).split())) for p in curve.known
    ]
    text = "  ".join(points) or "unknown"
    shows = curve.shows_at
    if shows is not None:
        text += f"\ncommunication becomes significant from {shows.gpus:,} GPUs on" + (
            f": {shows.costs}" if shows.costs else ""
        )
    elif len(curve.known) > 1:
        text += f"\ncommunication is not significant up to {curve.known[-1].gpus:,} GPUs"
    if (worst := curve.worst) is not None:
        text += (
            f"\nworst doubling: {percent(worst.doubling)}, from {worst.gpus // 2:,} to {worst.gpus:,} GPUs"
        )
    text += f"\n{curve.grows}"
    yield from pair(name, text, width)
