"""Start processes that cannot outlive their parent, and kill everything that belongs to one owner.

Linux only. Three mechanisms, each for what the one before misses:

1. the parent-death signal: the kernel kills a child when its parent ends;
2. the process group: one signal reaches a rank and what it started;
3. the mark: an environment variable that every descendant inherits, found in /proc whatever its parent is now.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from seatrial.base.errors import InputError
from seatrial.base.files import open_file

MARK = "SEATRIAL_AGENT"  # names the agent that a process belongs to

_KILL_S = 5.0  # for killed processes to end
_MANY_FILES = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when the thread that started it, in process `parent`, ends.

    If `parent` has exited already, the signal is sent at once: the kernel only reports deaths that happen later.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process rather than of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def python(module: str, *arguments: str, interpreter: str | None = None) -> list[str]:
    """The command that runs `module` with `arguments` in a new Python process; default: this interpreter.

    -P: do not import from the current folder, where a `random.py` would shadow the standard library.
    """
    return [interpreter or sys.executable, "-P", "-m", module, *arguments]


def allow_files(count: int, what: str) -> None:
    """Raise the open-file limit of this process and its children to `count`, which `what` needs.

    Raises InputError if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        if resource.RLIM_INFINITY != hard < count:
            message = f"a process may have {hard} files open here, but {what} need {count}"
            raise InputError(message, hint="raise the limit, as with `ulimit -Hn 65536`, or start fewer")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def allow_many_files() -> None:
    """Raise the open-file limit to 65,536, or as far as possible: a coordinator has a connection to every node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _MANY_FILES if hard == resource.RLIM_INFINITY else min(_MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def signal_group(pid: int, signum: int) -> None:
    """Send `signum` to the process group `pid`; a no-op if it no longer exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


def fork(body: Callable[[], int], *, log: Path | int | None = None) -> int:
    """Fork a child that runs `body`, exits with its value, and dies with this process; returns its pid.

    The child leads its own process group, has default signal handlers (SIGUSR1 and SIGUSR2 are ignored), reads from
    /dev/null, and writes stdout and stderr, line-buffered, to `log`, a path or an open descriptor. An uncaught
    exception in `body` is logged with its traceback, and the exit code is 1. The child exits without `atexit`
    handlers: those belong to the parent. Call it from the main thread: the child dies when the calling thread does.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that arrives between fork and the reset of the handlers would be handled as one to the parent.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run_child(body, parent, log, mask)
        # In both processes, so that the group exists whichever runs first. It fails if the child did it itself and has
        # since called exec, or has ended.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _run_child(
    body: Callable[[], int], parent: int, log: Path | int | None, mask: set[signal.Signals] | set[int]
) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            # A scheduler may send these to all processes of a job. Only the agents handle them.
            signal.signal(signum, signal.SIG_IGN)
        _redirect(os.open(os.devnull, os.O_RDONLY), 0)
        if log is not None:
            fd = open_log(log) if isinstance(log, Path) else log
            os.dup2(fd, 1)
            _redirect(fd, 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # SIGKILL loses what is buffered
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = body()
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is None:
            code = 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # the last frame of this process: nothing above could report it
        traceback.print_exc()
    finally:
        exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Exit without freeing every module and object first, which with torch imported takes 0.6 s of CPU.

    For the end of a process's main function: `atexit` handlers do not run, threads are not waited for. Code 0 becomes 1
    if output could not be written.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed by whoever started this process
                stream.flush()
        except (OSError, ValueError):
            code = code or 1
    os._exit(code)


def make_log_folder(log: Path) -> None:
    """Make the two folders above `log`, not those above them: a moved run folder must not be recreated half-empty."""
    log.parent.parent.mkdir(exist_ok=True)
    log.parent.mkdir(exist_ok=True)


def open_log(path: Path) -> int:
    """Open a log for appending, created if missing; returns the descriptor.

    Raises OSError, also for a link or a pipe.
    """
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _redirect(fd: int, target: int) -> None:
    if fd != target:
        os.dup2(fd, target)
        os.close(fd)


def reap(handle: Callable[[int, int], None]) -> None:
    """Call `handle(pid, status)` for each child that has ended, after killing what is left of its process group.

    `status` is the exit code, or minus the signal number. The group is killed before its dead leader is reaped: until
    then the pid cannot be reused by an unrelated process.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        signal_group(ended.si_pid, signal.SIGKILL)
        _, status = os.waitpid(ended.si_pid, 0)
        handle(ended.si_pid, os.waitstatus_to_exitcode(status))


def living() -> dict[int, int]:
    """pid -> parent's pid of every process that has not ended; zombies count as ended."""
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as f:
                # The command's name, in parentheses, may contain anything; the state and the parent follow it.
                state, parent = f.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in (b"Z", b"X"):
            table[int(name)] = int(parent)
    return table


def descendants(root: int) -> set[int]:
    """Living children of `root`, their children, and so on."""
    parents = living()
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def marked(*marks: str) -> set[int]:
    """Living processes that belong to any of `marks`, whatever their parent is now."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    found = set()
    for pid in living():
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                environment = f.read()
        except OSError:  # ended meanwhile, or another user's
            continue
        if not wanted.isdisjoint(environment.split(b"\0")):
            found.add(pid)
    return found


def kill_all(find: Callable[[], set[int]]) -> set[int]:
    """SIGKILL what `find` returns, except this process, until it returns nothing; the pids that did not die.

    Returns after `_KILL_S` at the latest: a process in an uninterruptible system call cannot be killed.
    """
    deadline = time.monotonic() + _KILL_S
    while True:
        targets = find() - {os.getpid()}
        if not targets or time.monotonic() > deadline:
            return targets
        pidfds = [fd for pid in targets if (fd := _kill(pid)) is not None]
        try:
            waiting = select.poll()
            for fd in pidfds:
                waiting.register(fd, select.POLLIN)
            alive = len(pidfds)
            while alive and (ended := waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)):
                for fd, _event in ended:
                    waiting.unregister(fd)
                alive -= len(ended)
        finally:
            for fd in pidfds:
                os.close(fd)


def _kill(pid: int) -> int | None:
    """SIGKILL `pid`; a pidfd that becomes readable when it has ended, None if it no longer exists."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        os.close(fd)
        return None
    return fd


def status_text(status: int) -> str:
    """How a process ended, as text; `status` is its exit code, or minus the signal number."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
