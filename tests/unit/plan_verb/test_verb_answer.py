"""The answer as data: what follows from what, and that nothing is made up where something is not known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from verb_cases import EVERY, NDR, job, must_change, nowhere, small, too_large, voyage

from seatrial.base.errors import InputError
from seatrial.hardware.networks import find_network
from seatrial.job.schema import GpuSection
from seatrial.plan.model.place import place_of
from seatrial.plan.report.advice import Wanted, difference, excess, short, targets
from seatrial.plan.report.answer import ENOUGH, Answer, Wishes, answer, usual_nodes
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import ALIKE
from seatrial.ui.plan_table import target_words

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster


def test_the_reference_voyage_is_answered() -> None:
    """Is TP8 PP2 the best, and by how much; are 2,500 tokens/s/GPU within reach; 6.4 TB/s beside what is needed."""
    told = voyage()
    assert told.own.prediction is not None
    assert told.found is not None
    assert told.best is not None
    assert told.own.fits
    assert short(told.own.recipe) == "TP8 async PP2 FSDP8"
    costs = told.found.own_costs
    assert costs is not None
    assert costs > ALIKE
    tokens, mfu = told.targets
    assert (tokens.wanted.value, mfu.wanted.value) == (2500, 0.45)
    for target in told.targets:
        assert target.own == target.wanted.by(told.own.prediction)
        if target.inside is not None:
            assert target.wanted.by(target.inside.prediction) == "inside"
    assert told.carried.capacity == 400e9
    assert told.carried.capacity * told.carried.nodes == 6.4e12
    assert told.carried.mean is not None
    assert told.carried.enough is not None
    assert told.carried.mean < told.carried.enough < told.carried.capacity


def test_how_likely_an_end_is() -> None:
    told = voyage()
    base, end = told.own.prediction, told.ending
    assert base is not None
    assert end is not None
    assert told.advice is not None
    days = [Wanted(n * 86400.0, "end") for n in (4, 5, 6)]
    found = list(targets(base, told.advice.ways, days, end.finish))
    assert [t.likely for t in found] == [end.finish.within(w.value, base.pace.spread) for w in days]
    for target in found:
        # The speed that it takes is that of a run which ends just then.
        speed = base.tokens_per_s_per_gpu * end.finish.wall_s / target.wanted.value
        assert target.speed == Wanted(pytest.approx(speed), "tokens/s/GPU")
        assert target.better is not None
        assert target.better.built
        assert target.better.gain == max(w.gain for w in told.advice.ways if w.built)
        assert target.likely is not None
        assert target.likely_with is not None
        assert target.likely_with > target.likely
    (never,) = targets(base, (), days[:1], None)
    assert (never.likely, never.why_not) == (None, "saving and failures leave no time to train")
    assert (never.own, never.met) == ("no", None)


def test_an_end_of_a_layout_that_does_not_fit_is_not_judged() -> None:
    told = must_change()
    wanted = Wishes(targets=(Wanted(86400.0, "end"),))
    (target,) = answer(told.job, told.place, wanted).targets
    assert (target.likely, target.why_not) == (None, "the layout does not fit")
    assert target.likely_with is not None
    assert "the end within 24 h: the layout does not fit; " in target_words(target)


def test_enough_network_costs_what_it_says() -> None:
    from dataclasses import replace

    from seatrial.plan.cost.predict import predict

    told = voyage()
    cluster, network = told.place.cluster, told.place.network
    assert cluster is not None
    assert network is not None
    assert told.carried.enough is not None

    def step(bytes_s: float) -> float:
        gbps = bytes_s * 8 / 1e9 / network.nics_per_node
        at = replace(cluster, network=replace(network, gbps_per_nic=gbps))
        return predict(told.job.architecture, told.own.recipe, at).step_s

    assert step(told.carried.enough) / step(1e20) - 1 == pytest.approx(ENOUGH, abs=1e-3)


def test_the_price_and_the_end() -> None:
    priced, told = small().ending, voyage().ending
    assert priced is not None
    assert told is not None
    assert priced.cost == pytest.approx(3.0 * priced.finish.gpu_hours)
    assert told.cost is None  # nobody named a price
    assert told.finish.gpu_hours == pytest.approx(told.finish.wall_s / 3600 * 128)
    assert told.every_steps == 500
    assert told.finish.every_s > told.best.every_s  # 500 steps are more than Young's interval
    assert told.finish.wall_s >= told.best.wall_s
    assert told.slow.wall_s >= told.finish.wall_s


def test_ways_are_faster_legal_and_fit() -> None:
    for told in (voyage(), small(), must_change()):
        assert told.advice is not None
        assert told.own.prediction is not None
        cluster = told.place.cluster
        assert cluster is not None
        gains = [w.gain for w in told.advice.ways]
        assert gains == sorted(gains, reverse=True)
        assert len({(w.recipe, w.prediction.step_s) for w in told.advice.ways}) == len(gains)
        for way in told.advice.ways:
            assert way.prediction.fits
            assert refusal(told.job, cluster, way.recipe) is None
            assert way.gain == pytest.approx(told.own.prediction.step_s / way.prediction.step_s - 1)
            assert way.gain > 0 or not told.own.fits


def test_a_turn_is_a_turn() -> None:
    """Just beyond the value another of the listed layouts is ahead, just before it the best one is, as far as can be told."""
    from dataclasses import replace

    from seatrial.plan.cost.predict import predict

    told = voyage()
    assert told.advice is not None
    assert told.found is not None
    cluster, network = told.place.cluster, told.place.network
    assert cluster is not None
    assert network is not None
    turns = [t for t in told.advice.turns if t.what == "network" and t.at is not None]
    for turn in turns:
        assert turn.at is not None
        assert turn.becomes is not None

        def step(recipe: object, factor: float) -> float:
            at = replace(cluster, network=replace(network, gbps_per_nic=network.gbps_per_nic * factor))
            return predict(told.job.architecture, recipe, at).step_s  # type: ignore[arg-type]

        beyond = turn.at / turn.now * (1.02 if turn.at > turn.now else 0.98)
        best = told.found.choices[0].recipe
        assert step(turn.becomes, beyond) < step(best, beyond) / (1 + ALIKE) * 1.02


def test_unknown_stays_unknown() -> None:
    told = nowhere()
    assert told.own.prediction is None
    assert "names no GPU" in told.own.why_unknown
    assert (told.found, told.ending, told.weak, told.strong, told.advice) == (None,) * 5
    assert told.own.fits is None
    assert told.carried.mean is None
    # What needs no speed is known all the same.
    assert told.own.memory.allocated > 0
    assert told.own.traffic.sent > 0
    assert told.carried.a_gpu > 0


def test_the_cost_of_deterministic_kernels_is_said_to_be_unknown() -> None:
    of = job("llama3-8b-h100", "train.deterministic=true")
    told = answer(of, place_of(of), Wishes(look_further=False))
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
        return answer(of, place_of(of), Wishes(look_further=False))

    hopper, other, known = told("Hopper").own, told(None).own, small().own
    assert hopper.prediction is not None
    assert known.prediction is not None
    assert hopper.prediction.step_s == pytest.approx(known.prediction.step_s, rel=0.08)
    assert hopper.prediction.pace.kind == "extrapolated"
    assert hopper.room == other.room == known.room
    assert other.prediction is None
    assert "an unknown architecture" in other.why_unknown


def test_fp32_has_no_speed_but_memory_and_traffic_twice_as_wide() -> None:
    wide = job("llama3-8b-h100", "train.precision=fp32", "train.accumulate=whole")
    told = answer(wide, place_of(wide))
    assert told.own.prediction is None
    assert "fp32" in told.own.why_unknown
    assert told.own.fits is not None
    assert 1.5 < told.own.traffic.data / small().own.traffic.data <= 2


def test_a_network_that_nobody_named() -> None:
    of = job("llama3-8b-h100", "cluster.nodes=2", "cluster.gpu=H100 PCIe")
    told = answer(of, place_of(of))
    assert told.own.prediction is None
    assert "network" in told.own.why_unknown
    assert told.own.fits is not None
    named = answer(of, place_of(of, NDR), Wishes(look_further=False))
    assert named.own.prediction is not None
    assert (named.found, named.advice) == (None, None)


def test_speed_of_a_chip_that_nobody_measured_is_unknown() -> None:
    """No NVIDIA kernels and no NeMo for AMD's: memory and traffic alone."""
    of = job("llama3-8b-h100", "cluster.gpu=MI300X")
    told = answer(of, place_of(of))
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
        of = job("llama3-8b-h100", *settings)
        told = answer(of, place_of(of), Wishes(look_further=False))
        assert told.own.prediction is not None
        steps.append(told.own.prediction.step_s)
    assert steps[0] == pytest.approx(steps[1])
    assert min(steps[2:]) > steps[1]


def test_what_fits_nowhere() -> None:
    told = too_large()
    assert told.own.fits is False
    assert told.best is None
    assert told.found is not None
    assert told.found.too_large == told.found.tried > 0


def test_a_run_that_fails_more_than_it_trains_has_no_end() -> None:
    from seatrial.hardware.failures import Rate

    of = job("qwen2.5-72b-b300")
    wishes = Wishes(rate=Rate("often", "often", 1e6, "made up"), look_further=False)
    assert answer(of, place_of(of, NDR), wishes).ending is None


def test_place() -> None:
    of = job("llama3-8b-h100", "cluster.nodes=2")
    assumed = place_of(of)
    assert assumed.network is not None
    assert any("assumed" in told for told in assumed.provenance)
    given = place_of(of, "roce 8X200")
    assert given.network == find_network("RoCE 8x200")
    assert given.provenance == ()
    with pytest.raises(InputError, match="unknown network") as error:
        place_of(of, "Infiniband NDR 8x40")
    assert "did you mean" in (error.value.diagnostics[0].hint or "")
    unknown = place_of(job("llama3-8b-h100", "cluster.gpu=H100 SMX"))
    assert unknown.gpu is None
    assert "H100 SXM" in unknown.why_no_gpu
    assert unknown.cluster is None
    assert math.isnan(unknown.shape.gpu.hbm_gb)
    cpu = place_of(job("llama3-8b-h100", "cluster.device=cpu"))
    assert cpu.gpu is None


def test_usual_nodes_hold_the_jobs_own() -> None:
    of = job("qwen2.5-72b-b300")
    cluster = place_of(of, NDR).cluster
    assert cluster is not None
    from dataclasses import replace

    assert usual_nodes(cluster) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert usual_nodes(replace(cluster, nodes=18)) == (9, 18, 36, 72)
    assert usual_nodes(replace(cluster, nodes=300)) == (75, 150, 300)


def test_wishes() -> None:
    p = small().own.prediction
    assert p is not None
    assert p.mfu is not None
    assert Wanted(p.tokens_per_s_per_gpu * 0.99, "tokens/s/GPU").by(p) == "yes"
    assert Wanted(p.tokens_per_s_per_gpu * p.step_s / p.low_s * 0.99, "tokens/s/GPU").by(p) == "inside"
    assert Wanted(p.tokens_per_s_per_gpu * p.step_s / p.low_s * 1.01, "tokens/s/GPU").by(p) == "no"
    assert Wanted(p.mfu, "MFU").by(p) == "yes"


def test_differences_in_the_words_of_the_job_file() -> None:
    from dataclasses import replace

    a = voyage().own.recipe
    b = replace(
        a, layout=replace(a.layout, tensor=4, shard=16), microbatch=2, recompute="full", reshard=not a.reshard
    )
    told = difference(a, b)
    for word in ("tensor 4", "shard 16", "microbatch 2", "full recomputation", "reshard_after_forward"):
        assert word in told
    assert difference(a, a) == "nothing"


def test_asynchronous_tensor_parallel_is_a_setting_like_others() -> None:
    """With it a job is told what it does not hide; without it, what it would; never what this trainer has not."""
    plain = job("qwen2.5-72b-b300", "parallel.async_tensor=false")
    told = answer(plain, place_of(plain))
    assert told.advice is not None
    ways = {w.what: w for w in told.advice.ways}
    way = ways["async_tensor = true"]
    assert way.built
    assert way.gain > ALIKE
    assert way.recipe == voyage().own.recipe
    assert {w.what.split(" ")[0] for w in told.advice.ways if not w.built} <= {"nemo", "a"}
    assert difference(told.own.recipe, way.recipe) == "async_tensor = true"
    assert "async_tensor = false" in difference(way.recipe, told.own.recipe)
    # In the full plan it is called an assumption, as soon as any layout that is shown has it.
    for one in (told, voyage()):
        assert any("async_tensor" in text and "assum" in text for text in one.provenance)
    assert not any("async_tensor" in text for text in nowhere().provenance)
    # Other software hides what it hides.
    of = job("qwen2.5-72b-b300")
    other = answer(of, place_of(of), Wishes(stack="nemo", look_further=False))
    assert short(other.own.recipe) == "TP8 PP2 FSDP8"
    assert not any("async_tensor" in text for text in other.provenance)


def test_excess_is_the_part_that_grew_most() -> None:
    told = voyage()
    assert told.own.prediction is not None
    assert told.best is not None
    more = excess(told.own.prediction, told.best.prediction)
    assert more is not None
    assert more.name == "tensor-parallel communication"
    assert excess(told.best.prediction, told.best.prediction) is None


@pytest.mark.parametrize("case", EVERY, ids=lambda c: c.__name__)
def test_what_is_predicted_has_its_sources(case: object) -> None:
    told: Answer = case()  # type: ignore[operator]
    if told.own.prediction is not None:
        assert any(text.startswith("pace ") for text in told.provenance)
        assert all(text.strip() for text in told.provenance)
