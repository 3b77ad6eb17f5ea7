"""Facts of nodes as node_stage.measure() tells them, for tests of what is made of them."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from seatrial.check.node.node_stage import FACTS_VERSION, NodeOptions
from seatrial.hardware.counters import Port

GIB = 1 << 30
PCIS = (
    "0000:18:00",
    "0000:2a:00",
    "0000:3a:00",
    "0000:5d:00",
    "0000:9a:00",
    "0000:ab:00",
    "0000:ba:00",
    "0000:db:00",
)
LIMITS = {"sm_mhz": 1980, "memory_mhz": 3201, "pcie_gen": 5, "pcie_width": 16, "power_w": 700.0}
NAME = "NVIDIA H200"


def cpu_node() -> dict[str, Any]:
    """A node without GPUs of which nothing is wrong."""
    return copy.deepcopy(
        {
            "version": FACTS_VERSION,
            "options": asdict(NodeOptions()),
            "inventory": {
                "host": "n",
                "kernel": "6.1.0",
                "architecture": "x86_64",
                "system": "Debian GNU/Linux 12 (bookworm)",
                "cpu": "AMD EPYC",
                "cpus_online": 16,
                "numa_nodes": 1,
                "memory_bytes": 64 * GIB,
                "pci_gpus": [],
                "pci_nics": [{"pci": "0000:00:03", "ids": "1af4:1041"}],
                "gpu_files": 0,
                "nvidia_driver": None,
                "packages": {"torch": "2.13.0", "nvidia-ml-py": None},
                "uptime_s": 1000.0,
            },
            "limits": {
                "limits": {"memlock": [None, None], "nofile": [65536, 65536], "nproc": [None, None]},
                "may_lock_all": False,
                "uid": 0,
                "cpus": 16,
                "cgroup": "v2",
                "cpu_quota": None,
                "memory_limit_bytes": None,
                "memory_used_bytes": None,
                "memory_available_bytes": 60 * GIB,
                "swap_used_bytes": 0,
                "pids_limit": None,
                "overcommit": 0,
                "shm": {"size": 32 * GIB, "free": 32 * GIB},
                "container": None,
            },
            "clock": {
                "kernel": {"synchronised": True, "offset_s": 1e-5, "max_error_s": 0.01},
                "chrony": None,
                "timedatectl": True,
                "no_answer": [],
            },
            "interface": {"name": "eth0", "problem": None, "state": "up", "mbit_s": 25000, "mtu": 9000},
            "gpus": None,
            "gpus_after": None,
            "storage": {
                "folder": "/data/checkpoints",
                "at": "/data/checkpoints",
                "size_bytes": 1000 * GIB,
                "free_bytes": 500 * GIB,
                "inodes": 1000,
                "free_inodes": 900,
                "read_only": False,
                "writable": True,
                "problem": None,
                "type": "ext4",
                "source": "/dev/nvme0n1",
                "write_gb_s": 2.0,
                "read_gb_s": 3.0,
                "wrong_blocks": 0,
            },
            "rates": {
                "device": "cpu",
                "cpu": {
                    "threads": 16,
                    "gemm_gflop_s": 1000.0,
                    "memory_gb_s": 100.0,
                    "memory_share": 0.98,
                    "loopback_gb_s": 3.0,
                    "loopback_share": 1.0,
                },
                "gpus": {},
                "pairs": [],
                "skipped": [],
                "failed": [],
                "doing": "TCP on 127.0.0.1",
                "whole": True,
                "ended": "ok",
                "problem": "",
                "seconds": 4.0,
            },
            "link_errors": [None, None],
            "ports": {"before": {}, "after": {}},
            "load_s": 8.0,
            "kernel": {
                "source": "/dev/kmsg",
                "text": "6,1,0,-;Linux version 6.1.0\n6,2,10,-;Command line: quiet\n",
                "problem": None,
                "lost": False,
                "lines": 2,
                "cut": False,
            },
            "outputs": [],
            "calls": [],
            "parts": {},
            "seconds": 9.0,
        }
    )


def port(number: int, **changes: Any) -> dict[str, Any]:
    """One port of ConnectX-7, active at 400 Gb/s."""
    found = Port(
        f"mlx5_{number}", 1, "MT4129", "ACTIVE", "InfiniBand", 400.0, {"symbol_error": 3, "link_downed": 0}
    )
    return asdict(found) | changes


def load(**changes: Any) -> dict[str, Any]:
    """Samples of a healthy H200 under its products: held by its power limit."""
    found = {
        "samples": 15,
        "sm_mhz": 1700,
        "least_sm_mhz": 1650,
        "reasons": 0x4,
        "pcie_gen": 5,
        "pcie_width": 16,
    }
    return found | {"temperature_c": 60, "power_w": 698.0, "limits": dict(LIMITS)} | changes


def gpu_node(gpus: int = 8) -> dict[str, Any]:
    """A node of H200s with as many ports, of which nothing is wrong."""
    facts = cpu_node()
    facts["inventory"] |= {"nvidia_driver": "570.86.15", "gpu_files": gpus}
    facts["inventory"]["pci_gpus"] = [
        {"pci": pci, "ids": "10de:2335", "vendor": "NVIDIA"} for pci in PCIS[:gpus]
    ]
    facts["gpus"] = {
        "problem": None,
        "ended": "ok",
        "driver": "570.86.15",
        "files": {f"nvidia{n}": "ok" for n in range(gpus)},
        "gpus": [
            {
                "index": n,
                "pci": pci,
                "bus_id": f"0000{pci}.0",
                "name": NAME,
                "uuid": f"GPU-{n}",
                "now": {},
                "limits": dict(LIMITS),
                "links": {str(link): True for link in range(18)},
                "uncorrectable": 0,
                "processes": 0,
            }
            for n, pci in enumerate(PCIS[:gpus])
        ],
    }
    facts["gpus_after"] = copy.deepcopy(facts["gpus"])
    ports = {f"mlx5_{n}/1": port(n) for n in range(gpus)}
    facts["ports"] = {"before": ports, "after": copy.deepcopy(ports)}
    rates = {"hbm_gb_s": 4100.0, "h2d_gb_s": 55.0, "d2h_gb_s": 54.0, "problem": None, "name": NAME}
    facts["rates"] |= {
        "device": "cuda",
        "cpu": None,
        "gpus": {
            pci: rates | {"gemm_tflop_s": 790.0, "sustained_tflop_s": 700.0, "load": load()}
            for pci in PCIS[:gpus]
        },
        "pairs": [
            {
                "from": one,
                "to": other,
                "peer_access": True,
                "gb_s": 376.0,
                "back_gb_s": 375.0,
                "both_gb_s": 740.0,
            }
            for i, one in enumerate(PCIS[:gpus])
            for other in PCIS[i + 1 : gpus]
        ],
    }
    return facts
