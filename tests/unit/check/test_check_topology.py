"""Topologies from ibnetdiscover and Slurm: leaves, uplinks, damaged and foreign text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.check.names import hostlist
from seatrial.check.outputs.topology import Topology, judge_topology, parse_topology, read_topology

FILE = Path(__file__).parents[2] / "fixtures" / "check" / "ibnetdiscover_four_nodes.txt"
TEXT = FILE.read_text(encoding="utf-8")
LEAF_A, LEAF_B = "MF0;leaf-a:MQM9700/U1", "MF0;leaf-b:MQM9700/U1"


def test_the_leaf_of_each_port_is_read_from_ibnetdiscover() -> None:
    topology = read_topology(FILE)
    for node in ("gpu01", "gpu02", "gpu03", "gpu04"):
        assert topology.leaf(node, "mlx5_0") == LEAF_A
        assert topology.leaf(node, "mlx5_1") == LEAF_B
        assert topology.leaf(node, "mlx5_7") is None, "on different leaves: not known for another port"
    assert topology.leaf("gpu05", "mlx5_0") is None
    assert not any("Aggregation" in link.peer for link in topology.links), "SHARP's port is no node"


def test_missing_uplinks_and_narrow_links_are_found() -> None:
    found = {f.code: f for f in judge_topology(parse_topology(TEXT, "x")) if f.verdict != "PASS"}
    assert found["TOP001"].target.peer == LEAF_B
    assert (found["TOP001"].measured, found["TOP001"].verdict) == (3, "FAIL")
    assert found["TOP002"].measured == "2xNDR"
    assert "gpu03 mlx5_1" in found["TOP002"].message
    whole = re.sub("2xNDR", "4xNDR", TEXT)
    assert {f.code for f in judge_topology(parse_topology(whole, "x")) if f.verdict != "PASS"} == {"TOP001"}


def test_older_link_generation_is_slower_than_fewer_newer_lanes() -> None:
    slow = TEXT.replace("2xNDR", "4xEDR")
    assert [f.measured for f in judge_topology(parse_topology(slow, "x")) if f.code == "TOP002"] == ["4xEDR"]


def test_text_that_is_cut_off_is_refused() -> None:
    cut = TEXT[: TEXT.index('Switch\t129 "S-fc6a1c0300b00011"')]
    with pytest.raises(InputError, match="cut off: 2 switches"):
        parse_topology(cut, "x")
    with pytest.raises(InputError, match="cannot be read"):
        parse_topology(TEXT.replace('[2]\t"H-', "[2]\tH-", 1), "x")


@given(st.integers(0, len(TEXT)), st.integers(0, 40), st.text(max_size=5))
def test_damaged_text_is_read_or_refused(start: int, length: int, new: str) -> None:
    try:
        topology = parse_topology(TEXT[:start] + new + TEXT[start + length :], "x")
    except InputError:
        return
    assert judge_topology(topology)


@pytest.mark.parametrize("text", ["", "\0\0", "Host CA 'mlx5_0'", "SwitchName=a Switches=b,c", "#\n#\n"])
def test_what_is_not_a_topology_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_topology(text, "x")


def test_a_slurm_topology_has_one_leaf_per_node() -> None:
    text = "# c\nSwitchName=l1 Nodes=gpu[01-02,7]\nSwitchName=l2 Nodes=x1,x2 LinkSpeed=4\nSwitchName=top Switches=l[1-2]\n"
    topology = parse_topology(text, "topology.conf")
    assert topology.leaf("gpu02", "mlx5_3") == "l1"
    assert topology.leaf("gpu7") == "l1"
    assert topology.leaf("x1", "mlx5_0") == "l2"
    assert topology.leaf("gpu03") is None
    assert judge_topology(topology)[0].verdict == "UNJUDGED"


def test_all_problems_of_a_slurm_file_are_reported_with_lines() -> None:
    with pytest.raises(InputError) as error:
        parse_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1,m[3-1]\nNodes=k\n", "t.conf")
    assert [(d.file, d.line) for d in error.value.diagnostics] == [("t.conf", 2), ("t.conf", 3)]
    with pytest.raises(InputError, match="below a \\(line 1\\) and below b"):
        parse_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", "t.conf")


def test_host_lists() -> None:
    assert hostlist("a[01-03,7],b") == ["a01", "a02", "a03", "a7", "b"]
    assert hostlist("r[1-2]n[08-10]") == ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]
    assert hostlist("") == []
    for bad in ("a[3-1]", "a[x]", "a[1-999999999]", "a[1", "a b", "a[]"):
        with pytest.raises(ValueError, match=r"range|hosts"):
            hostlist(bad)


def test_a_node_whose_ports_share_a_leaf_needs_no_device_names() -> None:
    topology = Topology({("n", "HCA-1"): "l", ("n", "HCA-2"): "l"})
    assert topology.leaf("n", "mlx5_0") == "l"
