"""Facts of nodes in columns: slots and rails that fit although nodes differ, and what is missing is not a number."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from node_facts import PCIS, cpu_node, gpu_node, port

from seatrial.check.blame.nodes import doubtful, judge_nodes
from seatrial.check.node.columns import columns

Facts = dict[str, Any]

RATE_CODES = ("MSR001", "MSR002", "MSR003", "MSR004")
LINK_ERRORS = "GPU {n}: NVIDIA H200 (UUID: GPU-{n})\n\t Link 4: Replay Errors: {errors}\n\t Link 4: Recovery Errors: 0\n"


def without(facts: Facts, slot: int) -> Facts:
    facts = copy.deepcopy(facts)
    pci = facts["gpus"]["gpus"].pop(slot)["pci"]
    del facts["rates"]["gpus"][pci]
    facts["rates"]["pairs"] = [p for p in facts["rates"]["pairs"] if pci not in (p["from"], p["to"])]
    return facts


def bad(nodes: dict[str, Facts | None]) -> set[tuple[str, str, str]]:
    return {
        (f.code, f.verdict, str(f.target))
        for f in judge_nodes(columns(nodes))
        if f.verdict in ("FAIL", "WARN")
    }


def test_nodes_of_which_nothing_is_wrong() -> None:
    stage = columns({"a": gpu_node(), "b": gpu_node(), "c": gpu_node()})
    assert stage.slots == PCIS
    assert stage.devices == tuple(f"mlx5_{n}/1" for n in range(8))
    assert stage.gpu == "NVIDIA H200"
    assert stage.links == 18
    assert stage.present.all()
    assert stage.port_up.all()
    assert stage.rates["p2p"].shape == (3, 8, 8)
    assert np.isnan(stage.rates["p2p"][0].diagonal()).all()
    assert stage.rates["p2p"][0, 1, 2] == 376.0
    assert stage.rates["p2p"][0, 2, 1] == 375.0
    assert not len(doubtful(stage))
    assert {f.verdict for f in judge_nodes(stage)} <= {"PASS", "UNJUDGED"}


def test_a_missing_gpu_leaves_a_hole_and_shifts_no_other() -> None:
    nodes: dict[str, Facts | None] = {"a": gpu_node(), "b": without(gpu_node(), 2), "c": gpu_node()}
    stage = columns(nodes)
    assert not stage.present[1, 2]
    assert np.isnan(stage.rates["gemm"][1, 2])
    assert not np.isnan(stage.rates["gemm"][1, 3])
    assert bad(nodes) == {("GPU001", "FAIL", f"b GPU 2 ({PCIS[2]})")}


def test_nodes_that_number_their_buses_differently_are_alike() -> None:
    other = gpu_node()
    for n, gpu in enumerate(other["gpus"]["gpus"]):
        gpu["pci"] = f"0001:0{n}:00"
    other["rates"]["gpus"] = {
        f"0001:0{n}:00": rates for n, rates in enumerate(other["rates"]["gpus"].values())
    }
    other["rates"]["pairs"] = []
    stage = columns({"a": gpu_node(), "b": other})
    assert stage.slots == tuple(f"slot {n}" for n in range(8))
    assert stage.present.all()
    assert stage.rates["gemm"][1].tolist() == [790.0] * 8


def test_a_node_that_did_not_answer() -> None:
    stage = columns({"a": gpu_node(), "b": None})
    assert stage.answered.tolist() == [True, False]
    assert not stage.present[1].any()
    assert np.isnan(stage.rates["gemm"][1]).all()
    assert doubtful(stage).tolist() == [1]


def test_what_is_measured_again_fits_the_first_measurement() -> None:
    first = columns({"a": gpu_node(), "b": gpu_node(), "c": cpu_node()})
    again = columns({"b": without(gpu_node(), 0)}, like=first)
    assert again.slots == first.slots
    assert again.devices == first.devices
    assert again.present[0].tolist() == [False] + [True] * 7


def test_nodes_without_gpus_and_rdma_have_one_rail() -> None:
    down = cpu_node()
    down["interface"]["state"] = "down"
    stage = columns({"a": cpu_node(), "b": down, "c": None})
    assert stage.devices == ("eth0",)
    assert stage.port_up.tolist() == [[True], [False], [False]]
    assert stage.rates["gemm"].shape == (3, 0)
    other = cpu_node()
    other["interface"]["name"] = "ens5"
    assert columns({"a": cpu_node(), "b": other}).devices == ("network",)


def test_a_port_that_is_down_or_gone() -> None:
    one, two, three = gpu_node(), gpu_node(), gpu_node()
    two["ports"]["after"]["mlx5_3/1"] = port(3, state="DOWN")
    for when in ("before", "after"):
        del three["ports"][when]["mlx5_5/1"]
    nodes: dict[str, Facts | None] = {"a": one, "b": two, "c": three}
    assert {b for b in bad(nodes) if b[0] == "MSR009"} == {
        ("MSR009", "FAIL", "b mlx5_3/1"),
        ("MSR009", "FAIL", "c mlx5_5/1"),
    }


def test_error_counters_are_judged_by_their_growth_under_load() -> None:
    one, two = gpu_node(), gpu_node()
    two["ports"]["after"]["mlx5_1/1"] = port(1, counters={"symbol_error": 500, "link_downed": 1})
    two["link_errors"] = [LINK_ERRORS.format(n=6, errors=5), LINK_ERRORS.format(n=6, errors=5000)]
    nodes: dict[str, Facts | None] = {"a": one, "b": two}
    assert bad(nodes) == {
        ("MSR010", "FAIL", "b mlx5_1/1"),
        ("MSR006", "FAIL", f"b GPU 6 ({PCIS[6]}) NVLink 4"),
    }


def test_links_down_are_those_that_others_have_up() -> None:
    one, two = gpu_node(), gpu_node()
    two["gpus"]["gpus"][3]["links"]["11"] = False
    assert columns({"a": one, "b": two}).links_down == {(1, 3): (11,)}
    # 12 of 18 by design, on all of them.
    cards = gpu_node(2)
    for gpu in cards["gpus"]["gpus"]:
        gpu["links"] = {str(n): n < 12 for n in range(18)}
    stage = columns({"a": cards})
    assert (stage.links, stage.links_down) == (12, {})


def test_memory_errors_and_driver_messages() -> None:
    one, two, dark = gpu_node(), gpu_node(), gpu_node()
    one["gpus"]["gpus"][1]["uncorrectable"] = 2
    two["gpus_after"]["gpus"][6]["uncorrectable"] = 1  # of the load
    one["gpus_after"]["gpus"][1]["uncorrectable"] = None  # it does not say any more
    two["kernel"]["text"] += f"3,9,100,-;NVRM: Xid (PCI:{PCIS[4]}): 79, pid=1, GPU has fallen off the bus.\n"
    dark["kernel"] |= {"text": None, "problem": "/dev/kmsg: Operation not permitted"}
    stage = columns({"a": one, "b": two, "c": dark})
    assert stage.uncorrectable == {(0, 1): 2, (1, 6): 1}
    assert stage.kernel_log[2] is None
    found = {(f.code, f.verdict, f.target.node) for f in judge_nodes(stage) if f.verdict != "PASS"}
    assert {("MSR007", "FAIL", "a"), ("MSR008", "FAIL", "b"), ("MSR008", "UNJUDGED", "c")} <= found


def test_nothing_at_all() -> None:
    stage = columns({})
    assert stage.names == ()
    assert columns({"a": None}).answered.tolist() == [False]


def test_what_was_not_measured_does_not_pass() -> None:
    facts = gpu_node()
    facts["rates"] = None
    found = {f.code: f.verdict for f in judge_nodes(columns({"a": facts})) if f.code in RATE_CODES}
    assert found == {"MSR001": "UNJUDGED", "MSR002": "UNJUDGED", "MSR003": "UNJUDGED", "MSR004": "UNJUDGED"}
    # A single GPU has no other to copy to, on a card whose floor for that is known.
    alone = gpu_node(1)
    alone["gpus"]["gpus"][0]["name"] = alone["rates"]["gpus"][PCIS[0]]["name"] = "NVIDIA H100 80GB HBM3"
    found = {f.code: f.verdict for f in judge_nodes(columns({"a": alone})) if f.code in RATE_CODES}
    assert found == {"MSR001": "PASS", "MSR002": "UNJUDGED", "MSR003": "PASS"}
