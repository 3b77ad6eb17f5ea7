"""Text and figures of a plan: labelled lines, wrapped to a width; layouts, rates and intervals."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import fields

from seatrial.base import units
from seatrial.job.schedules import schedule_named
from seatrial.plan.cost.memory import FRAGMENTATION, Memory
from seatrial.plan.cost.predict import Prediction
from seatrial.plan.model.hardware import Hardware
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import Suggestion, excess, short
from seatrial.plan.report.beyond_memory import BeyondMemory
from seatrial.plan.search.search import TIE_MARGIN, Choice, Found
from seatrial.ui import figures

Line = tuple[str, str]  # text and style
LABEL = 13
LABELLED = "labelled"
HEAD = "bold"
_KEPT = "\N{NO-BREAK SPACE}"  # keeps number and unit together
INTERVAL = "85 % interval"  # of a prediction (plan/cost/calibration.py: Z)


def pair(label: str, text: str, width: int, style: str = "") -> list[Line]:
    """`label` and its wrapped text, further lines aligned below the first, whose style marks it as labelled."""
    head = f"{label:<{LABEL}}" if len(label) < LABEL else f"{label}  "
    texts = spaced(text).split("\n")
    lines: list[Line] = []
    for i, part in enumerate(texts):
        start = head if i == 0 else " " * LABEL
        wrapped = textwrap.wrap(
            start + part if i == 0 else part,
            max(20, width - 2 - (0 if i == 0 else LABEL)),
            subsequent_indent=" " * LABEL if i == 0 else "",
            break_on_hyphens=False,
        )
        for j, line in enumerate(wrapped):
            shown = line if i == 0 else " " * LABEL + line
            first = i == 0 and j == 0
            lines.append((f"  {shown}".rstrip(), f"{LABELLED} {style}".strip() if first else style))
    return lines


def spaced(text: str) -> str:
    """Percentages with a space: 4 %."""
    return re.sub(r"(\d)%", r"\1 %", text)


def labelled(line: Line) -> tuple[str, str, str] | None:
    """(label, text, style) of a line that `pair` began; None for any other."""
    text, style = line
    if style.split(" ")[0] != LABELLED:
        return None
    return text[2 : 2 + LABEL], text[2 + LABEL :], style.removeprefix(LABELLED).strip()


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, left: Sequence[int] = (0,)
) -> list[Line]:
    """Columns under headings, figures right-aligned; the last column holds text and wraps within itself."""
    if not rows:
        return []
    last = len(head) - 1
    wide = [max(len(r[i]) for r in (head, *rows)) for i in range(last)]
    start = 2 + sum(w + 2 for w in wide)
    lines: list[Line] = []
    for row in (head, *rows):
        cells = [
            f"{cell:<{w}}" if i in left else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(row[:last], wide, strict=True))
        ]
        words = textwrap.wrap(spaced(row[last]), max(10, width - start), break_long_words=False) or [""]
        style = "dim" if row is head else ""
        lines.append(("  " + "  ".join([*cells, words[0]]).rstrip(), style))
        lines += [(" " * start + more, style) for more in words[1:]]
    return lines


def gib(n_bytes: float) -> str:
    """Binary size: 131 GiB, 837 KiB."""
    return f"{n_bytes / 1024:.3g} KiB" if 1024 <= n_bytes < 1024**2 else figures.memory(n_bytes)


def data(n_bytes: float) -> str:
    """Decimal size, as networks and storage count: 872 GB, 6.4 TB."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= limit * 0.9995:
            value = n_bytes / limit
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{n_bytes:.0f} B"


def seconds(s: float) -> str:
    """Duration: 23.6 s, 350 ms, 1 min 12 s; three digits, more than any prediction is accurate to."""
    if s < 1:
        return f"{s * 1000:.3g} ms"
    return f"{s:.3g} s" if s < 60 else units.duration(s)


def span(low: float, high: float) -> str:
    """Interval: 19.8 to 28.1 s; in one unit if both ends have the same."""
    a, b = seconds(low), seconds(high)
    unit = b.rpartition(" ")[2]
    if a.endswith(f" {unit}") and a.count(" ") == b.count(" ") == 1:
        a = a.rpartition(" ")[0]
    return f"{a} to {b}"


def percent(share: float | None, digits: int = 0) -> str:
    """Share: 33 %; None gives "unknown"."""
    return "unknown" if share is None else f"{share * 100:.{digits}f} %"


def mfu_span(p: Prediction) -> str:
    """MFU with its interval: 27.5 % (22.7 to 33.4)."""
    if p.mfu is None:
        return "unknown"
    low, high = p.mfu * p.step_s / p.high_s, p.mfu * p.step_s / p.low_s
    return f"{p.mfu * 100:.1f} % ({low * 100:.1f} to {high * 100:.1f})"


def rate_span(p: Prediction) -> str:
    """Speed with its interval: 1,390 tokens/s/GPU (1,146 to 1,687)."""
    each = p.tokens_per_s_per_gpu
    low, high = each * p.step_s / p.high_s, each * p.step_s / p.low_s
    return f"{figures.rate(each)} tokens/s/GPU ({figures.rate(low)} to {figures.rate(high)})"


def batches(recipe: Recipe) -> str:
    """How a layout splits its batch: "32 microbatches of 8, async_tensor"."""
    behind = ", async_tensor" if recipe.async_tensor else ""
    again = "" if recipe.recompute == "none" else f", {recipe.recomputation}"
    many_of = f"{many(recipe.microbatches, 'microbatch', 'microbatches')} of {recipe.microbatch}"
    return f"{many_of}{behind}{again}{', sharded gradients' if _shards_gradients(recipe) else ''}"


def _shards_gradients(recipe: Recipe) -> bool:
    """Whether it reduces gradients in every microbatch, where that makes a difference."""
    return recipe.accumulate == "sharded" and recipe.microbatches > 1


def recomputed(recipe: Recipe) -> str:
    """Recomputation as a symbol: "r", in every second layer "r/2"; with offload "ro"; selective "s"; none ""."""
    if recipe.recompute == "none":
        return ""
    some = f"/{recipe.recompute_every}" if recipe.recompute_every > 1 else ""
    return f"{'s' if recipe.recompute == 'selective' else 'ro' if recipe.offloads else 'r'}{some}"


def _recomputes(recipe: Recipe) -> list[str]:
    if recipe.recompute == "none":
        return []
    kind = "recomputes" if recipe.recompute == "full" else f"recomputes {recipe.recompute}ly"
    entries = [f"{kind} 1 of {recipe.recompute_every} layers" if recipe.recompute_every > 1 else kind]
    return [*entries, "offloads inputs"] if recipe.offloads else entries


def settings(recipe: Recipe, *, short: bool = False) -> str:
    """Settings of a layout other than its sizes: microbatch, schedule, recomputation, resharding."""
    entries = [f"mb {recipe.microbatch}{recomputed(recipe)}" if short else f"microbatch {recipe.microbatch}"]
    layout = recipe.layout
    # In the short form the name of the layout, PP2x4, says that stages are interleaved.
    if layout.pipeline > 1 and not (short and layout.schedule == "interleaved-1f1b"):
        entries.append(layout.schedule)
    if not short:
        entries += _recomputes(recipe)
    if layout.pipeline == 1 and recipe.shard_ranks > 1:
        entries.append(("reshard" if short else "reshards") if recipe.reshard else "no reshard")
    if _shards_gradients(recipe):
        entries.append("sharded" if short else "sharded gradients")
    return ", ".join(entries)


_HELD = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered weights",
    "unsharded_gradients": "whole gradients",
    "activations": "activations",
    "logits": "logits",
    "messages": "stage messages",
    "runtime": "runtime and NCCL",
    "streams": "other streams' memory",
}
_GPU_ALONE = (_HELD["runtime"], _HELD["streams"])


def held(memory: Memory, *, gpu: bool, most: int | None = None) -> str:
    """The kinds of a rank's memory, largest first; `most` of them, and the rest summed as one.

    On a `gpu` they add up to `Memory.reserved`, elsewhere to what torch's allocator hands out.
    """
    kinds = [(getattr(memory, f.name), _HELD.get(f.name, f.name)) for f in fields(memory)]
    if gpu:
        kinds.append((memory.allocated * FRAGMENTATION, "fragmentation"))
    else:
        kinds = [k for k in kinds if k[1] not in _GPU_ALONE]
    whole = sum(n for n, _ in kinds)
    kinds = [k for k in sorted(kinds, reverse=True) if k[0] >= 0.01 * whole]
    if most is not None and len(kinds) > most + 1:
        kinds = kinds[:most]
    rest = whole - sum(n for n, _ in kinds)
    if rest >= 0.01 * whole:
        kinds.append((rest, "other"))
    if not kinds or min(n for n, _ in kinds) < 0.1 * 1024**3:
        return ", ".join(f"{name} {gib(n)}" for n, name in kinds)
    return ", ".join(f"{name} {figure(n / 1024**3)}" for n, name in kinds) + " GiB"


_PARTS = {
    "GEMMs below peak": "products",
    "attention below peak": "attention",
    "memory-bound operators": "operators",
    "recomputation": "recompute",
    "tensor-parallel communication": "TP comm",
    "context-parallel communication": "CP comm",
    "pipeline communication": "PP comm",
    "pipeline bubble and uneven stages": "bubble",
    "data-parallel communication": "DP comm",
    "compute slowed by overlap": "contention",
}


def part(name: str) -> str:
    """Short name of a part of the step."""
    return _PARTS.get(name, name)


def why(p: Prediction, best: Prediction) -> str:
    """What limits a layout: of the best one the largest part of its step, of others the part that exceeds the best's most."""
    if not p.fits:
        return "does not fit"
    if abs(p.step_s / best.step_s - 1) < 5e-4:
        most = max(p.waterfall[1:], key=lambda s: s.share)
        return f"{part(most.name)} {percent(most.share)}"
    more = excess(p, best)
    return "" if more is None else f"{part(more.name)} +{seconds(more.seconds).replace(' ', _KEPT)}"


def flop(n: float) -> str:
    """FLOP count: 445 GFLOP, 2.8 TFLOP."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if n >= limit * 0.9995:
            return f"{n / limit:.3g} {unit}FLOP"
    return f"{n:.0f} FLOP"


def figure(value: float) -> str:
    """Three significant digits, without powers of ten: 36.5, 738, 2,650."""
    return f"{value:.3g}" if value < 999.5 else f"{float(f'{value:.3g}'):,.0f}"


def many(n: int, one: str, several: str | None = None) -> str:
    """Count with its noun: 1 node, 16 nodes."""
    return f"{n:,} {one if n == 1 else several or one + 's'}"


def cluster(place: Hardware) -> str:
    """Nodes, GPUs, and the network if anything uses it: "8 nodes x 8 H100 SXM; InfiniBand NDR 8x400 (assumed)"."""
    text = f"{many(place.nodes, 'node')} x {place.gpus_per_node} "
    text += place.gpu.name if place.gpu is not None else "ranks; GPU unknown"
    if place.domain is not None:
        text += f", NVLink joins {place.domain}"
    if place.shape.several_domains and place.network is not None:
        text += f"; {place.network.name}" + (" (assumed)" if place.network_is_assumed else "")
    elif place.shape.several_domains:
        text += f"; network unknown: {place.why_no_network}"
    return text


def brief(recipe: Recipe) -> str:
    """Layout with settings that its sizes do not show: TP2 PP2x4 FSDP32, mb 2."""
    entries = [short(recipe), f"mb {recipe.microbatch}"]
    if schedule_named(recipe.layout.schedule).split_backward:
        entries.append(recipe.layout.schedule)
    # "selective" as in the job file: a line has little room.
    entries += [words.replace("recomputes selectively", "selective") for words in _recomputes(recipe)]
    if _shards_gradients(recipe):
        entries.append("sharded gradients")
    return ", ".join(entries)


def too_large(beyond: BeyondMemory) -> str:
    """The best layout that only memory refuses: how fast, how much is missing, what makes it fit."""
    p, ways = beyond.prediction, "; no single change makes it fit"
    compared = beyond.gain is not None
    if beyond.suggestions:
        ways = f"; fits {' or '.join(_fits_with(way, compared=compared) for way in beyond.suggestions)}"
    missing = f"{percent(beyond.over)} too much memory ({gib(p.memory.reserved)} of {gib(p.available)})"
    if beyond.gain is None:
        rate = (
            f"{figures.rate(p.tokens_per_s_per_gpu)} tokens/s/GPU if it fitted (none does, to compare with)"
        )
        return f"{brief(beyond.recipe)}: {missing}; {rate}{ways}"
    return f"{brief(beyond.recipe)}: {percent(beyond.gain)} faster than the best, but {missing}{ways}"


def _fits_with(way: Suggestion, *, compared: bool) -> str:
    """`compared`: with the speed of the best layout that fits."""
    tight = ", tight" if way.prediction.verdict.word == "tight" else ""
    if not way.built:
        return f"on {way.what}{tight}"
    if not compared:
        return f"with {way.what}{tight}"
    slower = 1 / (1 + way.gain) - 1
    speed = "as fast as the best" if slower <= TIE_MARGIN else f"{percent(slower)} slower than the best"
    speed = f"{percent(way.gain)} faster than the best" if way.gain > TIE_MARGIN else speed
    return f"with {way.what} ({speed}{tight})"


def unlisted_sure(found: Found, shown: Sequence[Choice]) -> Choice | None:
    """The fastest layout that fits with margin, if it is neither among those `shown` nor the job's own."""
    listed = [*shown, *([] if found.own is None else [found.own])]
    return next((c for c in found.sure[:1] if all(c.recipe != other.recipe for other in listed)), None)


# Mark of a layout that is tight, and its note below a table.
TIGHT = "!"
TIGHT_NOTE = f"{TIGHT}: may run out of memory"


def marked(recipe: Recipe, p: Prediction) -> str:
    """A layout's sizes, with a mark if it is tight."""
    return short(recipe) + (f" {TIGHT}" if p.verdict.word == "tight" else "")


def note(text: str, width: int) -> list[Line]:
    """A dim remark below a table."""
    return [
        (f"  {line}", "dim")
        for line in textwrap.wrap(spaced(text), max(20, width - 2), break_on_hyphens=False)
    ]
