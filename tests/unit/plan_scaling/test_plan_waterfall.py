"""The geometry of the waterfall: bars add up from the peak to the result for any shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.failures import RATES
from seatrial.hardware.networks import find_network
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost.finish import finish
from seatrial.plan.cost.predict import Share, predict
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.step_waterfall import TABLE
from seatrial.plan.report.waterfall import KINDS, LEAST, waterfall_of

MODEL = model_presets()["qwen2.5-72b"]
REFERENCE = Recipe(4096, 1024, layout=Layout(tensor=8, pipeline=2, shard=8), reshard=False, compiled=True)


def cluster() -> Cluster:
    gpu = find_gpu("B300 SXM")
    assert gpu is not None
    return Cluster(gpu, 16, 8, find_network("InfiniBand NDR 8x400"))


@st.composite
def shares(draw: st.DrawFn) -> list[Share]:
    weights = draw(st.lists(st.floats(0, 1), min_size=1, max_size=14))
    first = draw(st.floats(0.01, 1))
    whole = first + sum(weights)
    parts = [first / whole, *(w / whole for w in weights)]
    return [Share(f"part {i}", s, 10 * s) for i, s in enumerate(parts)]


@pytest.mark.cluster  # slow
@given(shares())
@settings(max_examples=200, deadline=None)
def test_each_bar_begins_at_the_end_of_the_previous_one(given_shares: list[Share]) -> None:
    shown = waterfall_of(given_shares)
    at = 1.0
    for bar in shown.bars[1:-1]:
        # What is too small to draw lies between two bars.
        assert at - bar.high <= LEAST * len(shown.nothing) + 1e-9
        assert bar.high - bar.low == pytest.approx(bar.share)
        at = bar.low
    assert shown.bars[0].high == 1.0
    assert shown.bars[-1].high == shown.mfu == given_shares[0].share
    drawn = sum(b.share for b in shown.bars[1:])
    assert drawn == pytest.approx(1.0, abs=LEAST * (len(shown.nothing) + 1))
    assert len(shown.bars) + len(shown.nothing) == len(given_shares) + 1
    assert shown.seconds == pytest.approx(sum(s.seconds for s in given_shares))


def test_a_part_can_be_a_gain() -> None:
    shown = waterfall_of([Share("model FLOPs", 0.6, 6), Share("loss", 0.5, 5), Share("gain", -0.1, -1)])
    _, loss, gain, result = shown.bars
    assert (loss.low, loss.high) == (0.5, 1.0)
    assert (gain.low, gain.high) == (0.5, pytest.approx(0.6))
    assert gain.words == "+10.0 %"
    assert result.high == 0.6


def test_parts_that_do_not_add_up_to_1_are_refused() -> None:
    with pytest.raises(ValueError, match=r"add up to 0\.9"):
        waterfall_of([Share("model FLOPs", 0.5, 5), Share("loss", 0.4, 4)])
    with pytest.raises(ValueError, match="add up to 0 "):
        waterfall_of([])


def test_every_part_of_a_prediction_a_run_or_a_step_has_a_kind() -> None:
    """A part that is added to the waterfall gets a colour and a word, or this fails."""
    found = predict(MODEL, REFERENCE, cluster())
    run = finish(found, MODEL, REFERENCE, cluster(), 24000, rate=RATES[1], storage_gb_s=20.0)
    names = [s.name for s in run.waterfall]
    assert names[0] == "model FLOPs"
    rows = {name for name, *_ in TABLE}
    rows.add("computation below peak, tensor-parallel communication")  # of compiled blocks
    assert {*names[1:], *rows} == set(KINDS)
    assert {s.name for s in found.waterfall[1:]} < set(KINDS)


def test_the_reference_voyage_in_words() -> None:
    found = predict(MODEL, REFERENCE, cluster())
    shown = waterfall_of(found.waterfall)
    assert shown.mfu == pytest.approx(found.mfu)
    assert shown.seconds == pytest.approx(found.step_s)
    assert "context-parallel communication" in shown.nothing
    assert shown.losses[0] == "kernels"
    assert shown.sentence.startswith(
        f"Of the GPUs' dense peak {shown.mfu * 100:.1f} % goes into model FLOPs; lost to "
    )
