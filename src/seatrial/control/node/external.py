"""Work that may hang, in a forked process of its own: commands outside the run, and probes of driver and network.

A command that waits in an uninterruptible system call (as nvidia-smi does if the driver hangs) cannot be killed. So
the agent never waits for one: it reads messages from a child, and gives up on it after a timeout.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.base import process
from seatrial.base.lines import Channel

Message = dict[str, Any]
Body = Callable[[Channel], None]

_LONGEST_OUTPUT = 4000  # characters kept of what a command prints, from its end
_GRACE_S = 2.0  # from a command's own time limit until its child is given up
_REAP_S = 0.5  # a killed process that has not ended by then is left to the reaper of this one's children


class Child:
    """A forked process that runs `body` with its end of a channel to this one. Main thread only.

    It holds none of this process's files, and dies with it.
    """

    def __init__(self, body: Body) -> None:
        ours, theirs = Channel.pair()

        def run() -> int:
            keep = theirs.fileno()
            os.closerange(3, keep)
            os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
            body(theirs)
            return 0

        self.pid = process.fork(run)
        theirs.close()
        self._channel = ours

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def ended(self) -> bool:
        """Whether it has closed its side, and all it sent has been received."""
        return self._channel.closed

    def receive(self) -> list[Message]:
        """What it has sent since the last call, without waiting."""
        return self._channel.receive()

    def post(self, message: Message) -> None:
        """Send it one message, without waiting for it to be read; dropped while it has not read earlier ones."""
        if self._channel.flush() and not self._channel.behind:
            self._channel.post(message)

    def close(self) -> None:
        """Kill it with all that it started. Waits half a second at most."""
        self._channel.close()
        if self.pid < 0:
            return
        process.signal_group(self.pid, signal.SIGKILL)
        # The agent reaps all its children, so this one may have been reaped already.
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self.pid)
            try:
                select.select([fd], [], [], _REAP_S)
            finally:
                os.close(fd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self.pid = -1


@dataclass(frozen=True)
class ExternalResult:
    """How a command ended. `done`: it ended by itself, with exit code 0. `exit_code` is None if there is none."""

    done: bool
    exit_code: int | None
    output: str


class External:
    """A running command: no shell, no input, both outputs combined. Watch it, and call `result` when it is readable."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        self._name = argv[0]
        self._timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s + _GRACE_S
        self._child = Child(lambda channel: _run(list(argv), timeout_s, channel.send))
        self._result: ExternalResult | None = None

    def fileno(self) -> int:
        return self._child.fileno()

    def result(self) -> ExternalResult | None:
        """The result, or None while it is running. Once there is one, the child has ended or been given up."""
        if self._result is not None:
            return self._result
        for message in self._child.receive():
            self._result = ExternalResult(**message)
        if self._result is None and self._child.ended:
            self._result = ExternalResult(False, None, f"{self._name}: its process was killed")
        elif self._result is None and time.monotonic() > self.deadline:
            text = f"{self._name} did not end within {self._timeout_s:g} s and cannot be killed"
            self._result = ExternalResult(False, None, text)
        if self._result is not None:
            self._child.close()
        return self._result


def _run(argv: list[str], timeout_s: float, send: Callable[[Message], bool]) -> None:
    try:
        # SIGKILL to its group reaches the command too; a timeout is reported with what it has printed.
        ended = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        text = f"{argv[0]} did not end within {timeout_s:g} s\n{_text(late.output)}".rstrip()
        send({"done": False, "exit_code": None, "output": text})
    except OSError as error:
        send({"done": False, "exit_code": None, "output": f"{argv[0]}: {error.strerror or error}"})
    else:
        send({"done": ended.returncode == 0, "exit_code": ended.returncode, "output": _text(ended.stdout)})


def _text(output: bytes | str | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text).strip()[-_LONGEST_OUTPUT:]
