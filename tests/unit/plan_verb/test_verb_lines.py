"""The printed plan: within the width, in a fixed order, without unknown values."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from typing import Any

import pytest
from verb_cases import EVERY, must_change, nowhere, reference, small
from verb_cases import too_large as too_large_for_all

from seatrial.plan.report.answer import Answer
from seatrial.ui.plan_html import page
from seatrial.ui.plan_json import document
from seatrial.ui.plan_table import lines, verdict
from seatrial.ui.plan_words import data, figure, flop, gib, percent, seconds, span, too_large

pytestmark = pytest.mark.cluster  # slow


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("full", [False, True], ids=["short", "full"])
@pytest.mark.parametrize("case", EVERY, ids=lambda c: c.__name__)
def test_lines_keep_to_the_width(case: Any, full: bool, width: int) -> None:
    shown = lines(case(), width=width, full=full)
    # At 60 columns a table of figures is what it is.
    most = max(width, 80)
    assert [text for text, _ in shown if len(text) > most] == []
    assert not any(text != text.rstrip() for text, _ in shown)
    text = "\n".join(text for text, _ in shown)
    for wrong in ("nan", "inf ", "None", "%%", "{", "e+0"):
        assert wrong not in text, wrong
    assert text.startswith("plan of ")
    assert "\n  verdict" in text


def text_of(told: Answer, **options: Any) -> str:
    return "\n".join(text for text, _ in lines(told, width=100, **options))


def test_the_first_screen_is_short_and_full_shows_more() -> None:
    short, full = lines(reference(), width=120), lines(reference(), width=120, full=True)
    assert len(short) < 70 < len(full)
    told = text_of(reference())
    order = ["the job's own layout", "layouts: ", "faster than", "where the FLOPs go", "speeds", "verdict"]
    assert [told.index(word) for word in order] == sorted(told.index(word) for word in order)


_REACHED = {
    "yes": "met by the prediction",
    "inside": "above the prediction, inside its interval",
    "no": "outside the interval",
}


def test_the_reference_voyage_in_words() -> None:
    told = text_of(reference())
    for words in (
        "capacity 6.4 TB/s: 16 nodes x 400 GB/s in one direction",
        "needed ",
        f"2,500 tokens/s/GPU is {_REACHED[reference().targets[0].own]}",
        "32 microbatches of 8, async_tensor",
        "85 % interval ",
        "872 GB every 500 steps",
        "TP8 async PP2 FSDP8",
        "async: async_tensor = true",
        "dense peak",
    ):
        assert words in told, words
    assert "at 3 each" in text_of(small())
    assert "0.00379 a node and day" in text_of(reference(), full=True)


def test_verdicts() -> None:
    assert verdict(reference())[0].startswith(
        "fits, 1,802 tokens/s/GPU; the best layout is 18 % faster (tight; "
    )
    assert verdict(nowhere()) == ("memory and traffic are known, speed is not", "yellow")
    text, style = verdict(too_large_for_all())
    assert "no layout fits on this cluster" in text
    assert style == "bold red"
    text, style = verdict(must_change())
    assert "the best layout that fits makes " in text
    assert style == "bold red"


def test_a_layout_that_does_not_fit_has_no_forecast() -> None:
    for case in (too_large_for_all, must_change):
        told = text_of(case())
        for words in ("finish ", "cost ", "where the FLOPs go", "faster than"):
            assert words not in told
        assert "does not fit" in told


def test_without_a_gpu_only_what_is_known() -> None:
    told = text_of(nowhere())
    assert "GPU unknown; network unknown" in told
    assert "tokens/s" not in told
    assert "a rank sends " in told


@pytest.mark.parametrize("case", EVERY, ids=lambda c: c.__name__)
def test_the_document_is_plain_and_whole(case: Any) -> None:
    told = case()
    text = json.dumps(document(told), allow_nan=False)
    back = json.loads(text)
    assert back["schema_version"] == 1
    assert back["own"]["fits"] == told.own.fits
    assert (back["own"]["prediction"] is None) == (told.own.prediction is None)
    if told.own.prediction is not None:
        shares = back["own"]["prediction"]["waterfall"]
        assert sum(s["share"] for s in shares) == pytest.approx(1)
        assert shares[0]["share"] == pytest.approx(back["own"]["prediction"]["mfu"])
    if told.found is not None:
        assert len(back["search"]["choices"]) == len(told.found.choices)
    assert back["provenance"] == list(told.provenance)


def test_figures() -> None:
    assert [data(n) for n in (0, 900, 5.584e8, 872e9, 6.4e12)] == [
        "0 B",
        "900 B",
        "558 MB",
        "872 GB",
        "6.4 TB",
    ]
    assert [figure(x) for x in (36.51, 738.2, 2650.3, 0.123)] == ["36.5", "738", "2,650", "0.123"]
    assert flop(444.8e9) == "445 GFLOP"
    assert gib(837 * 1024) == "837 KiB"
    assert percent(0.4913) == "49 %"
    assert percent(None) == "unknown"
    assert [seconds(s) for s in (0.0351, 23.58, 111.9)] == ["35.1 ms", "23.6 s", "1 min 52 s"]
    assert span(17.04, 32.6) == "17 to 32.6 s"
    assert span(0.9, 1.2) == "900 ms to 1.2 s"


def test_a_layout_that_fails_only_for_memory_is_shown_once() -> None:
    beyond = reference().beyond
    assert beyond is not None
    assert beyond.suggestions
    assert "microbatch 1 (8 % slower than the best, tight)" in too_large(beyond)
    assert " ".join(text_of(reference()).split()).count(f"too large {too_large(beyond)} ") == 1
    assert escape(f"Too large: {too_large(beyond)}.") in page(reference())
    told = document(reference())["search"]["beyond_memory"]
    assert told["recipe"]["microbatch"] == beyond.recipe.microbatch
    assert told["ways"][0]["what"] == "microbatch 1"
    assert "no single change makes it fit" in too_large(replace(beyond, suggestions=()))
    assert "too large" not in text_of(too_large_for_all())
    assert document(too_large_for_all())["search"]["beyond_memory"] is None


def test_small_clusters_show_no_empty_sections() -> None:
    told = text_of(small())
    assert "all inside the node" in told
    assert "there is " not in told


def test_validation_time_is_shown() -> None:
    assert "\n  validation" not in text_of(small())
    job = small().job
    train = job.train.model_copy(update={"validate_every_steps": 500})
    validated = replace(job, file=job.file.model_copy(update={"train": train}))
    told = text_of(replace(small(), job=validated))
    assert "not in these times: at most 32 global batches every 500 steps, about 2.1 % longer" in told
