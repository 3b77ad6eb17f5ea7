"""What the kernel knows of its clock's error, by adjtimex(2)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

# linux/timex.h
_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000
_TIME_ERROR = 5


class _Timex(ctypes.Structure):
    """struct timex of glibc on 64-bit Linux, sys/timex.h."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("ppsfreq", ctypes.c_long),
        ("jitter", ctypes.c_long),
        ("shift", ctypes.c_int),
        ("stabil", ctypes.c_long),
        ("counts", ctypes.c_long * 4),
        ("tai", ctypes.c_int),
        ("rest", ctypes.c_int * 11),
    )


@dataclass(frozen=True)
class KernelClock:
    """The state of the clock, as the time service reports it to the kernel."""

    synchronised: bool
    offset_s: float
    max_error_s: float


def kernel_clock() -> KernelClock | None:
    """None if the kernel does not report it. Read-only, so it needs no privilege."""
    found = _Timex(modes=0)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found))
    if state < 0:
        return None  # blocked by seccomp in some containers
    return KernelClock(
        state != _TIME_ERROR and not found.status & _STA_UNSYNC,
        found.offset / (1e9 if found.status & _STA_NANO else 1e6),
        found.maxerror / 1e6,
    )
