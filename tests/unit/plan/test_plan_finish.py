"""Time to finish: checkpoints, failures, and a waterfall of the whole run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.failures import RATES
from seatrial.hardware.networks import find_network
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost.finish import Finish, finish
from seatrial.plan.cost.predict import predict
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

MODEL = model_presets()["qwen2.5-72b"]
GPU = find_gpu("B300 SXM")
assert GPU is not None
CLUSTER = Cluster(GPU, 16, 8, find_network("InfiniBand NDR 8x400"))
VOYAGE = Recipe(4096, 1024, layout=Layout(tensor=8, pipeline=2, shard=8), reshard=False, compiled=True)
STEP = predict(MODEL, VOYAGE, CLUSTER)
BY_NAME = {r.name: r for r in RATES}


def run(rate: str = "llama-3", steps: int = 24000, storage_gb_s: float = 20.0) -> Finish:
    return finish(STEP, MODEL, VOYAGE, CLUSTER, steps, rate=BY_NAME[rate], storage_gb_s=storage_gb_s)


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
    twice = replace(VOYAGE, layout=replace(VOYAGE.layout, shard=4, replicate=2))
    step = predict(MODEL, twice, CLUSTER)
    found = finish(step, MODEL, twice, CLUSTER, 100, rate=BY_NAME["ant"], storage_gb_s=20.0)
    assert found.stall_s == pytest.approx(2 * run().stall_s)


def test_a_run_without_steps_or_storage() -> None:
    with pytest.raises(ValueError, match="0 steps"):
        run(steps=0)
    with pytest.raises(ValueError, match="0 GB/s"):
        run(storage_gb_s=0)
