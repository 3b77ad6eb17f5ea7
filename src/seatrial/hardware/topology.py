"""Which CPUs and RDMA ports are near a GPU, from the kernel's PCI tree. Reads files only; unknown stays unknown."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from seatrial.base.kernel_files import text_of
from seatrial.hardware.devices import visible_devices
from seatrial.hardware.host_memory import control_groups

_ROOT = Path("/")
_PCI_DEVICE = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_LINK_LAYERS = ("InfiniBand", "Ethernet")  # what NCCL's verbs transport uses; Ethernet is RoCE


@dataclass(frozen=True)
class Gpu:
    """A GPU as a rank sees it. `cpus` is empty if the rank is not to be bound; `reason` says why in either case."""

    device: str  # as CUDA_VISIBLE_DEVICES names it
    pci: str | None
    numa: int | None
    cpus: frozenset[int]
    reason: str


def usable_cores(root: Path = _ROOT) -> int:
    """CPUs that this process may use: its affinity, and the quota of its control groups (cgroup v2)."""
    counts = [len(os.sched_getaffinity(0))]
    for group in control_groups(root):
        quota, period = [*(text_of(group / "cpu.max") or "").split(), "", ""][:2]
        if quota.isdecimal() and period.isdecimal():
            counts.append(math.ceil(int(quota) / int(period)))
    return max(1, min(counts))


def local_gpus(environment: Mapping[str, str], affinity: Set[int], root: Path = _ROOT) -> list[Gpu]:
    """The GPUs of this host visible to processes with `environment`, in order: local rank n has the n-th."""
    known, models = _driver_gpus(root)
    # CUDA puts the fastest first unless configured otherwise; equal ones are ordered by PCI address.
    ordered = len(models) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    found = []
    for device in visible_devices(environment, dev=root / "dev", proc=root / "proc"):
        if device.isdecimal():
            pci = known[int(device)][1] if ordered and int(device) < len(known) else None
        else:
            pci = next((address for uuid, address in known if uuid.startswith(device)), None)
        found.append(_placed(device, pci, affinity, root))
    return found


def _driver_gpus(root: Path) -> tuple[list[tuple[str, str]], set[str]]:
    """(UUID, PCI address) of the GPUs that have a device file here, in PCI order; and their models."""
    known: list[tuple[str, str]] = []
    models = set()
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        lines = (line.partition(":") for line in (text_of(folder / "information") or "").splitlines())
        values = {key.strip(): value.strip() for key, _, value in lines}
        # In a container the driver lists every GPU of the host, but only ours have a file in /dev.
        if (root / f"dev/nvidia{values.get('Device Minor', '?')}").exists():
            known.append((values.get("GPU UUID", ""), folder.name.lower()))
            models.add(values.get("Model", ""))
    return known, models


def _placed(device: str, pci: str | None, affinity: Set[int], root: Path) -> Gpu:
    if pci is None:
        return Gpu(device, None, None, frozenset(), f"the PCI address of GPU {device} is not known")
    node = text_of(root / f"sys/bus/pci/devices/{pci}/numa_node") or ""
    if not node.isdecimal():  # -1: firmware or hypervisor does not report it
        return Gpu(device, pci, None, frozenset(), f"the NUMA node of {pci} is not known")
    cpus = frozenset(cpus_of(text_of(root / f"sys/devices/system/node/node{node}/cpulist") or "") & affinity)
    why = "the CPUs of" if cpus else "not bound: no CPU that may be used is in"
    return Gpu(device, pci, int(node), cpus, f"{why} NUMA node {node}, where {pci} is")


def cpus_of(text: str) -> set[int]:
    """The numbers in a kernel's list, such as "0-3,8"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def cpu_list(cpus: Set[int]) -> str:
    """The inverse of `cpus_of`."""
    first = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    last = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


@dataclass(frozen=True)
class Ports:
    """The RDMA ports for NCCL: `chosen` as "mlx5_0:1", empty if the choice is left to NCCL. `reason` says why."""

    chosen: tuple[str, ...]
    reason: str


def rdma_ports(gpus: Sequence[Gpu], root: Path = _ROOT) -> Ports:
    """The active ports below the PCIe switches of `gpus`, if every one of them has such a port.

    Only then is it certain that the other ports are for something else, such as storage or management.
    """
    active: dict[str, list[str]] = {}  # port -> its PCI path
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = port.parent.parent
        up = (text_of(port / "state") or "").startswith("4:")  # IB_PORT_ACTIVE
        if up and text_of(port / "link_layer") in _LINK_LAYERS:
            active[f"{device.name}:{port.name}"] = _pci_path(device / "device")
    if not active:
        return Ports((), "no active InfiniBand or RoCE port")
    paths = [_pci_path(root / f"sys/bus/pci/devices/{gpu.pci}") if gpu.pci else [] for gpu in gpus]
    near = [port for port, path in active.items() if any(_share_switch(path, gpu) for gpu in paths)]
    far = [port for port in active if port not in near]
    if not paths or not all(any(_share_switch(active[port], gpu) for port in near) for gpu in paths):
        why = "not every GPU shares a PCIe switch with one, so it is unknown which ports are for storage"
    elif not far:
        why = "each shares a PCIe switch with a GPU"
    else:
        return Ports(
            tuple(near), f"they share a PCIe switch with the GPUs of this node, {', '.join(far)} with none"
        )
    return Ports((), f"all {len(active)} active InfiniBand and RoCE ports are left to NCCL: {why}")


def _pci_path(link: Path) -> list[str]:
    """The PCI devices from the root port down to the one that `link` leads to."""
    return [part for part in link.resolve().parts if _PCI_DEVICE.fullmatch(part)]


def _share_switch(a: Sequence[str], b: Sequence[str]) -> bool:
    return bool(a and b) and a[0] == b[0]  # the same root port: nothing but switches between them


def transport_facts(root: Path = _ROOT) -> list[str]:
    """What is known here about GPUDirect RDMA and NVLink SHARP; NCCL itself decides whether to use them."""
    version = text_of(root / "proc/driver/nvidia/version") or ""
    if (root / "sys/module/nvidia_peermem").exists():
        direct = "nvidia_peermem is loaded, so NCCL can use GPUDirect RDMA"
    elif "Open Kernel Module" in version:
        direct = "nvidia_peermem is not loaded; the open driver can offer GPUDirect RDMA by dma-buf"
    else:
        direct = "nvidia_peermem is not loaded; it is unknown whether GPUDirect RDMA is available"
    switches = len(list((root / "proc/driver/nvidia-nvswitch/devices").glob("*")))
    nvls = (
        f"{switches} NVSwitches found, so NCCL can use NVLS if the GPUs support it"
        if switches
        else "the driver shows no NVSwitch: it is unknown whether NVLS is available"
    )
    return [direct, f"{nvls} (NCCL_DEBUG=INFO shows what it uses)"]
