"""Detect kills by the kernel's out-of-memory killer since the start of the watch."""

from __future__ import annotations

from pathlib import Path

from seatrial.base.kernel_files import text_of


class OomWatch:
    """Compares the kernel's own counters with what they were when it was made.

    The cgroup's counter (memory.events in version 2, memory.oom_control in version 1) counts kills among its own
    processes by any out-of-memory killer. /proc/vmstat counts those of the whole machine: if it is unchanged there
    was none here, but if it has risen, the victim may be another user's process.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._own = _counter_file(proc, cgroups)
        self._machine = proc / "vmstat"
        self._own_before = _oom_kills(self._own) if self._own else None
        self._machine_before = _oom_kills(self._machine)

    def struck(self) -> bool | None:
        """True: a process of our cgroup was killed for memory. False: none was. None: it cannot be known."""
        if self._own is not None and self._own_before is not None:
            now = _oom_kills(self._own)
            if now is not None:
                return now > self._own_before
        now = _oom_kills(self._machine)
        if now is not None and now == self._machine_before:
            return False
        return None


def _counter_file(proc: Path, cgroups: Path) -> Path | None:
    candidates = []
    for line in (text_of(proc / "self/cgroup", errors="surrogateescape") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.oom_control"
        elif controllers == "":
            root, name = cgroups, "memory.events"
        else:
            continue
        # In a container the path may be the host's, and our cgroup is mounted as the root.
        candidates += [root / inside / name, root / name]
    return next((c for c in candidates if _oom_kills(c) is not None), None)


def _oom_kills(path: Path) -> int | None:
    lines = (line.partition(" ") for line in (text_of(path) or "").splitlines())
    return next((int(value) for key, _, value in lines if key == "oom_kill"), None)
