"""Time to finish: checkpoints, failures, and a waterfall of the whole run."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.failures import RATES
from seatrial.hardware.networks import find_network
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost.finish import NEW_PROCESS_S, Finish, finish
from seatrial.plan.cost.predict import predict
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

MODEL = model_presets()["qwen2.5-72b"]
GPU = find_gpu("B300 SXM")
assert GPU is not None
CLUSTER = Cluster(GPU, 16, 8, find_network("InfiniBand NDR 8x400"))
REFERENCE = Recipe(4096, 1024, layout=Layout(tensor=8, pipeline=2, shard=8), reshard=False, compiled=True)
STEP = predict(MODEL, REFERENCE, CLUSTER)
BY_NAME = {r.name: r for r in RATES}


def run(
    rate: str = "llama-3", steps: int = 24000, storage_gb_s: float = 20.0, every_steps: int | None = None
) -> Finish:
    at = BY_NAME[rate]
    return finish(
        STEP, MODEL, REFERENCE, CLUSTER, steps, rate=at, storage_gb_s=storage_gb_s, every_steps=every_steps
    )


def test_a_batch_ramp_adds_its_phases() -> None:
    at = {"rate": BY_NAME["llama-3"], "storage_gb_s": 20.0, "every_steps": 500}
    half = predict(MODEL, replace(REFERENCE, global_batch=512), CLUSTER)
    whole = finish(STEP, MODEL, REFERENCE, CLUSTER, 20000, **at)
    found = finish(STEP, MODEL, REFERENCE, CLUSTER, 20000, **at, ramp=[(4000, half)])
    assert 0.5 * STEP.step_s < half.step_s < 0.6 * STEP.step_s
    assert found.wall_s == pytest.approx((20000 * STEP.step_s + 4000 * half.step_s) / found.ettr)
    assert found.ettr == whole.ettr
    assert sum(s.share for s in found.waterfall) == pytest.approx(1.0, rel=1e-9)
    assert sum(s.seconds for s in found.waterfall) == pytest.approx(found.wall_s, rel=1e-9)
    assert found.mfu < whole.mfu  # the pipeline is idle longer


def test_the_whole_run_adds_up() -> None:
    found = run()
    assert sum(s.share for s in found.waterfall) == pytest.approx(1.0, rel=1e-9)
    assert sum(s.seconds for s in found.waterfall) == pytest.approx(found.wall_s, rel=1e-9)
    assert STEP.mfu is not None
    assert found.mfu == pytest.approx(STEP.mfu * found.ettr)
    assert found.checkpoint_bytes == pytest.approx(872e9, rel=0.001)  # as the preset says
    assert found.gpu_hours == pytest.approx(found.wall_s / 3600 * 128)
    assert found.low_s < found.wall_s < found.high_s
    assert found.failures == pytest.approx(found.wall_s / 86400 * 16 * BY_NAME["llama-3"].per_node_day)


def test_more_failures_and_slower_storage_cost() -> None:
    ettr = [run(r.name).ettr for r in sorted(RATES, key=lambda r: r.per_node_day)]
    assert ettr == sorted(ettr, reverse=True)
    assert 0.9 < ettr[-1] < ettr[0] < 1
    assert run(storage_gb_s=2.0).wall_s > run().wall_s
    assert run(steps=48000).wall_s == pytest.approx(2 * run().wall_s)


def test_replicas_save_nothing() -> None:
    twice = replace(REFERENCE, layout=replace(REFERENCE.layout, shard=4, replicate=2))
    step = predict(MODEL, twice, CLUSTER)
    found = finish(step, MODEL, twice, CLUSTER, 100, rate=BY_NAME["ant"], storage_gb_s=20.0)
    assert found.stall_s == pytest.approx(2 * run().stall_s)


def test_probability_of_an_end_matches_the_interval() -> None:
    """With few failures: 85 % of runs end within the interval, half of them before the prediction."""
    found, spread = run(), STEP.pace.spread
    low, middle, high = (found.within(s, spread) for s in (found.low_s, found.wall_s, found.high_s))
    assert high - low == pytest.approx(0.85, abs=0.01)
    assert middle == pytest.approx(0.5, abs=0.01)
    assert found.within(0.1 * found.wall_s, spread) < 1e-6
    assert found.within(10 * found.wall_s, spread) == pytest.approx(1)
    # With faster steps as likely as with that much more time, but for the failures.
    assert found.within(found.wall_s / 1.1, spread, faster=1.1) == pytest.approx(middle, abs=0.01)


def simulated(found: Finish, steps: int, spread: float, chance: random.Random) -> float:
    """Seconds of one run: a failure goes back to the newest save that was written, wherever in its interval it comes."""
    mttf, x = found.wall_s / found.failures, math.exp(chance.gauss(0, spread))
    work, interval = steps * STEP.step_s * x, found.every_s * x
    written = found.down_s - NEW_PROCESS_S - found.joining_s
    at = done = 0.0
    while True:
        needs = (work - done) + (work - done) / interval * found.stall_s
        up = chance.expovariate(1 / mttf)
        if up >= needs:
            return at + needs
        done += max(0, math.floor((up - written) / (interval + found.stall_s))) * interval
        at += up + found.down_s
        while (again := chance.expovariate(1 / mttf)) < found.down_s:
            at += again


@pytest.mark.parametrize("spread", [0.02, 0.12])
def test_probability_of_an_end_matches_simulated_runs(spread: float) -> None:
    """About three failures, each of which loses nine hours on average."""
    found = run("ant", every_steps=3000)
    assert 2 < found.failures < 4
    assert found.ettr < 0.9
    chance = random.Random(5)
    ends = [simulated(found, 24000, spread, chance) for _ in range(4000)]
    for times in (0.85, 0.92, 1.0, 1.08, 1.15):
        share = sum(end <= times * found.wall_s for end in ends) / len(ends)
        assert found.within(times * found.wall_s, spread) == pytest.approx(share, abs=0.06), times


def test_a_run_without_steps_or_storage() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        run(steps=0)
    with pytest.raises(ValueError, match="0 GB/s"):
        run(storage_gb_s=0)
