"""A plan as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from seatrial.base import units
from seatrial.job.job import Job
from seatrial.plan.advice import excess, short
from seatrial.plan.answer import Answer
from seatrial.plan.fit import Account, Fit, account
from seatrial.plan.predict import Prediction
from seatrial.plan.scaling import Point, Scaling
from seatrial.plan.search import Choice
from seatrial.plan.waterfall import waterfall_of
from seatrial.ui import figures
from seatrial.ui.account_svg import account_svg
from seatrial.ui.plan_words import (
    CASES,
    TIGHT_NOTE,
    batches,
    data,
    marked,
    mfu_span,
    part,
    percent,
    seconds,
    settings,
    span,
)
from seatrial.ui.scaling_svg import scaling_svg
from seatrial.ui.svg import style as picture_style
from seatrial.ui.waterfall_svg import waterfall_svg

_ROWS = 12  # layouts
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--page:#f6f7f9;--card:#fff;--line:#dfe3e8;
--bad:#c62828;--warn:#a86500;--good:#2a7d46}
@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#9aa4af;--page:#14171b;--card:#1d2126;--line:#31373e;
--bad:#ff7b72;--warn:#e3a33b;--good:#63c584}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:32px 0 10px}
p{margin:6px 0}.soft{color:var(--soft)}.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 18px;margin:10px 0}
.head{border-left:6px solid var(--c,var(--line))}.good{--c:var(--good)}.warn{--c:var(--warn)}.bad{--c:var(--bad)}.said{color:var(--c,var(--ink));font-weight:600}
.big{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:14px 26px;margin-top:16px}.big b{font-size:23px;display:block;line-height:1.2}
.big span{color:var(--soft);font-size:13px}.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
td,th{text-align:right;padding:5px 0 5px 14px;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
th{color:var(--soft);font-weight:500}td.l,th.l{text-align:left;padding-left:0}td.w,th.w{text-align:left;white-space:normal;min-width:130px}td.l{white-space:normal;min-width:110px}
tr.own td{font-weight:600}.pic{overflow-x:auto}.pic svg{min-width:640px}tr.off td{color:var(--soft)}ul{margin:6px 0 0;padding-left:20px}svg{display:block}
details summary{cursor:pointer}@media print{.card{break-inside:avoid}}
"""


def page(
    answer: Answer,
    fits: Sequence[Fit] = (),
    *,
    verdict: str = "",
    tone: str = "",
    wishes: Sequence[str] = (),
) -> str:
    """The whole document. Everything that came out of a file is escaped.

    `verdict` is the plan's last word, `tone` its colour: "good", "warn" or "bad". `wishes`: what was wanted,
    and whether it is within reach. `fits`: the smallest clusters, if they were asked for.
    """
    parts = (
        _head(answer, verdict, tone, wishes),
        _layouts(answer),
        _where(answer),
        _changes(answer),
        _memory(answer),
        _scaling([s for s in (answer.weak, answer.strong, answer.best_scaled) if s is not None]),
        _network(answer),
        _fits(fits),
        _sources(answer),
    )
    return _document(f"Plan of {answer.job.name}", [line for part in parts for line in part])


def fit_page(job: Job, told: Account, room: float | None, fits: Sequence[Fit]) -> str:
    """What the model of a job needs, and the smallest clusters that have it; `room` as in `account_svg`."""
    body = [f'<div class="card head"><h1>What {escape(job.name)} needs</h1>']
    body += [
        f'<div class="soft">{escape(told.headline)}</div></div>',
        "<h2>Memory</h2>",
        '<div class="card">',
    ]
    if told.gpu_bytes is not None:
        body.append(f"<p>With the job's own layout, {escape(str(job.layout))}:</p>")
        picture = account_svg(told, room, title="On the GPU that needs most", alone=False)
        body.append(f'<div class="pic">{picture}</div>')
    return _document(f"What {job.name} needs", [*body, *_account(told), "</div>", *_fits(fits)])


def _document(title: str, body: Sequence[str]) -> str:
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<style>{_STYLE}{picture_style()}</style></head><body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def _head(answer: Answer, verdict: str, tone: str, wishes: Sequence[str]) -> Iterator[str]:
    job, place, own = answer.job, answer.place, answer.own
    gpu = "GPU unknown" if place.gpu is None else place.gpu.name
    where = f"{place.nodes} node{'s' * (place.nodes != 1)} x {place.gpus_per_node} {gpu}"
    if place.network is not None:
        where += f", {place.network.name}"
    yield f'<div class="card head {escape(tone)}"><h1>Plan of {escape(job.name)}</h1>'
    yield f'<div class="soft">{escape(where)} · {escape(str(job.layout))}; {escape(batches(own.recipe))}</div>'
    if verdict:
        yield f'<p class="said {escape(tone)}">{escape(verdict)}</p>'
    yield from (f"<p>{escape(wish)}</p>" for wish in wishes)
    yield '<div class="big">'
    yield from (
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in _big(answer)
    )
    yield "</div></div>"


def _big(answer: Answer) -> Iterator[tuple[str, str]]:
    own, p = answer.own, answer.own.prediction
    if p is None:
        yield "unknown", f"speed: {own.why_unknown}"
    else:
        yield seconds(p.step_s), f"a step; {span(p.low_s, p.high_s)} {CASES}"
        yield figures.rate(p.tokens_per_s_per_gpu), "tokens/s/GPU"
        if p.mfu is not None:
            yield percent(p.mfu, 1), f"MFU; {mfu_span(p).partition('(')[2].removesuffix(')')}"
    needs = own.memory.reserved if own.room is not None else own.memory.allocated
    of = "a rank" if own.room is None else f"a GPU, of {figures.memory(own.room)}"
    if own.verdict is not None and own.verdict.why:
        of += f"; {own.verdict.word}, {own.verdict.why}"
    yield figures.memory(needs), of
    if answer.ending is not None:
        f = answer.ending.finish
        yield units.duration(f.wall_s), f"to the end; {units.duration(f.low_s)} to {units.duration(f.high_s)}"
        cost = answer.ending.cost
        hours = f"{f.gpu_hours:,.0f}"
        yield (hours, "GPU hours") if cost is None else (f"{cost:,.0f}", f"for {hours} GPU hours")


def _layouts(answer: Answer) -> Iterator[str]:
    found = answer.found
    if found is None:
        return
    yield "<h2>Layouts</h2>"
    told = f"{found.tried:,} are legal, {found.too_large:,} of them do not fit"
    if not found.choices:
        yield f'<div class="card bad"><p class="said">None fits.</p><p>{told}; the leanest needs {figures.memory(found.least_bytes)} a GPU.</p></div>'
        return
    yield '<div class="card wide"><table><tr><th class="l">layout</th><th class="w">settings</th><th>step</th><th>tok/s/GPU</th>'
    yield '<th>MFU</th><th>memory</th><th>slower</th><th class="w">why</th></tr>'
    best = found.choices[0].prediction
    for choice in found.choices[:_ROWS]:
        yield _choice(choice, best)
    if found.own is not None:
        yield _choice(found.own, best, own=True)
    if any(
        c.prediction.verdict.word == "tight" for c in (*found.choices[:_ROWS], *filter(None, [found.own]))
    ):
        told += f". {TIGHT_NOTE}"
    yield f'</table><p class="soft">{told}. The fastest of each pair of tensor and pipeline sizes is shown. Why: what takes'
    yield "most of the best step; of the others, what takes most more than there.</p></div>"


def _choice(choice: Choice, best: Prediction, *, own: bool = False) -> str:
    p = choice.prediction
    name = marked(choice.recipe, p) + (" (the job's own)" if own else "")
    slower = p.step_s / best.step_s - 1
    # The largest part for the best one; for the others the one that costs most more than there.
    most = max(p.waterfall[1:], key=lambda share: share.share)
    why = f"{part(most.name)} {percent(most.share)}" if p.fits else "does not fit"
    more = excess(p, best) if p.fits and slower >= 5e-4 else None
    if more is not None:
        why = f"{part(more.name)} +{seconds(more.seconds)}"
    cells = [
        seconds(p.step_s),
        figures.rate(p.tokens_per_s_per_gpu),
        figures.mfu(p.mfu),
        figures.memory(p.memory.reserved),
        "" if slower < 5e-4 else percent(slower),
    ]
    row = "".join(f"<td>{escape(c)}</td>" for c in cells)
    mark = ' class="own"' if own else ""
    left = f'<td class="l">{escape(name)}</td><td class="w">{escape(settings(choice.recipe))}</td>'
    return f'<tr{mark}>{left}{row}<td class="w">{escape(why)}</td></tr>'


def _where(answer: Answer) -> Iterator[str]:
    p = answer.own.prediction
    if p is None:
        return
    whole = answer.ending is not None
    shown = waterfall_of(p.waterfall if answer.ending is None else answer.ending.finish.waterfall)
    title = "Where the FLOPs go, of the whole run" if whole else "Where the FLOPs go, of a step"
    picture = waterfall_svg(shown, title=title, subtitle="share of the GPUs' dense peak", alone=False)
    yield f'<h2>Where the FLOPs go</h2><div class="card pic">{picture}</div>'


def _changes(answer: Answer) -> Iterator[str]:
    more = answer.advice
    if more is None or not more.ways:
        return
    yield '<h2>What would change it</h2><div class="card wide"><table><tr><th class="l">change</th><th class="w">layout</th>'
    yield '<th>tok/s/GPU</th><th>MFU</th><th>faster</th><th class="w">today</th></tr>'
    for way in more.ways:
        p = way.prediction
        cells = (figures.rate(p.tokens_per_s_per_gpu), figures.mfu(p.mfu), f"{way.gain * 100:+.0f} %")
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        layout = f"{marked(way.recipe, p)}, {settings(way.recipe)}"
        built = "" if way.built else "not this trainer, or not this cluster"
        yield (
            f'<tr><td class="l">{escape(way.what)}</td><td class="w">{escape(layout)}</td>{row}'
            f'<td class="w soft">{built}</td></tr>'
        )
    yield "</table></div>"


def _memory(answer: Answer) -> Iterator[str]:
    own = answer.own
    told = account(answer.job.architecture, own.recipe, stack=answer.stack)
    yield "<h2>Memory</h2>"
    yield f'<div class="card"><p>{escape(told.headline)}.</p>'
    picture = account_svg(told, own.room, title="On the GPU that needs most", alone=False)
    yield f'<div class="pic">{picture}</div>'
    yield from _account(told)
    yield "</div>"


def _account(told: Account) -> Iterator[str]:
    alone = ", ".join(f"{name} {data(n)}" for name, n in told.weights)
    yield f'<p class="soft">Weights alone: {escape(alone)}.</p><div class="wide"><table><tr><th class="l">what</th>'
    yield '<th>bytes a parameter</th><th>one copy</th><th>a GPU</th><th>all GPUs</th><th class="w"></th></tr>'
    for li in told.lines:
        each = "" if li.per_parameter is None else f"{li.per_parameter:g}"
        once = "" if li.once is None else data(li.once)
        gpu = "" if li.gpu is None else figures.memory(li.gpu)
        whole = "" if li.cluster is None else data(li.cluster)
        numbers = "".join(f"<td>{cell}</td>" for cell in (each, once, gpu, whole))
        yield f'<tr><td class="l">{escape(li.name)}</td>{numbers}<td class="w soft">{escape(li.note)}</td></tr>'
    if told.gpu_bytes is not None and told.cluster_bytes is not None:
        yield (
            f'<tr class="own"><td class="l">in all</td><td></td><td></td><td>{figures.memory(told.gpu_bytes)}</td>'
            f"<td>{data(told.cluster_bytes)}</td><td></td></tr>"
        )
    yield "</table></div>"


def _scaling(scalings: Sequence[Scaling]) -> Iterator[str]:
    if not scalings:
        return
    yield "<h2>Scaling</h2>"
    picture = scaling_svg(scalings, title="Tokens/s/GPU over the smallest cluster's", alone=False)
    yield f'<div class="card pic">{picture}</div>'
    for shown in scalings:
        yield f'<div class="card"><b>{shown.name.capitalize()}</b><p class="soft">{escape(shown.grows)}.</p><ul>'
        for v in shown.verdicts:
            word = {True: "met", False: "missed", None: "cannot be told"}[v.met]
            tone = {True: "good", False: "bad", None: ""}[v.met]
            yield f'<li><span class="said {tone}">{word}</span>: {escape(v.target)}; {escape(v.predicted)}</li>'
        at = shown.shows_at
        if at is not None:
            cost = f": {at.costs}" if at.costs else ""
            yield f"<li>communication starts to show at {at.gpus:,} GPUs{escape(cost)}</li>"
        yield '</ul><div class="wide"><table><tr><th>GPUs</th><th>global batch</th><th>tokens/s</th><th>times</th>'
        yield '<th>efficiency</th><th>of half the size</th><th>communication</th><th class="w">what grew most, or why not</th></tr>'
        yield from (_point(p, best=shown.best) for p in shown.points)
        yield "</table></div>"
        yield from (f'<p class="soft">Assumed: {escape(a)}.</p>' for a in shown.assumes)
        yield "</div>"


def _point(p: Point, *, best: bool) -> str:
    """A size; where it is the best layout of each, with its name."""
    batch = "" if p.global_batch is None else f"{p.global_batch:,}"
    if p.tokens_per_s is None or p.speedup is None:
        cells = [f"{p.gpus:,}", batch, "", "", "", "", ""]
    else:
        cells = [
            f"{p.gpus:,}",
            batch,
            figures.rate(p.tokens_per_s),
            f"{p.speedup:.2f}",
            percent(p.efficiency),
            "" if p.doubling is None else percent(p.doubling),
            percent(p.exposed),
        ]
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    off = "" if p.why_not is None else ' class="off"'
    told = [p.why_not or p.costs or ""]
    if best and p.recipe is not None:
        told.insert(0, f"{short(p.recipe)}, {settings(p.recipe)}")
    return f'<tr{off}>{row}<td class="w">{escape("; ".join(filter(None, told)))}</td></tr>'


def _network(answer: Answer) -> Iterator[str]:
    c = answer.carried
    if c.nodes == 1:
        return
    rows = [("a GPU sends to other nodes in a step", data(c.a_gpu))]
    if c.mean is not None:
        rows.append(("needed on average", f"{data(c.mean)}/s a node, {data(c.mean * c.nodes)}/s in all"))
    if c.enough is not None:
        rows.append(("a step is 5 % longer than with an endless network at", f"{data(c.enough)}/s a node"))
    there = (
        "unknown"
        if c.capacity is None
        else f"{data(c.capacity)}/s a node, {data(c.capacity * c.nodes)}/s in all"
    )
    rows.append(("there is, in one direction", there))
    body = "".join(f'<tr><td class="l">{escape(a)}</td><td>{escape(b)}</td></tr>' for a, b in rows)
    yield f'<h2>Network between nodes</h2><div class="card"><table>{body}</table></div>'


def _fits(fits: Sequence[Fit]) -> Iterator[str]:
    if not fits:
        return
    yield '<h2>The smallest clusters that fit</h2><div class="card wide"><table><tr><th class="l">GPU</th><th>GPUs</th><th>nodes</th>'
    yield '<th class="w">layout</th><th>memory a GPU</th><th>of</th><th>tok/s/GPU</th><th class="w"></th></tr>'
    for fit in (f for main in fits for f in (main, main.safe) if f is not None):
        r, p = fit.recipe, fit.prediction
        layout = "none" if r is None else f"{short(r)}, {settings(r)}"
        needs = figures.memory(fit.needs) if fit.needs < float("inf") else "unknown"
        speed = "unknown" if p is None else figures.rate(p.tokens_per_s_per_gpu)
        off = ' class="off"' if r is None else ""
        told = fit.why_unknown or ""
        if r is not None and fit.verdict.why:
            told = "; ".join(filter(None, (f"tight, {fit.verdict.why}", told)))
        yield (
            f'<tr{off}><td class="l">{escape(fit.gpu.name)}</td><td>{fit.gpus:,}</td><td>{fit.nodes}</td><td class="w">{escape(layout)}</td>'
            f"<td>{needs}</td><td>{figures.memory(fit.room)}</td><td>{speed}</td>"
            f'<td class="w soft">{escape(told)}</td></tr>'
        )
    yield "</table></div>"


def _sources(answer: Answer) -> Iterator[str]:
    if not answer.provenance:
        return
    told = "".join(f"<li>{escape(text)}</li>" for text in answer.provenance)
    yield f'<h2>Where this is from</h2><div class="card"><ul>{told}</ul></div>'
