"""The node stage for real, on this machine: what it measures, what it leaves (nothing), and programs that hang or lie."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seatrial.check.blame.nodes import judge_nodes
from seatrial.check.node import load_samples, probe_cuda, probe_storage
from seatrial.check.node.columns import columns
from seatrial.check.node.judge_node import judge_stage
from seatrial.check.node.node_stage import NodeOptions, Places, measure
from seatrial.check.node.node_storage import read_storage
from seatrial.check.node.probe_cpu import measure_cpu
from seatrial.check.node.run_tool import Order, Result, run_tool, run_tools

pytestmark = pytest.mark.cluster

PYTHON = sys.executable


BEFORE: set[int] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Services that other tests use may run in this process too."""
    BEFORE.clear()
    BEFORE.update(children())


def children() -> set[int]:
    """Living processes whose parent is this one, other than those from before the test."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if int(parent) == os.getpid() and state != b"Z":
            found.add(int(entry.name))
    return found - BEFORE


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# -- calls of other programs


def test_how_calls_end(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    ok, absent, refused, failed, hung = run_tools(
        [
            Order("ok", ("sh", "-c", "echo one; echo two; printf three"), 30.0),
            Order("absent", (str(tmp_path / "nope"),), 30.0),
            Order("refused", (str(plain),), 30.0),
            Order("failed", ("sh", "-c", "echo half; echo why >&2; exit 3"), 30.0),
            Order("hung", ("sh", "-c", "echo begun; exec sleep 1000"), 1.0),
        ]
    )
    assert (ok.ended, ok.exit_code, ok.out, ok.why) == ("ok", 0, "one\ntwo\nthree", "")
    assert (absent.ended, absent.why) == ("absent", "absent: not installed")
    assert refused.ended == "refused"
    assert "Permission denied" in refused.why
    assert (failed.ended, failed.exit_code, failed.out) == ("failed", 3, "half\n")
    assert failed.why == "failed: ended with exit code 3: why"
    assert (hung.ended, hung.out, hung.why) == ("hung", "begun\n", "hung: did not end within 1 s")
    assert children() == set()


def test_calls_run_at_once_and_take_what_they_started_along(tmp_path: Path) -> None:
    begun = time.monotonic()
    # Each waits for the other's file, so that one after the other they would not end.
    here, there = tmp_path / "here", tmp_path / "there"
    wait = "touch {}; until [ -e {} ]; do sleep 0.01; done; sleep 1000 & echo $!"
    results = run_tools(
        [
            Order("a", ("sh", "-c", wait.format(here, there)), 30.0),
            Order("b", ("sh", "-c", wait.format(there, here)), 30.0),
        ]
    )
    assert [r.ended for r in results] == ["ok", "ok"]
    # The sleep holds the pipe open: whoever waited for its end would wait for ever.
    assert time.monotonic() - begun < 30
    for result in results:
        until = time.monotonic() + 10
        while Path(f"/proc/{result.out.strip()}").exists() and time.monotonic() < until:
            os.sched_yield()
        assert not Path(f"/proc/{result.out.strip()}").exists()


def test_a_flood_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.check.node.run_tool.LARGEST_BYTES", 1 << 20)
    found = run_tool(Order("flood", ("sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"), 60.0))
    assert (found.ended, len(found.out)) == ("ok", 1 << 20)


def test_an_unkillable_process_is_abandoned_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in an uninterruptible wait cannot be made here, so the signal is kept away from a sleeping one."""
    monkeypatch.setattr("seatrial.check.node.run_tool.process.signal_group", lambda pid, signum: None)
    before = children()
    found = run_tool(Order("stuck", ("sleep", "1000"), 0.2))
    (left,) = children() - before
    assert found.ended == "stuck"
    assert "survived SIGKILL" in found.why
    os.kill(left, signal.SIGKILL)
    os.waitpid(left, 0)


def test_programs_die_with_their_caller(tmp_path: Path) -> None:
    script = (
        "from seatrial.check.node.run_tool import Order, run_tool\n"
        f"run_tool(Order('x', ('sh', '-c', 'echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 1000'), 100.0))"
    )
    caller = subprocess.Popen([PYTHON, "-c", script])
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < until
        os.sched_yield()
    pid = int((tmp_path / "pid").read_text())
    fd = os.pidfd_open(pid)
    caller.kill()
    caller.wait()
    try:
        import select

        assert select.select([fd], [], [], 30.0)[0], "the program outlived its caller"
    finally:
        os.close(fd)


# -- the whole stage


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A host without GPUs, ports and messages, whatever this one has: what is asked of it is asked of stand-ins."""
    log = tmp_path / "kmsg"
    log.write_text("6,0,100,-;Linux version 6.18.0\n6,1,200,-;random: crng init done\n")
    (tmp_path / "root").mkdir()
    return Places(str(tmp_path / "root"), str(tmp_path / "no-infiniband"), str(log))


def test_the_node_stage_of_this_machine(tmp_path: Path, places: Places) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    parts: list[str] = []
    # All that is measured is this machine's, but what its kernel said before is no matter of the test.
    facts = measure(NodeOptions(storage=str(folder), device="cpu"), parts.append, replace(places, root="/"))
    assert list(folder.iterdir()) == []
    assert children() == set()
    assert parts == ["inventory", "limits", "clock", "ports", "storage", "rates", "kernel log"]
    assert set(facts["parts"]) == set(parts)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["inventory"]["cpus_online"] >= 1
    assert facts["rates"]["whole"]
    cpu, storage = facts["rates"]["cpu"], facts["storage"]
    for rate in (cpu["gemm_gflop_s"], cpu["memory_gb_s"], cpu["loopback_gb_s"]):
        assert 0.01 < rate < 1e6
    assert 0 < storage["read_bytes"] <= storage["written_bytes"]  # a busy disk is not read to its end in time
    assert storage["wrong_blocks"] == 0
    assert facts["seconds"] < facts["options"]["seconds"]
    report = judge_stage({"n": facts})
    # What is wrong with this machine is its own affair, but nothing that was measured may count as a pass without a floor.
    assert {f.code for f in report.findings} >= {
        "NOD003",
        "NOD005",
        "NOD010",
        "NOD012",
        "NOD013",
        "NOD015",
        "NOD016",
    }
    assert {f.verdict for f in report.findings if f.code in ("NOD013", "NOD015", "NOD016", "NOD017")} == {
        "UNJUDGED"
    }
    assert {f.verdict for f in judge_nodes(columns({"n": facts})) if f.target.node == "n"} <= {
        "PASS",
        "UNJUDGED",
    }


def test_without_rates_there_is_no_load(tmp_path: Path, places: Places) -> None:
    facts = measure(NodeOptions(storage=str(tmp_path), device="cpu", rates=False), places=places)
    assert facts["rates"] is None
    assert "write_gb_s" not in facts["storage"]
    assert "rates" not in facts["parts"]
    codes = {f.code for f in judge_stage({"n": facts}).findings}
    assert "NOD012" in codes
    assert not codes & {"NOD013", "NOD015"}


PYNVML = """
import json, os
class NVMLError(Exception): pass
class Pci: pass
FAULTS = json.loads(os.environ["FAULTS"])
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "570.86.15"
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetPciInfo(h):
    found = Pci()
    found.busId = f"00000000:{0x18 + h:02X}:00.0"
    return found
def nvmlDeviceGetName(h): return "NVIDIA H200"
def nvmlDeviceGetUUID(h): return f"GPU-{h}"
def nvmlDeviceGetTotalEccErrors(h, kind, counter): return FAULTS.get("ecc", 0) * h
def nvmlDeviceGetMemoryErrorCounter(h, kind, counter, where): return FAULTS.get("ecc", 0) * h * kind
def nvmlDeviceGetRemappedRows(h): return (0, 0, 0, FAULTS.get("remap", 0) * h)
def nvmlDeviceGetNvLinkState(h, link): return int(link != FAULTS.get("link", -1) or h == 0)
"""
NVIDIA_SMI = """
case "$*" in
"topo -m") printf '\\tGPU0\\tGPU1\\tCPU Affinity\\tNUMA Affinity\\nGPU0\\t X \\tNV18\\t0-47\\t0\\nGPU1\\tNV18\\t X \\t0-47\\t0\\n\\nLegend:\\n\\n  X    = Self\\n' ;;
"nvlink -s") for g in 0 1; do echo "GPU $g: NVIDIA H200 (UUID: GPU-$g)"; for l in $(seq 0 17); do
    if [ "$g$l" = "1$DOWN" ]; then echo "	 Link $l: <inactive>"; else echo "	 Link $l: 26.562 GB/s"; fi; done; done ;;
"nvlink -e") for g in 0 1; do echo "GPU $g: NVIDIA H200 (UUID: GPU-$g)"; for l in $(seq 0 17); do
    for c in Replay Recovery CRC; do echo "	 Link $l: $c Errors: 0"; done; done; done ;;
*) exit 9 ;;
esac
"""


@pytest.mark.parametrize(
    ("faults", "down", "expected"),
    [
        ({}, "", set()),
        ({"ecc": 3}, "", {("GPU003", 1), ("MSR007", 1)}),
        ({"remap": 1}, "", {("GPU004", 1)}),
        ({"link": 7}, "7", {("NVL001", 1), ("MSR005", 1)}),
    ],
)
def test_two_gpus_from_driver_to_verdict(
    tmp_path: Path,
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, int],
    down: str,
    expected: set[tuple[str, int]],
) -> None:
    """Everything but CUDA, with a stand-in for the library and for nvidia-smi."""
    program(tmp_path, "nvidia-smi", NVIDIA_SMI)
    (tmp_path / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAULTS", json.dumps(faults))
    monkeypatch.setenv("DOWN", down)
    facts = json.loads(json.dumps(measure(NodeOptions(rates=False), places=places)))
    assert [g["pci"] for g in facts["gpus"]["gpus"]] == ["0000:18:00", "0000:19:00"]
    assert {o["tool"] for o in facts["outputs"]} == {
        "NVML",
        *(f"nvidia-smi {x}" for x in ("nvlink -s", "nvlink -e", "topo -m")),
    }
    found = [*judge_stage({"n": facts}).findings, *judge_nodes(columns({"n": facts}))]
    failed = {(f.code, f.target.gpu) for f in found if f.verdict == "FAIL"}
    assert failed == expected
    unread = [
        f for f in found if f.verdict == "UNJUDGED" and f.code in ("FILE001", "FILE003", "NOD001", "GPU011")
    ]
    assert unread == []


def test_kernel_messages_are_judged_with_their_line(tmp_path: Path, places: Places) -> None:
    with Path(places.kernel_log).open("a") as log:
        log.write("3,2,300,-;EXT4-fs (loop3): I/O error while writing superblock\n")
        log.write("3,3,400,-;blk_update_request: I/O error, dev sda, sector 1234 op 0x0:(READ)\n")
    report = judge_stage({"n": measure(NodeOptions(device="cpu", rates=False), places=places)})
    (told,) = (f for f in report.findings if f.code == "SYS007")
    assert (told.verdict, told.target.node) == ("WARN", "n")
    assert "(sda): 'blk_update_request: I/O error, dev sda, sector 1234 op 0x0:(READ)'" in told.message


def test_a_driver_that_hangs_is_a_finding_and_holds_up_nothing(
    tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "nvidia-smi", 'case "$1" in topo) echo torn;; *) exec sleep 1000;; esac')
    (tmp_path / "pynvml.py").write_text(
        "import time\nclass NVMLError(Exception): pass\ndef nvmlInit(): time.sleep(1000)\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    facts = measure(NodeOptions(rates=False, seconds=8.0), places=places)
    assert children() == set()
    found = judge_stage({"n": facts}).findings
    hung = {f.message for f in found if (f.code, f.verdict, f.target.node) == ("NOD002", "FAIL", "n")}
    assert hung == {
        "NVML: did not end within 2 s",
        "nvidia-smi nvlink -s: did not end within 2 s",
        "nvidia-smi nvlink -e: did not end within 2 s",
    }
    assert any(f.verdict == "UNJUDGED" and "topo" in " ".join(f.evidence) for f in found)


def test_a_tree_of_ports_is_read_and_judged(tmp_path: Path, places: Places) -> None:
    for n in range(4):
        folder = tmp_path / "infiniband" / f"mlx5_{n}"
        ports = folder / "ports/1"
        (ports / "counters").mkdir(parents=True)
        (folder / "hca_type").write_text("MT4129\n")
        (folder / "sys_image_guid").write_text(f"0000:0000:0000:000{n}\n")
        (ports / "state").write_text("4: ACTIVE\n" if n != 2 else "1: DOWN\n")
        (ports / "phys_state").write_text("5: LinkUp\n" if n != 2 else "3: Disabled\n")
        (ports / "rate").write_text("400 Gb/sec (4X NDR)\n" if n != 2 else "10 Gb/sec (4X SDR)\n")
        (ports / "link_layer").write_text("InfiniBand\n")
        (ports / "counters/symbol_error").write_text("0\n")
    facts = measure(
        NodeOptions(device="cpu", rates=False),
        places=replace(places, infiniband=str(tmp_path / "infiniband")),
    )
    assert set(facts["ports"]["before"]) == set(facts["ports"]["after"]) == {f"mlx5_{n}/1" for n in range(4)}
    assert facts["ports"]["before"]["mlx5_0/1"]["counters"] == {"symbol_error": 0}
    failed = {(f.code, f.target.port) for f in judge_stage({"n": facts}).findings if f.verdict == "FAIL"}
    assert ("NET001", "mlx5_2/1") in failed
    stage = columns({"n": facts})
    assert stage.port_up.tolist() == [[True, True, False, True]]


# -- storage


def test_a_probe_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    argv = [
        PYTHON,
        "-m",
        "seatrial.check.node.probe_storage",
        str(tmp_path),
        "4096",
        "600",
        ".seatrial-check-x",
    ]
    probe = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    begun = os.statvfs(tmp_path).f_bfree
    while os.statvfs(tmp_path).f_bfree > begun - 1000:
        assert time.monotonic() < until, "it writes nothing"
        assert probe.poll() is None
    assert list(tmp_path.iterdir()) == []  # even now it has no name
    probe.kill()
    probe.wait()
    assert list(tmp_path.iterdir()) == []


def test_storage_probe_works_without_o_tmpfile_and_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    found = probe_storage.measure(str(tmp_path), 48 << 20, 60.0, "x")
    assert (found["direct"], found["unnamed"]) == (False, False)
    assert found["written_bytes"] == found["read_bytes"] == 48 << 20
    assert found["wrong_blocks"] == 0
    assert list(tmp_path.iterdir()) == []


def test_changed_bytes_are_detected_on_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.readv

    def changed(fd: int, into: Any) -> int:
        done = real(fd, into)
        into[0][-1] ^= 1
        return done

    monkeypatch.setattr(os, "readv", changed)
    found = probe_storage.measure(str(tmp_path), 8 << 20, 60.0, "x")
    assert found["wrong_blocks"] == 2


def test_storage_that_cannot_be_written_or_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_storage("/proc/self", 1.0).get("write_gb_s") is None
    found = read_storage(str(tmp_path / "not" / "there" / "yet"), 1.0, rates=False)
    assert (found["at"], found["problem"]) == (str(tmp_path), None)
    monkeypatch.setattr("seatrial.check.node.node_storage._STAT", "import time; time.sleep(1000)")
    monkeypatch.setattr("seatrial.check.node.node_storage._STAT_S", 1.0)
    found = read_storage(str(tmp_path), 1.0)
    assert (found["ended"], found["problem"]) == ("hung", "stat of the storage: did not end within 1 s")
    assert children() == set()


def test_storage_probe_removes_only_stale_leftovers(tmp_path: Path) -> None:
    old, new = tmp_path / ".seatrial-check-old", tmp_path / ".seatrial-check-new"
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    read_storage(str(tmp_path), 0.5)
    assert [p.name for p in tmp_path.iterdir()] == [new.name]


# -- rates


@pytest.mark.long  # waits for three nodes
def test_one_machine_measures_one_node_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once take turns: the second begins its products when the first has told its rates."""
    order: list[str] = []
    holds = threading.Event()

    def tell(name: str) -> Any:
        def heard(message: dict[str, Any]) -> None:
            if message.get("doing") in ("GEMMs", "TCP on 127.0.0.1"):
                order.append(f"{name}: {message['doing']}")
                holds.set()
            if "cpu" in message:
                assert message["cpu"]["turn"]

        return heard

    first = threading.Thread(target=measure_cpu, args=(60.0, 1, tell("first")))
    first.start()
    assert holds.wait(60.0)
    measure_cpu(60.0, 1, tell("second"))
    first.join()
    assert order == [
        f"{who}: {what}" for who in ("first", "second") for what in ("GEMMs", "TCP on 127.0.0.1")
    ]


class _Event:
    """A CUDA event by the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda with two devices that are this CPU."""
    cuda = torch.cuda
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(cuda, "init", lambda: None)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        cuda,
        "get_device_properties",
        lambda n: SimpleNamespace(name="Fake", pci_domain_id=0, pci_bus_id=0x18 + n, pci_device_id=0),
    )
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (64 << 30, 64 << 30))
    monkeypatch.setattr(cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(cuda, "Event", _Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    real = torch.device
    monkeypatch.setattr(probe_cuda.torch, "device", lambda kind, number: real("cpu"))
    monkeypatch.setattr(probe_cuda, "_SHAPES", ((64, 64, 64), (32, 64, 32)))
    monkeypatch.setattr(probe_cuda, "_GUESS_FLOP_S", 1e7)
    monkeypatch.setattr(probe_cuda, "_SUSTAIN_S", 0.3)
    for name in ("_HBM_BYTES", "_HOST_BYTES", "_PAIR_BYTES"):
        monkeypatch.setattr(probe_cuda, name, 1 << 20)


def test_all_device_measurements_are_reported(two_devices: None) -> None:
    """On a stand-in: what torch.cuda really does is in tests/gpu."""
    told: list[dict[str, Any]] = []
    probe_cuda.measure_cuda(600.0, told.append)
    gpus: dict[str, dict[str, Any]] = {}
    for message in told:
        if "gpu" in message:
            gpus.setdefault(message["gpu"]["pci"], {}).update(message["gpu"])
    assert set(gpus) == {"0000:18:00", "0000:19:00"}
    for gpu in gpus.values():
        assert gpu["problem"] is None
        for rate in ("gemm_tflop_s", "sustained_tflop_s", "hbm_gb_s", "h2d_gb_s", "d2h_gb_s"):
            assert gpu[rate] > 0
        assert gpu["load"] is None  # neither NVML nor nvidia-smi here
        assert gpu["load_problem"]
    (pair,) = (m["pair"] for m in told if "pair" in m)
    assert (pair["from"], pair["to"]) == ("0000:18:00", "0000:19:00")
    assert min(pair["gb_s"], pair["back_gb_s"], pair["both_gb_s"]) > 0
    assert not any("failed" in m or "skipped" in m for m in told)


def test_parts_without_time_left_are_reported(two_devices: None) -> None:
    told: list[dict[str, Any]] = []
    probe_cuda.measure_cuda(-1.0, told.append)
    assert [m["skipped"] for m in told if "skipped" in m] == [
        "bf16 products",
        "sustained bf16 GEMMs",
        "copies within the memory",
        "copies from and to the host",
        "copies between GPUs",
    ]


def test_errors_of_cuda_end_it_and_those_of_memory_do_not(
    two_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(devices: Any, tell: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(devices: Any, tell: Any) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")

    monkeypatch.setattr(probe_cuda, "_products", out_of_memory)
    monkeypatch.setattr(probe_cuda, "_memory", broken)
    told: list[dict[str, Any]] = []
    probe_cuda.measure_cuda(600.0, told.append)
    assert [(m["failed"], m["hardware"]) for m in told if "failed" in m] == [
        ("bf16 products", False),
        ("copies within the memory", True),
    ]
    assert not any("pair" in m for m in told)


def test_nvidia_smi_samples_where_nvml_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "00000000:18:00.0, 1500, 5, 16, 61, 690.5, 0x0000000000000004, 1980, 5, 16\\n"
    program(tmp_path, "nvidia-smi", f"printf '{lines}%.0s' 1 2 3 4; exec sleep 1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with load_samples.Sampler() as sampler:
        until = time.monotonic() + 60
        while not sampler.summary().get("0000:18:00", {}).get("samples"):
            assert time.monotonic() < until
            os.sched_yield()
    found = sampler.summary()["0000:18:00"]
    assert sampler.problem is None
    assert (found["sm_mhz"], found["reasons"], found["pcie_gen"], found["pcie_width"]) == (1500, 4, 5, 16)
    assert found["limits"] == {"sm_mhz": 1980, "pcie_gen": 5, "pcie_width": 16}
    assert children() == set()


def test_a_result_as_json() -> None:
    facts = Result("x", "hung", -9, "out", "err", 1.0, 1.0).facts()
    assert json.loads(json.dumps(facts))["why"] == "x: did not end within 1 s"
    assert "out" not in facts
