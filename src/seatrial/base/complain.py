"""What a process says of its own troubles, to whoever reads its log."""

from __future__ import annotations

import contextlib
import os


def complain(text: str) -> None:
    """A line on stderr. Where that is a file on a disk that takes no more, nothing happens: it is the trouble itself.

    Nothing is left in a buffer either, which would fail again at the next occasion.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
