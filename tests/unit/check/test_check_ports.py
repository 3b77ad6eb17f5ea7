"""RDMA ports of a node: ibstat and sysfs, which ports count, and which are ill."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import ibstat, sysfs
from seatrial.check.outputs.network import NetworkContext
from seatrial.check.outputs.ports import fabric_ports, inventory, rates
from seatrial.check.outputs.tool import Lines, ParseError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"


def judged(name: str, **known: object) -> list[Finding]:
    text = (FIXTURES / name).read_text()
    assert ibstat.matches(text)
    return ibstat.judge(ibstat.parse(Lines.of(text), name), NetworkContext(**known))  # type: ignore[arg-type]


def told(found: list[Finding]) -> list[tuple[str, str, str | None]]:
    return [(f.code, f.verdict, f.target.port) for f in found]


def test_healthy_ports_are_one_pass() -> None:
    (found,) = judged("ibstat_four_ndr.txt")
    assert (found.code, found.verdict, found.measured) == ("NET001", "PASS", 4)
    assert "400 Gb/s" in found.message


def test_a_fabric_port_that_is_down_fails_and_is_named() -> None:
    (found,) = judged("ibstat_one_down.txt")
    assert told([found]) == [("NET001", "FAIL", "mlx5_2/1")]
    assert "Polling" in found.message
    assert found.evidence == ("ibstat_one_down.txt:42",)


def test_a_storage_port_that_is_down_is_not_a_fault() -> None:
    found = judged("ibstat_storage_down.txt")
    assert worst(found) == "PASS"
    assert any("mlx5_8/1" in f.message and "not a fault" in f.message for f in found)


def test_a_port_that_trained_slower_than_the_others_fails() -> None:
    assert told(judged("ibstat_one_slow.txt")) == [("NET002", "FAIL", "mlx5_1/1")]


def test_a_single_port_at_100_is_not_an_nvlink_bridge() -> None:
    assert told(judged("ibstat_one_at_100.txt")) == [("NET002", "FAIL", "mlx5_3/1")]


def test_nvlink_bridges_are_not_the_fabric() -> None:
    found = judged("ibstat_bridges_only_active.txt")
    assert told(found) == [("NET001", "FAIL", f"mlx5_{i}/1") for i in range(4)]
    (healthy,) = judged("ibstat_xdr_with_bridges.txt")
    assert (healthy.verdict, healthy.measured) == ("PASS", 4)
    assert "800 Gb/s" in healthy.message


def test_links_without_a_subnet_manager_fail() -> None:
    found = judged("ibstat_no_subnet_manager.txt")
    assert worst(found) == "FAIL"
    assert len(found) == 4
    assert "not configured by a subnet manager" in found[0].message


def test_required_rate_from_the_user_and_count_from_siblings() -> None:
    assert worst(judged("ibstat_four_ndr.txt", port_gbit_s=400.0)) == "PASS"
    assert {f.code for f in judged("ibstat_four_ndr.txt", port_gbit_s=800.0)} == {"NET002"}
    (missing,) = judged("ibstat_four_ndr.txt", fabric_ports=8)
    assert (missing.code, missing.verdict, missing.measured) == ("NET003", "FAIL", 4)


def with_second_port(block: str) -> str:
    """A CA of ibstat with a second port that has no cable."""
    port = block[block.index("\tPort 1:") :]
    for old, new in (("Port 1:", "Port 2:"), ("Active", "Down"), ("LinkUp", "Polling"), ("400", "10")):
        port = port.replace(old, new)
    return block.replace("Number of ports: 1", "Number of ports: 2") + port


def test_unused_second_ports_are_reported_but_do_not_fail() -> None:
    text = (FIXTURES / "ibstat_four_ndr.txt").read_text().partition("CA 'mlx5_8'")[0]
    cas = ["CA '" + part for part in text.split("CA '")[1:]]
    everywhere = "".join(map(with_second_port, cas))
    found = ibstat.judge(ibstat.parse(Lines.of(everywhere), "f"), NetworkContext())
    assert told(found) == [("NET001", "WARN", f"mlx5_{i}/2") for i in range(4)]


@pytest.mark.parametrize("name", ["ibstat_four_ndr.txt", "ibstat_one_slow.txt"])
def test_every_line_of_ibstat_matters(name: str) -> None:
    lines = (FIXTURES / name).read_text().splitlines(keepends=True)
    for i in range(len(lines)):
        text = "".join(lines[:i] + lines[i + 1 :])
        found = ibstat.TOOLS[0].read(text, "f", NetworkContext())
        assert worst(found) != "PASS", lines[i]


def test_what_other_nodes_are_compared_by() -> None:
    facts = ibstat.parse(Lines.of((FIXTURES / "ibstat_four_ndr.txt").read_text()), "f")
    assert inventory(facts) == {
        "fabric ports": 4,
        "NIC firmware": "28.39.3560",
        "fabric port rate, Gb/s": 400.0,
    }
    assert rates(facts)["mlx5_0"] == 400.0
    assert rates(facts)["mlx5_8"] == 100.0
    assert [p.name for p in fabric_ports(facts.ports)] == [f"mlx5_{i}/1" for i in range(4)]


def test_no_ca_is_an_error() -> None:
    with pytest.raises(ParseError):
        ibstat.parse(Lines.of("nothing\n"), "f")


def write_tree(folder: Path, text: str) -> None:
    for line in text.splitlines():
        path, _, value = line.partition(":")
        file = folder / path.removeprefix("/sys/class/infiniband/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n")


def test_sysfs_as_a_tree_and_as_text_agree(tmp_path: Path) -> None:
    text = (FIXTURES / "sysfs_grep.txt").read_text()
    write_tree(tmp_path, text)
    assert sysfs.is_tree(tmp_path)
    assert not sysfs.is_tree(tmp_path / "mlx5_0")
    tree, grep = sysfs.read_tree(tmp_path, "t"), sysfs.parse(Lines.of(text), "t")
    assert tree == grep
    found = sysfs.judge(tree, NetworkContext())
    assert {(f.code, f.verdict) for f in found} == {("NET001", "PASS"), ("NET011", "UNJUDGED")}
    assert "link_downed (mlx5_1/1)" in next(f.message for f in found if f.code == "NET011")


def test_unsaturated_lifetime_counters_are_not_a_fault() -> None:
    facts = sysfs.parse(Lines.of((FIXTURES / "sysfs_grep_clean.txt").read_text()), "t")
    assert worst(sysfs.judge(facts, NetworkContext())) == "PASS"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("mlx5_2/ports/1/state:4: ACTIVE", "mlx5_2/ports/1/state:1: DOWN", "FAIL"),
        ("mlx5_2/ports/1/rate:400 Gb/sec (4X NDR)", "mlx5_2/ports/1/rate:100 Gb/sec (1X NDR)", "FAIL"),
        ("mlx5_2/ports/1/rate:400 Gb/sec (4X NDR)", "mlx5_2/ports/1/rate:", "UNJUDGED"),
        ("mlx5_2/ports/1/rate:400 Gb/sec (4X NDR)", "mlx5_2/ports/1/rate:470 Gb/sec (4X NDR)", "UNJUDGED"),
        ("mlx5_2/ports/1/state:4: ACTIVE", "mlx5_2/ports/1/state:cannot read", "FAIL"),
    ],
)
def test_a_faulty_or_incomplete_tree(tmp_path: Path, old: str, new: str, verdict: str) -> None:
    text = (FIXTURES / "sysfs_grep_clean.txt").read_text()
    assert old in text
    write_tree(tmp_path, text.replace(old, new))
    assert worst(sysfs.judge(sysfs.read_tree(tmp_path, "t"), NetworkContext())) == verdict
