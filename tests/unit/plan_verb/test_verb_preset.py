"""The reference plan counts each assumption once, and the preset's comments match its prediction."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from verb_cases import reference

from presets import preset_file
from seatrial.plan.report.answer import FAILURES
from seatrial.ui.plan_table import lines

pytestmark = pytest.mark.cluster  # slow


def said(pattern: str) -> list[float]:
    """The figures in the preset's one line that matches."""
    found = re.findall(pattern, preset_file("qwen2.5-72b-b300").read_text(encoding="utf-8"))
    assert len(found) == 1, pattern
    values = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [float(v.replace(",", "")) for v in values]


def test_the_presets_comments_are_what_the_plan_predicts() -> None:
    told = reference()
    p, ending = told.own.prediction, told.forecast
    assert p is not None
    assert ending is not None
    assert told.found is not None
    assert told.found.own_costs is not None
    f, memory, gib = ending.finish, told.own.memory, 2**30
    parts = {s.name: s.share for s in p.waterfall}
    own, best = told.own.recipe, told.found.choices[0].recipe
    predicted = {
        r"# (\d+) billion tokens": [told.job.train.steps * own.global_batch * own.sequence / 1e9],
        r"tokens: (\d+) days as predicted, (\d+) hours at 2,500": [
            f.wall_s / 86400,
            told.job.train.steps * own.global_batch * own.sequence / 2500 / own.world / 3600,
        ],
        r"then 16\): (\d+) s as predicted": [p.step_s],
        r"# every (\d+) hours, (\d+) GB each": [f.every_s / 3600, f.checkpoint_bytes / 1e9],
        r"# every (\d+) minutes;": [told.job.resilience.snapshot_every_steps * p.step_s / 60],
        r"fails every (\d+) days or so": [f.wall_s / f.failures / 86400],
        r"activations are (\d+) of the (\d+) GiB needed of (\d+)": [
            n / gib for n in (memory.activations, memory.reserved, p.available)
        ],
        r"(\d+) % of a step is bubble": [100 * parts["pipeline bubble and uneven stages"]],
        r"gathered weights \((\d+) GB\)": [memory.gathered / 1e9],
        r"finds tensor (\d+) x shard (\d+) with microbatch (\d+), selective": [
            best.layout.tensor,
            best.layout.shard,
            best.microbatch,
        ],
        r"sharded gradients, (\d+) % faster, but tight": [100 * told.found.own_costs],
        r"cards of 400 Gb/s a node, ([\d.]+) TB/s in all": [(told.network_demand.capacity or 0) * 16 / 1e12],
    }
    for pattern, values in predicted.items():
        assert said(pattern) == pytest.approx(values, rel=0.02, abs=0.5), pattern  # whole numbers
    assert told.found.choices[0].prediction.verdict.word == "tight"


def test_network_failures_and_stragglers_are_assumed_once() -> None:
    told = reference()
    kinds = Counter(re.split(r"[: ]", text)[0] for text in told.provenance)
    assert [kinds[k] for k in ("network", "collectives", "latency", "failures", "stragglers", "storage")] == [
        1
    ] * 6
    assert told.forecast is not None
    assert told.forecast.rate is FAILURES
    full = " ".join(text.strip() for text, _ in lines(told, width=100, full=True))
    assert full.count("oversubscription") == full.count("no stragglers") == 0
    # What the scaling lines say of stragglers is what a step has in it.
    assert len(re.findall("stragglers[a-z: ]* 0.5 %", full)) == 2


def test_stragglers_slow_kernels_once() -> None:
    """As many GPUs again cost half a per cent of a step's kernels, and nothing else of it."""
    told = reference()
    assert told.weak is not None
    a, b = (p.prediction for p in told.weak.points if p.gpus in (512, 1024))
    assert a is not None
    assert b is not None
    assert b.parts.products / a.parts.products == pytest.approx((1 + 0.005 * 10) / (1 + 0.005 * 9))
