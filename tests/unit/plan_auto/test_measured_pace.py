"""The pace of earlier runs: with it they are predicted with their measured step time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from auto_cases import all_reduce, gpu_rates, job, made, report

from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.plan.cost.calibration import shipped
from seatrial.plan.cost.predict import predict
from seatrial.plan.measured.rates import measured_rates
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

H100 = find_gpu("H100 SXM")
assert H100 is not None
CLUSTER = Cluster(H100, 2, 8, find_network("InfiniBand NDR 8x400"))


def usual() -> float:
    """The step that the shipped calibration predicts."""
    j = job()
    return predict(j.architecture, Recipe.of(j), CLUSTER).step_s


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.5])
def test_a_measured_run_is_predicted_with_its_step_time(tmp_path: Path, factor: float) -> None:
    j, step = job(), usual() * factor
    made(tmp_path, j, step)
    found = measured_rates(tmp_path / "auto", j)
    calibration = found.calibration(shipped())
    p = predict(j.architecture, Recipe.of(j), CLUSTER, calibration=calibration)
    assert p.step_s == pytest.approx(step, rel=1e-4)
    assert p.pace.kind == "calibrated"
    assert "auto (55 steps" in p.pace.source
    assert p.high_s / p.low_s < math.exp(2 * 1.44 * 0.1)
    assert found.provenance == tuple(t for t in found.provenance if t.startswith("pace"))


def test_a_pace_is_derived_with_the_measured_rates(tmp_path: Path) -> None:
    j, step = job(), usual() * 1.2
    made(tmp_path, j, step)
    report(tmp_path / "auto", {"gpu": gpu_rates(gemm=600.0), "all_reduce": [all_reduce(2, 150.0)]})
    found = measured_rates(tmp_path / "auto", j)
    at = found.apply(CLUSTER)
    assert at != CLUSTER
    p = predict(j.architecture, Recipe.of(j), at, calibration=found.calibration(shipped()))
    assert p.step_s == pytest.approx(step, rel=1e-4)


def test_sibling_runs_are_used_and_other_paces_are_kept(tmp_path: Path) -> None:
    """Another name, layout and batch, the same model: a pace is of the stack and the GPU."""
    made(tmp_path, job("name=one", "parallel.tensor=2"), 30.0)
    made(tmp_path, job("name=two", "train.global_batch=64"), 30.0)
    found = measured_rates(tmp_path / "auto", job())
    (entry,) = found.paces
    assert (entry.stack, entry.gpu, entry.rows) == ("seatrial-compiled", "H100 SXM", 2)
    assert "one" in entry.source
    assert "two" in entry.source
    after = found.calibration(shipped())
    assert len(after.entries) == len(shipped().entries) + 1
    assert set(shipped().entries) < set(after.entries)
    # Runs that disagree make a wide interval.
    assert entry.spread > 0.08


def test_runs_of_a_scaling_test_are_not_used_for_themselves(tmp_path: Path) -> None:
    scaled = tmp_path / ".scale/auto-20261125-120000"
    scaled.mkdir(parents=True)
    (scaled / "scale.json").write_text("{}")
    made(scaled, job("name=2-nodes-1"), 30.0)
    (entry,) = measured_rates(tmp_path / "auto", job()).paces
    assert f"{scaled.relative_to(tmp_path)}/2-nodes-1 (55 steps" in entry.source
    assert measured_rates(tmp_path / "auto", job(), without=scaled).paces == ()


def test_without_compilation_it_is_another_stack(tmp_path: Path) -> None:
    made(tmp_path, job("train.compile=false"), 40.0)
    found = measured_rates(tmp_path / "auto", job())
    assert [e.stack for e in found.paces] == ["seatrial"]
    assert found.calibration(shipped()).pace("seatrial", H100).kind == "calibrated"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"device": "NVIDIA H200"}, "it ran on NVIDIA H200"),
        ({"device": "cpu"}, "it ran on cpu"),
        ({"steps": 20}, "15 usable steps, 20 are needed"),
        ({"of": "train.batch_ramp=[{steps=50, global_batch=64}]"}, "10 usable steps, 20 are needed"),
        ({"ranks": 8}, "0 usable steps"),
        ({"wait_s": 5.0}, "waiting for data"),
    ],
)
def test_unusable_runs_and_their_reasons(tmp_path: Path, more: dict[str, object], text: str) -> None:
    made(tmp_path, job(*[more.pop("of")] if "of" in more else []), 25.0, **more)  # type: ignore[arg-type, list-item]
    found = measured_rates(tmp_path / "auto", job())
    assert found.paces == ()
    assert text in found.unused[0]
    assert found.calibration(shipped()) is shipped()


def test_steps_that_no_pace_reproduces(tmp_path: Path) -> None:
    made(tmp_path, job(), 1e-3)
    found = measured_rates(tmp_path / "auto", job())
    assert "no pace reproduces" in found.unused[0]


def test_runs_of_another_model_are_ignored(tmp_path: Path) -> None:
    other = job("model.num_hidden_layers=16")
    made(tmp_path, other, 25.0)
    assert measured_rates(tmp_path / "auto", job()).unused == ()


def test_damaged_runs_are_ignored(tmp_path: Path) -> None:
    folder = made(tmp_path, job(), 25.0)
    folder.job_toml.write_text("name = 1\n")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "plan.json").write_text("{")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "plan.json").write_text(json.dumps([1]))
    found = measured_rates(tmp_path / "auto", job())
    assert len(found.unused) == 1
    assert "job.toml cannot be read" in found.unused[0]
    assert measured_rates(tmp_path / "nowhere" / "auto", job()).paces == ()


def test_a_recovery_with_fewer_replicas_does_not_count(tmp_path: Path) -> None:
    """Steps of a smaller world are told by their tokens a GPU."""
    j = job()
    made(tmp_path, j, 25.0, steps=40)
    again = replace(j)
    made(tmp_path, again, 50.0, steps=60, ranks=8)  # a second start, all of it on half of the ranks
    found = measured_rates(tmp_path / "auto", j)
    assert found.paces == ()
