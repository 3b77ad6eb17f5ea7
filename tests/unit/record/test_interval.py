"""How often to save: the formula, its limits, and what is written of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.hardware.failures import Rate
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.interval import FORMULA, choose_interval, count_failures, write_interval, young

PRIOR = Rate("test", "a test", 0.01, "nobody")
VALUES: dict[str, Any] = {
    "save_cost_s": 2.0,
    "write_s": 60.0,
    "step_time_s": 13.0,
    "nodes": 16,
    "failures": 0,
    "node_days": 0.0,
    "prior": PRIOR,
    "max_unsaved_s": 14400.0,
}


def test_the_formula() -> None:
    chosen = choose_interval(**VALUES)
    mttf_s = 86400 / (16 * 0.01)
    assert chosen.mttf_s == pytest.approx(mttf_s)
    assert chosen.steps == math.floor(math.sqrt(2 * 2.0 * mttf_s) / 13.0) == 113
    assert chosen.limited_by == ""


def test_the_runs_own_history_outweighs_the_prior() -> None:
    quiet = choose_interval(**VALUES | {"node_days": 10_000.0})
    noisy = choose_interval(**VALUES | {"node_days": 160.0, "failures": 40})
    assert quiet.mttf_s == pytest.approx(86400 / 16 * 10_100)
    assert noisy.mttf_s == pytest.approx(86400 / 16 / (41 / 260))
    assert noisy.steps < choose_interval(**VALUES).steps < quiet.steps


def test_limits_are_named() -> None:
    slow = choose_interval(**VALUES | {"write_s": 3000.0})
    assert (slow.steps, slow.limited_by) == (math.floor(6000 / 13), "the time that writing takes")
    assert "writing" in slow.reason
    dear = choose_interval(**VALUES | {"save_cost_s": 1e6})
    assert (dear.steps, dear.limited_by) == (math.floor(7200 / 13), "checkpoint.max_unsaved_s")


@given(
    st.floats(0, 1e4),
    st.floats(0, 1e5),
    st.floats(1e-3, 1e3),
    st.integers(1, 4096),
    st.integers(0, 10_000),
    st.floats(0, 1e6),
    st.floats(1, 1e6),
)
def test_any_history_gives_an_interval_within_the_limit(
    cost: float, write: float, step: float, nodes: int, failures: int, days: float, limit: float
) -> None:
    chosen = choose_interval(
        save_cost_s=cost,
        write_s=write,
        step_time_s=step,
        nodes=nodes,
        failures=failures,
        node_days=days,
        prior=PRIOR,
        max_unsaved_s=limit,
    )
    assert chosen.steps >= 1
    assert chosen.steps == 1 or chosen.steps * step <= limit / 2 * (1 + 1e-9)


def test_it_is_the_best_interval_of_its_model() -> None:
    """Lost time for an interval t is cost / t + t / (2 M) of the whole, to first order: least at Young's."""
    best = young(2.0, 5e5)

    def lost(t: float) -> float:
        return 2.0 / t + t / (2 * 5e5)

    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


@pytest.mark.parametrize("change", [{"step_time_s": 0.0}, {"nodes": 0}])
def test_what_no_interval_comes_from_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no interval from"):
        choose_interval(**VALUES | change)


def test_failures_are_what_the_run_recovered_from() -> None:
    kinds = ["generation_started", "recovering", "recovered", "rank_failed", "recovering"]
    found = [Event(float(i), 1, kind, "info", "") for i, kind in enumerate(kinds)]
    assert count_failures(found) == 2


def test_the_file_names_the_source_of_each_value(tmp_path: Path) -> None:
    chosen = choose_interval(**VALUES)
    write_interval(RunFolder(tmp_path), chosen)
    content = json.loads((tmp_path / "interval.json").read_text())
    assert content["formula"] == FORMULA
    assert content["steps"] == 113
    assert content["prior_source"] == "nobody"
    assert {"save_cost_s", "write_s", "step_time_s", "mttf_s", "failures", "node_days", "reason"} <= set(
        content
    )
