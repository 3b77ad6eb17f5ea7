"""Fits, tight, does not fit: counts, limits, and the same verdict everywhere."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import Case, cases

from presets import preset_job
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.memory_fit import SURE, Errors, Tail, errors_from, judge, shipped_errors
from seatrial.plan.cost.predict import capacity, predict, stack_for
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.report.advice import short
from seatrial.plan.report.answer import PlanOptions, answer
from seatrial.plan.search.search import search
from seatrial.ui.plan_html import page
from seatrial.ui.plan_json import document
from seatrial.ui.plan_table import lines, verdict
from seatrial.ui.plan_words import percent

SHARES = st.floats(0.01, 2.0)
RATIOS = st.lists(st.floats(1.0001, 3.0), max_size=30)

# Sharded data parallel alone, which is not what the preset does.
SHARDED = ("parallel.tensor=1", "parallel.async_tensor=false", "train.activation_checkpointing=full")


def errors(*tails: tuple[int, list[float]]) -> Errors:
    return Errors(tuple(Tail(f"source {i}", n, tuple(rs)) for i, (n, rs) in enumerate(tails)))


def test_fit_is_tight_at_one_error_in_100_but_not_in_101() -> None:
    """By hand: one figure was 1.2 times its prediction, and this layout leaves a tenth."""
    hundred, more = errors((100, [1.2])), errors((101, [1.2]))
    assert judge(10.0, 11.0, hundred).word == "tight"
    assert judge(10.0, 11.0, more).word == "fits"
    assert judge(10.0, 12.0, hundred).word == "fits"  # as far above as there is room: it would have run
    assert judge(10.0, 11.99, hundred).word == "tight"
    assert judge(10.0, 9.99, hundred).word == "does not fit"
    assert hundred.full == pytest.approx(1 / 1.2)
    assert more.full == 1.0
    assert judge(10.0, 10.0, more).word == "fits"


def test_the_stated_share_is_the_counted_one() -> None:
    known = errors((60, [1.5, 1.3, 1.1]), (40, [1.4, 1.05]))
    tight = judge(100.0, 120.0, known)
    assert (tight.word, tight.beyond, tight.figures, tight.share) == ("tight", 3, 100, 0.03)
    assert "3 of 100 published figures (3.0%)" in tight.why
    assert tight.document() == {"verdict": "tight", "figures_above": 3, "figures": 100, "share": 0.03}
    over = judge(121.0, 120.0, known)
    assert (over.beyond, over.share, over.why, over.sure) == (None, None, "", False)
    assert judge(10.0, 120.0, known).why == ""
    # A source's own errors do not judge its own layouts.
    assert judge(100.0, 120.0, known.without("source 0")).beyond == 1
    assert known.without("source 0").figures == 40


def test_without_figures_nothing_fits_with_margin() -> None:
    none = errors()
    assert none.full == 0.0
    verdict = judge(1.0, 100.0, none)
    assert (verdict.word, verdict.share) == ("tight", None)
    assert "unknown" in verdict.why


@pytest.mark.cluster  # slow
@given(needs=SHARES, more=st.floats(1.0, 2.0), count=st.integers(30, 400), above=RATIOS)
@settings(max_examples=200, deadline=None)
def test_limits_follow_from_counting(needs: float, more: float, count: int, above: list[float]) -> None:
    known = errors((count, above))
    order = ["does not fit", "tight", "fits"]
    found = judge(needs, 1.0, known)
    if needs <= 1.0:
        beyond = sum(r > 1.0 / needs for r in above)
        assert found.beyond == beyond
        assert found.sure == (beyond / count < SURE)
    assert (found.word == "does not fit") == (needs > 1.0)
    assert order.index(judge(needs, more, known).word) >= order.index(found.word)
    assert order.index(judge(needs * more, 1.0, known).word) <= order.index(found.word)
    # Up to `full` it fits, above it does not.
    assert 0.0 < known.full <= 1.0
    assert judge(known.full * (1 - 1e-9), 1.0, known).sure
    assert not judge(known.full * (1 + 1e-9), 1.0, known).sure


def test_the_shipped_errors_are_in_order() -> None:
    known = shipped_errors()
    assert known.figures == sum(s.figures for s in known.sources) > 100
    assert len({s.name for s in known.sources}) == len(known.sources) > 1
    for s in known.sources:
        assert len(s.above) <= s.figures
        assert list(s.above) == sorted(s.above, reverse=True)
        assert all(1.0 < r < 3.0 for r in s.above)
    # No one source alone decides how much of a GPU may be filled: without any of them there is still a limit.
    assert all(0.5 < known.without(s.name).full < 1.0 for s in known.sources)


def test_a_damaged_file_is_not_read_as_no_errors() -> None:
    with pytest.raises(KeyError):
        errors_from('[[source]]\nname = "a"\nfigures = 3\n')


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_verdict_of_a_prediction_matches_its_memory(case: Case) -> None:
    found = predict(case.model, case.recipe, case.cluster, stack=case.stack)
    held = memory(case.model, case.recipe, stack_for(case.recipe, case.stack))
    assert found.available == capacity(case.cluster)
    assert found.verdict == judge(held.reserved, capacity(case.cluster))
    assert found.fits == (found.verdict.word != "does not fit") == (held.reserved <= found.available)
    assert any(told.startswith("memory: fits up to ") for told in found.provenance)


def test_search_keeps_fastest_and_fastest_sure_fit_per_size_pair() -> None:
    job = preset_job("llama3-8b-h100", *SHARDED)
    cluster = hardware_of(job).cluster
    assert cluster is not None
    found = search(job, cluster)
    assert found.sure
    assert all(c.prediction.verdict.sure for c in found.sure)
    steps = [c.prediction.step_s for c in found.sure]
    assert steps == sorted(steps)
    fastest = {(c.recipe.layout.tensor, c.recipe.layout.pipeline): c for c in found.choices}
    for c in found.sure:
        best = fastest[c.recipe.layout.tensor, c.recipe.layout.pipeline]
        assert c.prediction.step_s >= best.prediction.step_s
        assert (c == best) == best.prediction.verdict.sure
    assert len({(c.recipe.layout.tensor, c.recipe.layout.pipeline) for c in found.sure}) == len(found.sure)


@pytest.mark.cluster  # slow
def test_a_tight_job_is_reported_but_not_refused() -> None:
    """Llama-3 8B with microbatch 8 on 8 H100: 97 % of the memory, by prediction."""
    whole = ("train.microbatch=8", "train.sequence_length=6144", "train.accumulate=whole")
    job = preset_job("llama3-8b-h100", *SHARDED, *whole)
    told = answer(job, hardware_of(job), PlanOptions())
    assert told.own.fits
    assert told.own.verdict is not None
    assert told.own.verdict.word == "tight"
    text, style = verdict(told)
    assert text.startswith("tight, ")
    assert text.endswith(" % faster (tight; 12 % with margin)")
    assert style == "yellow"
    shown = "\n".join(line for line, _ in lines(told, width=100))
    assert "memory       tight: " in shown
    told_why = shown[shown.index("memory       tight") : shown.index("\n  step ")]
    assert "may run out of memory: " in told_why
    own = next(line for line in shown.splitlines() if line.startswith("  own  "))
    assert " ! " in own
    assert "!: may run out of memory" in shown
    full = "\n".join(line for line, _ in lines(told, width=100, full=True))
    assert "GPUs: tight, may run out of memory" in " ".join(full.split())
    json = document(told)
    for found in (json["own"], json["own"]["prediction"], *json["search"]["choices"]):
        at = found.get("prediction", found)
        assert at["memory_verdict"]["figures"] == shipped_errors().figures
    assert json["own"]["memory_verdict"]["verdict"] == "tight"
    assert json["own"]["fits"] is True
    assert {c["prediction"]["memory_verdict"]["verdict"] for c in json["search"]["sure"]} == {"fits"}
    known = [p["memory_verdict"] for p in json["scaling"]["weak"]["points"] if p["step_s"] is not None]
    assert "tight" in {v["verdict"] for v in known}
    assert re.search(r">tight</span></b><span>[^<]*; may run out of memory: ", page(told))


def test_ranks_without_a_known_memory_get_no_verdict() -> None:
    job = preset_job("first-voyage")
    told = answer(job, hardware_of(job), PlanOptions())
    assert told.own.verdict is None
    assert document(told)["own"]["memory_verdict"] is None
    assert "tight" not in verdict(told)[0]


def test_a_verdict_follows_its_prediction() -> None:
    """It is no field that a changed copy could contradict."""
    job = preset_job("llama3-8b-h100", *SHARDED)
    cluster = hardware_of(job).cluster
    assert cluster is not None
    p = search(job, cluster).choices[0].prediction
    words = [replace(p, available=p.memory.reserved * f).verdict.word for f in (0.9, 1.01, 2.0)]
    assert words == ["does not fit", "tight", "fits"]


@pytest.mark.cluster  # slow
def test_verdict_names_fastest_sure_fit_when_the_best_is_tight() -> None:
    job = preset_job("llama3-8b-h100", *SHARDED)
    told = answer(job, hardware_of(job), PlanOptions())
    assert told.found is not None
    assert told.best is not None
    assert told.own.prediction is not None
    first = told.found.sure[0]
    assert told.best.prediction.verdict.word == "tight"
    more = told.own.prediction.step_s / first.prediction.step_s - 1
    text = verdict(told)[0]
    assert text.endswith(f" % faster (tight; {percent(more)} with margin)")
    # What it is stands in the table, on the terminal and on the page.
    shown = "\n".join(line for line, _ in lines(told, width=100))
    assert f"  ok   {short(first.recipe)} " in shown
    assert f"with margin: {short(first.recipe)}<" in page(told)
    assert "  ok  " not in "\n".join(
        line
        for line, _ in lines(replace(told, found=replace(told.found, sure=told.found.choices)), width=100)
    )
    # If the job's own is as fast as any that fits with margin, the text says that instead.
    same = replace(told.found, sure=(replace(first, prediction=told.own.prediction),))
    assert verdict(replace(told, found=same))[0].endswith("(tight; none is faster with margin)")
    # One that does not fit learns of both.
    large = preset_job(
        "llama3-8b-h100", *SHARDED, "train.microbatch=4", "train.activation_checkpointing=none"
    )
    over = answer(large, hardware_of(large), PlanOptions())
    assert over.own.fits is False
    assert re.search(r"fits makes [\d,]+ tokens/s/GPU \(tight; \d+ % slower with margin\)$", verdict(over)[0])
    assert over.found is not None
    none = replace(over, found=replace(over.found, sure=()))
    assert verdict(none)[0].endswith("(tight; none fits with margin)")
