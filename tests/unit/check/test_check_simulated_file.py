"""Scenarios from files: what they describe is checked, and every mistake in them is told at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.check.blame.simulated_file import read_scenario
from seatrial.check.judging.findings import worst

GOOD = """
[cluster]
nodes = 16
gpu = "H200 SXM"
nodes_per_leaf = 4
seed = 3
[noise]
harmless = 0.0
hidden_log = 0.0
[[fault]]
kind = "nic_slow"
node = 3
rail = 5
share = 0.7
[[fault]]
kind = "leaf_slow"
leaf = [2, 1]
share = 0.5
[[node]]
node = 4
gemm_tflops = [790, 790, 790, 400, 790, 790, 790, 790]
kernel_log = ["[12.5] NVRM: Xid (PCI:0000:0f:00): 31, pid=7, name=python, Ch 1"]
counters = { 2 = { symbol_error = [0, 4000] } }
[[node]]
node = 9
rail_gbit_s = [390, 390, 390, 390, 390, 390, 390, 200]
kernel_log = ["[12.5] NVRM: Xid (PCI:0000:2b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."]
"""


def write(folder: Path, text: str, name: str = "cluster.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_scenario_is_checked_like_a_cluster(tmp_path: Path) -> None:
    report = read_scenario(write(tmp_path, GOOD)).run()
    assert {str(b) for b in report.blames} == {
        "leaf switch leaf02-rail1",
        "node0003 mlx5_5/1",
        "node0004 GPU 3 (0000:63:00)",
        "node0004 mlx5_2/1",
        "node0009 GPU 1 (0000:2b:00)",
        "node0009 mlx5_7/1",
    }
    assert worst(report.findings) == "FAIL"
    for blamed in report.blames:
        assert blamed.finding().action
        assert str(blamed) in blamed.finding().message


def test_json_and_toml_agree(tmp_path: Path) -> None:
    import tomllib

    text = json.dumps(tomllib.loads(GOOD))
    first = read_scenario(write(tmp_path, GOOD)).run()
    assert read_scenario(write(tmp_path, text, "cluster.json")).run() == first


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = """
[cluster]
nodes = 0
gpu = "H1000"
rials = 8
[noise]
outlier = 2
[[fault]]
kind = "nic_slow"
node = 0
gpu = 1
[[fault]]
kind = "gremlin"
[[fault]]
kind = "leaf_slow"
leaf = 3
[[node]]
node = 0
gemm_tflops = [1, 2]
counters = { 9 = {} }
"""
    with pytest.raises(InputError) as error:
        read_scenario(write(tmp_path, text))
    said = "\n".join(d.message for d in error.value.diagnostics)
    for part in (
        "nodes: 0 is not an integer",
        "unknown GPU 'H1000'",
        "unknown key 'rials'",
        "outlier: 2 is not a number in 0..1",
        "(nic_slow): has no 'gpu'",
        "(nic_slow): needs 'rail'",
        "no such kind 'gremlin'",
        "leaf: [block, rail] is needed",
        "gemm_tflops: 8 numbers are required",
        "unknown key '9'",
    ):
        assert part in said, part


@pytest.mark.parametrize(
    "text", ["", "nodes = 3", "[cluster", "[cluster]\nnodes = true", "fault = 3\n[cluster]\nnodes = 2"]
)
def test_what_describes_no_cluster_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError):
        read_scenario(write(tmp_path, text))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_scenario(tmp_path / "absent.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\0")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\0")
    for name in ("b.toml", "b.json"):
        with pytest.raises(InputError):
            read_scenario(tmp_path / name)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["node", "kind", "leaf", "2"]), inner)
    ),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.dictionaries(st.sampled_from(["cluster", "noise", "fault", "node"]), values), st.booleans())
def test_any_json_is_a_scenario_or_refused(tmp_path: Path, table: dict[str, object], cluster: bool) -> None:
    if cluster:
        table["cluster"] = {"nodes": 4}
    path = write(tmp_path, json.dumps(table), "x.json")
    try:
        scenario = read_scenario(path)
    except InputError:
        return
    assert scenario.run().findings
