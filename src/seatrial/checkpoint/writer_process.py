"""The rank's side of its writing process: starting it, talking to it, and noticing that it is gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass, field
from typing import Any, Literal

from seatrial.base import process
from seatrial.base.lines import Channel

WRITER_MODULE = "seatrial.checkpoint.writer"
_END_S = 5.0  # a process that has nothing to do any more may take that long to end
_DIE_S = 1.0  # one that was killed; one that takes longer is in a system call that nothing interrupts

What = Literal["part", "commit", "removed"]


@dataclass(frozen=True)
class Outcome:
    """What became of an order."""

    attempt: int
    what: What
    ok: bool
    problem: str | None = None  # why not
    # What sort of problem: a kind of StorageError (full, denied, unreachable, ...), "damaged" where what was written does
    # not read back, "superseded" where a later generation has begun, "writer" where the process ended, "other".
    kind: str = ""
    seconds: float = 0.0
    bytes: int = 0  # of the part; of all files of the checkpoint
    names: list[str] = field(default_factory=list)  # of the checkpoint; of those that were removed


class WriterProcess:
    """One process. It dies with this one, and with the thread that made this object: that must be the main thread."""

    def __init__(self, memory: int) -> None:
        """`memory`: the file that it reads. Raises OSError."""
        ours, theirs = Channel.pair()
        try:
            told = ("--channel", str(theirs.fileno()), "--memory", str(memory), "--parent", str(os.getpid()))
            self._process = subprocess.Popen(
                process.python(WRITER_MODULE, *told),
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = ours
        self.hangs = False  # it was killed, and is there all the same

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, order: dict[str, Any]) -> None:
        """Send an order without waiting."""
        self._channel.post(order)

    def wait(self, timeout_s: float) -> None:
        """Until it says something or ends, or `timeout_s` have passed."""
        self._channel.readable(timeout_s)

    def outcomes(self) -> list[Outcome]:
        """What it has told. Raises ValueError where that makes no sense."""
        self._channel.flush()
        try:
            return [Outcome(**message["outcome"]) for message in self._channel.receive()]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the writing process talks nonsense: {error!r}") from None

    @property
    def ended(self) -> str | None:
        """How it ended, once all that it told has been received; None while it runs."""
        if not self._channel.closed:
            return None
        self._reaped(_DIE_S)
        status = self._process.returncode
        return "does not answer any more" if status is None else process.status_text(status)

    def end(self) -> None:
        """Let it end by itself: it has nothing left to do that anybody waits for."""
        self._channel.close()
        if not self._reaped(_END_S):
            self.kill()

    def kill(self) -> None:
        """End it, whatever it does. One that hangs in the storage dies as soon as that lets it go."""
        self._channel.close()
        self._process.kill()
        self.hangs = not self._reaped(_DIE_S)

    def _reaped(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        return False
