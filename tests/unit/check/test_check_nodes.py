"""What nodes measured of themselves: who stands out, what is harmless, what measuring again settles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from seatrial.check.blame.faults import Fault, Shape
from seatrial.check.blame.nodes import NodeStage, doubtful, judge_nodes, settle
from seatrial.check.blame.simulated import Cluster, Noise, SimulatedBench
from seatrial.check.judging.findings import Finding, worst

CALM = Noise(outlier=0, own_outlier=0, nothing=0, silent=0, harmless=0, hidden_log=0)
FOUR = np.arange(4)


def stage(*faults: Fault, nodes: int = 4, gpu: str = "H100 SXM") -> NodeStage:
    cluster = Cluster(Shape(nodes, nodes_per_leaf=4), faults, gpu=gpu, noise=CALM)
    return SimulatedBench(cluster).nodes(np.arange(nodes))


def bad(found: list[Finding]) -> set[tuple[str, str, str]]:
    return {(f.code, f.verdict, str(f.target)) for f in found if f.verdict != "PASS"}


@pytest.mark.parametrize("gpu", ["A100-80GB SXM", "H100 SXM", "H200 SXM", "B200 SXM", "B300 SXM"])
def test_healthy_nodes_pass_every_check(gpu: str) -> None:
    found = judge_nodes(stage(gpu=gpu))
    assert worst(found) == "PASS", bad(found)
    assert len({f.code for f in found}) == 11, "each check says that it passed"


def test_slow_gpu_finding_has_peer_deviation_and_its_model_floor() -> None:
    (found,) = [f for f in judge_nodes(stage(Fault("gpu_slow", 2, 5, share=0.6))) if f.verdict == "FAIL"]
    assert (found.code, found.target.node, found.target.gpu, found.unit) == (
        "MSR001",
        "node0002",
        5,
        "TFLOP/s",
    )
    assert found.expected is not None
    assert found.expected.value == 794.5
    assert found.expected.source
    assert found.deviation == pytest.approx(-0.4, abs=0.03)


def test_if_all_are_equally_slow_the_floor_shows_it() -> None:
    slow = tuple(Fault("gpu_slow", n, g, share=0.7) for n in range(4) for g in range(8))
    found = judge_nodes(stage(*slow))
    assert len([f for f in found if f.code == "MSR001" and f.verdict == "FAIL"]) == 32


def test_an_unknown_gpu_has_no_floor_but_its_peers() -> None:
    one = replace(stage(Fault("gpu_slow", 1, 1, share=0.85)), gpu="H100 of another kind")
    assert bad(judge_nodes(one)) == {("MSR001", "WARN", "node0001 GPU 1 (0000:2b:00)")}


def test_too_few_peers_and_no_floor_is_unjudged() -> None:
    cluster = Cluster(Shape(1, gpus=2, nodes_per_leaf=4), noise=CALM)
    found = judge_nodes(replace(SimulatedBench(cluster).nodes(np.arange(1)), gpu=None))
    assert {f.code for f in found if f.verdict == "UNJUDGED"} == {"MSR001", "MSR002", "MSR003", "MSR004"}
    assert worst(found) == "UNJUDGED"


def test_a_missing_gpu_is_the_slot_that_the_siblings_have() -> None:
    found = bad(judge_nodes(stage(Fault("gpu_missing", 3, 2))))
    assert ("GPU001", "FAIL", "node0003 GPU 2 (0000:47:00)") in found
    assert {where for _, _, where in found} == {"node0003 GPU 2 (0000:47:00)"}, "nothing else shifts"


def test_harmless_messages_and_counters_are_not_faults() -> None:
    noise = replace(CALM, harmless=1.0)
    for seed in range(5):
        cluster = Cluster(Shape(4, nodes_per_leaf=4), seed=seed, noise=noise)
        measured = SimulatedBench(cluster).nodes(FOUR)
        assert len(measured.kernel_log) == len(measured.counters) == 4
        assert worst(judge_nodes(measured)) == "PASS"


def test_a_log_that_cannot_be_seen_is_unjudged() -> None:
    cluster = Cluster(Shape(4, nodes_per_leaf=4), noise=replace(CALM, hidden_log=1.0))
    found = judge_nodes(SimulatedBench(cluster).nodes(FOUR))
    assert [f.verdict for f in found if f.code == "MSR008"][:4] == ["UNJUDGED"] * 4
    assert worst(found) == "UNJUDGED"


def test_remeasuring_clears_one_low_reading_but_not_a_slow_gpu() -> None:
    first = stage(Fault("gpu_slow", 1, 3, share=0.6))
    first.rates["hbm"][2, 4] *= 0.5
    assert doubtful(first).tolist() == [1, 2]
    rows = doubtful(first)
    again = stage(Fault("gpu_slow", 1, 3, share=0.6))

    def part() -> NodeStage:
        rates = {name: values[rows] for name, values in again.rates.items()}
        return replace(
            again,
            rates=rates,
            answered=again.answered[rows],
            present=again.present[rows],
            port_up=again.port_up[rows],
        )

    settled = settle(first, [(rows, part()), (rows, part())])
    assert bad(judge_nodes(settled)) == {("MSR001", "FAIL", "node0001 GPU 3 (0000:63:00)")}
    assert first.rates["hbm"][2, 4] < 2000, "the first readings are left as they were"


def test_a_late_answer_of_a_node_counts() -> None:
    first = stage()
    first.answered[3] = False
    rows = doubtful(first)
    assert rows.tolist() == [3]
    cluster = Cluster(Shape(4, nodes_per_leaf=4), noise=CALM)
    settled = settle(first, [(rows, SimulatedBench(cluster).nodes(rows))])
    assert settled.answered.all()
    assert bad(judge_nodes(first)) == {("MSR011", "FAIL", "node0003")}
    assert worst(judge_nodes(settled)) == "PASS"
