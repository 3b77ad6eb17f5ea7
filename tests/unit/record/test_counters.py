"""Network counters of a node before and after a generation, on made-up trees of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.record.counters import (
    Reading,
    all_faults,
    node_faults,
    read_node,
    read_readings,
    write_readings,
)
from seatrial.record.folder import RunFolder

SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm OutSegs RetransSegs InErrs
Tcp: 1 {sent} {again} 0
"""
PORT = {"port_xmit_wait": 100, "symbol_error": 5, "port_xmit_data": 1000}
ROCE = {"np_cnp_sent": 7, "local_ack_timeout_err": 1}


def tree(root: Path, *, sent: int = 1000, again: int = 3, rate: str = "400 Gb/sec (4X NDR)") -> Path:
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    files = {port / "counters" / n: str(v) for n, v in PORT.items()}
    files |= {port / "hw_counters" / n: str(v) for n, v in ROCE.items()}
    files |= {port / "state": "4: ACTIVE", port / "rate": rate, port / "link_layer": "InfiniBand"}
    net = root / "sys/class/net"
    files |= {net / "eth0/statistics/tx_errors": "2", net / "eth0/speed": "100000"}
    files |= {net / "eth1/statistics/tx_errors": "0", net / "lo/statistics/tx_errors": "9"}
    files[root / "proc/net/snmp"] = SNMP.format(sent=sent, again=again)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def read(root: Path, at_s: float) -> Reading:
    return replace(read_node(root / "sys", root / "proc"), monotonic_s=at_s)


def signals(begin: Reading, end: Reading) -> list[tuple[str, str | None]]:
    return [(f.signal, f.where) for f in node_faults(begin, end)]


def test_what_is_there_is_read_and_the_rest_is_absent(tmp_path: Path) -> None:
    found = read(tree(tmp_path), 1.0)
    assert found.ports["mlx5_0/1"].counters == PORT | ROCE
    assert found.ports["mlx5_0/1"].gbit_s == 400
    assert found.interfaces == {"eth0": {"tx_errors": 2, "speed": 100_000}, "eth1": {"tx_errors": 0}}
    assert found.tcp == {"OutSegs": 1000, "RetransSegs": 3}
    empty = read_node(tmp_path / "nothing", tmp_path / "nothing")
    assert (empty.ports, empty.interfaces, empty.tcp) == ({}, {}, {})


def test_only_what_grew_is_a_fault(tmp_path: Path) -> None:
    root = tree(tmp_path)
    begin = read(root, 1.0)
    assert signals(begin, read(root, 31.0)) == []
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "counters/symbol_error").write_text("905")
    # 30 s at 400 Gb/s are 1.5e12 bytes; a tick is 8 of them. Held back for a fifth of the time.
    (port / "counters/port_xmit_wait").write_text(str(100 + int(0.2 * 1.5e12 / 8)))
    (port / "hw_counters/np_cnp_sent").write_text("100007")
    (root / "sys/class/net/eth0/statistics/tx_errors").write_text("500")
    end = read(root, 31.0)
    assert signals(begin, end) == [
        ("link_errors", "mlx5_0/1"),
        ("congestion", "mlx5_0/1"),
        ("link_errors", "eth0"),
    ]
    assert "held back for 20%" in node_faults(begin, end)[1].message
    assert node_faults(end, begin) == []  # the host started anew in between


@pytest.mark.parametrize(("again", "found"), [(50, False), (500, True)])
def test_tcp_sends_again(tmp_path: Path, again: int, found: bool) -> None:
    begin = read(tree(tmp_path), 1.0)
    end = read(tree(tmp_path, sent=101_000, again=3 + again), 31.0)
    assert signals(begin, end) == ([("retransmissions", None)] if found else [])


def test_a_link_slower_than_the_same_of_other_nodes(tmp_path: Path) -> None:
    usual = read(tree(tmp_path / "a"), 1.0)
    slow = read(tree(tmp_path / "b", rate="100 Gb/sec (1X NDR)"), 1.0)
    found = all_faults({node: (each, each) for node, each in enumerate([usual, slow, usual, usual])})
    assert {node: [(f.signal, f.where) for f in faults] for node, faults in found.items()} == {
        0: [],
        1: [("slow_link", "mlx5_0/1")],
        2: [],
        3: [],
    }
    # Two nodes do not say which of them is right.
    assert not any(all_faults({0: (usual, usual), 1: (slow, slow)}).values())


def test_the_file_is_read_as_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    begin, end = read(tree(tmp_path), 1.0), read(tree(tmp_path, again=900), 31.0)
    assert read_readings(folder, 4) == ({}, [])
    write_readings(folder, 4, 0, begin, None)
    assert read_readings(folder, 4) == ({}, [])  # it has not ended
    write_readings(folder, 4, 0, begin, end)
    assert read_readings(folder, 4) == ({0: (begin, end)}, [])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"seatrial_counters": 1}', '{"seatrial_counters": 1, "begin": {"ports": 3}, "end": null}',
     '{"seatrial_counters": 1, "begin": {"monotonic_s": 1, "ports": {}, "interfaces": {"a": {"b": "c"}}, "tcp": {}}, "end": null}',
     '{"seatrial_counters": 1, "begin": {"monotonic_s": 1, "ports": {"a": {"x": 1}}, "interfaces": {}, "tcp": {}}, "end": null}'],
)  # fmt: skip
def test_a_damaged_file_is_a_problem(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    path = folder.ranks / "000004" / "node7.counters.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found, problems = read_readings(folder, 4)
    assert found == {}
    assert [p.file for p in problems] == ["ranks/000004/node7.counters.json"]
