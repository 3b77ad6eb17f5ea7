"""Measured steps in the planner's categories: every part in one row, equal totals, notes on merged parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import NDR, gpu

from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost.predict import Prediction, predict
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.step_waterfall import RESULT, TABLE, StepWaterfall, step_waterfall
from seatrial.plan.report.waterfall import waterfall_of
from seatrial.record.frontier import Account, account
from seatrial.record.stages import BACKWARD, FORWARD, PIPELINE, STAGES, RankStages

RANKS = 8
TABLES = st.lists(st.floats(0, 10), min_size=RANKS * len(STAGES), max_size=RANKS * len(STAGES))


def measured(table: np.ndarray, not_separated: Mapping[str, str] | None = None) -> Account:
    steps = np.array([3])
    ranks = {
        r: RankStages(1, r, RANKS, "cuda", 1, not_separated or {}, steps, table[None, r])
        for r in range(RANKS)
    }
    found = account(ranks)
    assert found is not None
    return found


@cache
def predicted() -> Prediction:
    recipe = Recipe(4096, 64, layout=Layout(pipeline=2, shard=2, tensor=2), recompute="full")
    return predict(model_presets()["llama3-8b"], recipe, Cluster(gpu("H100 SXM"), 1, 8, NDR))


def even() -> np.ndarray:
    """Every stage takes the same on all ranks; the first ones of STAGES least."""
    return np.tile(np.arange(1.0, len(STAGES) + 1), (RANKS, 1))


def seconds(found: StepWaterfall) -> dict[str, float | None]:
    return {row.name: row.seconds for row in found.rows}


def test_every_part_and_every_stage_is_in_one_row() -> None:
    parts = [RESULT, *(part for _, parts, _ in TABLE for part in parts)]
    assert sorted(parts) == sorted(share.name for share in predicted().waterfall)
    assert sorted(stage for *_, stages in TABLE for stage in stages) == sorted(STAGES)


@settings(max_examples=40)
@given(TABLES, st.sampled_from([1, 2, 4]), st.one_of(st.none(), st.floats(0, 20)), st.booleans())
def test_rows_add_up(values: list[float], pipeline: int, ideal: float | None, compiled: bool) -> None:
    table = np.array(values).reshape(RANKS, -1)
    table[0, FORWARD] += 0.1
    found = step_waterfall(
        measured(table, {"tensor": "compiled"} if compiled else None),
        pipeline,
        model_flops_s=ideal,
        prediction=predicted(),
    )
    assert sum(row.seconds or 0.0 for row in found.rows) == pytest.approx(found.step_s, rel=1e-9)
    assert found.step_s == pytest.approx(table.sum(axis=1).max(), rel=1e-9)
    assert sum(r.predicted_s or 0.0 for r in found.rows) == pytest.approx(predicted().step_s, rel=1e-9)
    for is_plan in (False, True):
        assert sum(s.share for s in found.shares(predicted=is_plan)) == pytest.approx(1.0, rel=1e-9)
        waterfall_of(found.shares(predicted=is_plan), found.whole)


def test_stages_map_to_the_plans_parts() -> None:
    found = step_waterfall(measured(even()), 1, model_flops_s=2.0, prediction=predicted())
    passes = 3.0 + 4.0
    assert seconds(found)[RESULT] == 2.0
    assert seconds(found)["computation below peak"] == pytest.approx(passes - 2.0)
    assert seconds(found)["expert-parallel communication"] == 8.0
    assert seconds(found)["context-parallel communication"] == 9.0
    assert seconds(found)["data-parallel communication"] == pytest.approx(10.0 + 11.0)
    assert found.mfu == pytest.approx(2.0 / sum(range(1, len(STAGES) + 1)))
    planned = {share.name: share.seconds for share in predicted().waterfall}
    row = next(row for row in found.rows if row.name == "optimizer")
    assert (row.predicted_s, row.ratio) == (planned["optimizer"], pytest.approx(5.0 / planned["optimizer"]))
    host = next(row for row in found.rows if row.name == "host")
    assert (host.predicted_s, host.ratio) == (None, None)


def test_without_a_known_peak_mfu_is_unknown() -> None:
    found = step_waterfall(measured(even()), 1, model_flops_s=None, prediction=None)
    assert (found.mfu, found.rows[0].seconds, found.whole) == (None, None, "step")
    assert seconds(found)["forward and backward"] == pytest.approx(7.0)
    notes = " ".join(found.notes())
    assert "MFU unknown" in notes
    assert "model FLOPs, GEMMs below peak, attention below peak" in notes
    picture = waterfall_of(found.shares(), found.whole)
    assert (picture.bars[0].name, picture.bars[-1].name) == ("step", "forward and backward")
    assert picture.sentence.startswith("Of the step ")


def test_uneven_stages_count_as_pipeline() -> None:
    table = even()
    table[4:, BACKWARD] += 1.0  # the second of two pipeline ranks
    table[:4, PIPELINE] += 1.0
    found = step_waterfall(measured(table), 2, model_flops_s=2.0, prediction=predicted())
    assert seconds(found)["computation below peak"] == pytest.approx(7.5 - 2.0)
    assert seconds(found)["pipeline bubble and communication"] == pytest.approx(12.0 + 0.5)


def test_tensor_waits_inside_compiled_blocks_are_one_row() -> None:
    table = even()
    table[:, STAGES.index("tensor")] = 0.0
    found = step_waterfall(measured(table, {"tensor": "x"}), 1, model_flops_s=2.0, prediction=predicted())
    row = found.rows[1]
    assert row.name == "computation below peak, tensor-parallel communication"
    planned = {share.name: share.seconds for share in predicted().waterfall}
    assert row.predicted_s == pytest.approx(sum(planned[part] for part in row.parts))
    assert "tensor-parallel communication" in row.parts
    assert any("are not separated" in text and "tensor-parallel" in text for text in found.notes())
