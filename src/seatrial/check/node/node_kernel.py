"""The kernel's log of this node since its start: from /dev/kmsg, else the journal, else dmesg."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from seatrial.base.kernel_files import KMSG, KMSG_RECORD_BYTES
from seatrial.check.node.run_tool import Order, run_tool
from seatrial.check.outputs.kernel_text import is_relevant

_RECORDS = 200_000  # more than any ring buffer holds: stops at a device that never ends
_LARGEST_BYTES = 16 << 20
_TIMEOUT_S = 5.0
# Longest log in bytes that is kept whole. Of a longer one only the relevant lines and the newest are kept.
_WHOLE_BYTES = 50_000
_NEWEST = 100


def read_kernel_log(kmsg: Path = KMSG) -> dict[str, Any]:
    """`text` is the log, None if it cannot be read, with `problem`. `lost`: its beginning has been overwritten.

    `lines` is the number of lines of the whole log; `cut`: `text` has only the relevant lines and the newest.
    """
    lines, problem, lost = _records(kmsg)
    source = str(kmsg)
    if lines is None or lost:
        # The journal keeps what the ring buffer has dropped. Short: one line per message, with its time.
        argv = ("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short-iso")
        journal = run_tool(Order("journalctl -k", argv, _TIMEOUT_S))
        found = journal.out.splitlines() if journal.ok else []
        if len(found) > len(lines or ()):
            lines, source, lost, problem = found, "journalctl -k", False, None
        elif lines is None:
            dmesg = run_tool(Order("dmesg", ("dmesg",), _TIMEOUT_S))
            if dmesg.ok and dmesg.out.strip():
                lines, source, problem = dmesg.out.splitlines(), "dmesg", None
            else:
                problem = "; ".join(p for p in (problem, dmesg.why or "dmesg prints nothing") if p)
    if lines is None:
        return {"source": None, "text": None, "problem": problem, "lost": False, "lines": 0, "cut": False}
    if not lines:
        why = f"{source} is empty: not visible in a container, or cleared"
        return {"source": source, "text": None, "problem": why, "lost": False, "lines": 0, "cut": False}
    kept, cut = lines, sum(map(len, lines)) > _WHOLE_BYTES
    if cut:
        kept = [x for x in lines[:-_NEWEST] if is_relevant(x)] + lines[-_NEWEST:]
    text = "\n".join(kept) + "\n"
    return {
        "source": source,
        "text": text,
        "problem": None,
        "lost": lost,
        "lines": len(lines),
        "cut": cut,
    }


def _records(path: Path) -> tuple[list[str] | None, str | None, bool]:
    """Lines, the reason if there are none, and whether older ones are lost. Never waits for future messages."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return None, f"{path}: {error.strerror}", False
    lines: list[str] = []
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):  # a regular file in tests: many lines per read
            with os.fdopen(fd, "rb", closefd=False) as file:
                lines = file.read(_LARGEST_BYTES).decode(errors="replace").splitlines()
            return lines, None, _begins_late(lines)
        for _ in range(_RECORDS):
            try:
                record = os.read(fd, KMSG_RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten while it was read; the next read returns what is left
            except OSError as error:
                return None, f"{path}: {error.strerror}", False
            if not record:
                break
            # "priority,number,microseconds,flags;text", then lines of details.
            lines.append(record.decode(errors="replace").partition("\n")[0])
    finally:
        os.close(fd)
    return lines, None, _begins_late(lines)


def _begins_late(lines: list[str]) -> bool:
    """Whether the first record is not the first one ever logged."""
    number = lines[0].split(",", 2)[1:2] if lines else []
    return bool(number) and number[0].isdecimal() and int(number[0]) > 0
