"""Counters: differences count, totals do not; what is missing is not zero; what stands at its end says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.hardware.counters import (
    LIMITS,
    Port,
    fabric,
    findings,
    first_findings,
    nvlink_findings,
    parse_nvlink_errors,
    read_ports,
    saturated,
    wait_share,
)

# Totals as a healthy port has them after some months.
HEALTHY = {
    "link_downed": 2,
    "link_error_recovery": 0,
    "symbol_error": 3,
    "port_rcv_errors": 14,
    "port_xmit_discards": 0,
    "local_ack_timeout_err": 5,
    "packet_seq_err": 40,
    "out_of_sequence": 7,
    "roce_adp_retrans": 3,
    "port_xmit_wait": 2_000_000_000,
    "port_xmit_data": 230_000_000_000_000,
    "port_rcv_data": 230_000_000_000_000,
}


def port(**changed: int) -> Port:
    return Port("mlx5_4", 1, "MT4129", "ACTIVE", "InfiniBand", 400.0, HEALTHY | changed)


def after(seconds: float = 10.0, **added: int) -> list[tuple[str, str]]:
    """Findings after `added` was counted within `seconds`: signal and message."""
    old = port(**{name: 0 for name in added if name not in HEALTHY})
    counters = {name: value + added.get(name, 0) for name, value in old.counters.items()}
    new = replace(old, counters=counters)
    return [(f.signal, f.message) for f in findings({old.name: old}, {new.name: new}, seconds)]


def test_totals_mean_nothing() -> None:
    assert after() == []


def test_a_loaded_healthy_port_has_nothing_wrong() -> None:
    # 300 Gb/s for 10 s, held back for 1 % of the time, a few stray errors
    assert after(port_xmit_data=93_750_000_000, port_xmit_wait=625_000_000, symbol_error=3) == []


@pytest.mark.parametrize(
    ("counter", "delta", "signal"),
    [
        ("local_ack_timeout_err", 1, "retransmissions"),
        ("packet_seq_err", 500, "retransmissions"),
        ("out_of_sequence", 5000, "retransmissions"),
        ("roce_adp_retrans_to", 1, "retransmissions"),
        ("np_cnp_sent", 100_000, "congestion"),
        ("rp_cnp_handled", 100_000, "congestion"),
        ("np_ecn_marked_roce_packets", 1_000_000, "congestion"),
        ("port_xmit_discards", 100, "congestion"),
        ("symbol_error", 50, "link_errors"),
        ("link_error_recovery", 1, "link_errors"),
        ("link_downed", 1, "link_down"),
    ],
)
def test_each_counter_names_itself_and_its_port(counter: str, delta: int, signal: str) -> None:
    [(found, message)] = after(**{counter: delta})
    assert found == signal
    assert counter in message
    assert f"+{delta}" in message
    assert message.startswith("mlx5_4/1")


def test_every_limit_has_a_reason_and_can_be_met() -> None:
    for limit in LIMITS:
        delta = max(limit.least, int(limit.per_s * 10) + 1)
        assert [signal for signal, _ in after(**{limit.counter: delta})] == [limit.signal]
        assert limit.reason
        below = min(limit.least - 1, int(limit.per_s * 10))
        assert after(**{limit.counter: below}) == []


def test_waiting_is_a_part_of_the_time() -> None:
    # 400 Gb/s are 6.25e9 ticks of 8 bytes a second
    assert wait_share(6_250_000_000, 400.0, 10.0) == pytest.approx(0.1)
    assert wait_share(10**12, 400.0, 1.0) == 1.0
    assert wait_share(None, 400.0, 1.0) is None
    assert wait_share(1, None, 1.0) is None
    [(signal, message)] = after(seconds=1.0, port_xmit_wait=1_250_000_000)
    assert signal == "congestion"
    assert "waited for 20% of the time" in message


def test_several_counters_of_one_fault_are_one_finding() -> None:
    [(signal, message)] = after(np_cnp_sent=100_000, rp_cnp_handled=200_000)
    assert signal == "congestion"
    assert "np_cnp_sent" in message
    assert "rp_cnp_handled" in message


def test_evidence_lists_observed_and_unobservable_counters() -> None:
    old = port()
    new = replace(
        old,
        counters={
            **old.counters,
            "packet_seq_err": 540,
            "port_xmit_data": 230_012_500_000_000,
            "out_of_sequence": 0,  # cleared meanwhile
        },
    )
    [found] = findings({old.name: old}, {new.name: new}, 10.0)
    assert found.where == "mlx5_4/1"
    assert found.evidence["deltas"] == {"packet_seq_err": 500}
    assert found.evidence["sent_gbit_s"] == 40.0
    assert found.evidence["received_gbit_s"] == 0.0
    assert "np_cnp_sent" in found.evidence["unsupported"]
    assert "packet_seq_err" not in found.evidence["unsupported"]


def test_a_link_that_goes_down_and_one_that_was_never_up() -> None:
    up = port()
    down = replace(up, state="DOWN")
    unread = replace(up, state=None)
    name = up.name
    [found] = findings({name: up}, {name: down}, 10.0)
    assert (found.signal, found.evidence["state"]) == ("link_down", "DOWN")
    [gone] = findings({name: up}, {}, 10.0)
    assert (gone.signal, gone.evidence["state"]) == ("link_down", "gone")
    assert findings({name: down}, {name: down}, 10.0) == []
    assert findings({name: down}, {name: up}, 10.0) == []
    assert findings({name: up}, {name: unread}, 10.0) == []


def test_cleared_saturated_and_absent_counters_show_nothing() -> None:
    name = port().name
    for old, new in (
        (port(packet_seq_err=4000), port(packet_seq_err=0)),  # cleared
        (port(link_downed=254), port(link_downed=255)),  # at its end: how far it would have gone is unknown
        (Port("mlx5_4", 1, None, "ACTIVE", None, None), port(local_ack_timeout_err=99)),  # it was not there
        (port(local_ack_timeout_err=99), Port("mlx5_4", 1, None, "ACTIVE", None, None)),
    ):
        assert findings({name: old}, {name: new}, 10.0) == []
    assert findings({name: port()}, {name: port(packet_seq_err=9999)}, 0.0) == []


def test_saturation() -> None:
    assert saturated("link_downed", 255)
    assert saturated("symbol_error", 65535)
    assert saturated("port_xmit_wait", 2**32 - 1)
    assert not saturated("symbol_error", 65536)  # wider here
    assert not saturated("packet_seq_err", 65535)
    found = first_findings({p.name: p for p in (port(link_downed=255), replace(port(), number=2))})
    assert [(f.signal, f.evidence) for f in found] == [
        ("counter_saturated", {"saturated": {"link_downed": ["mlx5_4/1"]}})
    ]


def test_a_roce_port_without_its_files_is_not_observable() -> None:
    roce = replace(port(), link_layer="Ethernet", counters={**HEALTHY, "np_cnp_sent": 0})
    [found] = first_findings({roce.name: roce})
    assert found.signal == "not_observable"
    assert sorted(found.evidence["unsupported"]) == ["np_ecn_marked_roce_packets", "rp_cnp_handled"]


def device(root: Path, name: str, adapter: str, rate: str, state: str = "4: ACTIVE", **counters: int) -> None:
    folder = root / name / "ports/1"
    (folder / "counters").mkdir(parents=True)
    (folder / "hw_counters").mkdir()
    (root / name / "hca_type").write_text(adapter + "\n")
    for file, text in (("rate", rate), ("state", state), ("link_layer", "InfiniBand")):
        (folder / file).write_text(text + "\n")
    for counter, value in counters.items():
        hardware = counter in ("packet_seq_err", "out_of_sequence")
        (folder / ("hw_counters" if hardware else "counters") / counter).write_text(f"{value}\n")


def test_a_tree_as_the_kernel_shows_it(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", "MT4129", "400 Gb/sec (4X NDR)", port_xmit_wait=7, packet_seq_err=1)
    device(tmp_path, "mlx5_1", "MT4129", "10 Gb/sec (4X SDR)", "1: DOWN")
    (tmp_path / "mlx5_1/ports/1/counters/symbol_error").write_text("not available\n")
    ports = read_ports(tmp_path)
    assert sorted(ports) == ["mlx5_0/1", "mlx5_1/1"]
    first = ports["mlx5_0/1"]
    assert (first.adapter, first.state, first.link_layer, first.gbit_s) == (
        "MT4129",
        "ACTIVE",
        "InfiniBand",
        400.0,
    )
    assert first.counters == {"port_xmit_wait": 7, "packet_seq_err": 1}
    assert ports["mlx5_1/1"].state == "DOWN"
    assert ports["mlx5_1/1"].counters == {}
    assert read_ports(tmp_path / "nothing here") == {}


def test_nvlink_bridges_are_not_the_fabric(tmp_path: Path) -> None:
    for number in range(2):
        device(tmp_path, f"mlx5_{number}", "MT4131", "800 Gb/sec (4X XDR)")
        device(tmp_path, f"mlx5_{number + 2}", "MT4129", "100 Gb/sec (1X NDR)")
    assert sorted(read_ports(tmp_path)) == ["mlx5_0/1", "mlx5_1/1"]
    hdr100 = [Port(f"mlx5_{n}", 1, "MT4129", "ACTIVE", "InfiniBand", 100.0) for n in range(2)]
    assert fabric(hdr100) == hdr100
    older = [Port("mlx5_2", 1, "MT4123", "ACTIVE", "InfiniBand", 100.0), port()]
    assert fabric(older) == older


OLD_LINKS = """GPU 0: Some GPU (UUID: GPU-a)
         Link 0: Replay Errors: {replay}
         Link 0: Recovery Errors: 0
         Link 0: CRC Errors: {crc}

         Link 1: Replay Errors: 148
         Link 1: CRC Errors: 65535
GPU 1: Some GPU (UUID: GPU-b)
         Link 0: Replay Errors: 9
"""
NEW_LINKS = """GPU 0: Some newer GPU (UUID: GPU-c)
\t Link 3: Malformed packet Errors: 0
\t Link 3: Effective Errors: {effective}
\t Link 3: Effective BER: 15e-255
\t Link 3: Total link recovery events: 0
\t Link 3: FEC Errors - 0: {fec}
\t Link 3: FEC Errors - 1: {fec}
\t Link 3: Raw Errors Lane 0: {fec}
"""


def test_nvlink_errors_of_the_old_layout() -> None:
    before = parse_nvlink_errors(OLD_LINKS.format(replay=2353, crc=0))
    assert before["GPU-a", 0] == {"replay errors": 2353, "recovery errors": 0, "crc errors": 0}
    assert sorted(before) == [("GPU-a", 0), ("GPU-a", 1), ("GPU-b", 0)]
    assert nvlink_findings(before, before, 60.0) == []
    later = parse_nvlink_errors(OLD_LINKS.format(replay=2953, crc=5))
    [found] = nvlink_findings(before, later, 60.0)
    assert (found.signal, found.where, found.evidence["link"]) == ("nvlink_errors", "GPU-a", 0)
    assert found.evidence["deltas"] == {"replay errors": 600, "crc errors": 5}
    assert "crc" not in found.message


def test_nvlink_errors_of_the_new_layout() -> None:
    before = parse_nvlink_errors(NEW_LINKS.format(effective=0, fec=36_000_000_000))
    busy = parse_nvlink_errors(NEW_LINKS.format(effective=0, fec=99_000_000_000))
    assert nvlink_findings(before, busy, 60.0) == []  # the error correction at work
    broken = parse_nvlink_errors(NEW_LINKS.format(effective=2, fec=99_000_000_000))
    [found] = nvlink_findings(before, broken, 60.0)
    assert "effective errors +2" in found.message
    assert parse_nvlink_errors("all links are inActive\n") == {}
