"""Error counters of network ports and NVLinks: faults found from two readings.

Lifetime totals are meaningless: a healthy port has errors from the day its cable was plugged in, and the old counters
saturate at 255 or 65535. So everything here is a difference over an interval. A missing counter is not zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.base.kernel_files import text_of

# A tick of port_xmit_wait is the time of 8 bytes on the link, whatever its width: docs.nvidia.com, ibdiagnet user
# manual, Congestion Assessment on InfiniBand Links (Quantum and later); for the adapters github.com/NVIDIA/
# ib-traffic-monitor, issue 3.
_WAIT_BYTES = 8
_DATA_BYTES = 4  # port_xmit_data and port_rcv_data count words of four bytes (same specification)

# Share of time that a port may have had data to send and no credit to send it. A link that waits for 8 % of the
# time cannot exceed 92 % of its rate, below which a link counts as suspect.
WAIT_SHARE = 0.08


@dataclass(frozen=True)
class Limit:
    """How much of one counter is too much: at least `least` in an interval, and `per_s` a second.

    `bits` is the width at which the counter saturates, None for one that does not in practice.
    """

    counter: str
    signal: str
    least: int
    per_s: float
    reason: str
    bits: int | None = None


_PMA = "InfiniBand Architecture Specification vol. 1, PortCounters"
LIMITS = (
    Limit("link_downed", "link_down", 1, 0.0, "each is a link that was lost", 8),
    Limit("link_error_recovery", "link_errors", 1, 0.0, "each is a retraining that stops the link", 8),
    # 1e-12 errors a bit, which the specification allows, were 120 an hour at the original link rates.
    Limit("symbol_error", "link_errors", 10, 120 / 3600, "more than a bit error rate of 1e-12", 16),
    Limit(
        "port_rcv_errors",
        "link_errors",
        10,
        1.0,
        "damaged packets; a few come with every link that starts",
        16,
    ),
    Limit("port_rcv_remote_physical_errors", "link_errors", 10, 1.0, "damaged before the switch", 16),
    Limit("local_link_integrity_errors", "link_errors", 1, 0.0, "each is a burst of errors", 4),
    Limit("excessive_buffer_overrun_errors", "link_errors", 1, 0.0, "flow control has failed", 4),
    Limit("port_xmit_discards", "congestion", 10, 1.0, "packets discarded instead of sent", 16),
    Limit(
        "local_ack_timeout_err",
        "retransmissions",
        1,
        0.0,
        "each stalls a queue pair for a second or more",
        None,
    ),
    Limit("packet_seq_err", "retransmissions", 10, 1.0, "the peer asked for packets again", None),
    Limit("implied_nak_seq_err", "retransmissions", 10, 1.0, "responses were lost", None),
    # Adaptive routing reorders packets, and some firmware counts that here.
    Limit("out_of_sequence", "retransmissions", 100, 100.0, "packets were lost on the way here", None),
    Limit("roce_adp_retrans", "retransmissions", 10, 1.0, "packets sent again", None),
    Limit("roce_adp_retrans_to", "retransmissions", 1, 0.0, "each is a time-out", None),
    # Some CNPs are normal in congestion control; at this rate flows are throttled all the time. Chosen here.
    Limit("np_cnp_sent", "congestion", 1000, 1000.0, "this port asks senders to slow down", None),
    Limit("rp_cnp_handled", "congestion", 1000, 1000.0, "this port is asked to slow down", None),
    Limit(
        "np_ecn_marked_roce_packets",
        "congestion",
        1000,
        10_000.0,
        "a queue on the way is past its mark",
        None,
    ),
)
LIMIT_OF = {limit.counter: limit for limit in LIMITS}
# Signals that name a queue or a loss on the way, not a damaged link.
CONGESTION_SIGNALS = ("congestion", "retransmissions")
_TRAFFIC = ("port_xmit_wait", "port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets")
_WIDTHS = {limit.counter: limit.bits for limit in LIMITS if limit.bits} | {"port_xmit_wait": 32}
_FOLDERS = ("counters", "hw_counters")
# Counters that only a RoCE port can have.
_ROCE = ("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets")

# By the names of `nvidia-smi nvlink -e`, in lower case.
NVLINK_LIMITS = (
    Limit("replay errors", "nvlink_errors", 10, 1.0, "corrected by sending again; many cost speed", 16),
    Limit("recovery errors", "nvlink_errors", 1, 0.0, "each is a retraining that stops the link", 16),
    Limit("crc errors", "nvlink_errors", 10, 1.0, "corrected by sending again; many cost speed", 16),
    Limit("malformed packet errors", "nvlink_errors", 1, 0.0, "missed by the error correction", None),
    Limit("buffer overrun errors", "nvlink_errors", 1, 0.0, "flow control has failed", None),
    Limit("rx errors", "nvlink_errors", 1, 0.0, "missed by the error correction", None),
    Limit("local link integrity errors", "nvlink_errors", 1, 0.0, "each is a burst of errors", None),
    Limit("link recovery failed events", "nvlink_errors", 1, 0.0, "the link was lost", None),
    Limit(
        "total link recovery events",
        "nvlink_errors",
        1,
        0.0,
        "each is a retraining that stops the link",
        None,
    ),
    Limit("effective errors", "nvlink_errors", 1, 0.0, "left over by the error correction", None),
)


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device at one moment. Values missing from its files are None or absent."""

    device: str
    number: int
    adapter: str | None
    state: str | None  # "ACTIVE", "DOWN", "INIT", ...
    link_layer: str | None
    gbit_s: float | None
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"


@dataclass(frozen=True)
class PortFault:
    """A fault of a port or a link. `where` is "mlx5_0/1" or a GPU's UUID; None if several ports are affected."""

    signal: str
    where: str | None
    message: str
    evidence: dict[str, Any]


Ports = dict[str, Port]


def read_ports(root: Path) -> Ports:
    """Every fabric port below `root` (/sys/class/infiniband). An unreadable file counts as absent."""
    ports = []
    for folder in sorted(root.glob("*/ports/*")):
        if not folder.name.isdigit():
            continue
        adapter = text_of(folder.parents[1] / "hca_type")
        state, rate = text_of(folder / "state"), text_of(folder / "rate")
        speed = re.match(r"[0-9.]+", rate or "")
        counters = {}
        for counter in (*LIMIT_OF, *_TRAFFIC):
            value = next((v for f in _FOLDERS if (v := text_of(folder / f / counter)) is not None), None)
            if value is not None and value.isdecimal():
                counters[counter] = int(value)
        ports.append(
            Port(
                folder.parents[1].name,
                int(folder.name),
                adapter,
                None if state is None else state.rpartition(":")[2].strip(),
                text_of(folder / "link_layer"),
                float(speed[0]) if speed else None,
                counters,
            )
        )
    return {p.name: p for p in fabric(ports)}


def fabric(ports: Iterable[Port]) -> list[Port]:
    """`ports` without NVLink bridges: B200 and B300 boards show four ConnectX-7 at 100 Gb/s that lead to no network.

    If a host has no other port, they are its network.
    """
    ports = list(ports)
    bridges = [
        p for p in ports if p.adapter == "MT4129" and p.gbit_s == 100.0 and p.link_layer == "InfiniBand"
    ]
    return ports if len(bridges) == len(ports) else [p for p in ports if p not in bridges]


def first_findings(ports: Ports) -> list[PortFault]:
    """Faults visible in one reading: saturated counters, and counters that RoCE ports lack."""
    found = []
    stuck: dict[str, list[str]] = {}
    lacking: dict[str, list[str]] = {}
    for port in ports.values():
        for counter in sorted(c for c, value in port.counters.items() if saturated(c, value)):
            stuck.setdefault(counter, []).append(port.name)
        if port.link_layer == "Ethernet":
            for counter in (c for c in _ROCE if c not in port.counters):
                lacking.setdefault(counter, []).append(port.name)
    if stuck:
        text = f"saturated at their maximum: {_listed(stuck)}"
        found.append(PortFault("counter_saturated", None, text, {"saturated": stuck}))
    if lacking:
        text = f"ECN and CNP are not observable everywhere, files are missing: {_listed(lacking)}"
        found.append(PortFault("not_observable", None, text, {"unsupported": lacking}))
    return found


def _listed(counters: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{counter} ({', '.join(ports)})" for counter, ports in counters.items())


def saturated(counter: str, value: int) -> bool:
    """Whether `value` is the maximum of a counter of this name. A counter that is wider on this device goes past it."""
    bits = _WIDTHS.get(counter)
    return bits is not None and value == (1 << bits) - 1


def findings(before: Ports, after: Ports, seconds: float) -> list[PortFault]:
    """Faults of each port in the `seconds` between two readings; one finding per signal."""
    found = []
    for name, old in before.items():
        new = after.get(name)
        if new is None or (old.state == "ACTIVE" and new.state not in ("ACTIVE", None)):
            now = "gone" if new is None else new.state
            text = f"{name}: the link was ACTIVE and is {now}" if new else f"{name}: the device is gone"
            found.append(PortFault("link_down", name, text, {"state": now, "adapter": old.adapter}))
        if new is not None and seconds > 0:
            found += _of_port(old, new, seconds)
    return found


def changes(before: Ports, after: Ports, seconds: float) -> dict[str, dict[str, Any]]:
    """What happened at each port that both readings have, in the `seconds` between them.

    "deltas" has the counters that grew; one that is neither "unsupported" nor "saturated" did not. "per_gbyte": the same, and
    port_xmit_wait, for each 10^9 bytes sent; None if how many is not known, or none were.
    """
    found = {}
    for name in before.keys() & after.keys() if seconds > 0 else ():
        port = after[name]
        deltas = _deltas(before[name], port)
        wait = deltas.get("port_xmit_wait")
        sent = deltas.get("port_xmit_data", 0) * _DATA_BYTES / 1e9
        counts = {c: d for c, d in deltas.items() if c in LIMIT_OF or c == "port_xmit_wait"}
        found[name] = _evidence(port, deltas, wait_share(wait, port.gbit_s, seconds), seconds) | {
            "per_gbyte": {c: d / sent for c, d in counts.items()} if sent else None
        }
    return found


def _deltas(old: Port, new: Port) -> dict[str, int]:
    return {c: d for c in new.counters if (d := _delta(c, old.counters, new.counters)) is not None}


def _of_port(old: Port, new: Port, seconds: float) -> list[PortFault]:
    deltas = _deltas(old, new)
    values: dict[str, list[str]] = {}
    for limit in LIMITS:
        delta = deltas.get(limit.counter)
        if delta is not None and _exceeds(limit, delta, seconds):
            values.setdefault(limit.signal, []).append(
                f"{limit.counter} +{delta} in {seconds:.0f} s ({limit.reason})"
            )
    wait = wait_share(deltas.get("port_xmit_wait"), new.gbit_s, seconds)
    if wait is not None and wait >= WAIT_SHARE:
        values.setdefault("congestion", []).append(
            f"port_xmit_wait: waited for {wait:.0%} of the time (suspect from {WAIT_SHARE:.0%})"
        )
    evidence = _evidence(new, deltas, wait, seconds)
    return [
        PortFault(signal, new.name, f"{new.name}: {'; '.join(t)}", evidence) for signal, t in values.items()
    ]


def _evidence(port: Port, deltas: dict[str, int], wait: float | None, seconds: float) -> dict[str, Any]:
    def gbit_s(counter: str) -> float | None:
        return round(deltas[counter] * _DATA_BYTES * 8 / seconds / 1e9, 3) if counter in deltas else None

    return {
        "adapter": port.adapter,
        "link_layer": port.link_layer,
        "rate_gbit_s": port.gbit_s,
        "interval_s": round(seconds, 3),
        "sent_gbit_s": gbit_s("port_xmit_data"),
        "received_gbit_s": gbit_s("port_rcv_data"),
        "xmit_wait_share": None if wait is None else round(wait, 4),
        "deltas": {c: d for c, d in deltas.items() if d and c in LIMIT_OF},
        "unsupported": [c for c in (*LIMIT_OF, "port_xmit_wait") if c not in port.counters],
        "saturated": [c for c, value in port.counters.items() if saturated(c, value)],
    }


def wait_share(ticks: int | None, gbit_s: float | None, seconds: float) -> float | None:
    """Share of the time in which a port had data and could not send, 0..1, from a port_xmit_wait difference."""
    if ticks is None or not gbit_s or seconds <= 0:
        return None
    return min(1.0, ticks * _WAIT_BYTES * 8 / (gbit_s * 1e9 * seconds))


def _exceeds(limit: Limit, delta: int, seconds: float) -> bool:
    return delta >= limit.least and delta / seconds >= limit.per_s


def _delta(counter: str, before: Mapping[str, int], after: Mapping[str, int]) -> int | None:
    """Increase of a counter; None if unknown because it is new, was cleared, or is saturated."""
    if counter not in before or counter not in after or saturated(counter, after[counter]):
        return None
    delta = after[counter] - before[counter]
    return delta if delta >= 0 else None


# -- NVLink

Links = dict[tuple[str, int], dict[str, int]]  # (GPU's UUID, link) -> counter -> value

_GPU_LINE = re.compile(r"^GPU [0-9]+: .*\(UUID: (?P<uuid>[^)\s]+)\)", re.ASCII)
_LINK_LINE = re.compile(r"^\s*Link (?P<link>[0-9]+): (?P<counter>[^:]+): (?P<value>[0-9]+)\s*$", re.ASCII)


def parse_nvlink_errors(text: str) -> Links:
    """Parse the error counters of `nvidia-smi nvlink -e`, old or new layout. Error rates ("15e-255") are left out."""
    links: Links = {}
    gpu = None
    for line in text.splitlines():
        if found := _GPU_LINE.match(line):
            gpu = found["uuid"]
        elif gpu is not None and (found := _LINK_LINE.match(line)):
            counter = found["counter"].strip().lower()
            links.setdefault((gpu, int(found["link"])), {})[counter] = int(found["value"])
    return links


def nvlink_findings(before: Links, after: Links, seconds: float) -> list[PortFault]:
    """Faults of each NVLink in the `seconds` between two readings."""
    found = []
    for (gpu, link), new in after.items():
        old = before.get((gpu, link))
        if old is None or seconds <= 0:
            continue
        grown, deltas = [], {}
        for limit in NVLINK_LIMITS:
            name, top = limit.counter, None if limit.bits is None else (1 << limit.bits) - 1
            if name not in old or name not in new or new[name] == top:
                continue
            delta = new[name] - old[name]
            if delta > 0:
                deltas[name] = delta
            if _exceeds(limit, delta, seconds):
                grown.append(f"{name} +{delta} in {seconds:.0f} s ({limit.reason})")
        if grown:
            evidence = {"gpu": gpu, "link": link, "interval_s": round(seconds, 3), "deltas": deltas}
            text = f"NVLink {link} of {gpu}: {'; '.join(grown)}"
            found.append(PortFault("nvlink_errors", gpu, text, evidence))
    return found
