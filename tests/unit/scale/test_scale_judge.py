"""Gates and losses: passed and failed only where that is sure."""

from __future__ import annotations

import math

import pytest
from scale_cases import speed

from seatrial.scale.judge import Gates, Judgement, judge_gates, judge_losses, judge_utilisation
from seatrial.scale.statistics import Estimate, estimate

SIZES = [(1, 8), (2, 16), (16, 128)]


def gates(
    asked: Gates, doubling: Estimate | None = None, speedup: Estimate | None = None
) -> list[tuple[str, str]]:
    found = judge_gates(asked, SIZES, {2: doubling}, lambda nodes, of: speedup)
    return [(j.name, j.verdict) for j in found]


def test_gates_not_requested_are_unjudged() -> None:
    found = judge_gates(Gates(), SIZES, {2: speed(0.1)}, lambda nodes, of: speed(1))
    assert [j.verdict for j in found] == ["UNJUDGED", "UNJUDGED"]
    assert all("not requested" in j.text for j in found)


def test_utilisation_is_judged_if_the_gpus_report_it() -> None:
    found = judge_utilisation(0.7, {1: speed(0.9), 2: speed(0.5), 4: None})
    assert [(j.name, j.verdict) for j in found] == [
        ("tensor cores, 1 node", "PASS"),
        ("tensor cores, 2 nodes", "FAIL"),
        ("tensor cores, 4 nodes", "UNJUDGED"),
    ]
    assert "unknown" in found[2].text


@pytest.mark.parametrize(
    ("efficiency", "verdict"),
    [
        (speed(0.9), "PASS"),
        (speed(0.7), "FAIL"),
        (speed(0.8), "UNJUDGED"),
        (None, "UNJUDGED"),
        (estimate([0.9]), "UNJUDGED"),
    ],
)
def test_a_doubling_is_judged_by_its_whole_interval(efficiency: Estimate | None, verdict: str) -> None:
    assert gates(Gates(doubling=0.8), efficiency)[0] == ("1 to 2 nodes", verdict)


@pytest.mark.parametrize(("times", "verdict"), [(13.0, "PASS"), (11.0, "FAIL"), (12.0, "UNJUDGED")])
def test_the_total_speedup_is_between_the_named_sizes(times: float, verdict: str) -> None:
    assert gates(Gates(speedup=(8, 128, 12)), speedup=speed(times))[1] == ("8 to 128 GPUs", verdict)


def test_a_gate_on_a_missing_size_is_unjudged() -> None:
    found = judge_gates(Gates(0.8, (8, 256, 12)), [(1, 8)], {}, lambda nodes, of: None)
    assert [j.text for j in found] == [
        "no two sizes differ by a factor of two",
        "no size in --nodes has 256 GPUs",
    ]
    assert {j.verdict for j in found} == {"UNJUDGED"}


BASE = [5.0, 4.9, 4.81, 4.7, 4.62, 4.5]


def losses(mode: str, other: list[float], precision: str = "fp32") -> Judgement:
    found = judge_losses(mode, precision, {1: 4, 2: 8}, {1: [BASE], 2: [BASE, other]})  # type: ignore[arg-type]
    assert found[0].verdict == "PASS"
    return found[1]


@pytest.mark.parametrize(
    ("off", "precision", "verdict"),
    [(5e-5, "fp32", "PASS"), (2e-4, "fp32", "FAIL"), (2e-4, "bf16", "PASS"), (0.02, "bf16", "FAIL")],
)
def test_strong_every_step_has_the_first_sizes_loss(off: float, precision: str, verdict: str) -> None:
    other = [*BASE[:-1], BASE[-1] * (1 + off)]
    assert losses("strong", other, precision).verdict == verdict


def test_weak_the_first_step_is_compared_alone() -> None:
    assert losses("weak", [5.05, 1.0, 1.0, 1.0, 1.0, 1.0]).verdict == "PASS"
    assert losses("weak", [5.5, *BASE[1:]]).verdict == "FAIL"


@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_a_loss_that_is_not_finite_fails(mode: str) -> None:
    assert losses(mode, [*BASE[:-1], math.nan]).verdict == "FAIL"


def test_without_the_first_size_losses_are_not_compared() -> None:
    (found,) = judge_losses("strong", "fp32", {1: 4, 2: 8}, {2: [BASE]})
    assert (found.verdict, found.text) == ("UNJUDGED", "the first size was not measured")
    assert judge_losses("weak", "fp32", {1: 4}, {}) == []
