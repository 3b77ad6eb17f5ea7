"""Driver messages in every form in which a kernel log may hold them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.hardware.xid import NVLINK5_CODES, XidMessage, address, catalogue, parse

OFF_THE_BUS = "GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("line", "time"),
    [
        (f"NVRM: Xid (PCI:0000:3b:00): 79, {OFF_THE_BUS}", None),
        (f"[155044.078590] NVRM: Xid (PCI:0000:3b:00): 79, {OFF_THE_BUS}", "155044.078590"),
        (f"[  130.456250] [  T1946] NVRM: Xid (PCI:0000:3b:00): 79, {OFF_THE_BUS}", "130.456250"),
        (
            f"[Mon Sep 14 04:48:45 2026] NVRM: Xid (PCI:0000:3b:00): 79, {OFF_THE_BUS}",
            "Mon Sep 14 04:48:45 2026",
        ),
        (
            f"kern  :warn  : 2025-01-21T04:41:44,283302+00:00 NVRM: Xid (PCI:0000:3b:00): 79, {OFF_THE_BUS}",
            "2025-01-21T04:41:44,283302+00:00",
        ),
        (
            f"Nov  2 18:29:55 host kernel: [  966.503025] NVRM: Xid (0000:3b:00): 79, {OFF_THE_BUS}",
            "Nov  2 18:29:55",
        ),
        (f"4,1227,437812449932,c;NVRM: Xid (PCI:0000:3b:00): 79, {OFF_THE_BUS}", "437812.449932"),
        (
            f"4,9,5000000,-,caller=T7;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=a b, {OFF_THE_BUS}",
            "5.000000",
        ),
        (f"NVRM: Xid (PCI:00000000:3B:00.0): 79, {OFF_THE_BUS}", None),
        (f"NVRM: Xid (3b:00): 79, {OFF_THE_BUS}", None),
        (f"NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, {OFF_THE_BUS}", None),
        ("NVRM: GPU at PCI:0000:3b:00: has fallen off the bus.", None),
        (f"[  9.100] NVRM: GPU 0000:3b:00.0: {OFF_THE_BUS}", "9.100"),
    ],
)
def test_every_prefix_is_parsed_alike(line: str, time: str | None) -> None:
    found = parse(line)
    assert found is not None
    assert (found.kind, found.code, found.pci, found.time) == ("xid", 79, "0000:3b:00", time)
    assert found.message.endswith("fallen off the bus.")


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("43, pid=1045242, name=pt_main_thread, Ch 00000008", (43, 1045242, "pt_main_thread", "Ch 00000008")),
        ("43, Ch 00000020, engmask 00000101", (43, None, None, "Ch 00000020, engmask 00000101")),
        ("38, pid=1659,", (38, 1659, None, "")),
        (
            "63, pid=1896, Row Remapper: New row marked",
            (63, 1896, None, "Row Remapper: New row marked"),
        ),
        (
            "94, pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No",
            (94, None, None, "Contained: SM (0x1). RST: No"),
        ),
        (
            "119, pid=430, name=ray::Worker, Timeout waiting for RPC from GSP!",
            (119, 430, "ray::Worker", "Timeout waiting for RPC from GSP!"),
        ),
        ("62", (62, None, None, "")),
    ],
)
def test_process_and_text(rest: str, expected: tuple[object, ...]) -> None:
    found = parse(f"NVRM: Xid (PCI:0000:2b:00): {rest}")
    assert found is not None
    assert (found.code, found.pid, found.name, found.message) == expected


@pytest.mark.parametrize(
    ("rest", "unit", "severity", "link", "subcode", "benign"),
    [
        (
            "145, pid=9, name=x, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008)",
            "RLW_SRC_TRACK",
            "nonfatal",
            12,
            0,
            False,
        ),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x0)", "NETIR_LINK_EVT", "fatal", 8, 4, False),
        # 38: taken down by software
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x0)", "NETIR_LINK_EVT", "fatal", 0, 38, True),
        ("149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x0)", "NETIR", "fatal", None, 0, False),
        (
            "146, TLW_RX/TLW_RX_PIPE0 Fatal XC0 i0 Link 01",
            "TLW_RX/TLW_RX_PIPE0",
            "fatal",
            1,
            None,
            False,
        ),
        ("150, something new", None, None, None, None, False),
        ("74, NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000)", None, None, 14, 0, False),
    ],
)
def test_nvlink(
    rest: str, unit: str | None, severity: str | None, link: int | None, subcode: int | None, benign: bool
) -> None:
    found = parse(f"NVRM: Xid (PCI:0008:01:00): {rest}")
    assert found is not None
    assert (found.unit, found.severity, found.link, found.subcode) == (unit, severity, link, subcode)
    assert found.benign is benign


@pytest.mark.parametrize(
    ("to", "meaning"),
    [
        ("0x1 (GPU Reset Required)", "reset"),
        ("0x2 (Node Reboot Required)", "reboot"),
        ("0x2 (OS Reboot)", "reboot"),
        ("0x1 (Drain and Reset)", "reset"),
        ("0x1 (PF FLR)", "reset"),
        ("0x3 (Drain P2P)", "drain_p2p"),
        ("0x0 (None)", "none"),
        ("0x4 (a label of the future)", "reset"),
        ("0x9 (Node Reboot Required)", "reboot"),
        ("0x9 (a label of the future)", None),
    ],
)
def test_the_drivers_own_recommendation(to: str, meaning: str | None) -> None:
    line = f"NVRM: Xid (PCI:0000:2a:00): 154, GPU recovery action changed from 0x0 (None) to {to}"
    found = parse(line)
    assert found is not None
    assert found.recovery == meaning


def test_nvswitch() -> None:
    found = parse("[ 1108.858286] nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 timeout")
    assert found == XidMessage(
        "sxid", 24007, "0000:c3:00", "Fatal, Link 28 timeout", "1108.858286", severity="fatal", link=28
    )
    found = parse("nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 61 egress")
    assert found is not None
    assert found.severity == "nonfatal"
    found = parse("nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 12028, Severity 1 Engine instance 60")
    assert found is not None
    assert found.severity is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01",
        "NVRM: GPU at PCI:0000:00:05: GPU-00000000-0000-0000-0000-000000000000",
        "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
        "NVRM: Xid (PCI:zz:66:00): 79, pid=2280636",
        "6,4001,261573217,-;nvidia-nvswitch0: open (major=510)",
        "mlx5_core 0001:43:00.0: Port module event: module 0, Cable plugged",
        "oom_reaper: reaped process 345646 (vector), now anon-rss:0kB",
    ],
)
def test_other_lines_are_not_driver_messages(line: str) -> None:
    assert parse(line) is None


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    parse(text)
    parse(f"NVRM: Xid (PCI:0000:3b:00): {text}")
    found = parse(f"NVRM: Xid (PCI:0000:3b:00): 149, {text}")
    if found is not None:
        assert found.message.isprintable()
        assert len(found.message) <= 500


@given(
    before=st.sampled_from(["", "[ 12.5000] ", "4,1,2,-;", "Feb 01 14:25:31 host kernel: "]),
    code=st.integers(0, 999_999),
    domain=st.integers(0, 0xFFFF),
    bus=st.integers(0, 255),
    pid=st.none() | st.integers(0, 2**22),
    name=st.none() | st.text("abcXYZ019_:./-", min_size=1, max_size=15),
    text=st.text("abc XYZ(),:=0123'<>", max_size=60).filter(lambda t: "pid=" not in t and "name=" not in t),
)
def test_what_was_written_is_read(
    before: str, code: int, domain: int, bus: int, pid: int | None, name: str | None, text: str
) -> None:
    process = "".join(
        [f"pid={pid}, " if pid is not None else "", f"name={name}, " if name is not None else ""]
    )
    found = parse(f"{before}NVRM: Xid (PCI:{domain:04x}:{bus:02x}:00): {code}, {process}{text}")
    assert found is not None
    assert (found.code, found.pid, found.name) == (code, pid, name)
    assert found.pci == f"{domain:04x}:{bus:02x}:00"
    assert found.message == " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:3B:00.0", "0000:3b:00"),
        ("PCI:0000:3b:00", "0000:3b:00"),
        (" 3b:00.0\n", "0000:3b:00"),
        ("0008:01:00.0", "0008:01:00"),
        ("GPU-1234", None),
        ("", None),
        ("[N/A]", None),
    ],
)
def test_addresses(text: str, expected: str | None) -> None:
    assert address(text) == expected


def test_the_catalogue_is_whole() -> None:
    assert list(catalogue()) == list(range(1, 173))
    assert catalogue()[79].bucket == "RESTART_BM"
    assert catalogue()[79].name == "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS"
    assert {catalogue()[code].bucket for code in NVLINK5_CODES} == {"WORKFLOW_NVLINK5_ERR"}
    assert [code for code, xid in catalogue().items() if xid.bucket is None] == list(range(162, 173))
    assert all(xid.source and xid.meaning and xid.cls for xid in catalogue().values())
