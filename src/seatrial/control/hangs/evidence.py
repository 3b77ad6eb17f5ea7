"""The kernel's view of an unresponsive process, and the stacks that it wrote on request.

Reads /proc and one log; never blocks. A rank's supervisor client registers SIGUSR2, whose handler writes the main
thread's stack without Python's global lock (GIL): it works even while native code holds the GIL.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seatrial.base.files import open_file
from seatrial.base.kernel_files import fields_of, text_of

_HZ = os.sysconf("SC_CLK_TCK")
_LONGEST_STACK = 32_000  # characters: the main thread comes last
_STACK_BEGINS = re.compile(rb"^(Stack|Current thread|Thread) .*\(most recent call first\)", re.MULTILINE)

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait of the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a tracer",
    "Z": "a zombie",
    "X": "dead",
    "I": "idle",
}


@dataclass(frozen=True)
class Evidence:
    """A process's state and activity between two observations. Plain values, because it is sent as JSON."""

    pid: int
    state: str  # the kernel's letter; "X" if there is no such process
    waited_s: float  # between the two observations
    cpu_s: float  # CPU time used between them, all threads
    threads: int
    waits_in: str  # the kernel function that the main thread sleeps in; "" if unknown
    # A thread in an uninterruptible wait at both times: its name and kernel function; "" if none.
    blocked: str
    tracer: str  # "pid (name)" of a debugger; "" if none
    asked: bool  # SIGUSR2 was sent
    stack: str  # what it wrote then; "" if nothing

    @property
    def alive(self) -> bool:
        return self.state not in ("X", "Z")

    @property
    def stopped(self) -> bool:
        """Stopped by SIGSTOP or a debugger, or frozen with its control group."""
        return self.state in ("T", "t") or "freez" in self.waits_in

    @property
    def busy(self) -> bool:
        """Whether it used a tenth of a core or more, which a process that only waits never does."""
        return self.waited_s > 0 and self.cpu_s / self.waited_s >= 0.1

    def __str__(self) -> str:
        parts = [f"process {self.pid} is {_STATES.get(self.state, self.state)}"]
        if not self.alive:
            return parts[0]
        if self.tracer:
            parts.append(f"traced by {self.tracer}")
        if self.waits_in:
            parts.append(f"waits in {self.waits_in}")
        if self.blocked:
            parts.append(f"thread {self.blocked} is in an uninterruptible wait")
        parts.append(f"used {self.cpu_s:.2f} s of CPU in {self.waited_s:.2f} s")
        if self.asked:
            parts.append("answered SIGUSR2" if self.stack else "did not answer SIGUSR2")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Evidence:
        return cls(**values)


class Observation:
    """One process over a short time: begun by the constructor, completed by `end`."""

    def __init__(self, pid: int, log: Path, *, ask: bool = True) -> None:
        """`ask`: have it write its stacks to `log`, its stderr. The signal is not sent if it would kill the process."""
        self.pid = pid
        self._log = log
        self._log_bytes = _size(log)
        self._begin = time.monotonic()
        self._cpu_s = _cpu_s(pid)
        self._blocked = _blocked(pid)
        self._asked = ask and _catches(pid, signal.SIGUSR2) and _send(pid, signal.SIGUSR2)

    def end(self) -> Evidence:
        """Collect the evidence. A quarter of a second after the beginning is late enough for the stacks."""
        status = fields_of(Path(f"/proc/{self.pid}/status"))
        cpu_s = _cpu_s(self.pid)
        stuck = self._blocked.items() & _blocked(self.pid).items()
        return Evidence(
            pid=self.pid,
            state=status.get("State", "X")[:1],
            waited_s=round(time.monotonic() - self._begin, 3),
            cpu_s=round(max(0.0, cpu_s - self._cpu_s), 3),
            threads=int(status.get("Threads", "0")),
            waits_in=_wchan(f"/proc/{self.pid}"),
            blocked=next((text for _, text in sorted(stuck)), ""),
            tracer=_tracer(status.get("TracerPid", "0")),
            asked=self._asked,
            stack=_written_since(self._log, self._log_bytes) if self._asked else "",
        )


def _cpu_s(pid: int) -> float:
    """CPU time of all its threads so far."""
    fields = (text_of(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _HZ if len(fields) > 12 else 0.0


def _wchan(folder: str) -> str:
    name = text_of(Path(folder) / "wchan") or ""
    return "" if name == "0" else name


def _blocked(pid: int) -> dict[str, str]:
    """Thread id -> "name (kernel function)" of its threads in an uninterruptible wait."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{thread}"
            head, _, rest = (text_of(Path(folder) / "stat") or "").rpartition(")")
            if rest.split()[:1] == ["D"]:
                name, kernel = head.partition("(")[2], _wchan(folder)
                found[thread] = f"{name} ({kernel})" if kernel else name
    return found


def _tracer(pid: str) -> str:
    if not pid.isdigit() or int(pid) == 0:
        return ""
    return f"{pid} ({text_of(Path(f'/proc/{pid}/comm')) or 'unknown'})"


def _catches(pid: int, signum: int) -> bool:
    """Whether it has a handler for `signum`: without one the signal would kill it."""
    return bool(int(fields_of(Path(f"/proc/{pid}/status")).get("SigCgt", "0"), 16) >> (signum - 1) & 1)


def _send(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _written_since(log: Path, offset: int) -> str:
    """The stacks in what was written to `log` after `offset`."""
    try:
        with open(open_file(log), "rb") as f:
            f.seek(offset)
            written = f.read(2 * _LONGEST_STACK)
    except OSError:
        return ""
    begin = _STACK_BEGINS.search(written)
    return written[begin.start() :].decode(errors="replace")[:_LONGEST_STACK] if begin else ""
