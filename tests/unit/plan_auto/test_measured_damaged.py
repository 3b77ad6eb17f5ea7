"""Check reports with any one value changed: no crash, and no prediction from an invalid rate."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from auto_cases import all_reduce, gpu_rates, job, made, rails, report, storage

from seatrial.plan.cost.calibration import shipped
from seatrial.plan.cost.predict import predict
from seatrial.plan.measured.rates import measured_rates
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe

pytestmark = pytest.mark.cluster  # slow together

JOB = job()
PLACE = hardware_of(JOB)
MODEL, RECIPE = JOB.architecture, Recipe.of(JOB)
WRONG = (None, [], {}, "x", -1, 0, 1e308, True, 10**400, 1e-300, [{}], {"a": 1})


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a document."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*at, i))


def put(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    inner = document[at[0]]
    copy = list(document) if isinstance(document, list) else dict(document)
    copy[at[0]] = put(inner, at[1:], value)
    return copy


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: str(w)[:8])
def test_any_invalid_value_is_ignored(wrong: Any, tmp_path: Path) -> None:
    folder = tmp_path / "auto"
    rates = {"gpu": gpu_rates(gemm=650.0, hbm=2600.0, p2p=370.0), "rail": rails(390.0)}
    report(folder, rates | {"all_reduce": [all_reduce(1, 340.0)], "node": storage(2.0, 2.4)})
    file = next(folder.rglob("check.json"))
    whole = json.loads(file.read_text(encoding="utf-8"))
    for at in places(whole):
        file.write_text(json.dumps(put(whole, at, wrong)), encoding="utf-8")
        found = measured_rates(folder, JOB)
        cluster = found.at(PLACE).cluster
        assert cluster is not None
        step = predict(MODEL, RECIPE, cluster, calibration=found.calibration(shipped())).step_s
        assert math.isfinite(step)
        assert step > 0
        if found.storage_gb_s is not None:
            assert 0 < found.storage_gb_s < 1e9


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", *WRONG], ids=lambda w: str(w)[:8])
def test_any_invalid_figure_of_a_run_is_ignored(wrong: Any, tmp_path: Path) -> None:
    file = made(tmp_path, JOB, 12.0).metrics
    whole = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    cluster = PLACE.cluster
    assert cluster is not None
    for key in whole[0]:
        lines = [json.dumps(record | {key: wrong}) for record in whole]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        found = measured_rates(tmp_path / "auto", JOB)
        p = predict(MODEL, RECIPE, cluster, calibration=found.calibration(shipped()))
        assert 0 < p.low_s < p.high_s < math.inf


def test_a_report_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    reports = tmp_path / JOB.name / "reports"
    reports.mkdir(parents=True)
    os.mkfifo(reports / "check.json")
    other = tmp_path / "other"
    other.mkdir()
    os.mkfifo(other / "plan.json")
    found = measured_rates(tmp_path / JOB.name, JOB)
    assert "is a pipe" in found.unused[0]
