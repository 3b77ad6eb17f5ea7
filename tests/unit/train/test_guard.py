"""Decisions about a step, from its values and the history."""

from __future__ import annotations

import math
import random

import pytest

from seatrial.job.schema import ResilienceSection
from seatrial.train.health.guard import LEAST, WINDOW, Guard, StepDecision

NAN, INF = math.nan, math.inf


def guard(**keys: object) -> Guard:
    return Guard(ResilienceSection(**keys))  # type: ignore[arg-type]


def usual(
    watch: Guard, steps: int, first: int = 1, seed: int = 0, spread: float = 0.02
) -> list[StepDecision]:
    noise = random.Random(seed)
    return [
        watch.judge(s, 2.5 + noise.gauss(0, spread), math.exp(noise.gauss(0, 0.3)))
        for s in range(first, first + steps)
    ]


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, INF), (-INF, NAN)])
def test_nonfinite_step_is_redone_rolled_back_then_skipped(loss: float, norm: float) -> None:
    watch = guard()
    assert watch.judge(5, 1.0, 1.0).action == "accept"
    verdicts = [watch.judge(6, loss, norm) for _ in range(3)]
    assert [v.action for v in verdicts] == ["redo", "back", "skip"]
    assert {v.signal for v in verdicts} == {"nonfinite"}
    watch.mark_skipped(6, verdicts[-1].reason)
    assert watch.skip_reason(6)
    assert watch.skip_reason(7) is None


def test_attempts_at_a_step_are_counted_over_its_replays() -> None:
    watch = guard()
    assert watch.judge(6, NAN, 1.0).action == "redo"
    assert watch.judge(6, 1.0, 1.0).action == "accept"
    assert watch.judge(6, NAN, 1.0).action == "back"


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_max_skipped_steps_counts_over_the_whole_run(budget: int) -> None:
    watch = Guard(ResilienceSection(max_skipped_steps=budget))
    for step in range(budget):
        actions = [watch.judge(step, NAN, 1.0).action for _ in range(3)]
        assert actions == ["redo", "back", "skip"]
        watch.mark_skipped(step, "")
        watch.mark_skipped(step, "replayed: it counts once")
    assert [watch.judge(99, NAN, 1.0).action for _ in range(3)] == ["redo", "back", "fail"]
    later = Guard(ResilienceSection(max_skipped_steps=budget), skipped=watch.skipped)
    assert [later.judge(99, NAN, 1.0).action for _ in range(3)][-1] == "fail"


def test_without_a_snapshot_a_nonfinite_step_is_skipped() -> None:
    watch = guard()
    watch.judge(6, NAN, 1.0)
    back = watch.judge(6, NAN, 1.0)
    assert watch.without_rollback(6, NAN, 1.0, back).action == "skip"


def test_a_spike_is_reported_once_an_episode() -> None:
    watch = guard()
    usual(watch, 40)
    verdicts = [watch.judge(s, 3.5, 1.0) for s in (41, 42, 43)]
    assert [(v.action, v.signal) for v in verdicts] == [
        ("accept", "loss_spike"),
        ("accept", None),
        ("accept", None),
    ]
    assert verdicts[0].data["what"] == "loss"
    assert watch.judge(44, 2.5, 1.0).signal is None
    again = watch.judge(45, 2.5, 40.0)
    assert again.signal == "loss_spike"
    assert again.data["what"] == "gradient norm"


def test_a_lasting_level_becomes_the_median() -> None:
    watch = guard()
    usual(watch, 70)
    assert sum(watch.judge(s, 4.0, 1.0).signal is not None for s in range(71, 71 + WINDOW)) == 1
    assert watch.judge(71 + WINDOW, 4.0, 1.0).signal is None
    assert not watch._in_episode


def test_early_steps_and_falling_losses_are_not_spikes() -> None:
    watch = guard()
    assert watch.judge(1, 9.0, 50.0).signal is None
    for step in range(2, 200):
        assert watch.judge(step, 1 + 8 * math.exp(-step / 30), 50 / step + 0.5).signal is None


@pytest.mark.cluster  # slow
def test_spike_detection_has_few_false_alarms_and_few_misses() -> None:
    """Of 24,000 steps whose gradient norms scatter log-normally, and of 60 that have six times the norm."""
    alarms, found = 0, 0
    for seed in range(60):
        watch = guard()
        alarms += sum(v.signal is not None for v in usual(watch, 400, seed=seed))
        found += watch.judge(401, 2.5, 6 * math.exp(random.Random(-seed).gauss(0, 0.3))).signal is not None
    assert alarms <= 3
    assert found >= 50


def test_on_spike_skip() -> None:
    watch = guard(on_spike="skip")
    usual(watch, 40)
    first = watch.judge(41, 9.0, 1.0)
    assert (first.action, first.signal) == ("back", "loss_spike")
    usual(watch, 6, first=35)
    assert watch.skip_reason(41) is None, "the first time it may have been a fault that passes"
    assert watch.judge(41, 9.0, 1.0).action == "back"
    assert watch.skip_reason(41)
    watch.mark_skipped(41, "a spike")
    assert watch.judge(42, 2.5, 1.0).action == "accept"


def test_on_spike_skip_counts_against_max_skipped_steps() -> None:
    watch = guard(on_spike="skip", max_skipped_steps=0)
    usual(watch, 40)
    assert [watch.judge(41, 9.0, 1.0).action for _ in range(2)] == ["back", "fail"]


def test_a_spike_without_a_snapshot_is_reported() -> None:
    watch = guard(on_spike="skip")
    usual(watch, 40)
    for _ in range(2):
        verdict = watch.without_rollback(41, 9.0, 1.0, watch.judge(41, 9.0, 1.0))
        assert (verdict.action, verdict.signal, verdict.data["action"]) == ("accept", "loss_spike", "warn")
        assert watch.skip_reason(41) is None


def test_spike_factor() -> None:
    for factor, wanted in ((2.0, "loss_spike"), (20.0, None)):
        watch = guard(spike_factor=factor)
        usual(watch, 40)
        assert watch.judge(41, 2.8, 1.0).signal == wanted


def test_new_and_old_processes_decide_alike() -> None:
    """A new process that is told the recent values judges as one that saw them."""
    old = guard(on_spike="skip")
    noise = random.Random(1)
    history = {s: (2.5 + noise.gauss(0, 0.05), math.exp(noise.gauss(0, 0.5))) for s in range(1, 100)}
    for step, (loss, norm) in history.items():
        old.judge(step, loss, norm)
    new = Guard(ResilienceSection(on_spike="skip"), recent={s: history[s] for s in range(100 - WINDOW, 100)})
    for loss in (2.5, 2.7, 2.9, 3.1, 4.0):
        assert old.judge(100, loss, 1.0).action == new.judge(100, loss, 1.0).action
    assert LEAST < WINDOW
