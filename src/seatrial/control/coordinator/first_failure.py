"""Determine which of many failures was the first. Pure: ends of processes in, one failure out.

When one rank exits, its peers fail too because of closed connections, and often report it sooner. Time alone
would therefore blame the wrong rank: a rank's own failure precedes consequences, and only among equals the
earlier one comes first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from seatrial.base.errors import EXIT_BAD_INPUT, EXIT_FAILED
from seatrial.base.process import status_text
from seatrial.record import messages as msg
from seatrial.record.failure import Failure

_OOM_HINT = "the kernel's out-of-memory killer did it: use a smaller microbatch, activation checkpointing, or more ranks a model"
_PERHAPS_OOM_HINT = "an external kill -9, or the kernel's out-of-memory killer: see `dmesg`"
_KILLED_HINT = "an external kill -9: the kernel's out-of-memory killer has killed nothing here"
_CRASH_HINT = "a crash in native code: the end of the log, or `coredumpctl` if available, may show where"

Exited = msg.RankExited | msg.ForkServerExited


def first_failure(exits: Iterable[tuple[int, Exited]]) -> Failure | None:
    """The failure that caused all others, or None if nothing failed by itself. `exits`: each with its node."""
    # What happens to a process after its agent has signalled it is not its fault.
    failed = [
        (node, exited)
        for node, exited in exits
        if exited.status != 0 and (exited.signalled is None or _when(exited) < exited.signalled)
    ]
    return _failure(*min(failed, key=lambda f: _order(f[1]))) if failed else None


def is_consequence(exited: Exited) -> bool:
    """Whether it failed only because another process did."""
    return exited.error is not None and exited.error.consequence


def _order(exited: Exited) -> tuple[bool, float, int]:
    return is_consequence(exited), _when(exited), -1 if exited.rank is None else exited.rank


def _when(exited: Exited) -> float:
    return exited.time if exited.error is None else exited.error.time


def _failure(node: int, exited: Exited) -> Failure:
    error, rank = exited.error, exited.rank
    if error is None:
        cause, hint, code = status_text(exited.status), _signal_hint(exited), EXIT_FAILED
        if exited.oom_killed:
            cause += " (out of memory)"
    else:
        message, hint = error.message.strip(), error.hint
        # For bad input the worker's own message is shown; for anything else, the exception's type as well.
        code = EXIT_BAD_INPUT if error.exit_code == EXIT_BAD_INPUT else EXIT_FAILED
        cause = f"{error.type}: {message}" if message else error.type
        if code == EXIT_BAD_INPUT and message:
            cause = message
    who = f"fork server of node {node}" if rank is None else f"rank {rank} on node {node}"
    return Failure(
        node,
        rank,
        message=f"{who} {cause}" if error is None else f"{who}: {cause}",
        cause=f"the fork server {cause}" if rank is None else cause,
        time=_when(exited),
        exit_code=code,
        log=exited.log,
        tail=exited.tail,
        hint=hint or "",
    )


def _signal_hint(exited: Exited) -> str | None:
    if exited.status == -signal.SIGKILL:
        return {True: _OOM_HINT, False: _KILLED_HINT, None: _PERHAPS_OOM_HINT}[exited.oom_killed]
    if -exited.status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        return _CRASH_HINT
    return None
