"""Report a process's own problems to its log."""

from __future__ import annotations

import contextlib
import os


def complain(text: str) -> None:
    """Write a line to stderr, best effort: a failed write, as to a log file on a full disk, is ignored.

    Unbuffered: a buffered line that could not be written would fail again at the next write.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
