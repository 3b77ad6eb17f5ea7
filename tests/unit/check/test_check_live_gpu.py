"""A live check of GPU nodes, whose agents are stand-ins: which rails are measured how, and what is made of it."""

from __future__ import annotations

import pytest
from standin_agent_pool import GPUS, Nodes, StandinAgentPool

from seatrial.base.errors import InputError
from seatrial.check.live import conductor as live
from seatrial.check.live.conductor import LiveOptions, LiveResult, check_live
from seatrial.check.live.hosts import Host
from seatrial.check.node.node_stage import NodeOptions


def check(monkeypatch: pytest.MonkeyPatch, nodes: Nodes, rate: float | None = 400.0) -> LiveResult:
    monkeypatch.setattr(StandinAgentPool, "nodes", nodes, raising=False)
    monkeypatch.setattr(live, "AgentPool", StandinAgentPool)
    hosts = [Host(f"node{n}", f"10.0.0.{n}") for n in range(nodes.count)]
    return check_live(hosts, LiveOptions(NodeOptions(), port_gbit_s=rate), lambda line: None)


def against(result: LiveResult) -> set[tuple[str, str | None]]:
    return {(f.code, f.target.node) for f in result.report.findings if f.verdict == "FAIL"}


def test_healthy_nodes_are_not_blamed_and_rates_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, Nodes(4))
    assert against(result) == set()
    assert (result.blames, result.unsettled) == ((), ())
    rail = result.measured["rail"]
    assert (rail["median"], rail["n"], rail["algorithm"]) == (392.0, 4 * GPUS, "ib_write_bw")
    gpu = result.measured["gpu"]
    assert (gpu["kind"], gpu["gemm"]["median"], gpu["gemm"]["n"]) == ("NVIDIA H200", 790.0, 4 * GPUS)
    assert {(r["nodes"], r["ranks"]) for r in result.measured["all_reduce"]} == {(1, 8), (2, 16), (4, 32)}
    cleared = [f for f in result.report.findings if f.code == "PAI001"]
    assert [f.verdict for f in cleared] == ["PASS"] * 4
    assert [f.measured for f in cleared] == pytest.approx([392.0] * 4)
    inside = [f for f in result.report.findings if f.code == "NCC002" and f.verdict == "PASS"]
    assert {f.target.node for f in inside} == {f"node{n}" for n in range(4)}  # by the floor of NVLS


@pytest.mark.parametrize("rate", [400.0, None])
@pytest.mark.parametrize("perftest", [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 4, 5}])
def test_a_slow_rail_is_named(
    monkeypatch: pytest.MonkeyPatch, perftest: set[int], rate: float | None
) -> None:
    """With perftest everywhere by ib_write_bw, else by NCCL held to the rail."""
    nodes = Nodes(6, perftest=perftest)
    nodes.rails[2][3] = 98.0
    result = check(monkeypatch, nodes, rate)
    assert [(b.kind, b.node, b.port, b.verdict) for b in result.blames] == [
        ("nic", "node2", "mlx5_3/1", "FAIL")
    ]
    missing = [f for f in result.report.findings if "not installed" in f.message]
    assert {f.target.node for f in missing} == {f"node{n}" for n in set(range(6)) - perftest}
    assert {f.verdict for f in missing} <= {"UNJUDGED"}


def test_a_port_down_in_perftest_is_reported_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, Nodes(4, ports_down={(1, 5)}))
    assert {node for _, node in against(result)} == {"node1"}
    assert "NET001" in {code for code, _ in against(result)}


def test_a_slow_collective_of_one_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, Nodes(8, inside={5: 180.0}))
    assert {b.node for b in result.blames} == {"node5"}
    assert ("NCC002", "node5") in against(result)


def test_wrong_sums_fail_and_name_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, Nodes(4, wrong={3}))
    wrong = [f for f in result.report.findings if f.code == "LIV006"]
    assert {f.verdict for f in wrong} == {"FAIL"}
    assert "node3" in {f.target.node for f in wrong}  # alone, inside the node


def test_nccl_that_counts_more_nodes_than_hosts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, Nodes(4, nccl_nodes=6))
    assert any(f.code == "NCC004" and f.verdict == "FAIL" for f in result.report.findings)


def test_hosts_of_one_name_are_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="listed twice"):
        check_live([Host("a", "a"), Host("a", "b")], LiveOptions(NodeOptions()), lambda line: None)
    with pytest.raises(InputError, match="no host"):
        check_live([], LiveOptions(NodeOptions()), lambda line: None)
