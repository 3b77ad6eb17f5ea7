"""The runtime that does nothing, runtime.c, from Python: the process must have been started with it in LD_PRELOAD."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Record(ctypes.Structure):
    """As in runtime.c."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
    ]


ON_WAIT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
runtime = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
runtime.null_records.restype = ctypes.POINTER(Record)
runtime.null_nccl_stream.restype = ctypes.c_uint64
NO_STREAM = 2**64 - 1
runtime.null_kernel.argtypes = [ctypes.c_char_p, ctypes.c_uint64]


def clear() -> None:
    """Forget what was recorded."""
    runtime.null_clear()


def records_since() -> list[tuple[str, str, int]]:
    """(kind, name, stream) of each call since `clear`, in order."""
    n = ctypes.c_size_t()
    found = runtime.null_records(ctypes.byref(n))
    return [(chr(found[i].kind), found[i].name.decode(), found[i].stream) for i in range(n.value)]


def ours(stack: traceback.StackSummary) -> str:
    """The innermost line of src in `stack`, and its function."""
    frames = [f for f in stack if "/seatrial/" in f.filename]
    if not frames:
        return "torch"
    frame = frames[-1]
    return f"{frame.filename.rpartition('/seatrial/')[2]}:{frame.lineno} {frame.name}"


@contextmanager
def waits_noted(found: Counter[str]) -> Iterator[None]:
    """Count in `found` where the host waits for the device."""

    def note(how: bytes) -> None:
        found[f"{how.decode()} at {ours(traceback.extract_stack())}"] += 1

    call = ON_WAIT(note)
    runtime.null_on_wait(call)
    try:
        yield
    finally:
        runtime.null_on_wait(ON_WAIT())
