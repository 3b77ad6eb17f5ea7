"""A plan as styled lines: the job's own layout, better ones, reasons, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator

from seatrial.base import units
from seatrial.job.architecture import Architecture
from seatrial.plan.cost.calibration import Z
from seatrial.plan.cost.predict import Prediction
from seatrial.plan.measured.runs import ENOUGH_STEPS, ONE_RUN
from seatrial.plan.report.advice import (
    FURTHEST,
    Crossover,
    Suggestion,
    Target,
    TargetValue,
    short,
)
from seatrial.plan.report.answer import Answer
from seatrial.plan.report.waterfall import waterfall_of
from seatrial.plan.search.search import TIE_MARGIN, Choice
from seatrial.ui import figures
from seatrial.ui.plan_estimate import MUCH, own, scaling
from seatrial.ui.plan_words import (
    HEAD,
    TIGHT,
    TIGHT_NOTE,
    Line,
    brief,
    cluster,
    figure,
    flop,
    gib,
    many,
    marked,
    note,
    pair,
    percent,
    recomputed,
    seconds,
    settings,
    table,
    too_large,
    unlisted_sure,
    why,
)
from seatrial.ui.waterfall import STYLES, waterfall_lines

_LAYOUTS, _WAYS = 5, 6
_WIDE = 110
# Parts of the run with a smaller share are shown only in the full plan.
_SMALL = 0.005


def lines(answer: Answer, *, width: int, full: bool = False) -> list[Line]:
    """All lines of the plan. `full`: every layout, size and source, not only the first ones."""
    sections = (
        _header(answer, width),
        own(answer, width, full=full),
        _layouts(answer, width, full=full),
        _faster(answer, width, full=full),
        _crossovers(answer, width),
        scaling(answer, width) if full else iter(()),
        _waterfall(answer, width, full=full),
        _sources(answer, width, full=full),
        _verdict(answer, width),
    )
    out: list[Line] = []
    for section in sections:
        shown = list(section)
        if shown and out:
            out.append(("", ""))
        out += shown
    return out


def _lora(arch: Architecture) -> str:
    if arch.lora is None:
        return ""
    return f"; LoRA of rank {arch.lora.rank}, {units.count(arch.trained_parameters())} parameters trained"


def _header(answer: Answer, width: int) -> Iterator[Line]:
    job, arch, train = answer.job, answer.job.architecture, answer.job.train
    yield f"plan of {job.name}", HEAD
    yield from pair(
        "model",
        f"{arch.family}, {figures.parameters(arch)}, {many(arch.num_hidden_layers, 'layer')}; "
        f"{flop(arch.flops_per_token(train.sequence_length))} per token{_lora(arch)}",
        width,
    )
    yield from pair(
        "work",
        f"{many(train.steps, 'step')} of {train.batches} x {train.sequence_length:,} tokens: "
        f"{units.count(train.tokens)} tokens, {train.precision}",
        width,
    )
    yield from pair("cluster", cluster(answer.place), width)


def _layouts(answer: Answer, width: int, *, full: bool) -> Iterator[Line]:
    found = answer.found
    if found is None:
        return
    yield f"layouts: {found.tried:,} that the rules allow, {found.too_large:,} of them do not fit", HEAD
    if not found.choices:
        if found.tried:
            yield from pair(
                "none fits", f"the smallest needs {gib(found.least_bytes)} per GPU", width, "bold red"
            )
        if answer.beyond is not None:
            yield from pair("nearest", too_large(answer.beyond), width)
        return
    wide = width >= _WIDE
    best = found.choices[0].prediction
    shown = found.choices if full else found.choices[:_LAYOUTS]
    rows = [_row(str(i), c, best, wide) for i, c in enumerate(shown, 1)]
    if (safe := unlisted_sure(found, shown)) is not None:
        rows.append(_row("ok", safe, best, wide))
    if found.own is not None:
        rows.append(_row("own", found.own, best, wide))
    if wide:
        head = ["", "layout", "settings", "step", "tok/s/GPU", "MFU", "GiB", "slower", "why"]
    else:
        head = ["", "layout", "mb", "tok/s/GPU", "MFU", "slower", "why"]
    yield from table(head, rows, width, left=(0, 1, *((2,) if wide else ())))
    listed = [*shown, *([found.own] if found.own is not None else [])]
    rest = len(found.choices) - len(shown)
    entries = [f"{rest} more: --full"] if rest > 0 else []
    marks = "mb: microbatch, r: recomputes"
    if any(c.recipe.recompute == "selective" for c in shown):
        marks += ", s: selectively"
    if any(c.recipe.offloads for c in listed):
        marks += ", ro: and offloads inputs"
    if any(c.recipe.recompute_every > 1 for c in shown):
        marks += ", s/2: in 1 of 2 layers"
    entries.insert(0, marks)
    if safe is not None:
        entries.insert(0, "ok: fastest with margin")
    if any(c.recipe.async_tensor for c in shown):
        entries.insert(0, "async: async_tensor = true")
    if any(c.recipe.layout.stages_per_rank > 1 for c in shown):
        entries.insert(0, "PP2x4: 4 stages per rank")
    if any(c.prediction.verdict.word == "tight" for c in listed):
        entries.insert(0, TIGHT_NOTE)
    if entries:
        yield from note("; ".join(entries), width)
    if answer.advice is not None and answer.advice.alike:
        near = [short(r) for r in answer.advice.alike]
        names = ", ".join(near[:3]) + (f" and {len(near) - 3} more" if len(near) > 3 else "")
        yield from pair("alike", f"{names}: within {percent(TIE_MARGIN)}, indistinguishable", width)
    if answer.beyond is not None:
        yield from pair("too large", too_large(answer.beyond), width)


def _row(name: str, choice: Choice, best: Prediction, wide: bool) -> list[str]:
    p, r = choice.prediction, choice.recipe
    slower = p.step_s / best.step_s - 1
    row = [
        name,
        marked(r, p),
        settings(r, short=True) if wide else f"{r.microbatch}{recomputed(r)}",
    ]
    row += [seconds(p.step_s)] if wide else []
    row += [figures.rate(p.tokens_per_s_per_gpu), figures.mfu(p.mfu)]
    row += [figure(p.memory.reserved / 1024**3)] if wide else []
    return [*row, "" if not p.fits else "-" if abs(slower) < 5e-4 else percent(slower), why(p, best)]


def _faster(answer: Answer, width: int, *, full: bool) -> Iterator[Line]:
    more = answer.advice
    if more is None:
        return
    fits = answer.own.fits is not False
    # Gains that could be differences between two releases are shown in full only.
    shown = (
        more.suggestions
        if full
        else [way for way in more.suggestions if not fits or way.gain > TIE_MARGIN][:_WAYS]
    )
    if not shown:
        return
    yield "faster than the job's own layout" if fits else "changes that make it fit", HEAD
    rows = [
        [
            *([f"{way.gain * 100:+.0f} %"] if fits else []),
            figures.rate(way.prediction.tokens_per_s_per_gpu),
            figures.mfu(way.prediction.mfu),
            *(t.speed.by(way.prediction) for t in answer.targets),
            f"{way.what}{f': {brief(way.recipe)}' * way.what.startswith('the best')}{_doubt(way)}{'' if way.built else ' *'}",
        ]
        for way in shown
    ]
    wanted = [f"{_wanted(t.wanted)}?" for t in answer.targets]
    head = [*([""] if fits else []), "tok/s/GPU", "MFU", *wanted, "with"]
    yield from table(head, rows, width, left=())
    listed = [] if answer.found is None else answer.found.choices[:_LAYOUTS]
    if any(map(_doubt, shown)) and all(c.prediction.verdict.word != "tight" for c in listed):
        yield from note(TIGHT_NOTE, width)
    if any(not w.built for w in shown):
        yield from note("* requires another network or other software", width)


def _doubt(way: Suggestion) -> str:
    return f" {TIGHT}" if way.prediction.verdict.word == "tight" else ""


def _crossovers(answer: Answer, width: int) -> Iterator[Line]:
    if answer.advice is None or not answer.advice.crossovers:
        return
    yield "crossovers: when another layout becomes best", HEAD
    for what in dict.fromkeys(t.what for t in answer.advice.crossovers):
        turns = [t for t in answer.advice.crossovers if t.what == what]
        text = "; ".join(
            [f"{figure(turns[0].now)} {turns[0].unit} here", *(_crossover_text(t) for t in turns if t.at)]
        )
        if not any(t.at for t in turns):
            text += f"; never, within a factor of {FURTHEST:g}"
        yield from pair(what, text, width)


def _crossover_text(turn: Crossover) -> str:
    assert turn.at is not None
    way = "below" if turn.at < turn.now else "above"
    return f"{way} {figure(turn.at)} {'none fits' if turn.becomes is None else short(turn.becomes)}"


def _waterfall(answer: Answer, width: int, *, full: bool) -> Iterator[Line]:
    if answer.waterfall is None or answer.own.fits is False:
        return
    shown = waterfall_of(answer.waterfall)
    what = "a step" if answer.forecast is None else "the whole run"
    yield f"where the FLOPs go in {what}", HEAD
    small = 0
    for line, bar in zip(waterfall_lines(shown, width), shown.bars, strict=True):
        if full or bar.kind in ("peak", "result") or abs(bar.share) >= _SMALL:
            yield line, STYLES[bar.kind]
        else:
            small += 1
    if small:
        yield f"  and {many(small, 'part')} below {percent(_SMALL, 1)}: --full", "dim"


def _sources(answer: Answer, width: int, *, full: bool) -> Iterator[Line]:
    if full and answer.provenance:
        yield "sources", HEAD
        for source in answer.provenance:
            yield from pair("", source, width)
        return
    p = answer.own.prediction
    if p is None:
        return
    text = f"{p.pace.kind} for {answer.stack} on {_gpu(answer)} {p.pace.source}"
    if p.pace.kind == "calibrated":
        text = f"calibrated: {answer.stack} on {_gpu(answer)}, {p.pace.source}"
    if p.pace.spread > ONE_RUN:
        now, then = (percent(math.expm1(Z * spread)) for spread in (p.pace.spread, ONE_RUN))
        text += (
            f"; ±{now}, and about ±{then} after a run of {ENOUGH_STEPS} steps of this model on one such node"
        )
    assumed = sum("assum" in source for source in answer.provenance)
    yield from pair("speeds", f"{text}; {many(assumed, 'number')} assumed: --full", width)


def _gpu(answer: Answer) -> str:
    return "an unknown GPU" if answer.place.gpu is None else answer.place.gpu.name


def _verdict(answer: Answer, width: int) -> Iterator[Line]:
    for target in answer.targets:
        yield from pair("target", target_words(target), width)
    text, style = verdict(answer)
    yield from pair("verdict", text, width, style)


def verdict(answer: Answer) -> Line:
    """Whether it fits, how fast it is and whether another layout is faster; and the style: green, yellow or red.

    One short sentence: what the layouts are stands in the table.
    """
    mine, best = answer.own, answer.best
    p = mine.prediction
    sure = answer.found.sure[0] if answer.found is not None and answer.found.sure else None
    if mine.fits is False:
        assert mine.available is not None
        text = f"does not fit: {percent(mine.memory.reserved / mine.available - 1)} too much memory"
        if best is not None:
            text += f"; the best layout that fits makes {_speed(best.prediction)}{_margin(best, sure)}"
        elif answer.found is not None:
            text += ", and no layout fits on this cluster (--fit lists clusters that do)"
        return text, "bold red"
    word: str = "" if mine.verdict is None else mine.verdict.word
    style = "yellow" if word == "tight" else "green"
    if p is None:
        return "; ".join(filter(None, (word, "memory and traffic are known, speed is not"))), "yellow"
    text = f"{word}, {_speed(p)}"
    if answer.forecast is not None and (lost := 1 - answer.forecast.finish.ettr) > MUCH:
        text, style = f"{text}, {percent(lost)} of the time lost to failures and checkpoints", "yellow"
    if best is None:
        return text, style
    slower = p.step_s / best.prediction.step_s - 1
    if slower <= TIE_MARGIN:
        near = f"within {percent(slower, 1)} of the best layout, indistinguishable"
        text += f"; {'no layout is faster' if slower < 5e-4 else near}"
        return text + _margin(Choice(mine.recipe, p, mine.limit), sure, tell=False), style
    return f"{text}; the best layout is {percent(slower)} faster{_margin(best, sure, p)}", "yellow"


def _speed(p: Prediction) -> str:
    return f"{figures.rate(p.tokens_per_s_per_gpu)} tokens/s/GPU"


def _margin(choice: Choice, sure: Choice | None, own: Prediction | None = None, *, tell: bool = True) -> str:
    """Of a tight choice: that it is, unless `tell` is false, and how fast the fastest with margin is: compared with the job's own layout, else with it."""
    if choice.prediction.verdict.word != "tight":
        return ""
    if sure is None:
        text = "none fits with margin"
    elif own is None:
        text = f"{percent(sure.prediction.step_s / choice.prediction.step_s - 1)} slower with margin"
    elif (more := own.step_s / sure.prediction.step_s - 1) < 5e-4:
        text = "none is faster with margin"
    else:
        text = f"{percent(more)} with margin"
    return f" ({'tight; ' * tell}{text})"


def target_words(target: Target) -> str:
    """Whether a target is reached, and which change would reach it."""
    w = target.wanted
    if w.of == "end":
        return _end_words(target)
    name = f"{'MFU ' if w.of == 'MFU' else ''}{_wanted(w)}{' tokens/s/GPU' if w.of != 'MFU' else ''}"
    text = {
        "yes": f"{name} is met by the prediction",
        "inside": f"{name} is above the prediction, inside its interval",
        "no": f"{name} is outside the interval",
    }[target.own]
    if target.own == "yes":
        return text
    if target.own == "no" and target.inside is not None:
        text += f"; inside with {_suggestion_with_rate(target.inside)}"
    if target.met is not None:
        text += f"; met with {_suggestion_with_rate(target.met)}"
    elif target.inside is None and target.own == "no":
        text += "; no examined change reaches it"
    return text


def _wanted(w: TargetValue) -> str:
    if w.of == "end":
        hours = w.value / 3600
        return f"{figure(hours)} h" if hours < 48 else f"{figure(hours / 24)} d"
    return percent(w.value) if w.of == "MFU" else f"{w.value:,.0f}"


def _end_words(target: Target) -> str:
    """How likely the run ends in time, and how likely with the best change."""
    text = f"the end within {_wanted(target.wanted)}: {target.why_not}"
    if target.likely is not None:
        text += f"{_chance(target.likely)} likely, needs {target.speed.value:,.0f} tokens/s/GPU"
    if target.better is not None and target.likely_with is not None:
        tight = ", tight" if _doubt(target.better) else ""
        text += f"; {_chance(target.likely_with)} with {target.better.what}{tight}"
    return f"{text} (steps as in their interval, failures at the assumed rate)"


def _chance(likely: float) -> str:
    if likely < 0.01:
        return "less than 1 %"
    return "more than 99 %" if likely > 0.99 else percent(likely)


def _suggestion_with_rate(way: Suggestion) -> str:
    p = way.prediction
    built = "" if way.built else " (not with this setup)"
    tight = ", tight" if _doubt(way) else ""
    return f"{way.what}{tight}{built}: {figures.rate(p.tokens_per_s_per_gpu)}"
