"""What is read of a node: from trees of /proc and /sys as they are on other machines, and from what NVML answers."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from seatrial.base.kernel_files import fields_of, number_of, text_of
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.findings import Finding
from seatrial.check.node import node_gpu, node_storage, probe_nvml
from seatrial.check.node.judge_node import pieces_of
from seatrial.check.node.node_clock import parse_chrony, read_clock
from seatrial.check.node.node_inventory import last_level_cache_bytes, read_inventory
from seatrial.check.node.node_kernel import read_kernel_log
from seatrial.check.node.node_limits import read_limits
from seatrial.check.node.node_ports import default_interface, fabric_of, is_up, mlxlink_orders, read_interface
from seatrial.check.node.node_stage import collect_rates
from seatrial.check.outputs.kernel_text import is_relevant
from seatrial.check.outputs.kernel_text import parse as parse_log
from seatrial.check.outputs.tool import Lines

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# -- files


def test_missing_files_and_files_without_a_number(tmp_path: Path) -> None:
    tree(tmp_path, {"a": "max\n", "b": " 12 \n", "c": 'Name: x: y\nKEY="v"\nName: z\nnothing\n'})
    assert text_of(tmp_path / "nope") is None
    assert (number_of(tmp_path / "a"), number_of(tmp_path / "b"), number_of(tmp_path / "nope")) == (
        None,
        12,
        None,
    )
    assert fields_of(tmp_path / "c") == {"Name": "x: y", "KEY": "v"}
    assert fields_of(tmp_path) == {}


# -- inventory


def test_the_inventory_of_a_gpu_node(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "processor : 0\nmodel name : Intel(R) Xeon(R) Platinum 8480C\n",
        "proc/meminfo": "MemTotal:       2113443288 kB\nMemAvailable:   2000000000 kB\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
        "proc/uptime": "1234.56 9999.00\n",
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.4 LTS"\n',
        "sys/devices/system/cpu/online": "0-111,224-335\n",
        "sys/devices/system/node/node0/cpulist": "0-111\n",
        "sys/devices/system/node/node1/cpulist": "224-335\n",
        "dev/nvidia0": "",
        "dev/nvidia1": "",
        "dev/nvidiactl": "",
        "dev/nvidia-uvm": "",
    }
    for address, kind, vendor, device in (
        ("0000:18:00.0", "0x030200", "0x10de", "0x2335"),
        ("0000:2a:00.0", "0x030200", "0x10de", "0x2335"),
        ("0000:03:00.0", "0x030000", "0x1a03", "0x2000"),  # the board's management controller
        ("0000:19:00.0", "0x020700", "0x15b3", "0x1021"),
        ("0000:c1:00.0", "0x120000", "0x1002", "0x74a1"),
    ):
        folder = f"sys/bus/pci/devices/{address}"
        files |= {f"{folder}/class": kind, f"{folder}/vendor": vendor, f"{folder}/device": device}
    found = read_inventory(tree(tmp_path, files))
    assert found["cpu"] == "Intel(R) Xeon(R) Platinum 8480C"
    assert found["cpus_online"] == 224
    assert found["numa_nodes"] == 2
    assert found["memory_bytes"] == 2113443288 * 1024
    assert found["system"] == "Ubuntu 22.04.4 LTS"
    assert (found["nvidia_driver"], found["gpu_files"], found["uptime_s"]) == ("570.86.15", 2, 1234.56)
    assert [(g["pci"], g["ids"], g["vendor"]) for g in found["pci_gpus"]] == [
        ("0000:18:00", "10de:2335", "NVIDIA"),
        ("0000:2a:00", "10de:2335", "NVIDIA"),
        ("0000:c1:00", "1002:74a1", "AMD"),
    ]
    assert found["pci_nics"] == [{"pci": "0000:19:00", "ids": "15b3:1021"}]


def test_an_inventory_of_nothing(tmp_path: Path) -> None:
    found = read_inventory(tmp_path)
    assert found["pci_gpus"] == found["pci_nics"] == []
    assert found["memory_bytes"] is found["nvidia_driver"] is found["uptime_s"] is None


def test_caches_that_are_shared_count_once(tmp_path: Path) -> None:
    for cpu in range(4):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cache"
        shared = "0-1" if cpu < 2 else "2-3"
        tree(tmp_path, {f"{folder}/index0/level": "1", f"{folder}/index0/size": "48K"})
        tree(tmp_path, {f"{folder}/index3/level": "3", f"{folder}/index3/size": "32768K"})
        tree(tmp_path, {f"{folder}/index3/shared_cpu_list": shared})
    assert last_level_cache_bytes(tmp_path) == 2 * 32768 * 1024
    assert last_level_cache_bytes(tmp_path / "nope") is None


# -- limits


def test_limits_of_a_container_with_cgroup_v2(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/c1\n",
            "proc/self/status": "Name:\tpython\nCapEff:\t00000000a80425fb\n",
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 500 kB\nSwapTotal: 100 kB\nSwapFree: 60 kB\n",
            "proc/sys/vm/overcommit_memory": "1\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
            "sys/fs/cgroup/kubepods/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/kubepods/pod1/pids.max": "1000\n",
            "sys/fs/cgroup/kubepods/pod1/c1/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/pod1/c1/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod1/c1/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/kubepods/pod1/c1/pids.max": "max\n",
            "run/.containerenv": "",
        },
    )
    found = read_limits(root, shm=tmp_path)
    assert (found["cgroup"], found["cpu_quota"], found["pids_limit"]) == ("v2", 4.0, 1000)
    assert (found["memory_limit_bytes"], found["memory_used_bytes"]) == (8 * GIB, 2 * GIB)
    assert (found["memory_available_bytes"], found["swap_used_bytes"]) == (500 * 1024, 40 * 1024)
    assert (found["may_lock_all"], found["overcommit"], found["container"]) == (False, 1, "Podman")
    assert found["shm"]["size"] > 0


def test_limits_with_cgroup_v1_and_without_any(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
            "proc/self/status": "CapEff:\t000001ffffffffff\n",
            # In the container its own group is the mount's top.
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    found = read_limits(root, shm=tmp_path / "nope")
    assert (found["cgroup"], found["cpu_quota"]) == ("v1", 2.5)
    assert (found["memory_limit_bytes"], found["memory_used_bytes"]) == (4 * GIB, GIB)
    assert (found["may_lock_all"], found["shm"]) == (True, None)
    tree(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    tree(tmp_path, {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"})
    found = read_limits(root)
    assert found["cpu_quota"] is found["memory_limit_bytes"] is None
    assert read_limits(tmp_path / "empty")["cgroup"] is None


# -- clock


def test_what_chrony_prints() -> None:
    line = "A29FC87B,162.159.200.123,4,1700000000.123,0.000021,0.00001,0.00002,1.5,0.01,0.1,0.02,0.001,64.2,Normal\n"
    assert parse_chrony(line) == {
        "source": "162.159.200.123",
        "stratum": 4,
        "offset_s": 0.000021,
        "leap": "Normal",
    }
    assert parse_chrony("506 Cannot talk to daemon\n") is None


def test_the_kernel_reports_this_machines_clock() -> None:
    """adjtimex, with the real structure of this machine: a wrong layout would give nonsense."""
    found = read_clock()["kernel"]
    assert found is not None
    assert abs(found["offset_s"]) < 1.0
    assert 0 <= found["max_error_s"] <= 16.0  # NTP_PHASE_LIMIT


# -- kernel log


def test_an_invisible_kernel_log_and_one_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # neither dmesg nor journalctl
    found = read_kernel_log(tmp_path / "nope")
    assert found["text"] is None
    assert "No such file" in found["problem"]
    assert "dmesg: not installed" in found["problem"]
    log = tmp_path / "log"
    log.write_text("")
    assert "is empty" in read_kernel_log(log)["problem"]
    # As /dev/kmsg writes: the first number says what was overwritten.
    log.write_text("6,0,1,-;Linux version\n6,1,2,-;usb\n")
    found = read_kernel_log(log)
    assert (found["text"], found["lost"], found["lines"], found["cut"]) == (log.read_text(), False, 2, False)
    log.write_text("6,812,1,-;usb\n")
    assert read_kernel_log(log)["lost"]
    xid = "3,5000,2,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    log.write_text(xid + "\n" + "".join(f"6,{n},3,-;usb 1-1: new device\n" for n in range(5001, 9001)))
    found = read_kernel_log(log)
    assert (found["cut"], found["lines"]) == (True, 4001)
    assert found["text"].splitlines()[0] == xid
    assert len(found["text"].splitlines()) == 101


def test_relevant_lines_are_those_that_are_judged() -> None:
    lines = [
        "6,1,1,-;usb 1-1: new device",
        "3,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "4,3,3,-;mce: [Hardware Error]: Machine check events logged",
        "3,4,4,-;Out of memory: Killed process 77 (python)",
        "6,5,5,-;mlx5_core 0000:81:00.0: 31.504 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x4 link at 0000:80:01.1 (capable of 126.024 Gb/s with 16.0 GT/s PCIe x8 link)",
        "3,6,6,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 01 TLC",
        "6,7,7,-;NVRM: loading NVIDIA UNIX Open Kernel Module",
    ]
    kept = [line for line in lines if is_relevant(line)]
    assert kept == lines[1:6]
    whole, cut = parse_log(Lines.of("\n".join(lines)), "x"), parse_log(Lines.of("\n".join(kept)), "x")
    assert [m.xid for m in cut.messages] == [m.xid for m in whole.messages]
    assert [(o.what, o.quote) for o in cut.others] == [(o.what, o.quote) for o in whole.others]


# -- ports


def test_the_device_of_the_default_route(tmp_path: Path) -> None:
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    route = tmp_path / "route"
    route.write_text(
        head
        + "ib0\t00000000\t010A0A0A\t0003\t0\t0\t300\t00000000\t0\t0\t0\n"
        + "eth1\t000AA8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        + "eth0\t00000000\t010A0A0A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    )
    assert default_interface(route) == "eth0"
    route.write_text(head)
    assert default_interface(route) is None
    net = tree(tmp_path / "net", {"eth7/operstate": "up\n", "eth7/speed": "-1\n", "eth7/mtu": "1500\n"})
    found = read_interface("eth7", net=net, route=route)
    assert (found["state"], found["mbit_s"], found["mtu"], is_up(found)) == ("up", None, 1500, True)
    assert not is_up(read_interface("eth8", net=net, route=route))
    assert not is_up(read_interface(None, net=net, route=route))


def test_ports_that_are_down_are_looked_into() -> None:
    text = "".join(
        f"/sys/class/infiniband/mlx5_{n}/{file}:{value}\n"
        for n, state in enumerate(("4: ACTIVE", "1: DOWN"))
        for file, value in (
            ("hca_type", "MT4129"),
            ("ports/1/state", state),
            ("ports/1/phys_state", "5: LinkUp" if n == 0 else "2: Polling"),
            ("ports/1/rate", "400 Gb/sec (4X NDR)" if n == 0 else "10 Gb/sec (4X SDR)"),
            ("ports/1/link_layer", "InfiniBand"),
        )
    )
    assert set(fabric_of(text)) == {"mlx5_0/1", "mlx5_1/1"}
    assert [o.argv for o in mlxlink_orders(text)] == [("mlxlink", "-d", "mlx5_1", "-p", "1")]
    assert fabric_of("nothing of the kind") == {}
    assert mlxlink_orders("") == []


# -- storage


def test_the_mount_that_a_folder_lies_on(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 21 0:25 / /data rw shared:1 - nfs4 filer:/a rw\n"
        "31 30 0:26 / /data/my\\040runs rw - lustre 10.0.0.1@o2ib:/fs rw\n"
        "broken line\n"
    )
    assert node_storage._mount("/data/my runs/x", mounts)["type"] == "lustre"
    assert node_storage._mount("/data/other", mounts) == {"type": "nfs4", "source": "filer:/a"}
    assert node_storage._mount("/database", mounts)["type"] == "ext4"
    assert node_storage._mount("/x", tmp_path / "nope") == {"type": None, "source": None}


# -- rates


def test_what_was_measured_before_the_end_counts() -> None:
    text = "\n".join(
        [
            '{"doing": "bf16 products"}',
            '{"gpu": {"pci": "0000:18:00", "gemm_tflop_s": 700.0}}',
            "a warning of some library",
            '{"gpu": {"pci": "0000:18:00", "hbm_gb_s": 4000.0}}',
            '{"failed": "copies", "problem": "CUDA error", "hardware": true}',
            '{"doing": "copies between GPUs"}',
            '{"pair": {"from": "a", "to',
        ]
    )
    found = collect_rates(text)
    assert found["gpus"] == {"0000:18:00": {"gemm_tflop_s": 700.0, "hbm_gb_s": 4000.0}}
    assert (found["doing"], found["whole"], found["pairs"]) == ("copies between GPUs", False, [])
    assert found["failed"] == [{"part": "copies", "problem": "CUDA error", "hardware": True}]
    assert collect_rates("")["whole"] is False
    assert collect_rates('{"done": true}')["whole"] is True


# -- NVML


class NvmlError(Exception):
    """As pynvml's."""


class Library(ModuleType):
    """A stand-in for pynvml: two H200s of which nothing is wrong. What is no attribute, NVML does not know."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.health, self.state, self.pending, self.action, self.lost = 0b10101010, 3, 0, 0, False

    def nvmlInit(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.lost and index == 1:
            raise NvmlError("GPU is lost")
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x18 + handle:02X}:00.0".encode())

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=143771 << 20)

    def nvmlDeviceGetEccMode(self, handle: int) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return 0

    def nvmlDeviceGetMemoryErrorCounter(self, handle: int, kind: int, counter: int, where: int) -> int:
        return 0

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return 0, 1, self.pending, 0

    def nvmlDeviceGetFieldValues(self, handle: int, ids: list[int]) -> list[Any]:
        assert ids == [230]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.action))]

    def nvmlDeviceGetPerformanceState(self, handle: int) -> int:
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x1

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        return 345 if which == 1 else 3201

    def nvmlDeviceGetMaxClockInfo(self, handle: int, which: int) -> int:
        return 1980 if which == 1 else 3201

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 18:
            raise NvmlError("Invalid Argument")
        return int((handle, link) != (1, 5))

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, info: Any) -> int:
        found = info._obj
        assert found.version == 0x02000024  # nvmlGpuFabricInfo_v2
        assert ctypes.sizeof(found) == 0x24
        found.state, found.status, found.health = self.state, 0, self.health
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def judged() -> list[Finding]:
    facts = json.loads(json.dumps(probe_nvml.read()))
    outputs = [{"tool": "NVML", "states": node_gpu.states_of(facts)}]
    (piece,) = pieces_of({"outputs": outputs, "kernel": {"text": None}}, "n")
    return list(judge_pieces([piece]).findings)


def test_nvml_values_are_judged_like_nvidia_smi(library: Library) -> None:
    assert {(f.verdict, f.evidence) for f in judged()} == {("PASS", ("n: NVML",))}
    found = probe_nvml.read()
    assert found["driver"] == "570.86.15"
    assert [g["pci"] for g in found["gpus"]] == ["0000:18:00", "0000:19:00"]
    assert found["gpus"][0]["links"] == {str(n): True for n in range(18)}
    assert found["gpus"][1]["links"]["5"] is False
    assert found["gpus"][0]["processes"] is None  # not told by this library


@pytest.mark.parametrize(
    ("change", "code", "verdict"),
    [
        ({"health": 0b10101001}, "NVL005", "FAIL"),  # bandwidth degraded
        ({"health": 0b10011010}, "NVL005", "FAIL"),  # route unhealthy
        ({"health": 0b10100110}, "NVL005", "WARN"),  # route recovery in progress
        ({"state": 2}, "NVL005", "FAIL"),
        ({"action": 1}, "GPU009", "FAIL"),
        ({"action": 9}, "GPU009", "FAIL"),
        ({"lost": True}, "GPU002", "FAIL"),
        ({"pending": 1}, "GPU005", "PASS"),  # of a row that failed before the driver was loaded
        ({"nvmlDeviceGetMemoryErrorCounter": lambda *_: 2}, "GPU003", "FAIL"),
        ({"nvmlDeviceGetRetiredPages": lambda _, cause: [1] * 40}, "GPU006", "FAIL"),
        ({"nvmlDeviceGetCurrPcieLinkWidth": lambda _: 8}, "GPU008", "FAIL"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x48}, "GPU007", "FAIL"),
        ({"nvmlDeviceGetMemoryInfo": lambda n: SimpleNamespace(total=(n + 1) << 30)}, "GPU010", "WARN"),
        ({"nvmlDeviceGetPciInfo": lambda _: None}, "GPU011", "UNJUDGED"),
    ],
)
def test_faults_reported_by_nvml(library: Library, change: dict[str, Any], code: str, verdict: str) -> None:
    vars(library).update(change)
    assert (code, verdict) in {(f.code, f.verdict) for f in judged()}


def test_a_missing_fabric_is_not_a_fault(library: Library) -> None:
    library.state, library.health = 0, 0
    assert {f.verdict for f in judged()} == {"PASS"}


def test_device_files_show_which_gpus_are_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, {"nvidia0": "", "nvidia1": "", "nvidia2": "", "nvidiactl": "", "nvidia-uvm": ""})
    real = os.open

    def opened(path: Path, flags: int) -> int:
        if path.name != "nvidia0":
            number = {"nvidia1": errno.EPERM, "nvidia2": errno.EIO}[path.name]
            raise OSError(number, os.strerror(number))
        return real(path, flags)

    monkeypatch.setattr(os, "open", opened)
    assert probe_nvml.device_files(tmp_path) == {"nvidia0": "ok", "nvidia1": "EPERM", "nvidia2": "EIO"}


def test_nvml_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    def refuse() -> None:
        raise NvmlError("Driver/library version mismatch")

    monkeypatch.setattr(library, "nvmlInit", refuse)
    assert probe_nvml.read() == {"problem": "NVML: Driver/library version mismatch"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert probe_nvml.read() == {"problem": "the package nvidia-ml-py is not installed"}
    assert node_gpu.states_of({"problem": "x"}) is None


def test_this_process_holds_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read_inventory()
    read_limits()
    read_kernel_log(tmp_path / "nope")
    assert len(os.listdir("/proc/self/fd")) <= before
