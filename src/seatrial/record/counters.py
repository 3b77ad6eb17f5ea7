"""ranks/GENERATION/nodeN.counters.json: the network counters of a node, at the begin and at the end of a generation.

The limits and their sources are in `hardware.counters`. Here are those of plain network interfaces and TCP, what is seen only
by comparing nodes, and the file. Reading a port queries its firmware, which may not answer: call `read_node` where
that does not matter.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seatrial.base import atomic
from seatrial.base.files import read_json
from seatrial.hardware.counters import Port, PortFault, Ports, findings, read_ports
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem

_VERSION = 1
_NAME = re.compile(r"node([0-9]{1,9})\.counters\.json")
_STATISTICS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_crc_errors", "tx_dropped")
_ERRORS = {
    "rx_errors": "link_errors",
    "tx_errors": "link_errors",
    "rx_crc_errors": "link_errors",
    "tx_dropped": "congestion",
}
_LEAST, _PER_S = 10, 1.0  # as for the ports' own
# Of the segments sent. With one in a thousand lost, and a round trip of 0.1 ms, a connection cannot exceed 1.22 x 1448 bytes
# / (0.1 ms x sqrt(0.001)), 4.5 Gb/s (Mathis et al., The macroscopic behavior of the TCP congestion avoidance algorithm,
# 1997).
_SENT_AGAIN = 1e-3
_NODES = 3  # at least so many must agree on the speed of a port of one name, for another speed to be a fault


@dataclass(frozen=True)
class Reading:
    """The counters of one node at one moment. What could not be read is absent."""

    monotonic_s: float  # clock of this host since it started
    ports: Ports
    interfaces: Mapping[str, Mapping[str, int]]  # name -> statistic -> value; "speed" in Mb/s
    tcp: Mapping[str, int]  # OutSegs, RetransSegs


def read_node(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> Reading:
    """The counters of this node, of the network namespace of this process."""
    interfaces = {}
    for folder in sorted((sysfs / "class/net").glob("*")):
        if folder.name == "lo":
            continue
        values = {name: _number(folder / "statistics" / name) for name in _STATISTICS}
        values["speed"] = _number(folder / "speed")
        interfaces[folder.name] = {name: value for name, value in values.items() if value is not None}
    ports = read_ports(sysfs / "class/infiniband")
    return Reading(time.monotonic(), ports, interfaces, _tcp(proc / "net/snmp"))


def node_faults(begin: Reading, end: Reading) -> list[PortFault]:
    """What the counters of a node say of the time between two readings; nothing if it started anew in between."""
    seconds = end.monotonic_s - begin.monotonic_s
    if seconds <= 0:
        return []
    found = findings(begin.ports, end.ports, seconds)
    for name, now in end.interfaces.items():
        then = begin.interfaces.get(name, {})
        for counter, signal in _ERRORS.items():
            grown = now.get(counter, 0) - then.get(counter, now.get(counter, 0))
            if grown >= _LEAST and grown / seconds >= _PER_S:
                text = f"{name}: {counter} +{grown} in {seconds:.0f} s"
                found.append(PortFault(signal, name, text, {counter: grown, "interval_s": round(seconds, 3)}))
    sent, again = (_grown(begin.tcp, end.tcp, name) for name in ("OutSegs", "RetransSegs"))
    if sent and again and again >= _LEAST and again / sent >= _SENT_AGAIN:
        text = f"TCP sent {again / sent:.2%} of its segments again ({again} in {seconds:.0f} s)"
        found.append(PortFault("retransmissions", None, text, {"sent": sent, "again": again}))
    return found


def all_faults(readings: Mapping[int, tuple[Reading, Reading]]) -> dict[int, list[PortFault]]:
    """Node -> its faults, from the readings of all nodes at the begin and at the end: also links slower than the others'."""
    found = {node: node_faults(begin, end) for node, (begin, end) in readings.items()}
    speeds: dict[str, dict[int, float]] = {}
    for node, (_, end) in readings.items():
        for port in end.ports.values():
            if port.gbit_s and port.state in ("ACTIVE", None):
                speeds.setdefault(port.name, {})[node] = port.gbit_s
        for name, values in end.interfaces.items():
            if values.get("speed", 0) > 0:  # -1: not connected
                speeds.setdefault(name, {})[node] = values["speed"] / 1000
    for name, of_nodes in speeds.items():
        usual, count = Counter(of_nodes.values()).most_common(1)[0]
        for node, speed in of_nodes.items():
            if count >= _NODES and speed < usual:
                text = f"{name}: its link runs at {speed:g} Gb/s, that of {count} nodes at {usual:g}"
                found[node].append(PortFault("slow_link", name, text, {"gbit_s": speed, "usual": usual}))
    return found


def write_readings(
    folder: RunFolder, generation: int, node: int, begin: Reading, end: Reading | None
) -> None:
    """Write, or replace, the file of `node`; `end` is None at the begin. Raises OSError."""
    path = _path(folder, generation, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {
        "seatrial_counters": _VERSION,
        "begin": asdict(begin),
        "end": None if end is None else asdict(end),
    }
    atomic.write_json(path, value)


def read_readings(
    folder: RunFolder, generation: int
) -> tuple[dict[int, tuple[Reading, Reading]], list[Problem]]:
    """Node -> its readings, without nodes that have no end; and the files that cannot be used."""
    found: dict[int, tuple[Reading, Reading]] = {}
    problems: list[Problem] = []
    try:
        names = sorted(os.listdir(folder.ranks / f"{generation:06d}"))
    except OSError:  # no counters were read
        return found, problems
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        path = _path(folder, generation, int(match[1]))
        try:
            begin, end = _both(read_json(path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problems.append(Problem(str(path.relative_to(folder.path)), 1, f"not used: {reason}"))
            continue
        if end is not None:
            found[int(match[1])] = (begin, end)
    return found, problems


def _path(folder: RunFolder, generation: int, node: int) -> Path:
    return folder.ranks / f"{generation:06d}" / f"node{node}.counters.json"


def _both(value: Any) -> tuple[Reading, Reading | None]:
    """Raises ValueError."""
    if not isinstance(value, dict) or value.get("seatrial_counters") != _VERSION:
        raise ValueError("it is not a file of counters of this version")
    try:
        end = value["end"]
        return _reading(value["begin"]), None if end is None else _reading(end)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its readings are damaged: {error!r}") from None


def _reading(value: Any) -> Reading:
    ports = {name: Port(**port) for name, port in value["ports"].items()}
    every = [port.counters for port in ports.values()] + list(value["interfaces"].values()) + [value["tcp"]]
    if not all(type(n) is int for counters in every for n in counters.values()):
        raise TypeError("a counter is not a whole number")
    return Reading(float(value["monotonic_s"]), ports, value["interfaces"], value["tcp"])


def _grown(begin: Mapping[str, int], end: Mapping[str, int], name: str) -> int | None:
    return end[name] - begin[name] if name in begin and name in end and end[name] >= begin[name] else None


def _tcp(path: Path) -> dict[str, int]:
    """The two "Tcp:" lines of /proc/net/snmp: names, then values."""
    try:
        rows = [line.split()[1:] for line in path.read_text().splitlines() if line.startswith("Tcp:")]
    except (OSError, UnicodeDecodeError):
        return {}
    if len(rows) != 2:
        return {}
    values = dict(zip(*rows, strict=False))
    return {
        name: int(values[name]) for name in ("OutSegs", "RetransSegs") if values.get(name, "").isdecimal()
    }


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (
        OSError,
        ValueError,
    ):  # absent; or without a value, such as the speed of an interface that is down
        return None
