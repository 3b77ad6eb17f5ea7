"""The answer as data: derived values, and unknown values that stay unknown."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from verb_cases import EVERY, NDR, must_change, nowhere, reference, small, too_large

from presets import preset_job
from seatrial.base.errors import InputError
from seatrial.hardware.networks import find_network
from seatrial.job.schema import GpuSection
from seatrial.plan.cost.accumulate import adapted
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import TargetValue, difference, excess, short, targets
from seatrial.plan.report.answer import ENOUGH, Answer, PlanOptions, answer, usual_nodes
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import TIE_MARGIN
from seatrial.ui.plan_table import target_words
from seatrial.ui.plan_words import recomputed

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster


def test_answer_of_the_reference_voyage() -> None:
    """Is TP8 PP2 the best, and by how much; are 2,500 tokens/s/GPU within reach; 6.4 TB/s beside what is needed."""
    told = reference()
    assert told.own.prediction is not None
    assert told.found is not None
    assert told.best is not None
    assert told.own.fits
    assert short(told.own.recipe) == "TP8 async PP2 FSDP8"
    costs = told.found.own_costs
    assert costs is not None
    assert costs > TIE_MARGIN
    tokens, mfu = told.targets
    assert (tokens.wanted.value, mfu.wanted.value) == (2500, 0.45)
    for target in told.targets:
        assert target.own == target.wanted.by(told.own.prediction)
        if target.inside is not None:
            assert target.wanted.by(target.inside.prediction) == "inside"
    assert told.network_demand.capacity == 400e9
    assert told.network_demand.capacity * told.network_demand.nodes == 6.4e12
    assert told.network_demand.mean is not None
    assert told.network_demand.enough is not None
    assert told.network_demand.mean < told.network_demand.enough < told.network_demand.capacity


def test_probability_of_an_end() -> None:
    told = reference()
    base, end = told.own.prediction, told.forecast
    assert base is not None
    assert end is not None
    assert told.advice is not None
    days = [TargetValue(n * 86400.0, "end") for n in (4, 5, 6)]
    found = list(targets(base, told.advice.suggestions, days, end.finish))
    assert [t.likely for t in found] == [end.finish.within(w.value, base.pace.spread) for w in days]
    for target in found:
        # The speed that it takes is that of a run which ends just then.
        speed = base.tokens_per_s_per_gpu * end.finish.wall_s / target.wanted.value
        assert target.speed == TargetValue(pytest.approx(speed), "tokens/s/GPU")
        assert target.better is not None
        assert target.better.built
        assert target.better.gain == max(w.gain for w in told.advice.suggestions if w.built)
        assert target.likely is not None
        assert target.likely_with is not None
        assert target.likely_with > target.likely
    (never,) = targets(base, (), days[:1], None)
    assert (never.likely, never.why_not) == (None, "saving and failures leave no time to train")
    assert (never.own, never.met) == ("no", None)


def test_an_end_of_a_layout_that_does_not_fit_is_not_judged() -> None:
    told = must_change()
    wanted = PlanOptions(targets=(TargetValue(86400.0, "end"),))
    (target,) = answer(told.job, told.place, wanted).targets
    assert (target.likely, target.why_not) == (None, "the layout does not fit")
    assert target.likely_with is not None
    assert "the end within 24 h: the layout does not fit; " in target_words(target)


def test_the_enough_network_slows_a_step_as_stated() -> None:
    from dataclasses import replace

    from seatrial.plan.cost.predict import predict

    told = reference()
    cluster, network = told.place.cluster, told.place.network
    assert cluster is not None
    assert network is not None
    assert told.network_demand.enough is not None

    def step(bytes_s: float) -> float:
        gbps = bytes_s * 8 / 1e9 / network.nics_per_node
        at = replace(cluster, network=replace(network, gbps_per_nic=gbps))
        return predict(told.job.architecture, told.own.recipe, at).step_s

    assert step(told.network_demand.enough) / step(1e20) - 1 == pytest.approx(ENOUGH, abs=1e-3)


def test_cost_of_the_run() -> None:
    priced, told = small().forecast, reference().forecast
    assert priced is not None
    assert told is not None
    assert priced.cost == pytest.approx(3.0 * priced.finish.gpu_hours)
    assert told.cost is None  # nobody named a price
    assert told.finish.gpu_hours == pytest.approx(told.finish.wall_s / 3600 * 128)
    assert told.every_steps == 500
    assert told.finish.every_s > told.best.every_s  # 500 steps are more than Young's interval
    assert told.finish.wall_s >= told.best.wall_s
    assert told.slow.wall_s >= told.finish.wall_s


def test_suggestions_are_faster_legal_and_fit() -> None:
    for told in (reference(), small(), must_change()):
        assert told.advice is not None
        assert told.own.prediction is not None
        cluster = told.place.cluster
        assert cluster is not None
        gains = [w.gain for w in told.advice.suggestions]
        assert gains == sorted(gains, reverse=True)
        assert len({(w.recipe, w.prediction.step_s) for w in told.advice.suggestions}) == len(gains)
        for way in told.advice.suggestions:
            assert way.prediction.fits
            assert refusal(told.job, cluster, way.recipe) is None
            assert way.gain == pytest.approx(told.own.prediction.step_s / way.prediction.step_s - 1)
            assert way.gain > 0 or not told.own.fits


def test_the_best_layout_changes_at_a_crossover() -> None:
    """Just beyond the value another of the listed layouts is ahead, just before it the best one is, as far as can be told."""
    from dataclasses import replace

    from seatrial.plan.cost.predict import predict

    told = reference()
    assert told.advice is not None
    assert told.found is not None
    cluster, network = told.place.cluster, told.place.network
    assert cluster is not None
    assert network is not None
    turns = [t for t in told.advice.crossovers if t.what == "network" and t.at is not None]
    for turn in turns:
        assert turn.at is not None
        assert turn.becomes is not None

        def step(recipe: object, factor: float) -> float:
            at = replace(cluster, network=replace(network, gbps_per_nic=network.gbps_per_nic * factor))
            return predict(told.job.architecture, recipe, at).step_s  # type: ignore[arg-type]

        beyond = turn.at / turn.now * (1.02 if turn.at > turn.now else 0.98)
        best = told.found.choices[0].recipe
        assert step(turn.becomes, beyond) < step(best, beyond) / (1 + TIE_MARGIN) * 1.02


def test_unknown_stays_unknown() -> None:
    told = nowhere()
    assert told.own.prediction is None
    assert "names no GPU" in told.own.why_unknown
    assert (told.found, told.forecast, told.weak, told.strong, told.advice) == (None,) * 5
    assert told.own.fits is None
    assert told.network_demand.mean is None
    # What needs no speed is known all the same.
    assert told.own.memory.allocated > 0
    assert told.own.traffic.sent > 0
    assert told.network_demand.a_gpu > 0


def test_the_cost_of_deterministic_kernels_is_unknown() -> None:
    of = preset_job("llama3-8b-h100", "train.deterministic=true")
    told = answer(of, hardware_of(of), PlanOptions(look_further=False))
    assert [text for text in told.provenance if text.startswith("train.deterministic: its cost is in the")]
    assert told.own.prediction is not None
    assert not any("deterministic" in text for text in small().provenance)


def test_a_stated_gpu_is_planned_like_one_of_the_catalogue() -> None:
    """The figures of an H100 by hand: another name, so no pace of its own, and waves of its processors are not counted."""
    base = small().job
    cluster = base.file.cluster.model_copy(update={"gpu": None})

    def told(architecture: str | None) -> Answer:
        section = GpuSection(
            bf16_tflops=989, best_bf16_tflops=794.5, hbm_gb=80, hbm_tb_s=3.35, link_gb_s=450, watts=700,
            architecture=architecture,
        )  # fmt: skip
        of = replace(base, file=base.file.model_copy(update={"gpu": section, "cluster": cluster}))
        return answer(of, hardware_of(of), PlanOptions(look_further=False))

    hopper, other, known = told("Hopper").own, told(None).own, small().own
    assert hopper.prediction is not None
    assert known.prediction is not None
    assert hopper.prediction.step_s == pytest.approx(known.prediction.step_s, rel=0.08)
    assert hopper.prediction.pace.kind == "extrapolated"
    assert hopper.available == other.available == known.available
    assert other.prediction is None
    assert "an unknown architecture" in other.why_unknown


def test_fp32_has_no_speed_but_memory_and_traffic_twice_as_wide() -> None:
    wide = preset_job("llama3-8b-h100", "train.precision=fp32", "train.accumulate=whole")
    told = answer(wide, hardware_of(wide))
    assert told.own.prediction is None
    assert "fp32" in told.own.why_unknown
    assert told.own.fits is not None
    assert 1.5 < told.own.traffic.data / small().own.traffic.data <= 2


def test_without_a_network_its_speed_is_unknown() -> None:
    of = preset_job("llama3-8b-h100", "cluster.nodes=2", "cluster.gpu=H100 PCIe")
    told = answer(of, hardware_of(of))
    assert told.own.prediction is None
    assert "network" in told.own.why_unknown
    assert told.own.fits is not None
    named = answer(of, hardware_of(of, NDR), PlanOptions(look_further=False))
    assert named.own.prediction is not None
    assert (named.found, named.advice) == (None, None)


def test_speed_of_an_unmeasured_gpu_is_unknown() -> None:
    """No NVIDIA kernels and no NeMo for AMD's: memory and traffic alone."""
    of = preset_job("llama3-8b-h100", "cluster.gpu=MI300X")
    told = answer(of, hardware_of(of))
    assert (told.own.prediction, told.found, told.advice) == (None, None, None)
    assert "no training run and no attention kernel of CDNA 3 was measured" in told.own.why_unknown
    assert told.own.fits
    assert told.own.traffic.data > 0


def test_a_network_is_stated_by_its_figures() -> None:
    """The same figures as a known network's give its speed; oversubscription and latency slow it down."""
    nodes = ("cluster.nodes=4",)
    stated = ("network.gbps_per_nic=400", "network.nics_per_node=8", "network.latency_us=6")
    figures = [nodes, (*stated, *nodes)]
    figures += [
        (*stated, *nodes, slower) for slower in ("network.oversubscription=8", "network.latency_us=500")
    ]
    steps = []
    for settings in figures:
        of = preset_job("llama3-8b-h100", *settings)
        told = answer(of, hardware_of(of), PlanOptions(look_further=False))
        assert told.own.prediction is not None
        steps.append(told.own.prediction.step_s)
    assert steps[0] == pytest.approx(steps[1])
    assert min(steps[2:]) > steps[1]


def test_a_job_that_does_not_fit() -> None:
    told = too_large()
    assert told.own.fits is False
    assert told.best is None
    assert told.found is not None
    assert told.found.too_large == told.found.tried > 0


def test_a_run_without_time_to_train_has_no_forecast() -> None:
    from seatrial.hardware.failures import Rate

    of = preset_job("qwen2.5-72b-b300")
    wishes = PlanOptions(rate=Rate("often", "often", 1e6, "made up"), look_further=False)
    assert answer(of, hardware_of(of, NDR), wishes).forecast is None


def test_hardware_of() -> None:
    of = preset_job("llama3-8b-h100", "cluster.nodes=2")
    assumed = hardware_of(of)
    assert assumed.network is not None
    assert any("assumed" in told for told in assumed.provenance)
    given = hardware_of(of, "roce 8X200")
    assert given.network == find_network("RoCE 8x200")
    assert given.provenance == ()
    with pytest.raises(InputError, match="unknown network") as error:
        hardware_of(of, "Infiniband NDR 8x40")
    assert "did you mean" in (error.value.diagnostics[0].hint or "")
    unknown = hardware_of(preset_job("llama3-8b-h100", "cluster.gpu=H100 SMX"))
    assert unknown.gpu is None
    assert "H100 SXM" in unknown.why_no_gpu
    assert unknown.cluster is None
    assert math.isnan(unknown.shape.gpu.hbm_gb)
    cpu = hardware_of(preset_job("llama3-8b-h100", "cluster.device=cpu"))
    assert cpu.gpu is None


def test_usual_nodes_hold_the_jobs_own() -> None:
    of = preset_job("qwen2.5-72b-b300")
    cluster = hardware_of(of, NDR).cluster
    assert cluster is not None
    from dataclasses import replace

    assert usual_nodes(cluster) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert usual_nodes(replace(cluster, nodes=18)) == (9, 18, 36, 72)
    assert usual_nodes(replace(cluster, nodes=300)) == (75, 150, 300)


def test_plan_options() -> None:
    p = small().own.prediction
    assert p is not None
    assert p.mfu is not None
    assert TargetValue(p.tokens_per_s_per_gpu * 0.99, "tokens/s/GPU").by(p) == "yes"
    assert TargetValue(p.tokens_per_s_per_gpu * p.step_s / p.low_s * 0.99, "tokens/s/GPU").by(p) == "inside"
    assert TargetValue(p.tokens_per_s_per_gpu * p.step_s / p.low_s * 1.01, "tokens/s/GPU").by(p) == "no"
    assert TargetValue(p.mfu, "MFU").by(p) == "yes"


def test_differences_in_the_words_of_the_job_file() -> None:
    from dataclasses import replace

    a = reference().own.recipe
    b = replace(
        a, layout=replace(a.layout, tensor=4, shard=16), microbatch=2, recompute="full", reshard=not a.reshard
    )
    told = difference(a, b)
    for word in ("tensor 4", "shard 16", "microbatch 2", "full recomputation", "reshard_after_forward"):
        assert word in told
    assert difference(a, a) == "nothing"


def test_offloaded_inputs_in_words_and_only_where_they_are_ours() -> None:
    full = ("train.activation_checkpointing=full", "train.offload_activations=true")
    offload = preset_job("qwen2.5-72b-b300", *full)
    told = answer(offload, hardware_of(offload))
    own = told.own.recipe
    assert own.recomputation == "full recomputation, inputs in host memory"
    assert recomputed(own) == "ro"
    assert told.advice is not None
    found = {w.what: w.recipe for w in told.advice.suggestions}
    assert not found["no recomputation"].offloads
    assert not next(r for what, r in found.items() if what.startswith("nemo")).offload
    plain = preset_job("qwen2.5-72b-b300", full[0])
    theirs = [adapted(of, Recipe.of(of), None, "nemo") for of in (offload, plain)]
    assert theirs[0] == theirs[1]
    assert difference(replace(own, offload=False), own) == "offload_activations = true"


def test_async_tensor_is_a_suggestion() -> None:
    """With it a job is told what it does not hide; without it, what it would; never what this trainer has not."""
    plain = preset_job("qwen2.5-72b-b300", "parallel.async_tensor=false")
    told = answer(plain, hardware_of(plain))
    assert told.advice is not None
    ways = {w.what: w for w in told.advice.suggestions}
    way = ways["async_tensor = true"]
    assert way.built
    assert way.gain > TIE_MARGIN
    assert way.recipe == reference().own.recipe
    assert {w.what.split(" ")[0] for w in told.advice.suggestions if not w.built} <= {"nemo", "a"}
    assert difference(told.own.recipe, way.recipe) == "async_tensor = true"
    assert "async_tensor = false" in difference(way.recipe, told.own.recipe)
    # In the full plan it is called an assumption, as soon as any layout that is shown has it.
    for one in (told, reference()):
        assert any("async_tensor" in text and "assum" in text for text in one.provenance)
    assert not any("async_tensor" in text for text in nowhere().provenance)
    # Other software hides what it hides.
    of = preset_job("qwen2.5-72b-b300")
    other = answer(of, hardware_of(of), PlanOptions(stack="nemo", look_further=False))
    assert short(other.own.recipe) == "TP8 PP2 FSDP8"
    assert not any("async_tensor" in text for text in other.provenance)


def test_excess_is_the_part_that_grew_most() -> None:
    told = reference()
    assert told.own.prediction is not None
    assert told.best is not None
    more = excess(told.own.prediction, told.best.prediction)
    assert more is not None
    assert more.name == "tensor-parallel communication"
    assert excess(told.best.prediction, told.best.prediction) is None


@pytest.mark.parametrize("case", EVERY, ids=lambda c: c.__name__)
def test_predictions_have_sources(case: object) -> None:
    told: Answer = case()  # type: ignore[operator]
    if told.own.prediction is not None:
        assert any(text.startswith("pace ") for text in told.provenance)
        assert all(text.strip() for text in told.provenance)
