"""Load of a node from its kernel: CPUs, memory, pressure, network, clock. Unavailable values are absent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seatrial.base.kernel_files import bytes_of, fields_of, text_of
from seatrial.hardware.clock import kernel_clock
from seatrial.hardware.host_memory import host_memory
from seatrial.record.series import series

Values = dict[str, float]

_IDLE, _IOWAIT = 3, 4  # columns of the line "cpu" of /proc/stat: proc(5)
_GUEST = 8  # from here on the columns are part of earlier ones


class HostLoad:
    """Reads one node; shares of time are those since the previous reading."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._ticks = self._cpu_ticks()

    def read(self) -> Values:
        """Series -> value, now."""
        return {
            **self._cpu(),
            **self._memory(),
            **dict(_pressure(self._root / "proc/pressure")),
            **_network(self._root),
            **_tcp(self._root / "proc/net/snmp"),
            **_clock(),
        }

    def _cpu_ticks(self) -> list[int]:
        line = (text_of(self._root / "proc/stat") or "").partition("\n")[0].split()
        return [int(word) for word in line[1:] if word.isdecimal()] if line[:1] == ["cpu"] else []

    def _cpu(self) -> Values:
        before, self._ticks = self._ticks, self._cpu_ticks()
        spent = [b - a for a, b in zip(before, self._ticks, strict=False)][:_GUEST]
        lines = (text_of(self._root / "proc/stat") or "").splitlines()
        cpus = sum(line.startswith("cpu") for line in lines) - 1
        found: Values = {"node_cpus": cpus} if cpus > 0 else {}
        total = sum(spent)
        if len(spent) > _IOWAIT and total > 0 and min(spent) >= 0:  # iowait may run backwards
            found["node_cpu_busy_ratio"] = 1 - (spent[_IDLE] + spent[_IOWAIT]) / total
            found["node_cpu_iowait_ratio"] = spent[_IOWAIT] / total
        return found

    def _memory(self) -> Values:
        fields = fields_of(self._root / "proc/meminfo")
        total, free = (bytes_of(fields.get(name)) for name in ("MemTotal", "MemAvailable"))
        found: Values = {} if total is None else {"node_memory_total_bytes": total}
        if total is not None and free is not None:
            found["node_memory_used_bytes"] = total - free
        if (available := host_memory(self._root)) is not None:
            found["node_memory_available_bytes"] = available.bytes
        return found


def _pressure(folder: Path) -> Iterator[tuple[str, float]]:
    """Lines such as "some avg10=0.00 avg60=0.00 avg300=0.00 total=1234" (microseconds): Documentation/accounting/psi.rst."""
    for resource in ("cpu", "memory", "io"):
        for line in (text_of(folder / resource) or "").splitlines():
            tasks, _, rest = line.partition(" ")
            total = rest.rpartition("total=")[2]
            if tasks in ("some", "full") and total.isdecimal():
                name = series("node_pressure_seconds_total", resource=resource, tasks=tasks)
                yield name, int(total) / 1e6


def _network(root: Path) -> Values:
    """Sums over hardware interfaces; if there are none, as in a container, over all but the loopback."""
    lines = (text_of(root / "proc/net/dev") or "").splitlines()[2:]
    counted = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    counted = {n: columns for n, columns in counted.items() if n != "lo" and len(columns) >= 16}
    hardware = [n for n in counted if (root / "sys/class/net" / n / "device").exists()]
    used = [counted[n] for n in hardware or counted]
    if not used:
        return {}
    return {
        "node_network_received_bytes_total": sum(int(columns[0]) for columns in used),
        "node_network_sent_bytes_total": sum(int(columns[8]) for columns in used),
    }


def _tcp(path: Path) -> Values:
    lines = [line.split() for line in (text_of(path) or "").splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2:
        return {}
    fields = dict(zip(*lines, strict=False))
    found = {
        "node_tcp_sent_segments_total": fields.get("OutSegs", ""),
        "node_tcp_retransmitted_segments_total": fields.get("RetransSegs", ""),
    }
    return {name: int(text) for name, text in found.items() if text.isdecimal()}


def _clock() -> Values:
    clock = kernel_clock()
    if clock is None:
        return {}
    found: Values = {"node_clock_synchronised": float(clock.synchronised)}
    if clock.synchronised:  # the kernel reports offset 0 for an unsynchronised clock
        found["node_clock_offset_seconds"] = clock.offset_s
        found["node_clock_max_error_seconds"] = clock.max_error_s
    return found
