"""`accumulate = "auto"`: resolved by the memory of a GPU, and in a resume as at the first start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from presets import preset_job
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.launch.preflight import _accumulate
from seatrial.plan.cost.accumulate import accumulate_options, adapted, chosen
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.memory import memory, rank_parameters
from seatrial.plan.cost.memory_fit import judge
from seatrial.plan.cost.predict import predict, stack_for
from seatrial.plan.cost.step import traffic
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.search import search
from seatrial.record.folder import RunFolder

MODEL = model_presets()["qwen2.5-7b"]
RECIPE = Recipe(4096, 64, layout=Layout(shard=8))  # eight microbatches
SHARDED = replace(RECIPE, accumulate="sharded")


def needs(recipe: Recipe) -> float:
    return memory(MODEL, recipe, stack_for(recipe)).reserved


def test_sharded_gradients_are_one_shard_of_whole_ones() -> None:
    whole, sharded = (memory(MODEL, r, stack_for(r)) for r in (RECIPE, SHARDED))
    n = rank_parameters(MODEL, RECIPE, 0)
    head = 2 * MODEL.embedding_parameters()  # until the root's turn
    assert whole.gradients + whole.unsharded_gradients == 4 * n + head
    assert sharded.gradients == 4 * n / 8
    assert head < sharded.unsharded_gradients < 4 * n / 8  # and those of a layer on their way
    kept = 4 * n / 8 + sharded.unsharded_gradients
    assert whole.allocated - sharded.allocated == pytest.approx(4 * n + head - kept)
    # Under a pipeline torch by itself never reduces before the end of a step.
    stages = [replace(r, layout=Layout(pipeline=2, shard=4)) for r in (RECIPE, SHARDED)]
    assert needs(stages[1]) < needs(stages[0]) - n / 2


@pytest.mark.parametrize(
    "layout", [Layout(shard=8), Layout(pipeline=2, shard=4), Layout(shard=4, replicate=2)]
)
def test_sharded_gradients_are_reduced_in_every_microbatch(layout: Layout) -> None:
    gpu, network = find_gpu("H100 SXM"), find_network("InfiniBand NDR 8x400")
    assert gpu is not None
    cluster = Cluster(gpu, 4, 2, network)
    whole, sharded = (replace(r, layout=layout) for r in (RECIPE, SHARDED))
    sent = [traffic(MODEL, r, Fabric.of(cluster, r), stack_for(r)).data for r in (whole, sharded)]
    n, cut = rank_parameters(MODEL, whole, 0), layout.shard
    more = 4 * n * (cut - 1) / cut * (whole.microbatches - 1)  # and over replicas no more than once
    assert sent[1] - sent[0] == pytest.approx(more, rel=0.05)
    steps = [predict(MODEL, r, cluster) for r in (whole, sharded)]
    assert steps[0].step_s < steps[1].step_s


def test_auto_is_whole_if_that_fits_with_margin() -> None:
    whole, sharded = needs(RECIPE), needs(SHARDED)
    assert judge(whole, 2 * whole).sure
    assert chosen(MODEL, RECIPE, 2 * whole)[0] == "whole"
    for available, word in ((1.01 * whole, "tight"), (0.9 * whole, "too much"), (0.5 * sharded, "too much")):
        how, why = chosen(MODEL, RECIPE, available)
        assert how == "sharded"
        assert word in why
    assert chosen(MODEL, RECIPE, None) == ("whole", "the memory of a GPU is unknown")


def test_auto_with_nothing_to_choose() -> None:
    one = replace(RECIPE, global_batch=8)
    assert chosen(MODEL, one, 1.0)[0] == "sharded", "one microbatch"
    assert needs(one) == needs(replace(one, accumulate="sharded"))
    copies = replace(RECIPE, layout=Layout(replicate=8))
    assert chosen(MODEL, copies, 1.0)[0] == "whole", "all ranks hold whole gradients either way"
    split = Layout(pipeline=2, shard=4, stages_per_rank=2, schedule="zero-bubble")
    assert chosen(MODEL, replace(RECIPE, layout=split), 1.0)[0] == "whole", "the rules refuse it"
    assert chosen(MODEL, RECIPE, 1.0, "nemo")[0] == "whole", "another trainer"


def test_other_stacks_have_no_accumulate_setting() -> None:
    job = preset_job("qwen2.5-7b-h200", "train.accumulate=sharded")
    assert Recipe.of(job).accumulate == "sharded"
    assert adapted(job, Recipe.of(job), None).accumulate == "sharded"
    assert adapted(job, Recipe.of(job), None, "nemo").accumulate == "whole"
    assert [r.accumulate for r in accumulate_options(preset_job("qwen2.5-7b-h200"), RECIPE)] == [
        "whole",
        "sharded",
    ]
    assert [r.accumulate for r in accumulate_options(job, SHARDED)] == ["sharded"]


def test_search_shards_gradients_if_whole_ones_do_not_fit() -> None:
    job = preset_job("qwen2.5-7b-h200", "cluster.gpu=H100 SXM")
    gpu = find_gpu("H100 SXM")
    assert gpu is not None
    found = search(job, Cluster(gpu, 1, 8), own=False, microbatches=(1,))
    used = {c.recipe.accumulate for c in found.sure if c.recipe.microbatches > 1}
    assert used == {"whole", "sharded"}
    for c in found.sure:
        if c.recipe.accumulate == "sharded" and c.recipe.microbatches > 1:
            assert not judge(needs(replace(c.recipe, accumulate="whole")), c.prediction.available).sure
    bound = preset_job("qwen2.5-7b-h200", "cluster.gpu=H100 SXM", "train.accumulate=whole")
    fixed = search(bound, Cluster(gpu, 1, 8), own=False, microbatches=(1,))
    assert {c.recipe.accumulate for c in fixed.choices} == {"whole"}
    assert fixed.too_large > found.too_large


def test_a_resume_keeps_its_accumulation_while_that_fits(tmp_path: Path) -> None:
    job = preset_job("qwen2.5-7b-h200")
    folder = RunFolder(tmp_path / job.name)
    folder.path.mkdir()
    recipe = Recipe.of(job)
    whole = memory(job.architecture, recipe, stack_for(recipe)).reserved
    wide, tight, small = 2 * whole, 1.01 * whole, 0.9 * whole

    def again(text: str, available: float | None) -> str:
        folder.job_toml.write_text(text)
        return _accumulate(job, available, folder)[0]

    def written(how: str) -> str:
        train = job.train.model_copy(update={"accumulate": how})
        return replace(job, file=job.file.model_copy(update={"train": train})).to_toml()

    older = written("whole").replace('accumulate = "whole"\n', "")
    assert _accumulate(job, tight, folder)[0] == "sharded", "no earlier start"
    for text in (older, written("whole")):
        assert [again(text, available) for available in (wide, tight, small)] == ["whole", "whole", "sharded"]
    assert [again(written("sharded"), available) for available in (wide, None)] == ["sharded", "sharded"]
    assert again(written("sharded").replace("shard = 8", "shard = 4"), wide) == "whole", "another layout"
    assert again("damaged [", wide) == "whole"
    assert _accumulate(job, tight, None)[0] == "sharded", "--fresh"
