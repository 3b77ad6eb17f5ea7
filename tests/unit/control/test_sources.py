"""What the hardware says reaches the agent once, and what cannot be seen is said."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.base import process
from seatrial.base.kernel_files import KMSG
from seatrial.control.hardware import probe, sources
from seatrial.control.hardware.kernel_log import KernelLog
from seatrial.control.hardware.sources import Signal, Sources, gpu_addresses
from seatrial.control.hardware.xid_gate import BURST_S, HOLD_S, NVML_HOLD_S, RECORD_BURST_S, XidGate
from seatrial.control.node.external import Child
from seatrial.hardware.counters import changes
from seatrial.hardware.xid import XidMessage, parse
from seatrial.record.node_counters import GpuCounters, GpuUse, PortCounters, read_counters

NOWHERE = Path("/nowhere at all")


def xid(code: int, text: str = "what happened", pci: str = "0000:3b:00") -> str:
    return f"4,7,5000000,-;NVRM: Xid (PCI:{pci}): {code}, {text}"


@pytest.fixture
def made() -> Iterator[list[Sources]]:
    """Sources to be closed; then no process may be left."""
    those: list[Sources] = []
    before = process.descendants(os.getpid())  # services that other tests use
    yield those
    for one in those:
        one.close()
    assert process.descendants(os.getpid()) == before


def until(watched: Sources, wanted: str, *, timeout_s: float = 30.0) -> list[Signal]:
    """Everything up to the first signal of that name."""
    seen: list[Signal] = []
    end = time.monotonic() + timeout_s
    while not any(s.signal == wanted for s in seen):
        now = time.monotonic()
        assert now < end, f"no {wanted} among {seen}"
        deadline = watched.deadline(now)
        wait = end if deadline is None else min(end, deadline)
        select.select([watched], [], [], max(0.0, wait - now))
        seen += watched.poll(time.monotonic())
    return seen


# -- the kernel log


def test_only_new_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\nolder\n")
    log = KernelLog(path)
    assert log.lines() == []
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert log.lines() == ["one"]
        file.write("o\nthree\n")
        file.flush()
    assert log.lines() == ["two", "three"]
    path.write_text("cut off\n")
    assert log.lines() == ["cut off"]
    path.rename(tmp_path / "log.1")
    assert log.lines() == []
    path.write_text("another file\n")
    assert log.lines() == ["another file"]
    assert (log.problem, log.fileno(), log.silent) == (None, None, True)
    log.close()


def test_a_file_that_comes_later_is_read_from_its_start(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "log")
    assert log.problem is not None
    assert "No such file" in log.problem
    assert log.lines() == []
    (tmp_path / "log").write_text("first\n")
    assert log.lines() == ["first"]
    assert log.problem is None
    log.close()


def test_a_fifo_wakes_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    log = KernelLog(path)
    fd = log.fileno()
    assert fd is not None
    assert select.select([fd], [], [], 0)[0] == []
    for text in ("one\n", "two\n"):  # a writer that comes and goes
        with path.open("w") as file:
            file.write(text)
        assert select.select([fd], [], [], 30)[0] == [fd]
        assert log.lines() == [text.strip()]
    assert select.select([fd], [], [], 0)[0] == []
    log.close()


def test_a_line_without_an_end_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("")
    log = KernelLog(path)
    with path.open("ab") as file:
        file.write(b"x" * 3_000_000)
        file.flush()
        for _ in range(5):
            assert log.lines() == []
        file.write(b"\n\xff\xfe\n")
        file.flush()
        first, second = log.lines()
    assert len(first) == 8192
    assert second == "\ufffd\ufffd"
    log.close()


def test_the_real_kernel_log() -> None:
    if not os.access(KMSG, os.R_OK):
        pytest.skip(f"{KMSG} cannot be read here")
    log = KernelLog(KMSG)
    if log.problem is not None:
        pytest.skip(log.problem)
    assert log.fileno() is not None
    assert all("," in line for line in log.lines())  # nothing, unless something has just happened
    log.close()


def test_records_that_the_kernel_has_overwritten(
    made: list[Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Sources(Path("/dev/null"), NOWHERE, driver=NOWHERE)  # a device, as the real one is
    made.append(watched)
    given: list[bytes | OSError] = [
        OSError(errno.EPIPE, "Broken pipe"),
        f"{xid(79)}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n".encode(),
        BlockingIOError(),
    ]

    def read(fd: int, n_bytes: int) -> bytes:
        now = given.pop(0)
        if isinstance(now, OSError):
            raise now
        return now

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", read)
        told = watched.poll(1.0)
    assert [s.signal for s in told] == ["log_lost", "xid:79"]
    assert watched.poll(2.0) == []


def test_an_unreadable_log_is_reported_once(tmp_path: Path, made: list[Sources]) -> None:
    watched = Sources(tmp_path, NOWHERE, driver=NOWHERE)  # a folder
    made.append(watched)
    now = time.monotonic()
    [told] = watched.poll(now)
    assert told.signal == "not_observable"
    assert "neither a file, a FIFO nor a device" in told.message
    assert watched.poll(now + 100) == []
    assert watched.deadline(now) is None
    nothing = Sources(Path("/dev/null"), NOWHERE, driver=NOWHERE)
    made.append(nothing)
    assert nothing.poll(now) == []


# -- the gate


def message(code: int, text: str = "", pci: str = "0000:3b:00") -> XidMessage:
    found = parse(f"NVRM: Xid (PCI:{pci}): {code}, {text}")
    assert found is not None
    return found


def test_a_burst_is_one_fault() -> None:
    gate = XidGate()
    for _ in range(17):
        gate.add(message(13), "kernel log", 1.0)
    assert [t.signal for t in gate.due(1.0)] == ["xid:13"]
    gate.add(message(13, pci="0000:5f:00"), "kernel log", 1.1)
    assert [t.message.pci for t in gate.due(1.1)] == ["0000:5f:00"]
    gate.add(message(13), "kernel log", 1.0 + BURST_S)
    [again] = gate.due(1.0 + BURST_S)
    assert again.swallowed == 16


def test_what_is_only_recorded_does_not_fill_the_record() -> None:
    gate = XidGate()
    told = []
    for second in range(int(RECORD_BURST_S) + 1):
        gate.add(message(121), "kernel log", float(second))
        told += gate.due(float(second))
    assert [t.swallowed for t in told] == [0, RECORD_BURST_S - 1]


@pytest.mark.parametrize(
    ("follows", "signal"),
    [((94,), "xid:48:contained"), ((63, 94), "xid:48:contained"), ((94, 95), "xid:48"), ((), "xid:48")],
)
def test_a_memory_error_waits_for_what_comes_with_it(follows: tuple[int, ...], signal: str) -> None:
    gate = XidGate()
    gate.add(message(48), "kernel log", 0.0)
    assert gate.due(0.0) == []
    assert gate.deadline == HOLD_S
    gate.add(message(94, pci="0000:99:00"), "kernel log", 0.1)  # another GPU's
    for code in follows:
        gate.add(message(code), "kernel log", 0.1)
    told = {t.signal: t.other_codes for t in gate.due(HOLD_S)}
    assert told[signal] == follows
    assert gate.deadline is None


def test_nvml_counts_if_the_log_is_silent() -> None:
    gate = XidGate()
    bare = XidMessage("xid", 145, "0000:3b:00", "")
    gate.add(bare, "NVML", 0.0)
    gate.add(message(145, "RLW_REMAP Nonfatal XC0 i0 Link 02"), "kernel log", 0.1)
    assert [t.signal for t in gate.due(NVML_HOLD_S)] == ["xid:145:nonfatal"]
    gate.add(bare, "NVML", 2.5)  # late, of the same fault
    assert gate.due(60.0) == []
    gate.add(bare, "NVML", 70.0)
    assert gate.due(70.0) == []
    assert [(t.signal, t.source) for t in gate.due(70.0 + NVML_HOLD_S)] == [("xid:145", "NVML")]
    gate.add(bare, "NVML", 90.0, log_readable=False)
    assert [t.signal for t in gate.due(90.0)] == ["xid:145"]


# -- all together


def test_a_machine_without_anything_costs_nothing(made: list[Sources]) -> None:
    before = process.descendants(os.getpid())
    watched = Sources(KMSG, NOWHERE, driver=NOWHERE)
    made.append(watched)
    made.append(Sources(None, None, driver=None))
    assert made[-1].poll(0.0) == []
    assert watched.poll(0.0) == []
    assert watched.deadline(0.0) is None
    assert process.descendants(os.getpid()) == before


def test_a_message_in_the_log_becomes_a_signal(tmp_path: Path, made: list[Sources]) -> None:
    path = tmp_path / "log"
    watched = Sources(path, NOWHERE, driver=NOWHERE, gpus={"0000:3b:00"})
    made.append(watched)
    assert [s.signal for s in watched.poll(0.0)] == ["not_observable"]
    assert watched.deadline(0.0) == pytest.approx(0.25)
    path.write_text(
        "\n".join(
            [
                "6,1,1,-;eth0: link becomes ready",
                xid(79, "pid=7, name=python, GPU has fallen off the bus."),
                xid(79, "pid=7, name=python, GPU has fallen off the bus."),
                xid(119, "Timeout waiting for RPC from GSP!", "0000:99:00"),
                "4,8,5,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20009, Non-fatal, Link 04 RX Short",
                "4,8,5,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20009, Severity 1 Engine instance 4",
                "4,8,5,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20009, Data {0x1, 0x0}",
                "",
            ]
        )
    )
    assert watched.poll(0.1) == []  # it is a file, looked at four times a second
    first, second = watched.poll(0.3)
    assert (first.signal, first.gpu, first.port, first.time) == ("xid:79", "0000:3b:00", None, 0.3)
    assert first.message == "Xid 79 from GPU 0000:3b:00: GPU has fallen off the bus."
    assert first.evidence["pid"] == 7
    assert first.evidence["process"] == "python"
    assert first.evidence["logged"] == "5.000000"
    assert first.signal == "xid:79"
    assert (second.signal, second.gpu) == ("sxid:nonfatal", None)


def ports(root: Path, **counters: int) -> None:
    folder = root / "mlx5_0/ports/1"
    (folder / "hw_counters").mkdir(parents=True, exist_ok=True)
    (folder / "counters").mkdir(exist_ok=True)
    texts = {"rate": "400 Gb/sec (4X NDR)", "state": "4: ACTIVE", "link_layer": "InfiniBand"}
    for name, value in {**texts, **{f"hw_counters/{n}": f"{v}\n" for n, v in counters.items()}}.items():
        new = folder / f"{name}.new"
        new.write_text(value)
        new.rename(folder / name)  # never half written


def test_counters_are_read_in_a_process_of_their_own(tmp_path: Path, made: list[Sources]) -> None:
    ports(tmp_path, local_ack_timeout_err=5)
    kept = tmp_path / "run/nodes/node0.ports.json"
    kept.parent.parent.mkdir()
    watched = Sources(None, tmp_path, 0.02, driver=NOWHERE, ports_file=kept)
    made.append(watched)
    # Once it has said that it begins the second reading it has made the first.
    while not any(p.doing == "reading the ports' counters" for p in watched._probes):
        assert select.select([watched], [], [], 30)[0]
        assert watched.poll(time.monotonic()) == []
    ports(tmp_path, local_ack_timeout_err=6)
    found = until(watched, "retransmissions")[-1]
    assert (found.gpu, found.port) == (None, "mlx5_0/1")
    assert found.evidence["deltas"] == {"local_ack_timeout_err": 1}
    # The first reading and the newest stay in a file, for whoever compares runs.
    end = time.monotonic() + 30
    while (read := read_counters(PortCounters, kept)) is None or read.last == read.first:
        assert time.monotonic() < end
        time.sleep(0.01)
    changed = changes(read.first, read.last, read.seconds)
    assert changed["mlx5_0/1"]["deltas"] == {"local_ack_timeout_err": 1}


def test_a_run_folder_that_hangs_does_not_end_a_probe(
    tmp_path: Path, made: list[Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "write_counters", lambda *_: time.sleep(60))
    ports(tmp_path, local_ack_timeout_err=5, symbol_error=0)
    watched = Sources(None, tmp_path, 0.02, driver=NOWHERE, ports_file=tmp_path / "hangs")
    made.append(watched)
    while not any(p.doing == "reading the ports' counters" for p in watched._probes):
        assert select.select([watched], [], [], 30)[0]
        assert watched.poll(time.monotonic()) == []
    ports(tmp_path, local_ack_timeout_err=6, symbol_error=0)
    until(watched, "retransmissions")  # then it writes, for the first time
    ports(tmp_path, local_ack_timeout_err=6, symbol_error=99)
    until(watched, "link_errors")


def test_a_probe_that_falls_silent_is_a_finding(tmp_path: Path, made: list[Sources]) -> None:
    watched = Sources(None, NOWHERE, driver=NOWHERE)
    made.append(watched)

    def hang(channel: Any) -> None:
        channel.send({"alive": "nvmlInit"})
        select.select([], [], [])

    watched._start("GPUs", hang, 5.0)
    [started] = watched._probes
    while started.doing != "nvmlInit":
        assert select.select([watched], [], [], 30)[0]
        assert watched.poll(100.0) == []
    deadline = watched.deadline(100.0)
    assert deadline is not None
    assert watched.poll(deadline - 0.1) == []
    [told] = watched.poll(deadline)
    assert told.signal == "probe_silent"
    assert told.message == "the probe of the GPUs hangs; its last operation was: nvmlInit"
    assert watched.poll(deadline + 100) == []
    assert watched.deadline(deadline) is None


def test_a_probe_that_dies_is_a_finding(made: list[Sources]) -> None:
    watched = Sources(None, NOWHERE, driver=NOWHERE)
    made.append(watched)
    watched._start("ports", lambda channel: sys.exit(1), 5.0)
    told = until(watched, "probe_silent")[-1]
    assert "has exited" in told.message


# -- the probe of the GPUs, on stand-ins for NVML and nvidia-smi


class FakeNvml(types.ModuleType):
    """As much of NVML's Python interface as is used; gives `events`, then times out."""

    nvmlEventTypeXidCriticalError = 8
    NVML_ERROR_TIMEOUT = 10

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self, events: list[int], *, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.events = events
        self.replays = 40
        self.readings = 0
        self.broken = broken

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError(9)

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return ctypes.c_void_p(0x1000 + index)

    def nvmlDeviceRegisterEvents(self, handle: Any, events: int, into: str) -> None:
        assert (events, into) == (8, "set")

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return types.SimpleNamespace(busId=[b"00000000:3B:00.0", "00000000:5F:00.0"][handle.value - 0x1000])

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return types.SimpleNamespace(gpu=[100, 3][handle.value - 0x1000])  # the second one idles

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        assert kind == 1
        return 1410

    class c_nvmlGpmMetricsGet_t:
        def __init__(self) -> None:
            self.metrics = [types.SimpleNamespace(metricId=0, nvmlReturn=1, value=0.0)]

    def nvmlGpmQueryDeviceSupport(self, handle: Any) -> Any:
        return types.SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> list[int]:
        return [0]

    def nvmlGpmSampleGet(self, handle: Any, sample: list[int]) -> list[int]:
        self.readings += 1
        sample[0] = self.readings
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        assert (request.version, request.numMetrics, request.metrics[0].metricId) == (1, 1, 5)
        assert request.sample1[0] < request.sample2[0]
        request.metrics[0].nvmlReturn, request.metrics[0].value = 0, 62.5
        return request

    def nvmlDeviceGetPcieReplayCounter(self, handle: Any) -> int:
        if handle.value != 0x1000:
            raise self.NVMLError(3)  # not supported
        self.replays += 1
        return self.replays

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        if not self.events:
            raise self.NVMLError(self.NVML_ERROR_TIMEOUT)
        return types.SimpleNamespace(eventData=self.events.pop(0), device=ctypes.c_void_p(0x1001))


SMI = """#!/bin/sh
case "$1" in
--query-gpu*) echo "GPU-a, 00000000:3B:00.0"; echo "GPU-b, 00000000:5F:00.0" ;;
nvlink) echo x >> {count}
    printf 'GPU 0: A GPU (UUID: GPU-a)\\n\\t Link 0: Recovery Errors: %s\\n' $(wc -l < {count}) ;;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as /proc/driver/nvidia, an nvidia-smi whose error counter grows with each call, short intervals."""
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text(SMI.format(count=tmp_path / "count"))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "NVLINK_INTERVAL_S", 0.0)
    monkeypatch.setattr(probe, "_EVENT_WAIT_MS", 1)
    (tmp_path / "nvidia").mkdir()
    return tmp_path / "nvidia"


def test_xid_events_and_nvlink_errors(
    driver: Path, made: list[Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([79]))
    kept = driver.parent / "nodes/node0.gpus.json"
    watched = Sources(None, NOWHERE, 0.01, driver=driver, gpus_file=kept)
    made.append(watched)
    seen = until(watched, "nvlink_errors")
    if not any(s.signal == "xid:79" for s in seen):
        seen += until(watched, "xid:79")
    told = {s.signal: s for s in seen}
    assert told["xid:79"].gpu == "0000:5f:00"
    assert told["xid:79"].evidence["source"] == "NVML"
    assert "GPU has fallen off the bus" in told["xid:79"].message  # from the catalogue: NVML gives a number
    assert told["nvlink_errors"].gpu == "0000:3b:00"
    assert "recovery errors +1" in told["nvlink_errors"].message
    assert "no RDMA device" in told["not_observable"].message
    end = time.monotonic() + 30
    while (read := read_counters(GpuCounters, kept)) is None or read.gpus["0000:3b:00"].nvlink is None:
        assert time.monotonic() < end
        watched.poll(time.monotonic())
        time.sleep(0.01)
    busy, idle = read.gpus["0000:3b:00"], read.gpus["0000:5f:00"]
    assert busy.sm_mhz == 1410
    assert busy.samples >= 1
    assert busy.tensor_active == pytest.approx(0.625)
    assert busy.pcie_replays is not None
    assert busy.pcie_replays >= 1
    assert busy.nvlink is not None
    assert busy.nvlink["0 recovery errors"] >= 1
    # What it does not tell is unknown.
    assert idle == GpuUse(None, 0, None, None)


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [(None, "nvidia-ml-py is not installed"), (FakeNvml([], broken=True), "NVML: error 9")],
)
def test_blind_on_both_eyes(
    driver: Path,
    made: list[Sources],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvml: FakeNvml | None,
    reason: str,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: the import fails
    ports(tmp_path / "infiniband")
    watched = Sources(tmp_path / "no such log", tmp_path / "infiniband", 0.01, driver=driver)
    made.append(watched)
    told = until(watched, "not_observable")[-1]
    assert reason in told.message
    assert "no such log" in told.message


def test_a_gpu_of_another_job_is_ignored(
    driver: Path, made: list[Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([79, 31, 79]))
    watched = Sources(None, NOWHERE, 0.01, driver=driver, gpus={"0000:3b:00"})
    made.append(watched)
    seen = until(watched, "nvlink_errors")  # of ours
    assert not any(s.signal.startswith("xid") for s in seen)


def test_what_the_probes_read_is_passed_on(
    driver: Path, made: list[Sources], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([]))
    ports(tmp_path / "infiniband")
    read: dict[str, dict[str, float]] = {}
    watched = Sources(
        None, tmp_path / "infiniband", 0.01, driver=driver, gpus={"0000:3b:00"}, telemetry=read.__setitem__
    )
    made.append(watched)
    end = time.monotonic() + 30
    while "ports" not in read or 'gpu_nvlink_errors_total{gpu="0"}' not in read.get("gpus", {}):
        assert time.monotonic() < end
        select.select([watched], [], [], 1.0)
        watched.poll(time.monotonic())
    assert read["gpus"]['gpu_tensor_active_ratio{gpu="0"}'] == 0.625
    assert read["gpus"]['gpu_sm_clock_hertz{gpu="0"}'] == 1.41e9
    assert read["gpus"]['gpu_pcie_replays_total{gpu="0"}'] > 40
    assert not [name for name in read["gpus"] if 'gpu="1"' in name], "another job's"
    assert read["ports"]['port_active{port="mlx5_0/1"}'] == 1


def test_the_gpus_can_be_let_go_for_a_reset(
    driver: Path, made: list[Sources], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([]))
    before = process.descendants(os.getpid())
    watched = Sources(None, None, 0.01, driver=driver)
    made.append(watched)
    assert len(process.descendants(os.getpid()) - before) >= 1
    watched.release_gpus()
    assert process.descendants(os.getpid()) == before
    assert watched.poll(time.monotonic()) == []  # nothing is missed by that
    watched.resume_gpus()
    watched.resume_gpus()
    assert until(watched, "nvlink_errors")[-1].gpu == "0000:3b:00"


def test_a_hanging_nvidia_smi_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexec sleep 1000\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "SMI_TIMEOUT_S", 0.1)
    assert probe._smi("nvlink", "-e") is None


def test_persistent_findings_are_reported_again_later() -> None:
    reminder = probe._Reminder()
    finding = probe.PortFault("retransmissions", "mlx5_0/1", "text", {"deltas": {}})
    other = probe.PortFault("congestion", "mlx5_0/1", "text", {})
    told = [len(reminder.new([finding], t)) for t in (0.0, 10.0, probe.REMIND_S - 1, probe.REMIND_S)]
    assert told == [1, 0, 0, 1]
    assert len(reminder.new([finding, other], probe.REMIND_S + 10)) == 1
    assert reminder.new([], probe.REMIND_S + 20) == []
    [again] = reminder.new([finding], probe.REMIND_S + 30)  # it was over in between
    assert again["finding"]["evidence"]["for_s"] == 0.0


# -- which GPUs are ours


def test_addresses_of_visible_devices(tmp_path: Path) -> None:
    gpus, dev = tmp_path / "driver/gpus", tmp_path / "dev"
    dev.mkdir()
    for number, (pci, minor) in enumerate([("0000:5f:00.0", 0), ("0000:3b:00.0", 1), ("0000:9a:00.0", 2)]):
        (gpus / pci).mkdir(parents=True)
        text = f"Model: \t\t A GPU\nGPU UUID: \t GPU-{number}{number}\nDevice Minor: \t {minor}\n"
        (gpus / pci / "information").write_text(text)
    for minor in (0, 1):  # the third one is another container's
        (dev / f"nvidia{minor}").touch()

    def found(*names: str) -> frozenset[str] | None:
        return gpu_addresses(names, driver=tmp_path / "driver", dev=dev)

    assert found("0") == {"0000:3b:00"}
    assert found("0", "1") == {"0000:3b:00", "0000:5f:00"}
    assert found("GPU-00") == {"0000:5f:00"}
    assert found("GPU-") is None  # two of them
    assert found("2") is None
    assert found("MIG-1") is None
    assert gpu_addresses(["0"], driver=NOWHERE, dev=dev) is None


def test_the_agent_can_wait_for_all_of_it(made: list[Sources]) -> None:
    watched = Sources(None, NOWHERE, driver=NOWHERE)
    made.append(watched)
    assert select.select([watched], [], [], 0)[0] == []
    child = Child(lambda channel: None)
    watched._probes.append(sources._Probe("ports", child, 1.0))
    watched._poller.register(child.fileno(), select.EPOLLIN)
    assert select.select([watched], [], [], 30)[0] == [watched]
