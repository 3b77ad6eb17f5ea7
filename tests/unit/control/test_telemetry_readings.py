"""What is read of a node: the host from files as the kernel writes them, ports, and GPUs on a stand-in for NVML."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.control.telemetry.gpus import GpuSeries
from seatrial.control.telemetry.host import HostLoad
from seatrial.control.telemetry.node_sampler import storage_values
from seatrial.control.telemetry.ports import port_values
from seatrial.hardware.counters import Port
from seatrial.record.series import (
    MOST_GPUS,
    MOST_PORTS,
    NODE_SERIES,
    THROTTLE_REASONS,
    parse_series,
    series,
)
from seatrial.record.telemetry_writer import MOST_SERIES

NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0
  eth0: 1000 1 0 0 0 0 0 0 200 1 0 0 0 0 0 0
  eth1: 500 1 0 0 0 0 0 0 70 1 0 0 0 0 0 0
 veth0: 77 1 0 0 0 0 0 0 77 1 0 0 0 0 0 0
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host of two processors, 16 GiB, and two network cards."""
    files = {
        "proc/stat": "cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1\ncpu1 2\nintr 3\n",
        "proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n",
        "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n",
        "proc/pressure/io": "some avg10=0 avg60=0 avg300=0 total=10\nfull avg10=0 avg60=0 avg300=0 total=2000000\n",
        "proc/net/dev": NET,
        "proc/net/snmp": "Ip: A B\nIp: 1 2\nTcp: InSegs OutSegs RetransSegs\nTcp: 5 400 7\n",
        "sys/class/net/eth0/device/vendor": "x",
        "sys/class/net/eth1/device/vendor": "x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_host(root: Path) -> None:
    host = HostLoad(root)
    (root / "proc/stat").write_text("cpu  130 0 120 735 115 0 0 0 80 0\ncpu0 1\ncpu1 2\nintr 3\n")
    found = {name: value for name, value in host.read().items() if "clock" not in name}
    assert found == {
        "node_cpus": 2,
        "node_cpu_busy_ratio": pytest.approx(0.5),
        "node_cpu_iowait_ratio": pytest.approx(0.15),
        "node_memory_total_bytes": 16 << 30,
        "node_memory_used_bytes": 12 << 30,
        "node_memory_available_bytes": 4 << 30,
        'node_pressure_seconds_total{resource="cpu",tasks="some"}': 1.5,
        'node_pressure_seconds_total{resource="io",tasks="some"}': 1e-5,
        'node_pressure_seconds_total{resource="io",tasks="full"}': 2.0,
        "node_network_received_bytes_total": 1500,
        "node_network_sent_bytes_total": 270,
        "node_tcp_sent_segments_total": 400,
        "node_tcp_retransmitted_segments_total": 7,
    }


def test_no_hardware_card_in_a_container(root: Path) -> None:
    for name in ("eth0", "eth1"):
        (root / f"sys/class/net/{name}/device/vendor").unlink()
        (root / f"sys/class/net/{name}/device").rmdir()
    assert HostLoad(root).read()["node_network_received_bytes_total"] == 1577


def test_values_that_the_kernel_does_not_report_are_absent(tmp_path: Path) -> None:
    assert not [name for name in HostLoad(tmp_path).read() if "clock" not in name]


def test_this_host() -> None:
    names = HostLoad().read().keys()
    assert {"node_cpus", "node_memory_used_bytes", "node_tcp_sent_segments_total"} <= names
    assert {parse_series(name)[0] for name in names} <= NODE_SERIES.keys()


def test_storage(tmp_path: Path) -> None:
    found = storage_values("run", tmp_path / "not" / "there")
    free, total = (found[series(f"storage_{what}_bytes", storage="run")] for what in ("free", "total"))
    assert 0 < free <= total


# -- ports

IDLE = Port("mlx5_0", 1, "ConnectX-7", "ACTIVE", "InfiniBand", 400.0, {
    "port_xmit_data": 1000, "port_rcv_data": 2000, "port_xmit_wait": 0, "link_downed": 1, "symbol_error": 65535,
    "port_rcv_errors": 4, "packet_seq_err": 2, "out_of_sequence": 3, "np_cnp_sent": 5, "rp_cnp_handled": 6,
    "np_ecn_marked_roce_packets": 8, "port_xmit_discards": 0,
})  # fmt: skip


def of_port(port: Port, before: Port = IDLE) -> dict[str, float]:
    found = port_values({before.name: before}, {port.name: port}, 10.0)
    return {
        name.partition("{")[0] if "direction" not in name else name: value for name, value in found.items()
    }


def test_port() -> None:
    # A tick is the time of 8 bytes: a tenth of 10 s at 50 GB/s.
    found = of_port(replace(IDLE, counters=IDLE.counters | {"port_xmit_wait": 6_250_000_000 // 2 - 1}))
    assert found.pop("port_transmit_wait_ratio") == pytest.approx(0.05, rel=1e-6)
    assert found == {
        "port_active": 1,
        "port_speed_bytes_per_second": 50e9,
        "port_sent_bytes_total": 4000,
        "port_received_bytes_total": 8000,
        "port_link_downed_total": 1,
        "port_errors_total": 4,  # symbol_error is saturated
        "port_retransmissions_total": 5,
        "port_discards_total": 0,
        "port_ecn_marked_packets_total": 8,
        'port_cnp_total{port="mlx5_0/1",direction="sent"}': 5,
        'port_cnp_total{port="mlx5_0/1",direction="received"}': 6,
    }


def test_port_without_counters() -> None:
    assert of_port(replace(IDLE, state="DOWN", gbit_s=None, counters={})) == {"port_active": 0}


# -- GPUs


class Nvml:
    """As much of NVML as is asked for: GPU 0 trains and is hot, GPU 1 is another job's, GPU 2 answers little."""

    handles = {"0000:3b:00": 0, "0000:5f:00": 1, "0000:af:00": 2}  # noqa: RUF012

    def __init__(self) -> None:
        self.reasons = [0x04 | 0x40, 0x04, 0, 0x04]
        self.mhz = [1980, 1980, 1200, 1200]

    def ask(self, name: str, *arguments: Any) -> Any:
        handle, *rest = arguments
        assert handle != 1, "not ours"
        if handle == 2:
            return None
        match name.removeprefix("nvmlDeviceGet"), rest:
            case "UtilizationRates", []:
                return types.SimpleNamespace(gpu=75)
            case "ClockInfo", [1]:
                return self.mhz.pop(0)
            case "CurrentClocksThrottleReasons", []:
                return self.reasons.pop(0)
            case "PowerUsage", []:
                return 698_123
            case "Temperature", [0]:
                return 71
            case "MemoryInfo", []:
                return types.SimpleNamespace(used=60 << 30, total=80 << 30)
            case "TotalEccErrors", [kind, 0]:
                return (12, 1)[kind]
            case "FieldValues", [[(field, 0xFFFFFFFF)]]:
                value = types.SimpleNamespace(ullVal=field)
                return [types.SimpleNamespace(nvmlReturn=0, value=value)]
            case "Name", []:
                return b"NVIDIA H100 80GB HBM3"
            case "PcieReplayCounter", []:
                return 3
        return None  # CurrentClocksEventReasons: an older package


def test_gpus() -> None:
    nvml = Nvml()
    gpus = GpuSeries(nvml.ask, nvml.handles, ["0000:3b:00", "0000:af:00"])
    for share in (0.5, None, 0.25, 0.75):
        gpus.sample({"0000:3b:00": share, "0000:5f:00": 1.0})
    gpus.links(
        {("GPU-a", 0): {"crc errors": 2, "link": 9}, ("GPU-a", 1): {"replay errors": 3}},
        {"GPU-a": "0000:3b:00"},
    )
    found = gpus.values()
    expected = {
        "gpu_tensor_active_ratio": 0.5,
        "gpu_busy_ratio": 0.75,
        "gpu_sm_clock_hertz": 1.59e9,
        "gpu_power_watts": 698.123,
        "gpu_temperature_celsius": 71,
        "gpu_memory_used_bytes": 60 << 30,
        "gpu_memory_total_bytes": 80 << 30,
        "gpu_pcie_replays_total": 3,
        "gpu_nvlink_errors_total": 5,
        "gpu_nvlink_sent_bytes_total": 138 * 1024,
        "gpu_nvlink_received_bytes_total": 139 * 1024,
    }
    for name, value in expected.items():
        assert found.pop(series(name, gpu=0)) == pytest.approx(value), name
    throttled = {r: found.pop(series("gpu_throttle_ratio", gpu=0, reason=r)) for r in THROTTLE_REASONS}
    assert throttled == {
        "power_cap": 0.75,
        "hw_thermal": 0.25,
        "hw_slowdown": 0,
        "hw_power_brake": 0,
        "sw_thermal": 0,
    }
    assert found == {
        series("gpu_ecc_errors_total", gpu=0, severity="corrected"): 12,
        series("gpu_ecc_errors_total", gpu=0, severity="uncorrected"): 1,
        series("gpu_info", gpu=0, pci="0000:3b:00", name="NVIDIA H100 80GB HBM3"): 1,
        series("gpu_info", gpu=2, pci="0000:af:00", name="unknown"): 1,
    }, "what GPU 2 does not answer is absent; GPU 1 is another job's"
    nvml.reasons, nvml.mhz = [0x08], [900]
    gpus.sample({})
    again = gpus.values()
    assert again[series("gpu_sm_clock_hertz", gpu=0)] == 9e8, "the mean since the last values"
    assert series("gpu_tensor_active_ratio", gpu=0) not in again


def test_series_of_a_node_are_bounded() -> None:
    """The largest node that telemetry records: every GPU, port and storage with every label."""
    values = {"severity": 2, "reason": len(THROTTLE_REASONS), "direction": 2, "resource": 3, "tasks": 2}
    values |= {"gpu": MOST_GPUS, "port": MOST_PORTS, "storage": 3, "pci": 1, "name": 1}
    count = 0
    for each in NODE_SERIES.values():
        product = 1
        for label in each.labels:
            product *= values[label]
        count += product
    assert count <= MOST_SERIES


def test_no_more_ports_than_the_limit() -> None:
    ports = {f"mlx5_{i}/1": replace(IDLE, device=f"mlx5_{i}") for i in range(MOST_PORTS + 5)}
    named = {parse_series(name)[1]["port"] for name in port_values(ports, ports, 10.0)}
    assert len(named) == MOST_PORTS
