"""The rank's side of its writing process: starting it, communicating with it, and detecting its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass, field
from typing import Any, Literal

from seatrial.base import process
from seatrial.base.lines import Channel

WRITER_MODULE = "seatrial.checkpoint.writer"
_END_S = 5.0  # for an idle process to exit
_DIE_S = 1.0  # for a killed process; one that takes longer is in an uninterruptible system call

What = Literal["part", "commit", "removed"]


@dataclass(frozen=True)
class Outcome:
    """The result of an order."""

    attempt: int
    what: What
    ok: bool
    problem: str | None = None  # if not ok
    # Kind of problem: a kind of StorageError (full, denied, unreachable, ...), "damaged" if what was written does
    # not read back, "superseded" if a later generation has begun, "writer" if the process ended, "other".
    kind: str = ""
    seconds: float = 0.0
    bytes: int = 0  # of the part, or of all files of the checkpoint
    names: list[str] = field(default_factory=list)  # of the checkpoint, or of those that were removed


class WriterProcess:
    """One writing process. It dies with this process, and with the thread that constructs this: use the main thread."""

    def __init__(self, memory: int) -> None:
        """`memory`: descriptor of the file that it reads. Raises OSError."""
        ours, theirs = Channel.pair()
        try:
            entries = (
                "--channel",
                str(theirs.fileno()),
                "--memory",
                str(memory),
                "--parent",
                str(os.getpid()),
            )
            self._process = subprocess.Popen(
                process.python(WRITER_MODULE, *entries),
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = ours
        self.hangs = False  # it was killed, but has not exited

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, order: dict[str, Any]) -> None:
        """Send an order without blocking."""
        self._channel.post(order)

    def wait(self, timeout_s: float) -> None:
        """Wait until it sends something or ends, or `timeout_s` have passed."""
        self._channel.readable(timeout_s)

    def outcomes(self) -> list[Outcome]:
        """Outcomes received since the last call. Raises ValueError for a malformed message."""
        self._channel.flush()
        try:
            return [Outcome(**message["outcome"]) for message in self._channel.receive()]
        except (KeyError, TypeError) as error:
            raise ValueError(f"protocol error from the checkpoint writer: {error!r}") from None

    @property
    def ended(self) -> str | None:
        """How it ended, once everything it sent has been received; None while it runs."""
        if not self._channel.closed:
            return None
        self._reaped(_DIE_S)
        status = self._process.returncode
        return "does not answer" if status is None else process.status_text(status)

    def end(self) -> None:
        """Let it exit by itself: it has no work left that matters. Killed if it does not."""
        self._channel.close()
        if not self._reaped(_END_S):
            self.kill()

    def kill(self) -> None:
        """Kill it, whatever it is doing. One that hangs in the storage dies as soon as its system call returns."""
        self._channel.close()
        self._process.kill()
        self.hangs = not self._reaped(_DIE_S)

    def _reaped(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        return False
