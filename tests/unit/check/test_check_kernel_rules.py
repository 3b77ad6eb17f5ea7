"""Kernel logs: every form that they are kept in, links that come and go, and what drivers tell beside their codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import kernel_text
from seatrial.check.outputs.kernel_rules import OTHERS, rule_of

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
FLAPS = (FIXTURES / "kernel_flaps.log").read_text()
(KERNEL,) = kernel_text.TOOLS


def bad(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.code, f.verdict) for f in found if f.verdict != "PASS"]


SAMPLES = (
    ("pcieport 0000:15:01.0: DPC: containment event, status:0x1f01 source:0x0000", "SYS003", "FAIL"),
    ("amdgpu 0000:05:00.0: amdgpu: 3 uncorrectable hardware errors detected in umc block", "SYS003", "FAIL"),
    (
        "nvidia 0000:9d:00.0: Unable to change power state from D3cold to D0, device inaccessible (config space inaccessible)",
        "SYS003",
        "FAIL",
    ),
    (
        "amdgpu 0000:05:00.0: amdgpu: ring sdma0 timeout, signaled seq=4312, emitted seq=4314",
        "SYS006",
        "WARN",
    ),
    ("nvme nvme2: Removing after probe failure status: -19", "SYS007", "FAIL"),
    ("nvme nvme2: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff", "SYS007", "WARN"),
    ("critical medium error, dev nvme0n1, sector 3907 op 0x0:(READ)", "SYS007", "WARN"),
    ("NETDEV WATCHDOG: ens1np0 (mlx5_core): transmit queue 3 timed out 5004 ms", "NET013", "WARN"),
    (
        "mlx5_core 0000:18:00.0: temp_warn:180:(pid 0): High temperature on sensors with bit set 0 1",
        "NET013",
        "WARN",
    ),
    ("python3 invoked oom-killer: gfp_mask=0x140dca", "SYS002", "WARN"),
    ("EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#0_DIMM#0", "SYS003", "FAIL"),
    ("Memory failure: 0x3f2a1b: recovery action for dirty LRU page: Recovered", "SYS003", "FAIL"),
    (
        "nvme 0000:61:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
        "SYS003",
        "FAIL",
    ),
    ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "SYS003", "WARN"),
    (
        "pcieport 0000:00:01.0: AER: Multiple Corrected error message received from 0000:01:00.0",
        "SYS003",
        "WARN",
    ),
    ("nvme 0000:2c:00.0: AER: aer_status: 0x00002001, aer_mask: 0x00000000", "SYS003", "WARN"),
    ("pcieport 0000:15:01.0: pciehp: Slot(12): Card not present", "SYS003", "WARN"),
    ("CPU24: Core temperature above threshold, cpu clock throttled (total events = 1)", "SYS003", "WARN"),
    ("NVRM: None of the NVIDIA devices were initialized.", "SYS004", "FAIL"),
    ("NVRM: API mismatch: the client has the version 535.183.01, but", "SYS004", "FAIL"),
    (
        "NVRM: GPU6 _kgspIsHeartbeatTimedOut: Heartbeat timed out, currentTimeMs 812751949",
        "SYS004",
        "FAIL",
    ),
    (
        "NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:9b:00 (printing 1 of every 30).",
        "SYS004",
        "FAIL",
    ),
    ("NVRM: GPU at 0000:01:00.0 has overheated and its clocks have been reduced", "GPU007", "WARN"),
    (
        "NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
        "NVL001",
        "WARN",
    ),
    (
        "nv-fabricmanager[41]: request to query NVSwitch device information from NVSwitch driver failed with error:",
        "NVL007",
        "WARN",
    ),
    ("Kernel panic - not syncing: Fatal exception", "SYS005", "WARN"),
    ("watchdog: BUG: soft lockup - CPU#24 stuck for 23s! [kworker/24:1:1234]", "SYS006", "WARN"),
    ("INFO: task python3:1234 blocked for more than 120 seconds.", "SYS006", "WARN"),
    ("rcu: INFO: rcu_sched self-detected stall on CPU", "SYS006", "WARN"),
    ("EXT4-fs (nvme0n1p2): Remounting filesystem read-only", "SYS007", "FAIL"),
    ("nvme nvme0: Disabling device after reset failure: -19", "SYS007", "FAIL"),
    ("blk_update_request: I/O error, dev sda, sector 1234 op 0x0:(READ)", "SYS007", "WARN"),
    ("nvme nvme0: I/O 12 QID 3 timeout, reset controller", "SYS007", "WARN"),
    ("nfs: server 10.1.2.3 not responding, still trying", "SYS007", "WARN"),
    (
        "mlx5_core 0000:0d:00.0: poll_health:801:(pid 0): device's health compromised - reached miss count",
        "NET013",
        "FAIL",
    ),
    (
        "mlx5_core 0000:06:00.0: wait_func_handle_exec_timeout:1128:(pid 1): cmd[0]: CREATE_UCTX(0xa04) No done completion",
        "NET013",
        "WARN",
    ),
    (
        "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature",
        "NET013",
        "WARN",
    ),
    (
        "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 2): Detected insufficient power on the PCIe slot (27W).",
        "NET013",
        "WARN",
    ),
    (
        "python3[253]: segfault at 7f797fe00000 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in libnccl.so.2[7f7c7ac00000]",
        "NCC005",
        "WARN",
    ),
    (
        "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
        "NCC005",
        "WARN",
    ),
    ("VFS: file-max limit 1000000 reached", "SYS002", "WARN"),
)


@pytest.mark.parametrize(("line", "code", "verdict"), SAMPLES)
def test_messages_of_drivers(line: str, code: str, verdict: str) -> None:
    assert bad(KERNEL.read(f"[   12.000001] quiet\n[   13.000001] {line}\n", "k")) == [(code, verdict)]


def test_every_rule_can_be_reached() -> None:
    reached = {rule[3] for line, _, _ in SAMPLES if (rule := rule_of(line)) is not None}
    assert {rule[3] for rule in OTHERS} == reached


@pytest.mark.parametrize(
    "line",
    [
        "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0: DEV 0000:3a:0a.0",
        "mlx5_core 0000:5c:00.0: mlx5_pcie_event:301:(pid 2): PCIe slot advertised sufficient power (27W).",
        "mlx5_core 0000:5c:00.1: Port module event: module 1, Cable unplugged",  # an empty cage, at the start
        "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ)",  # a virtual machine without a floppy
        "IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01",
        "nfs: server 10.1.2.3 OK",
        "acpi PNP0A08:03: PCIe AER handled by firmware",
    ],
)
def test_what_is_not_a_fault(line: str) -> None:
    assert worst(KERNEL.read(f"[   12.000001] {line}\n", "k")) == "PASS"


def test_a_link_that_flaps_is_named_and_others_are_not() -> None:
    (found,) = KERNEL.read(FLAPS, "k")
    assert (found.code, found.verdict, found.target.port) == ("NET014", "FAIL", "ib4")
    assert "5 times" in found.message
    assert found.evidence == ("k:3", "k:5", "k:7", "...")


def test_a_few_link_losses_warn_and_one_recovered_loss_passes() -> None:
    lines = FLAPS.splitlines(keepends=True)
    assert worst(KERNEL.read("".join(lines[:4]), "k")) == "PASS"
    assert worst(KERNEL.read("".join(lines[:3]), "k")) == "WARN"  # down at the end
    assert worst(KERNEL.read("".join(lines[:6]), "k")) == "WARN"
    # Five in all, never more than three on a day.
    spread = "".join(x.replace("Mar  4", f"Mar {4 + n // 6:2}") for n, x in enumerate(lines))
    assert worst(KERNEL.read(spread, "k")) == "WARN"


def test_link_messages_of_the_adapters_drivers() -> None:
    text = "".join(
        f"[ {100 + i}.000001] mlx5_core 0000:5c:00.0 ibs5: Link {word}\n"
        for i in range(6)
        for word in ("down", "up")
    )
    assert [(f.verdict, f.target.port) for f in KERNEL.read(text, "k")] == [("FAIL", "ibs5")]
    gone = (
        "[  1.000001] mlx5_core 0000:5d:00.0: Port module event: module 0, Cable plugged\n"
        "[  9.000001] mlx5_core 0000:5d:00.0: Port module event: module 0, Cable unplugged\n"
    )
    assert [(f.verdict, f.target.port) for f in KERNEL.read(gone, "k")] == [("WARN", "0000:5d:00.0")]


@pytest.mark.parametrize(
    "form",
    [
        "[Mar04 08:15] {}",  # dmesg -H, its first line and the others
        "[  +0.000012] {}",
        "2025-03-04T08:15:00,285060+00:00 {}",  # dmesg --time-format=iso
        "[Di Mär  4 08:15:00 2025] {}",  # dmesg -T in German
        "[  123.456789 <    0.000012>] {}",  # dmesg -d
        "[  123.456789][  T1231] {}",
        "kern  :warn  : [Tue Mar  4 08:15:00 2025] {}",  # dmesg -xT
        "Tue 2025-03-04 08:15:00 UTC node7 kernel: {}",  # journalctl -o short-full
        "Mar 04 08:15:00.285060 node7 kernel: {}",  # journalctl -o short-precise
        "1741076100.285060 node7 kernel: {}",  # journalctl -o short-unix
        "<4>Mar  4 08:15:00 node7 kernel: {}",
        "2025-03-04T08:15:00.285060+00:00 node7 kernel: {}",
    ],
)
def test_every_form_of_a_log_is_known(form: str) -> None:
    quiet = "".join(
        form.format(x) + "\n" for x in ("usb 1-1: new high-speed USB device", "random: crng init done")
    )
    assert KERNEL.matches(quiet)
    assert worst(KERNEL.read(quiet, "k")) == "PASS"
    fatal = form.format("pcieport 0000:00:03.1: AER: Uncorrectable (Fatal) error message received") + "\n"
    assert worst(KERNEL.read(quiet + fatal, "k")) == "FAIL"
    lost = form.format("NVRM: Xid (PCI:0000:3b:00): 79, pid=1896, GPU has fallen off the bus.") + "\n"
    assert worst(KERNEL.read(quiet + lost, "k")) == "FAIL"


def test_a_port_that_was_never_up_did_not_go_down() -> None:
    """A driver says "Link down" of a port without a cable when it comes up; only one that was up can have lost its link."""
    boot = "[   12.000001] mlx5_core 0000:5c:00.0 ens1f0: Link up\n[   12.100001] mlx5_core 0000:5c:00.1 ens1f1: Link down\n"
    (found,) = KERNEL.read(boot, "k")
    assert (found.code, found.verdict, found.target.port) == ("NET014", "UNJUDGED", "ens1f1")
    assert "went down" not in found.message
    assert worst(KERNEL.read(boot + "[   12.900001] mlx5_core 0000:5c:00.1 ens1f1: Link up\n", "k")) == "PASS"
    # The same line twice is one state, not two losses.
    again = boot + "[   99.000001] mlx5_core 0000:5c:00.1 ens1f1: Link down\n"
    assert [f.verdict for f in KERNEL.read(again, "k")] == ["UNJUDGED"]
    # networkd says "Lost" only of a link that had its carrier.
    lost = "Mar  4 08:10:11 node7 systemd-networkd[811]: ib4: Lost carrier\n"
    assert [(f.verdict, "went down 1 time" in f.message) for f in KERNEL.read(lost, "k")] == [("WARN", True)]


CAUSE = "NVRM: Xid (PCI:0000:dc:00): {}, pid=1818990, name=python3, {}\n"  # NVIDIA/open-gpu-kernel-modules, issue 1150


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ([(45, "Ch 00000001")], "WARN"),
        ([(45, "Ch 00000001 caused by previous Xid 149")], "FAIL"),
        ([(45, "Ch 00000001 caused by previous Xid 79")], "FAIL"),
        ([(45, "Ch 00000001 caused by previous Xid 31")], "WARN"),
        ([(45, "Ch 00000001 caused by previous Xid 9999")], "WARN"),
        ([(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x0 0x0 0x0 0x0 0x0)"), (45, "Ch 00000001 caused by previous Xid 149")], "PASS"),
        ([(149, "NETIR_LINK_EVT Nonfatal XC0 i0 Link 00 (0x004001c6 0x0 0x0 0x0 0x0 0x0)"), (45, "Ch 00000001 caused by previous Xid 149")], "WARN"),
    ],
)  # fmt: skip
def test_a_message_that_names_its_cause_is_judged_by_it(lines: list[tuple[int, str]], verdict: str) -> None:
    found = KERNEL.read("".join(CAUSE.format(*line) for line in lines), "k")
    derived = found[-1]
    assert (derived.measured, derived.verdict) == (45, verdict)
    assert worst(found) == verdict
    if "caused" in lines[-1][1] and verdict != "PASS":
        assert derived.action != ""
        assert f"Xid {lines[-1][1].rpartition(' ')[2]}" in (derived.expected.source + derived.message)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("blk_update_request: I/O error, dev sda, sector 1234 op 0x0:(READ)", "sda"),
        ("EXT4-fs (nvme0n1p2): Remounting filesystem read-only", "nvme0n1p2"),
        ("EXT4-fs error (device dm-3): ext4_find_entry:1455: inode #2: comm ls: reading directory lblock 0", "dm-3"),
        ("nvme nvme0: I/O 12 QID 3 timeout, reset controller", "nvme0"),
        ("md/raid1:md127: Disk failure on sdb1, disabling device.", "sdb1"),
        ("nfs: server 10.1.2.3 not responding, still trying", "10.1.2.3"),
        ("XFS (sdc1): metadata I/O error in \"xfs_buf_ioend\" at daddr 0x1 len 1 error 5", "sdc1"),
        ("systemd-udevd: attempt to access beyond end of device\\x0asdd: rw=0, want=8, limit=0", "sdd"),
        ("EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#0_DIMM#0", "MC1"),
        ("watchdog: BUG: soft lockup - CPU#24 stuck for 23s! [kworker/24:1:1234]", "CPU 24"),
        ("NVRM: GPU6 _kgspIsHeartbeatTimedOut: Heartbeat timed out, currentTimeMs 812751949", "GPU6"),
    ],
)  # fmt: skip
def test_a_finding_quotes_its_line_and_names_its_device(line: str, device: str) -> None:
    (found,) = KERNEL.read(f"[   13.000001] {line}\n", "k")
    assert f" ({device})" in found.message
    assert " ".join(line.split())[:60] in found.message
    assert found.evidence == ("k:1",)


@pytest.mark.parametrize(
    ("line", "pci"),
    [
        ("pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0", "0000:01:00"),
        ("NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x26:0x56:1463)", "0000:1b:00"),
        ("NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:9b:00 (printing 1 of every 30).", "0000:9b:00"),
        ("mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature", "0000:5c:00"),
    ],
)  # fmt: skip
def test_a_finding_names_its_card(line: str, pci: str) -> None:
    (found,) = KERNEL.read(f"[   13.000001] {line}\n", "k")
    assert found.target.pci == pci
    assert line[:60] in found.message


def test_disk_errors_are_grouped_into_one_finding_per_disk() -> None:
    line = "[{}.000001] blk_update_request: I/O error, dev {}, sector {} op 0x0:(READ)\n"
    found = KERNEL.read("".join(line.format(100 + i, "sda" if i else "sdb", i) for i in range(5)), "k")
    assert sorted((f.verdict, f.message.partition(":")[0]) for f in found) == [
        ("WARN", "disk errors (sda), 4 times, the last"),
        ("WARN", "disk errors (sdb)"),
    ]
    assert "sector 4 op" in next(f.message for f in found if "(sda)" in f.message)


@pytest.mark.parametrize(
    "line",
    [
        "EXT4-fs (loop3): I/O error while writing superblock",
        "EXT4-fs error (device loop0): ext4_find_entry:1455: inode #2: comm ls: reading directory lblock 0",
        "Buffer I/O error on dev loop0, logical block 0, lost sync page write",
        "EXT4-fs (loop7): Remounting filesystem read-only",
        "XFS (loop12): metadata I/O error in \"xfs_buf_ioend\" at daddr 0x1 len 1 error 5",
        "blk_update_request: I/O error, dev loop2, sector 0 op 0x0:(READ)",
        "blk_update_request: I/O error, dev sr0, sector 0 op 0x0:(READ)",
        "Buffer I/O error on dev ram0, logical block 0, async page read",
        "attempt to access beyond end of device\n[   14.000002] loop4: rw=0, want=8, limit=0",
        "systemd-udevd: attempt to access beyond end of device\\x0aloop0: rw=0, want=8, limit=0",
        "sd 6:0:0:0: [sdq] Attached SCSI removable disk\n[   15.000001] blk_update_request: I/O error, dev sdq, sector 1 op 0x0:(READ)",
        "sd 6:0:0:0: [sdq] Attached SCSI removable disk\n[   15.000001] EXT4-fs (sdq1): Remounting filesystem read-only",
    ],
)  # fmt: skip
def test_errors_of_other_devices_are_not_disk_faults(line: str) -> None:
    assert worst(KERNEL.read(f"[   13.000001] {line}\n", "k")) == "PASS"
    assert worst(KERNEL.read(f"[   13.000001] {line.replace('loop', 'sd').replace('removable ', '')}\n", "k")) in (
        "WARN", "FAIL", "PASS" if "sr0" in line or "ram0" in line else "FAIL",
    )  # fmt: skip


def test_a_link_quotes_the_line_of_its_last_loss() -> None:
    (found,) = KERNEL.read(FLAPS, "k")
    assert "ib4: Lost carrier" in found.message
