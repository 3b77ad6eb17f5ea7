"""The checkpoint folder as this node sees it: kind of storage, free space, and speed."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from seatrial.base.kernel_files import text_of
from seatrial.base.process import python
from seatrial.check.node.run_tool import Order, run_tool

_PREFIX = ".seatrial-check-"
_STALE_S = 3600.0
_MOST_MIB = 512
_SHARE = 0.05  # of the free space, at most
_STAT_S = 5.0
_GRACE_S = 3.0
# File systems in memory.
MEMORY_TYPES = ("tmpfs", "ramfs", "devtmpfs")


def read_storage(folder: str, seconds: float, *, rates: bool = True) -> dict[str, Any]:
    """Type, space and speed of `folder`'s storage; `problem` and `ended` if it gave no answer.

    Takes at most `seconds` and a few more, whatever the storage does. For a folder that does not exist yet, the nearest
    existing parent is measured. GB/s decimal, bytes.
    """
    facts: dict[str, Any] = {"folder": folder}
    # As a program: stat of a folder on an unreachable server does not return.
    asked = run_tool(Order("stat of the storage", (sys.executable, "-I", "-S", "-c", _STAT, folder), _STAT_S))
    if not asked.ok:
        return facts | {"ended": asked.ended, "problem": asked.why}
    facts |= json.loads(asked.out)
    facts |= _mount(facts["at"])
    if not rates or facts["problem"] is not None:
        return facts
    mib = min(_MOST_MIB, int(facts["free_bytes"] * _SHARE) >> 20)
    if mib < 4:
        return facts | {"problem": "too little free space to measure its throughput", "ended": "failed"}
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    argv = python("seatrial.check.node.probe_storage", facts["at"], str(mib), f"{seconds / 2:.3f}", name)
    order = Order("storage probe", argv, seconds + _GRACE_S)
    done = run_tool(order)
    if done.ended != "stuck":  # else touching it would hang as well
        _clear(Path(facts["at"]), name)
    if not done.ok:
        return facts | {"ended": done.ended, "problem": done.why}
    facts |= json.loads(done.out)
    return facts | {"seconds": done.seconds}


def _clear(folder: Path, name: str) -> None:
    """Remove the file if the probe was killed between creating and unlinking it, and files of checks long ended."""
    with contextlib.suppress(OSError):
        (folder / name).unlink()
    now = time.time()
    with contextlib.suppress(OSError):
        for left in folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if now - left.stat().st_mtime > _STALE_S:
                    left.unlink()


_STAT = """
import json, os, sys
folder = os.path.abspath(sys.argv[1])
at = folder
while not os.path.isdir(at) and at != "/":
    at = os.path.dirname(at)
try:
    s = os.statvfs(at)
    result = {
        "at": at,
        "size_bytes": s.f_blocks * s.f_frsize,
        "free_bytes": s.f_bavail * s.f_frsize,
        "inodes": s.f_files,
        "free_inodes": s.f_favail,
        "read_only": bool(s.f_flag & os.ST_RDONLY),
        "writable": os.access(at, os.W_OK | os.X_OK),
        "device": os.stat(at).st_dev,
        "problem": None,
    }
except OSError as error:
    result = {"at": at, "problem": error.strerror or str(error)}
print(json.dumps(result))
"""


def _mount(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> dict[str, Any]:
    """Type and source of the file system of `path`: the longest mount point above it, the last of equals."""
    best, found = "", dict[str, Any](type=None, source=None)
    for line in (text_of(mounts) or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/") or point == "/"
        if inside and len(point) >= len(best):
            best, found = point, {"type": rest[0], "source": rest[1]}
    return found
