"""The exception hierarchy, and the diagnostic that points at a place in a file.

SeatrialError              exit 1: a run, check or test failed
 ├─ InputError             exit 2: the user's input cannot be used; carries all problems at once
 ├─ RunFailed              exit 1: training stopped; names node, rank and cause
 └─ InternalError          exit 3: a bug in Seatrial
"""

from __future__ import annotations

import errno
import resource
import unicodedata
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERNAL = 3
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130

_LONGEST_LINE = 200  # characters of the user's file that an error shows


def printable(text: str) -> str:
    """`text` with control characters replaced: models, logs and damaged files may contain escape sequences."""
    # Cc and Cf: control and format characters (including text direction overrides); Cs: lone surrogates.
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "\N{REPLACEMENT CHARACTER}"
        for c in text.replace("\r\n", "\n")
    )


@dataclass(frozen=True)
class Diagnostic:
    """One problem in the user's input, with its place and what to do about it.

    `line` and `column` count from 1; they are None if the problem has no place in a file
    (a missing folder, an environment variable). `source_line` is the text of that line. `count` is the number of lines
    with this problem; `line` is the first of them.
    """

    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    length: int = 1
    source_line: str | None = None
    hint: str | None = None
    count: int = 1

    @property
    def full_message(self) -> str:
        """The message with the number of affected lines."""
        return f"{self.message} ({self.count:,} such lines were read)" if self.count > 1 else self.message

    def render(self) -> str:
        """The problem as text: `file:line:col: error: ...`, the line with a caret, then the hint."""
        place = ""
        if self.file is not None:
            place = self.file
            if self.line is not None:
                place += f":{self.line}"
                if self.column is not None:
                    place += f":{self.column}"
            place += ": "
        out = [f"{place}error: {self.full_message}"]
        if self.source_line is not None and self.line is not None and self.column is not None:
            gutter = f"{self.line} | "
            # Tabs keep their width, so that the caret is under the right character.
            # Of a very long line, show only the text around the place.
            start = (
                max(0, self.column - 1 - _LONGEST_LINE // 2) if len(self.source_line) > _LONGEST_LINE else 0
            )
            shown = self.source_line[start : start + _LONGEST_LINE]
            before = "".join("\t" if c == "\t" else " " for c in shown[: self.column - 1 - start])
            out.append(f"  {gutter}{shown}")
            out.append(
                f"  {' ' * (len(gutter) - 2)}| {before}{'^' * max(1, min(self.length, len(shown) - len(before)))}"
            )
        if self.hint is not None:
            out.append(f"  hint: {self.hint}")
        return printable("\n".join(out))


class SeatrialError(Exception):
    """A failure that is reported to the user as a message, never as a traceback."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        """The full text for stderr."""
        text = f"error: {self.message}"
        return printable(text if self.hint is None else f"{text}\n  hint: {self.hint}")


class InputError(SeatrialError):
    """All problems in the user's input, reported at once (exit 2)."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, problems: str | Diagnostic | list[Diagnostic], *, hint: str | None = None) -> None:
        if isinstance(problems, str):
            problems = [Diagnostic(problems, hint=hint)]
        elif isinstance(problems, Diagnostic):
            problems = [problems]
        self.diagnostics: list[Diagnostic] = problems
        super().__init__("; ".join(d.full_message for d in problems), hint=hint)

    def render(self) -> str:
        text = "\n".join(d.render() for d in self.diagnostics)
        n = len(self.diagnostics)
        return text if n == 1 else f"{text}\n{n} problems"


class RunFailed(SeatrialError):
    """A training run, a check or a test ended without success (exit 1)."""


class InternalError(SeatrialError):
    """A violated invariant: a bug in Seatrial (exit 3)."""

    exit_code = EXIT_INTERNAL


# Hints for OSErrors, by errno.
HINTS = {
    errno.ENOSPC: "free space there, or use another location",
    errno.EDQUOT: "your quota there is exhausted: free space, or request more",
    errno.EROFS: "the file system is mounted read-only; the kernel does that after a disk error (see dmesg)",
    errno.EIO: "the disk or its server failed; see the kernel log (dmesg)",
    errno.ESTALE: "the file server no longer has the folder (stale handle): is it still mounted?",
    errno.ENOTCONN: "the process behind the mount has exited: mount it again",
    errno.EACCES: "check the permissions and the owner",
    errno.EPERM: "check the permissions and the owner",
    errno.EMFILE: "too many files are open at once: allow more of them, as with `ulimit -n 65536`",
    errno.ENFILE: "this machine has too many files open: end the processes that hold them, or raise fs.file-max",
    errno.ENOMEM: "free memory, or raise its limit: `ulimit -v`, the limit of the container or job",
    errno.EAGAIN: "no more processes or threads can be created: raise `ulimit -u`, the limit of the container or job",
    errno.EFBIG: "the size of files is limited by `ulimit -f`, or by the file system",
}
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.EISDIR)


def from_machine(error: Exception) -> SeatrialError | None:
    """Describe an OSError, or an invalid path, for the user; None for what may be a bug in Seatrial."""
    if isinstance(error, MemoryError) or (isinstance(error, ImportError) and "map segment" in str(error)):
        return SeatrialError("no memory is left", hint=address_limit() or HINTS[errno.ENOMEM])
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return SeatrialError("no thread can be started", hint=HINTS[errno.EAGAIN])
    if not isinstance(error, OSError) or error.errno is None:
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    message = f"{where}{error.strerror}"
    if "No usable temporary directory" in message:
        return InputError(message, hint="set TMPDIR to a local folder that is writable")
    if error.errno in _NO_PATH:
        return InputError(message, hint="use another path")
    return SeatrialError(message, hint=HINTS[error.errno]) if error.errno in HINTS else None


def address_limit() -> str | None:
    """The hint if the address space is limited (RLIMIT_AS), which each library reports differently; else None."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return f"a process may have {limit >> 20:,} MiB of addresses here (`ulimit -v`), too little for torch: raise that limit"
