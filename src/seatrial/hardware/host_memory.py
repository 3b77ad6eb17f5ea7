"""Host memory that new processes can still get: limited by the kernel's available memory and by cgroups.

Memory files (memfd) are on the kernel's internal tmpfs, which has no size limit, not in /dev/shm. Their pages are
charged to the cgroup of the process that wrote them, like its other memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.base import units
from seatrial.base.kernel_files import number_of, text_of

# cgroup v1 writes "no limit" as the largest multiple of a page.
_V1_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class HostMemory:
    """`bytes` are still available; `source` names the limit, for people."""

    bytes: int
    source: str


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """The memory still available and its tightest limit; None if the kernel does not report it."""
    fields = dict(_fields(root / "proc/meminfo"))
    available, total = fields.get("MemAvailable"), fields.get("MemTotal")
    if available is None or total is None:
        return None
    text = f"{units.memory(available * 1024)} of the host's {units.memory(total * 1024)} are available"
    bounds = [HostMemory(available * 1024, text)]
    for group in control_groups(root):
        if (limit := memory_limit(group)) is not None:
            used = memory_used(group)
            text = f"control group {group}: {units.memory(limit)}, of which {units.memory(used)} are in use"
            bounds.append(HostMemory(max(0, limit - used), text))
    return min(bounds, key=lambda bound: bound.bytes)


def control_groups(root: Path = Path("/")) -> list[Path]:
    """cgroup folders of this process, each with all its visible ancestors."""
    found: dict[Path, None] = {}
    for line in (text_of(root / "proc/self/cgroup", errors="surrogateescape") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        mount = root / "sys/fs/cgroup"
        bases = [mount / names] if names else [mount / "unified", mount]
        base = next((b for b in bases if b.is_dir()), None)
        if base is None:
            continue
        # In a container the path is the host's, and the cgroup is at the top of the mount.
        inside = base / path.lstrip("/")
        inside = inside if inside.is_dir() else base
        while True:
            found[inside] = None
            if inside == base:
                break
            inside = inside.parent
    return list(found)


def memory_limit(group: Path) -> int | None:
    """Memory limit of a cgroup in bytes; None if it has no limit of its own."""
    # memory.high does not kill: above it processes are throttled until they make no progress.
    found = [number_of(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    return min((n for n in found if n is not None and n < _V1_NO_LIMIT), default=None)


def memory_used(group: Path) -> int:
    """Memory use of a cgroup in bytes, without reclaimable page cache. Memory files are not reclaimable."""
    used, prefix = number_of(group / "memory.current"), ""
    if used is None:  # cgroup v1
        used, prefix = number_of(group / "memory.usage_in_bytes") or 0, "total_"
    stat = dict(_fields(group / "memory.stat"))
    return max(0, used - sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active")))


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    """Parse lines such as "MemTotal:  1000 kB" and "inactive_file 1000"."""
    for line in (text_of(path) or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            yield words[0], int(words[1])
