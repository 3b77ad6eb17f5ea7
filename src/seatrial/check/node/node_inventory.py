"""The components of a node, by /proc and /sys: what must be equal among nodes that train together."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

from seatrial.base.kernel_files import bytes_of, fields_of, number_of, text_of
from seatrial.hardware.topology import cpus_of
from seatrial.hardware.xid import address

# Classes of /sys/bus/pci/devices/*/class: display controllers (VGA, 3D) and AMD's processing accelerators.
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_NETWORK_CLASSES = ("0x0200", "0x0207", "0x0280")  # Ethernet, InfiniBand, other
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9]+(?:\.[0-9]+)+)")
_PACKAGES = ("torch", "nvidia-ml-py")


def read_inventory(root: Path = Path("/")) -> dict[str, Any]:
    """Kernel, processors, memory, PCI devices, driver and packages. `root` is the parent of /proc, /sys, /dev and /etc.

    Memory in bytes. GPUs and NICs are PCI addresses ("0000:3b:00") with their ids ("10de:2335").
    """
    gpus, nics = _pci(root / "sys/bus/pci/devices")
    system = os.uname()
    processors = fields_of(root / "proc/cpuinfo")
    driver = _DRIVER.search(text_of(root / "proc/driver/nvidia/version") or "")
    files = [p.name for p in (root / "dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
    return {
        "host": system.nodename,
        "kernel": system.release,
        "architecture": system.machine,
        "system": fields_of(root / "etc/os-release").get("PRETTY_NAME"),
        "cpu": processors.get("model name") or processors.get("CPU part"),
        "cpus_online": len(cpus_of(text_of(root / "sys/devices/system/cpu/online") or "")) or os.cpu_count(),
        "numa_nodes": len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        "memory_bytes": bytes_of(fields_of(root / "proc/meminfo").get("MemTotal")),
        "pci_gpus": gpus,
        "pci_nics": nics,
        "gpu_files": len(files),
        "nvidia_driver": driver[1] if driver else None,
        "packages": {name: _version(name) for name in _PACKAGES},
        "uptime_s": _seconds(text_of(root / "proc/uptime")),
    }


def _pci(devices: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    gpus, nics = [], []
    for device in sorted(devices.iterdir()) if devices.is_dir() else []:
        kind, vendor = text_of(device / "class") or "", text_of(device / "vendor") or ""
        ids = f"{vendor.removeprefix('0x')}:{(text_of(device / 'device') or '').removeprefix('0x')}"
        entry = {"pci": address(device.name) or device.name, "ids": ids}
        # A board's management controller is a display controller too, but of another vendor.
        if kind[:6] in _GPU_CLASSES and vendor in _VENDORS:
            gpus.append(entry | {"vendor": _VENDORS[vendor]})
        elif kind[:6] in _NETWORK_CLASSES:
            nics.append(entry)
    return gpus, nics


def _seconds(text: str | None) -> float | None:
    first = (text or "").split(" ")[0]
    try:
        return float(first)
    except ValueError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def last_level_cache_bytes(root: Path = Path("/")) -> int | None:
    """Total size of this machine's last-level caches, in bytes; None if the kernel does not report it."""
    caches: dict[str, int] = {}
    for cpu in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        levels = [(number_of(i / "level") or 0, i) for i in (cpu / "cache").glob("index[0-9]*")]
        if not levels:
            continue
        level, index = max(levels, key=lambda found: found[0])
        size = (text_of(index / "size") or "").removesuffix("K")
        if size.isdecimal():
            caches[f"{level} {text_of(index / 'shared_cpu_list')}"] = int(size) * 1024
    return sum(caches.values()) or None
