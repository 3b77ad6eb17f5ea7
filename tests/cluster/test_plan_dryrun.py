"""`plan.report.dryrun_comparison`: a layout whose stages torch's pipeline cannot keep whole, by the closed form and by the trainer's own code."""

from __future__ import annotations

import pytest

from presets import preset_job
from seatrial.plan.cost.memory import representative_ranks
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.dryrun_comparison import compare_with_dry_run, job_with

pytestmark = pytest.mark.cluster


@pytest.mark.long  # two stages a rank: test_plan_agrees
def test_four_stages_a_rank() -> None:
    """Weights are gathered seven times and more in a step, not once: most of the layout's data-parallel traffic."""
    job = preset_job(
        "qwen2.5-7b-h200",
        "model.preset=qwen2.5-0.5b",
        "cluster.gpus_per_node=4",
        "train.compile=false",
        "train.sequence_length=512",
        "train.microbatch=1",
        "train.global_batch=32",
        "train.activation_checkpointing=none",
        "parallel.pipeline=2",
        "parallel.schedule=interleaved-1f1b",
        "parallel.stages_per_rank=4",
    )
    recipe = Recipe.of(job)
    assert job_with(job, recipe).layout == job.layout
    told = compare_with_dry_run(job, recipe, hardware_of(job).shape, processes=2)
    assert [r.pipeline for r in told.ranks] == representative_ranks(recipe.layout) == [0, 1]
    assert told.differing == ()
    sent = {p.what: p for p in told.ranks[0].pairs}["data parallel"]
    assert sent.closed == pytest.approx(sent.counted, rel=0.001)
