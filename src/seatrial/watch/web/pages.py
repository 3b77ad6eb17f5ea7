"""The pages of one run other than the first screen, as blocks. A page lists what is missing. Reads only the job file and plan.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from seatrial.base import units
from seatrial.base.files import flat, parse_toml, read_text
from seatrial.record.events import Event
from seatrial.ui import figures
from seatrial.ui.recovery import Recoveries, message_of
from seatrial.watch.web import blocks as b
from seatrial.watch.web import heat, reports
from seatrial.watch.web.documents import Document, read_document
from seatrial.watch.web.polled_run import PolledRun

Page = dict[str, Any]
POINTS = 1200  # points of a curve
_MOST_EVENTS = 1000
_MOST_ROWS = 500
_SEVERITY = {"error": "bad", "warning": "warn"}
# Major events, in addition to warnings and errors.
_STEPS_OF_A_RUN = ("run_started", "generation_started", "recovering", "recovered", "run_finished", "grown")


def page(title: str, blocks: Sequence[b.Block], missing: Sequence[str] = ()) -> Page:
    """A page; `missing`: what could not be read, or was not recorded."""
    return {"title": title, "blocks": list(blocks), "missing": list(missing)}


def ranks(polled: PolledRun) -> Page:
    """The metrics of the heat map, whose data is requested separately, and the ranks that deviate most."""
    rows = [
        [rank, node, units.duration(own), b.toned(f"{share:+.1f} %", "warn" if share > 2 else "")]
        for rank, node, own, share in heat.worst(polled, 24)
    ]
    found = [
        b.table(
            "Most deviating ranks", ["#rank", "#node", "#own work per step", "#against stage peers"], rows
        )
    ]
    split = polled.ranks.account
    missing = (
        []
        if split is not None
        else ["not all ranks have recorded the stages of a step of this generation yet"]
    )
    if not polled.telemetry:
        missing.append("node telemetry: not recorded")
    notes = (
        []
        if split is None
        else [
            b.note(
                f"Own work: time of a step in which a rank does not wait for others, median of steps {split.first_step:,}-{split.last_step:,}; "
                f"peers: the ranks of the same pipeline stage (of {polled.ranks.pipeline})."
            )
        ]
    )
    return page("Ranks", [*notes, *(found if rows else [])], missing) | {"metrics": heat.metrics(polled)}


def step(polled: PolledRun) -> Page:
    """The time of a step by stage, measured and planned."""
    split, waterfall = polled.ranks.account, polled.ranks.waterfall
    if split is None:
        return page("Step", [], ["the ranks have not recorded the stages of a step of this generation yet"])
    found = [
        b.facts(
            "Step",
            [
                ("mean step", units.duration(split.split.step_s)),
                ("steps", f"{split.first_step:,}-{split.last_step:,}"),
                ("ranks", f"{split.ranks:,}"),
                (
                    "slowest rank",
                    f"rank {split.split.pace_rank}, {units.duration(split.split.pace_ahead_s)} slower than the median",
                ),
                (
                    "plan",
                    None
                    if waterfall is None or waterfall.predicted_step_s is None
                    else units.duration(waterfall.predicted_step_s),
                ),
                ("MFU", None if waterfall is None else figures.mfu(waterfall.mfu)),
            ],
        ),
        b.bars(
            "Stages of a step",
            [
                _bar(name.replace("_", " "), seconds, split.split.step_s)
                for name, seconds in split.seconds.items()
            ],
            note="Frontier accounting: the stages add up to the step time of the slowest rank; waiting is what remains after own work.",
        ),
    ]
    notes = [
        b.note(f"{stage.replace('_', ' ')} is not separated: {why}")
        for stage, why in split.not_separated.items()
    ]
    missing = []
    if waterfall is not None:
        rows = []
        for row in waterfall.shown:
            entry = _bar(row.name, row.seconds, waterfall.step_s)
            if row.predicted_s is not None:
                entry |= {"planned": row.predicted_s, "planned_text": units.duration(row.predicted_s)}
            if row.ratio is not None:
                entry["ratio"] = f"{row.ratio:.2f} x plan"
            rows.append(entry)
        found.append(b.bars("Measured and planned", rows))
        notes += [b.note(text) for text in waterfall.notes()]
    if polled.ranks.why_no_prediction:
        missing.append(f"no prediction: {polled.ranks.why_no_prediction}")
    return page("Step", [*found, *notes], missing)


def _bar(label: str, seconds: float | None, whole: float) -> b.Block:
    if seconds is None:
        return {"label": label, "value": None, "text": "unknown"}
    return {
        "label": label,
        "value": seconds,
        "text": f"{units.duration(seconds)}  {100 * seconds / whole:.1f} %",
    }


def curves(polled: PolledRun) -> Page:
    """Loss, throughput and step time over the whole run."""
    history = polled.view.history
    steps = np.array(history.steps, dtype=np.int64)
    found, missing = [], []
    if not len(steps):
        return page("Curves", [], ["no step yet"])
    starts = _places(len(steps))
    x = steps[np.append(starts[1:], len(steps)) - 1].tolist()
    for title, name, unit in (
        ("Loss", "loss", "nats/token"),
        ("Step time", "step_time_s", "s"),
        ("Tokens per second", "tokens_per_s", ""),
    ):
        values = np.asarray(history.column(name), dtype=np.float64)
        lost = int((~np.isfinite(values)).sum())
        if lost:
            missing.append(f"{title.lower()} of {lost:,} steps is not finite")
        mean, low, high = _binned(values, starts)
        series = [("mean", mean)] if len(x) == len(steps) else [("mean", mean), ("low", low), ("high", high)]
        found.append(b.chart(title, x, series, unit=unit, band=len(series) > 1))
    validation = history.validation
    if validation:
        at, losses = zip(*validation[-POINTS:], strict=True)
        found.insert(1, b.chart("Validation loss", at, [("loss", losses)], unit="nats/token"))
    else:
        missing.append("validation loss: not measured (train.validate_every_steps)")
    return page("Curves", found, missing)


def _places(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Start index of each bin, at most POINTS bins over `count` values."""
    return np.unique(np.linspace(0, count, min(count, POINTS), endpoint=False).astype(np.int64))


def _binned(values: Any, starts: Any) -> tuple[list[float | None], list[float | None], list[float | None]]:
    """Mean, minimum and maximum of each bin; None if it has no finite value."""
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    low = np.minimum.reduceat(np.where(known, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
    there = counts > 0
    mean = sums / np.maximum(counts, 1)
    return tuple(
        [float(f"{v:.6g}") if ok else None for v, ok in zip(column.tolist(), there.tolist(), strict=True)]
        for column in (mean, low, high)
    )  # type: ignore[return-value]


def events(polled: PolledRun) -> Page:
    """Failures with their evidence, then all events, newest first."""
    view = polled.view
    found: list[b.Block] = []
    if view.failure is not None:
        failure = view.failure
        found += [
            b.facts(
                "The failure that ended the run",
                [
                    ("what", b.toned(failure.message, "bad")),
                    ("cause", failure.cause),
                    ("node", failure.node),
                    ("rank", failure.rank),
                    ("when", b.at(failure.time)),
                    ("log", failure.log),
                    ("hint", failure.hint),
                ],
            )
        ]
        if failure.tail:
            found.append(b.text("Last log lines", failure.tail))
    recoveries = Recoveries(view.events)
    counts = Counter(e.kind for e in view.events if e.severity in ("warning", "error"))
    found.append(
        b.facts(
            "Summary",
            [
                ("events", f"{len(view.events):,}"),
                ("recoveries", recoveries.total or "none"),
                ("most frequent", ", ".join(f"{kind} {n:,}" for kind, n in counts.most_common(5))),
            ],
        )
    )
    shown = view.events[-_MOST_EVENTS:][::-1]
    cut = len(view.events) - len(shown)
    found.append(
        {
            "kind": "events",
            "title": "Events",
            "rows": [_event(event) for event in shown],
            "note": f"{cut:,} earlier events are in events.jsonl" if cut else "",
        }
    )
    missing = [str(p) for p in view.problems if p.file.startswith("events")][:20]
    return page("Events and failures", found, missing)


def _event(event: Event) -> dict[str, Any]:
    data = event.data
    return {
        "time": event.time,
        "tone": _SEVERITY.get(event.severity, ""),
        "kind": event.kind,
        "text": message_of(event),
        "node": event.node,
        "rank": event.rank,
        "generation": event.generation,
        "major": event.severity in _SEVERITY or event.kind in _STEPS_OF_A_RUN,
        "evidence": "" if not data else json.dumps(data, ensure_ascii=False, indent=1, default=str)[:1500],
    }


def checkpoints(polled: PolledRun) -> Page:
    """Complete checkpoints, and statistics of saves from the events."""
    view = polled.view
    kept = [
        [f"{c.step:,}", b.ago(c.time), b.at(c.time), c.where, "newest" if c == view.latest else ""]
        for c in reversed(view.checkpoints)
    ]
    saves = [e for e in view.events if e.kind == "checkpoint_saved"]
    seconds = [s for e in saves if (s := Document(e.data).number("seconds")) is not None]
    stalled = [s for e in saves if (s := Document(e.data).number("stalled_s")) is not None]
    trouble = [
        e
        for e in view.events
        if e.kind in ("checkpoint_failed", "checkpoint_damaged", "checkpoint_set_aside", "checkpoint_overdue")
    ]
    missing: list[str] = []
    interval = read_document(view.folder.interval_json, missing)
    found = [
        b.facts(
            "Saves",
            [
                ("saved", f"{len(saves):,}"),
                ("median save time", units.duration(float(np.median(seconds))) if seconds else None),
                (
                    "training stalled per save",
                    f"median {units.duration(float(np.median(stalled)))}" if stalled else None,
                ),
                (
                    "steps since the latest",
                    None if view.latest is None else f"{max(0, view.step - view.latest.step):,}",
                ),
                ("interval", None if interval is None else b.rounded(interval.number("steps"))),
            ],
        ),
        b.table("Kept", ["#step", "#age", "saved", "where", ""], kept[:_MOST_ROWS]),
    ]
    if not kept:
        missing.append("no complete checkpoint yet")
    if trouble:
        rows = [
            [b.at(e.time), b.toned(e.kind, _SEVERITY.get(e.severity, "")), e.message] for e in trouble[-50:]
        ]
        found.append(b.table("Trouble", ["when", "event", "what"], rows[::-1]))
    last = saves[-20:][::-1]
    if last:
        rows = []
        for event in last:
            data = Document(event.data)
            size, took = data.number("bytes"), data.number("seconds")
            rows.append(
                [
                    b.rounded(data.number("step")),
                    b.at(event.time),
                    "" if size is None else units.memory(size),
                    "" if took is None else units.duration(took),
                ]
            )
        found.append(b.table("Latest saves", ["#step", "when", "#size", "#time"], rows))
    return page("Checkpoints", found, missing)


def data(polled: PolledRun) -> Page:
    """Samples seen, and the stores they came from."""
    view = polled.view
    missing: list[str] = []
    plan = read_document(view.folder.plan_json, missing)
    found = [
        b.facts(
            "Samples",
            [
                ("steps in the ledger", f"{view.ledger_steps:,}"),
                ("every sample seen once", _verdict(polled)),
                ("tokens trained on", units.count(view.tokens) if view.tokens else None),
                ("skipped steps", f"{len(view.skipped_steps):,}" if view.skipped_steps else "none"),
                ("skipped samples", f"{view.skipped_samples:,}" if view.skipped_steps else None),
                ("global batch", None if view.job.batches is None else str(view.job.batches)),
                ("sequence length", b.rounded(view.job.sequence_length)),
            ],
        )
    ]
    if plan is None:
        missing.append("plan.json does not exist, so the stores are unknown")
    else:
        tokens = plan.number("data", "tokens")
        stores = [store.value for store in plan.each("data", "stores") if isinstance(store.value, str)]
        digests = [digest.value for digest in plan.each("data", "digests") if isinstance(digest.value, str)]
        digests += [""] * len(stores)
        found.append(
            b.facts(
                "Tokens",
                [
                    ("tokens in the stores", None if tokens is None else units.count(tokens)),
                    ("tokenizer", plan.text("data", "tokenizer")),
                    (
                        "epochs",
                        None if not tokens or not view.tokens else f"{view.tokens / tokens:.2f}",
                    ),
                ],
            )
        )
        found.append(
            b.table("Stores", ["store", "manifest SHA-256"], list(zip(stores, digests, strict=False)))
        )
    if view.ledger_gaps:
        found.append(
            b.table(
                "Contradictions in the ledger",
                ["contradiction"],
                [[gap] for gap in view.ledger_gaps[:_MOST_ROWS]],
            )
        )
    if view.skipped_steps:
        found.append(b.note(f"Deliberately skipped: {figures.steps(view.skipped_steps)[:2000]}", "warn"))
    return page("Data", found, missing)


def _verdict(polled: PolledRun) -> Any:
    view = polled.view
    if view.ledger_gaps:
        return b.toned(f"no: {len(view.ledger_gaps):,} contradictions", "bad")
    if not view.ledger_steps:
        return "the ledger is empty"
    return b.toned("yes", "good") if view.job.batches else "unknown: job.toml has no global batch"


def plan(polled: PolledRun) -> Page:
    """Layout, model, and the job file with every key."""
    view, missing, found = polled.view, list[str](), list[b.Block]()
    document = read_document(view.folder.plan_json, missing)
    if document is None:
        missing = missing or ["plan.json does not exist"]
    else:
        parameters = document.number("parameters")
        layout = [
            (key, item.value) for key, item in document.items("layout") if isinstance(item.value, int | str)
        ]
        found.append(
            b.facts(
                "Layout",
                [
                    *layout,
                    ("microbatches", document.number("microbatches")),
                    ("parameters", None if parameters is None else units.count(parameters)),
                ],
            )
        )
        chosen = document.at("chosen")
        if isinstance(chosen.value, dict):
            reasons = [reason.value for reason in chosen.each("reasons") if isinstance(reason.value, str)]
            step_s, mfu = chosen.number("step_s"), chosen.number("mfu")
            found.append(
                b.facts(
                    'Chosen by parallel = "auto"',
                    [
                        ("basis", chosen.text("basis")),
                        ("predicted step", None if step_s is None else units.duration(step_s)),
                        ("predicted MFU", None if mfu is None else figures.mfu(mfu)),
                        ("reason", chosen.text("why_now")),
                    ],
                )
            )
            found += [b.note(reason) for reason in reasons[:40]]
        model = [
            (key, item.value)
            for key, item in document.items("architecture")
            if isinstance(item.value, int | float | str | bool)
        ]
        found.append(b.facts("Model", [(key.replace("_", " "), str(value)) for key, value in model]))
    try:
        job = flat(parse_toml(read_text(view.folder.job_toml, most=1 << 20)))
        rows = [
            [key, json.dumps(value, ensure_ascii=False, default=str)[:300]]
            for key, value in sorted(job.items())
        ]
        found.append(b.table("Job", ["key", "value"], rows[:_MOST_ROWS]))
    except (OSError, ValueError) as error:
        missing.append(f"job.toml cannot be read: {error.strerror if isinstance(error, OSError) else error}")
    return page("Plan", found, missing)


PAGES: Mapping[str, Callable[[PolledRun], Page]] = {
    "ranks": ranks,
    "step": step,
    "curves": curves,
    "events": events,
    "checkpoints": checkpoints,
    "data": data,
    "checks": lambda polled: page(*reports.checks(polled.view.folder)),
    "scaling": lambda polled: page(*reports.scaling(polled.view.folder)),
    "drills": lambda polled: page(*reports.drills(polled.view.folder)),
    "plan": plan,
}
