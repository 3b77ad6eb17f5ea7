"""Reading JSON documents that others may have left: never a wait for what is no file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The content of a regular file. Raises OSError, also for a pipe or a device; ValueError or RecursionError for no JSON."""
    # Opening a pipe that nobody writes to would wait for ever; of a regular file the flag changes nothing.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no file")
        return json.load(file)
