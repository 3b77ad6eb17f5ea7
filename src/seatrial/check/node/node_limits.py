"""The limits of a process on this node: of its user, of its container, and of shared memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from seatrial.base.kernel_files import bytes_of, fields_of, number_of, text_of
from seatrial.hardware.host_memory import control_groups, memory_limit, memory_used

_CAP_IPC_LOCK = 14  # linux/capability.h: its holder may lock memory without limit
_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
}


def read_limits(root: Path = Path("/"), *, shm: Path = Path("/dev/shm")) -> dict[str, Any]:
    """The limits in effect for this process. Bytes, counts and CPUs; None for no limit or unknown.

    `limits` has [soft, hard]. Limits of all parent cgroups apply as well, so the lowest is reported.
    """
    capabilities = int(fields_of(root / "proc/self/status").get("CapEff") or "0", 16)
    groups = control_groups(root)
    return {
        "limits": {name: [_finite(v) for v in resource.getrlimit(which)] for name, which in _LIMITS.items()},
        "may_lock_all": bool(capabilities >> _CAP_IPC_LOCK & 1),
        "uid": os.getuid(),
        "cpus": len(os.sched_getaffinity(0)),
        "cgroup": "v2" if (root / "sys/fs/cgroup/cgroup.controllers").exists() else "v1" if groups else None,
        "cpu_quota": _lowest(_quota(g) for g in groups),
        "memory_limit_bytes": _lowest(memory_limit(g) for g in groups),
        "memory_used_bytes": _used(groups),
        "memory_available_bytes": bytes_of(fields_of(root / "proc/meminfo").get("MemAvailable")),
        "swap_used_bytes": _swap(root),
        "pids_limit": _lowest(number_of(g / "pids.max") for g in groups),
        "overcommit": number_of(root / "proc/sys/vm/overcommit_memory"),
        "shm": _space(shm),
        "container": _container(root),
    }


def _finite(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _quota(group: Path) -> float | None:
    """The CPU time limit in CPUs, by cpu.max (v2) or cpu.cfs_quota_us (v1)."""
    first, _, second = (text_of(group / "cpu.max") or "").partition(" ")
    if first.isdecimal() and second.isdecimal() and int(second):
        return int(first) / int(second)
    quota, period = number_of(group / "cpu.cfs_quota_us"), number_of(group / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _used(groups: list[Path]) -> int | None:
    limited = next((g for g in groups if memory_limit(g) is not None), None)
    return None if limited is None else memory_used(limited)


def _lowest(values: Any) -> Any:
    return min((v for v in values if v is not None), default=None)


def _swap(root: Path) -> int | None:
    fields = fields_of(root / "proc/meminfo")
    total, free = bytes_of(fields.get("SwapTotal")), bytes_of(fields.get("SwapFree"))
    return None if total is None or free is None else total - free


def _space(folder: Path) -> dict[str, int] | None:
    """Size and free space in bytes; None if it does not exist."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return {"size": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def _container(root: Path) -> str | None:
    """The kind of container this process seems to be in; None without any sign of one."""
    if (root / ".dockerenv").exists():
        return "Docker"
    if (root / "run/.containerenv").exists():
        return "Podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    return next((n for n in ("APPTAINER_NAME", "SINGULARITY_NAME") if n in os.environ), None)
