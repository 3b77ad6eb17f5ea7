"""Each alert rule on situations made by hand: when it holds, what it says, and when it ceases to hold."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
from alert_cases import NOW, event, fired, judge, samples, situation, steps

from seatrial.base.batches import BatchSizes
from seatrial.base.errors import InternalError
from seatrial.cli.main import declare
from seatrial.job.alert_rules import load, rules
from seatrial.record.saved import CheckpointInfo
from seatrial.watch.alerts.conditions import CONDITIONS, evaluate
from seatrial.watch.grafana.alert_rules import alert_rules

HOT = 'gpu_temperature_celsius{gpu="3"}'
THERMAL = 'gpu_throttle_ratio{gpu="0",reason="hw_thermal"}'
CAPPED = 'gpu_throttle_ratio{gpu="0",reason="power_cap"}'
TOTAL, FREE = 'storage_total_bytes{storage="run"}', 'storage_free_bytes{storage="run"}'


def test_a_healthy_run_has_no_alert() -> None:
    healthy = {HOT: 70.0, THERMAL: 0.0, CAPPED: 1.0, TOTAL: 100.0, FREE: 50.0}
    saved = CheckpointInfo(280, "there", NOW - 20)
    nodes: dict[str, Any] = {"training": [0, 1], "spares": [2], "wanted_spares": 1, "wanted_nodes": 2}
    s = situation(samples=samples({0: healthy, 1: healthy}), checkpoint=saved, checkpoint_steps=50, **nodes)
    assert evaluate(s, rules(), {}) == {}
    assert evaluate(situation(steps=[], started=NOW - 60), rules(), {}) == {}


@pytest.mark.parametrize("kind", ["nonfinite", "loss_spike", "corruption", "straggler"])
def test_events_of_the_run_raise_alerts(kind: str) -> None:
    window = rules()[kind].limits["window_s"]
    seen = event(kind, 60, node=3, rank=25, signal=kind, evidence={"value": 9.0})
    found = judge(kind, events=[event(kind, 90, node=1), seen])
    assert found is not None
    assert (found.nodes, found.rank) == ([1, 3], 25)
    assert found.evidence["event"] == {
        "kind": kind,
        "time": seen.time,
        "message": seen.message,
        "evidence": {"value": 9.0},
    }
    assert "(2 times)" in found.message
    assert judge(kind, events=[event(kind, window + 1)]) is None


def test_link_errors_and_congestion_are_signals() -> None:
    links = [event("signal", node=5, signal="nvlink_errors"), event("signal", node=6, signal="link_down")]
    slow = [event("signal", node=7, signal="congestion")]
    other = [event("signal", node=8, signal="xid:79")]
    found, congestion = (
        judge("link_errors", events=links + slow + other),
        judge("congestion", events=links + slow),
    )
    assert found is not None
    assert found.nodes == [5, 6]
    assert congestion is not None
    assert congestion.nodes == [7]
    assert judge("link_errors", events=slow + other) is None
    assert judge("congestion", events=links + other) is None


def test_pcie_replays_are_link_errors() -> None:
    grown = {0: {'gpu_pcie_replays_total{gpu="0"}': 79.0}, 4: {'gpu_pcie_replays_total{gpu="1"}': 80.0}}
    found = judge("link_errors", grown=grown)
    assert found is not None
    assert (found.nodes, found.evidence["by_node"]) == ([4], {"4": 80.0})


def test_64_hot_nodes_are_one_alert() -> None:
    found = judge("gpu_hot", samples=samples({n: {HOT: 88.0 + n / 100} for n in range(64)}))
    assert found is not None
    assert found.nodes == list(range(64))
    assert len(found.evidence["by_node"]) == 32
    assert "nodes 0-63: 89 °C" in found.message


def test_between_clear_and_limit_alerts_do_not_change() -> None:
    held = fired("gpu_hot", samples=samples({1: {HOT: 88.0}}))
    between = samples({1: {HOT: 84.0}, 2: {HOT: 84.0}})
    found = judge("gpu_hot", held, samples=between)
    assert found is not None
    assert found.nodes == [1]
    assert judge("gpu_hot", samples=between) is None
    assert judge("gpu_hot", held, samples=samples({1: {HOT: 81.0}})) is None


def test_a_node_without_telemetry_is_not_resolved() -> None:
    held = fired("gpu_hot", samples=samples({1: {HOT: 88.0}}))
    old = samples({1: {HOT: 20.0}}, ago=300)
    found = judge("gpu_hot", held, samples=old, training=[1])
    assert found is not None
    assert found.evidence["not_read"] == [1]
    assert judge("gpu_hot", held, samples=old, training=[2]) is None  # it is no longer part of the run
    assert judge("gpu_hot", samples=samples({1: {HOT: 99.0}}, ago=300)) is None


def test_the_power_cap_does_not_count_as_throttling() -> None:
    assert judge("gpu_throttled", samples=samples({0: {CAPPED: 1.0, THERMAL: 0.05}})) is None
    found = judge("gpu_throttled", samples=samples({0: {THERMAL: 0.25}}))
    assert found is not None
    assert "25% of the time" in found.message


def test_storage_nearly_full() -> None:
    found = judge(
        "storage_full", samples=samples({0: {TOTAL: 100.0, FREE: 9.0}, 1: {TOTAL: 100.0, FREE: 40.0}})
    )
    assert found is not None
    assert found.nodes == [0]
    assert (found.evidence["free"], found.evidence["limit"]) == (0.09, 0.1)
    assert found.message == "storage nearly full: node 0: 9.0% free: run"
    held = fired("storage_full", samples=samples({0: {TOTAL: 100.0, FREE: 9.0}}))
    assert judge("storage_full", held, samples=samples({0: {TOTAL: 100.0, FREE: 11.0}}))
    assert judge("storage_full", held, samples=samples({0: {TOTAL: 100.0, FREE: 13.0}})) is None


def test_a_throughput_drop_stays_until_it_is_over() -> None:
    dropped = steps(300, tokens_per_s_per_gpu=lambda step: 100.0 if step <= 290 else 80.0)
    held = fired("throughput_drop", steps=dropped)
    found = judge("throughput_drop", steps=dropped)
    assert found is not None
    assert found.message == "tokens/s have dropped: by 20%, from 100 to 80 per GPU"
    slow = steps(900, tokens_per_s_per_gpu=lambda step: 100.0 if step <= 290 else 80.0)
    assert judge("throughput_drop", steps=slow) is None  # for who comes late it is usual
    assert judge("throughput_drop", held, steps=slow) is not None
    assert judge("throughput_drop", held, steps=steps(900, tokens_per_s_per_gpu=95.0)) is None


def test_single_slow_steps_are_no_throughput_drop() -> None:
    rare = steps(300, tokens_per_s_per_gpu=lambda step: 10.0 if step % 10 == 0 else 100.0)
    assert judge("throughput_drop", steps=rare) is None
    each = steps(
        300, generation=lambda step: step, tokens_per_s_per_gpu=lambda step: 100.0 if step < 290 else 1.0
    )
    assert judge("throughput_drop", steps=each) is None


def test_the_gradient_norm_drifts_up() -> None:
    def norms(low: float) -> dict[str, Any]:
        return {"grad_norm": lambda step: 1.0 if step <= 1450 else low}

    assert judge("gradient_drift", steps=steps(1500, **norms(1.9))) is None
    found = judge("gradient_drift", steps=steps(1500, **norms(2.1)))
    assert found is not None
    assert found.evidence["usual"] == 1.0
    assert (
        judge("gradient_drift", steps=steps(999, grad_norm=lambda step: 1.0 if step < 900 else 5.0)) is None
    )
    odd = steps(1500, grad_norm=lambda step: math.nan if step % 2 else 1.0)
    assert judge("gradient_drift", steps=odd) is None


def test_no_progress_by_the_age_of_the_last_step() -> None:
    old = steps(100, time=lambda step: NOW - 121 - (100 - step))
    found = judge("no_progress", steps=old, events=[event("step_overdue", 60, node=2, rank=9)])
    assert found is not None
    assert (found.nodes, found.rank, found.evidence["age_s"]) == ([2], 9, 121.0)
    assert found.evidence["event"]["kind"] == "step_overdue"
    assert judge("no_progress", steps=old, total_steps=100) is None
    slow = steps(100, step_time_s=20.0, time=lambda step: NOW - 190 - (100 - step))
    assert judge("no_progress", steps=slow) is None  # 10 of these steps are 200 s


def test_a_step_with_a_larger_batch_may_take_longer() -> None:
    old = steps(100, step_time_s=5.0, time=lambda step: NOW - 190 - (100 - step))
    assert judge("no_progress", steps=old) is not None
    assert judge("no_progress", steps=old, batches=BatchSizes.of(128, [(100, 32)])) is None
    assert judge("no_progress", steps=old, batches=BatchSizes.of(128, [(101, 32)])) is not None


def test_no_progress_from_the_start() -> None:
    assert judge("no_progress", steps=[], started=NOW - 1700) is None
    assert judge("no_progress", steps=[], started=NOW - 1801) is not None
    resumed = steps(50, time=lambda step: NOW - 90_000)
    assert judge("no_progress", steps=resumed, started=NOW - 1700) is None


def test_a_checkpoint_is_overdue() -> None:
    saved = CheckpointInfo(100, "there", NOW - 200)
    assert judge("checkpoint_overdue", checkpoint=saved, checkpoint_steps=100) is None  # 200 steps ago
    found = judge(
        "checkpoint_overdue", checkpoint=saved, checkpoint_steps=80, events=[event("checkpoint_failed", 30)]
    )
    assert found is not None
    assert (found.evidence["unsaved_steps"], found.evidence["event"]["kind"]) == (200, "checkpoint_failed")
    assert judge("checkpoint_overdue", checkpoint_steps=100) is not None
    assert judge("checkpoint_overdue", checkpoint=saved, events=[event("checkpoint_overdue", 30)]) is not None
    assert judge("checkpoint_overdue", checkpoint=saved, events=[event("checkpoint_overdue", 300)]) is None


def test_nodes_idle_untested_and_spares_gone() -> None:
    found = judge("idle_nodes", spares=[4, 5, 6], wanted_spares=2, idle={1: "excluded"})
    assert found is not None
    assert found.evidence["by_node"] == {"1": "excluded", "6": "spare beyond cluster.spares"}
    found = judge("untested_nodes", untested=[3], training=[0, 3])
    assert found is not None
    assert found.evidence["with_ranks"] == [3]
    nodes: dict[str, Any] = {"training": [0, 1], "wanted_nodes": 2}
    assert judge("spares_exhausted", wanted_spares=1, **nodes) is not None
    assert judge("spares_exhausted", wanted_spares=0, **nodes) is None
    assert judge("spares_exhausted", wanted_spares=1, spares=[2], **nodes) is None


@pytest.mark.parametrize("name", list(CONDITIONS))
def test_its_command_exists(name: str) -> None:
    rule = rules()[name]
    argv = rule.command.format_map({"run": "runs/a", "job": "a.toml", "node": 3}).split()
    if argv[0] == "seatrial":
        parser = argparse.ArgumentParser(exit_on_error=False)
        declare(argv[1], parser)
        parser.parse_args(argv[2:])
    else:
        assert argv[:2] == ["nvidia-smi", "-q"]


def test_every_rule_has_a_condition_and_a_source() -> None:
    assert list(rules()) == list(CONDITIONS)
    with pytest.raises(
        InternalError, match="a: `source` is missing; a: `severity` is 'bad'; a: `limit` is not a number"
    ):
        load('[a]\nseverity="bad"\nfor_s=0\nclear_s=0\nsummary="s"\ncommand=""\nlimit="x"')


def test_the_table_of_the_document_is_that_of_the_rules() -> None:
    text = (
        (Path(__file__).parents[3] / "docs/watch.md")
        .read_text(encoding="utf-8")
        .partition("\n## Alerts\n")[2]
    )
    text = text.partition("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    numbers = {n: ", ".join(f"`{k}` {v:g}" for k, v in rule.numbers.items()) for n, rule in rules().items()}
    expected = [[f"| `{n}`", rule.severity, numbers[n]] for n, rule in rules().items()]
    assert [[row[0], row[1], row[3]] for row in rows] == expected
    in_promql = {each.rule.name for each in alert_rules()}
    assert [row[4] for row in rows] == ["yes |" if name in in_promql else "no |" for name in rules()]
