"""Calls of other programs that never block the check: each in a process group of its own, with a timeout.

A hanging driver or file system leaves its caller in a wait that not even SIGKILL ends. So nothing here waits for a
process to exit: one that does not is reported as stuck, and abandoned.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Literal

from seatrial.base import process

Ended = Literal["ok", "failed", "absent", "refused", "hung", "stuck"]

LARGEST_BYTES = 16 << 20  # limit per stream: the text of eight GPUs with all their links is well below
_GRACE_S = 1.0  # from SIGKILL until a process counts as stuck
_LOOK_S = 0.05  # a program may close its streams and keep running
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Order:
    """One call. `name` is its name in reports: "nvidia-smi nvlink -s"."""

    name: str
    argv: Sequence[str]
    timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How a call ended.

    "ok": exit code 0. "failed": another one, or a signal. "absent": no such program. "refused": it cannot be run.
    "hung": it was killed at its timeout. "stuck": not even SIGKILL has ended it. `out` and `err` are what it printed.
    """

    name: str
    ended: Ended
    exit_code: int | None
    out: str
    err: str
    seconds: float
    limit_s: float

    @property
    def ok(self) -> bool:
        return self.ended == "ok"

    @property
    def why(self) -> str:
        """Why there is no answer, as text; empty if there is one."""
        last_line = next((line.strip() for line in reversed(self.err.splitlines()) if line.strip()), "")
        match self.ended:
            case "ok":
                return ""
            case "absent":
                return f"{self.name}: not installed"
            case "refused":
                return f"{self.name}: cannot be executed ({last_line[:200]})"
            case "hung":
                return f"{self.name}: did not end within {self.limit_s:g} s"
            case "stuck":
                return f"{self.name}: did not end within {self.limit_s:g} s, and survived SIGKILL"
            case "failed":
                how = process.status_text(self.exit_code or 0)
                return f"{self.name}: {how}" + (f": {last_line[:200]}" if last_line else "")

    def facts(self) -> dict[str, Any]:
        """The node's facts about this call: all but its output."""
        return {k: v for k, v in asdict(self).items() if k not in ("out", "err")} | {"why": self.why}


def run_tool(order: Order) -> Result:
    """run_tools() for one order."""
    return run_tools([order])[0]


def run_tools(orders: Sequence[Order]) -> list[Result]:
    """Run all at once; results in the order of `orders`. Takes as long as the slowest, or its limit and a second.

    No shell, no stdin, and LC_ALL=C, because the output is parsed. What a program started ends with it.
    Call it from a thread that lives as long as the programs: they die with it.
    """
    calls = [_Call(order) for order in orders]
    with selectors.DefaultSelector() as selector:
        for call in calls:
            for name, stream in call.streams.items():
                selector.register(stream, selectors.EVENT_READ, (call, name))
        while waiting := [call for call in calls if call.running]:
            nearest = min(call.deadline for call in waiting)
            for key, _ in selector.select(max(0.0, min(nearest - time.monotonic(), _LOOK_S))):
                call, name = key.data
                if not call.read(name):
                    selector.unregister(key.fileobj)
            for call in waiting:
                call.step(time.monotonic())
        for call in calls:
            call.close()
    return [call.result() for call in calls]


class _Call:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.started_at = time.monotonic()
        self.deadline = self.started_at + order.timeout_s
        self.ended: Ended | None = None
        self._killed: float | None = None
        self._texts = {"out": bytearray(), "err": bytearray()}
        self._done = self.started_at
        self._child: subprocess.Popen[bytes] | None = None
        parent = os.getpid()
        try:
            self._child = subprocess.Popen(
                order.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **order.environment, "LC_ALL": "C", "LANGUAGE": "C"},
                process_group=0,
                # Between fork and exec only a system call: it cannot wait for a lock of another thread.
                preexec_fn=lambda: process.die_with_parent(parent),
            )
        except OSError as error:
            self.ended = "absent" if isinstance(error, FileNotFoundError) else "refused"
            self._texts["err"] += (error.strerror or str(error)).encode()

    @property
    def running(self) -> bool:
        return self.ended is None

    @property
    def streams(self) -> dict[str, IO[bytes]]:
        if self._child is None:
            return {}
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        return {"out": self._child.stdout, "err": self._child.stderr}

    def read(self, name: str) -> bool:
        """Read what is available; False at the end of the stream."""
        data = os.read(self.streams[name].fileno(), _CHUNK)
        kept = self._texts[name]
        kept += data[: max(0, LARGEST_BYTES - len(kept))]
        return bool(data)

    def step(self, now: float) -> None:
        """Check whether it has exited, and kill it at its deadline."""
        child = self._child
        assert child is not None
        code = child.poll()
        if code is not None:
            # Nothing that it started may hold the pipes open, or keep running.
            process.signal_group(child.pid, signal.SIGKILL)
            self._drain()
            self._done = now
            if self._killed is not None:
                self.ended = "hung"
            else:
                self.ended = "ok" if code == 0 else "failed"
        elif self._killed is not None and now > self._killed + _GRACE_S:
            self.ended, self._done = "stuck", now
        elif self._killed is None and now >= self.deadline:
            process.signal_group(child.pid, signal.SIGKILL)
            self._killed, self.deadline = now, now + _GRACE_S

    def _drain(self) -> None:
        for name, stream in self.streams.items():
            os.set_blocking(stream.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                while self.read(name):
                    pass

    def close(self) -> None:
        """Close the pipes. A stuck process remains a child; the kernel ends it as soon as it can."""
        for stream in self.streams.values():
            stream.close()
        if self._child is not None and self.ended == "stuck":
            # Popen must not warn about a child that cannot be ended.
            self._child.returncode = -int(signal.SIGKILL)

    def result(self) -> Result:
        assert self.ended is not None
        code = None if self._child is None or self.ended == "stuck" else self._child.returncode
        texts = [bytes(t).decode(errors="replace") for t in self._texts.values()]
        return Result(
            self.order.name,
            self.ended,
            code,
            texts[0],
            texts[1],
            round(self._done - self.started_at, 3),
            self.order.timeout_s,
        )
