"""Human-readable numbers. Sizes are decimal for rates and counts, binary (GiB) for memory."""

from __future__ import annotations

import math

MIB, GIB = 2**20, 2**30


def count(n: float) -> str:
    """1234567 -> '1.23M'."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= limit * 0.9995:
            return f"{n / limit:.3g}{suffix}"
    return f"{n:.4g}"


def memory(n_bytes: float) -> str:
    """Bytes of memory or disk in binary units: '1.50 GiB'."""
    for power, suffix in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(n_bytes) >= 1024**power:
            return f"{n_bytes / 1024**power:.2f} {suffix}"
    return f"{n_bytes:.0f} B"


def duration(seconds: float) -> str:
    """0.25 -> '250 ms', 75 -> '1 min 15 s', 90000 -> '1 d 1 h'; 'unknown' if not finite."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {secs} s"
