"""Series of the RDMA ports, from two readings of their counters. A counter that is saturated is absent."""

from __future__ import annotations

from collections.abc import Iterable

from seatrial.hardware.counters import LIMITS, Port, Ports, changes, saturated
from seatrial.record.series import MOST_PORTS, series

_WORD_BYTES = 4  # of port_xmit_data and port_rcv_data: InfiniBand Architecture Specification vol. 1


def _with_signal(signal: str) -> tuple[str, ...]:
    return tuple(limit.counter for limit in LIMITS if limit.signal == signal)


# Series -> the counters that it sums up.
_SUMS = {
    "port_retransmissions_total": _with_signal("retransmissions"),
    "port_errors_total": _with_signal("link_errors"),
    "port_link_downed_total": ("link_downed",),
    "port_discards_total": ("port_xmit_discards",),
    "port_ecn_marked_packets_total": ("np_ecn_marked_roce_packets",),
}
_CNP = {"sent": "np_cnp_sent", "received": "rp_cnp_handled"}
_BYTES = {"port_sent_bytes_total": "port_xmit_data", "port_received_bytes_total": "port_rcv_data"}


def port_values(before: Ports, after: Ports, seconds: float) -> dict[str, float]:
    """Series -> value, of the ports in `after`; `seconds` since `before`."""
    found: dict[str, float] = {}
    changed = changes(before, after, seconds)
    for name, port in list(after.items())[:MOST_PORTS]:
        known: dict[str, float | None] = {
            "port_active": None if port.state is None else float(port.state == "ACTIVE"),
            "port_speed_bytes_per_second": None if port.gbit_s is None else port.gbit_s * 1e9 / 8,
            "port_transmit_wait_ratio": changed.get(name, {}).get("xmit_wait_share"),
        }
        known |= {total: _sum(port, counters) for total, counters in _SUMS.items()}
        for total, counter in _BYTES.items():
            words = _sum(port, (counter,))
            known[total] = None if words is None else words * _WORD_BYTES
        found |= {series(each, port=name): value for each, value in known.items() if value is not None}
        for direction, counter in _CNP.items():
            if (packets := _sum(port, (counter,))) is not None:
                found[series("port_cnp_total", port=name, direction=direction)] = packets
    return found


def _sum(port: Port, counters: Iterable[str]) -> float | None:
    values = [port.counters[c] for c in counters if c in port.counters and not saturated(c, port.counters[c])]
    return float(sum(values)) if values else None
