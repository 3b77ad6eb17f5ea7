"""Memory that processes started now can have on this host: what the kernel has available, and what control groups allow.

A memory file (memfd) lies in the kernel's own tmpfs, which no size limits, not in /dev/shm; its pages count to the control
group of the process that wrote them, like any other memory of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.base import units

# cgroup v1 writes "no limit" as the largest multiple of a page.
_V1_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class HostMemory:
    """`bytes` can still be had; `source` says what bounds it, in words."""

    bytes: int
    source: str


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """None where the kernel does not say."""
    fields = dict(_fields(root / "proc/meminfo"))
    available, total = fields.get("MemAvailable"), fields.get("MemTotal")
    if available is None or total is None:
        return None
    told = f"{units.memory(available * 1024)} of the host's {units.memory(total * 1024)} are available"
    bounds = [HostMemory(available * 1024, told)]
    for group in control_groups(root):
        if (limit := memory_limit(group)) is not None:
            used = memory_used(group)
            told = f"control group {group}: {units.memory(limit)}, of which {units.memory(used)} are in use"
            bounds.append(HostMemory(max(0, limit - used), told))
    return min(bounds, key=lambda bound: bound.bytes)


def control_groups(root: Path = Path("/")) -> list[Path]:
    """Folders of this process's control groups, each with all above it that can be seen here."""
    found: dict[Path, None] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        mount = root / "sys/fs/cgroup"
        bases = [mount / names] if names else [mount / "unified", mount]
        base = next((b for b in bases if b.is_dir()), None)
        if base is None:
            continue
        # In a container the path is the host's, and what it leads to is at the mount's top.
        inside = base / path.lstrip("/")
        inside = inside if inside.is_dir() else base
        while True:
            found[inside] = None
            if inside == base:
                break
            inside = inside.parent
    return list(found)


def memory_limit(group: Path) -> int | None:
    """Bytes that the processes of a control group may use; None for no limit of its own."""
    # memory.high does not kill: it slows whoever is above it down, until nothing goes on.
    found = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    return min((n for n in found if n is not None and n < _V1_NO_LIMIT), default=None)


def memory_used(group: Path) -> int:
    """Bytes that its processes have, without what the kernel gives up when memory is short: cached files. Memory files are not among these."""
    used, prefix = _number(group / "memory.current"), ""
    if used is None:  # version 1
        used, prefix = _number(group / "memory.usage_in_bytes") or 0, "total_"
    stat = dict(_fields(group / "memory.stat"))
    return max(0, used - sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active")))


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    """Of lines such as "MemTotal:  1000 kB" and "inactive_file 1000"."""
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            yield words[0], int(words[1])


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""
