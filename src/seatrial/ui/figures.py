"""Formats figures of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.base.batches import BatchSizes
from seatrial.base.errors import printable as printable
from seatrial.record.metrics import MetricsRecord

if TYPE_CHECKING:  # a view of a run needs no pydantic
    from seatrial.job.architecture import Architecture


def memory(n_bytes: float | None) -> str:
    """Memory: 312 MiB, 78.4 GiB; "unknown" if not measured."""
    if n_bytes is None:
        return "unknown"
    for power, suffix in ((3, "GiB"), (2, "MiB")):
        if n_bytes >= 1024**power:
            value = n_bytes / 1024**power
            return f"{value:.0f} {suffix}" if value >= 100 else f"{value:.3g} {suffix}"
    return units.memory(n_bytes)


def parameters(arch: Architecture) -> str:
    """Parameters of a model: 30.5B parameters, with experts also how many one token uses."""
    text = f"{units.count(arch.parameters())} parameters"
    return f"{text}, {units.count(arch.active_parameters())} of them active" if arch.num_experts else text


def rate(per_s: float | None) -> str:
    """Rate: 9,120 or 0.83."""
    if per_s is None or not math.isfinite(per_s):
        return str(per_s)
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2f}"


def mfu(share: float | None) -> str:
    """MFU: 41.2 %; "unknown" if the peak of the device is not known."""
    return "unknown" if share is None else f"{share * 100:.1f} %"


def eta(seconds: float | None) -> str:
    """Time left: 12 s, 1 min 12 s; "unknown" for None."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    return units.duration(seconds) if seconds >= 59.5 else f"{seconds:.0f} s"


def late_after_s(last: MetricsRecord, batches: BatchSizes | None) -> float:
    """Age of the last step, in seconds, from which it is highlighted."""
    growth = 1.0 if batches is None else batches.growth(last.step, last.step + 1)
    return max(10.0, 5 * last.step_time_s * growth)


def step_of(step: int, total: int | None) -> str:
    """Step of total: 50/200, equally wide for every step of the run."""
    return str(step) if total is None else f"{step:>{len(str(total))}}/{total}"


def unit(device: str | None) -> str:
    """Unit of one rank's speed: "GPU" only if it has one."""
    return "rank" if device in (None, "cpu") else "GPU"


def speed(m: MetricsRecord, unit: str) -> str:
    """Speed and memory: tok/s 9,120  tok/s/GPU 1,140  MFU unknown  mem 312 MiB."""
    return (
        f"tok/s {rate(m.tokens_per_s)}  tok/s/{unit} {rate(m.tokens_per_s_per_gpu)}  "
        f"MFU {mfu(m.mfu)}  mem {memory(m.memory_bytes)}"
    )


def extra(m: MetricsRecord) -> str:
    """The metrics of other packages: perplexity 31.2, watts 4.1e+05; empty if there are none."""
    return ", ".join(f"{printable(name)} {value:.4g}" for name, value in (m.extra or {}).items())


def experts(m: MetricsRecord) -> str:
    """Load of the experts: load 0.31 to 1.84 of the mean, 2 idle, balance loss 2.0312; empty without experts."""
    smallest, largest, idle, balance = m.expert_load_min, m.expert_load_max, m.idle_experts, m.router_aux_loss
    if smallest is None or largest is None or idle is None or balance is None:
        return ""
    return f"load {smallest:.2f} to {largest:.2f} of the mean, {idle:,} idle, balance loss {balance:.4f}"


def step_line(m: MetricsRecord, total: int | None, eta_s: float | None, unit: str) -> str:
    """One step as a plain line."""
    more = "" if m.validation_loss is None else f"validation {m.validation_loss:.4f}  "
    more += f"{extra(m)}  " if m.extra else ""
    width = 6 if total is None else max(6, 2 * len(str(total)) + 1)
    return (
        f"step {step_of(m.step, total):>{width}}  loss {m.loss:.4f}  grad {m.grad_norm:.2f}  {speed(m, unit)}  "
        f"{more}ETA {eta(eta_s)}"
    )


def steps(numbers: Sequence[int], most: int = 20) -> str:
    """Steps as text: step 5; steps 5, 7, 9-12; beyond `most` entries only their number. `numbers` are ascending."""
    ranges: list[list[int]] = []
    for n in numbers:
        if ranges and n == ranges[-1][-1] + 1:
            ranges[-1][1:] = [n]
        else:
            ranges.append([n])
    text = ", ".join("-".join(map(str, r)) for r in ranges[:most])
    more = sum(r[-1] - r[0] + 1 for r in ranges[most:])
    return f"step{'' if len(numbers) == 1 else 's'} {text}{f' and {more:,} more' if more else ''}"


def spark(values: Sequence[float]) -> str:
    """`values` as a sparkline of 40 characters, each bar the mean of an equal share of them; NaN and infinity show as "!"."""
    return area(values, 40, 1)[0] if len(values) > 1 else ""


def area(values: Sequence[float], width: int, height: int) -> list[str]:
    """`values` as an area of `height` lines, each column the mean of an equal share; NaN and infinity show as "!"."""
    bars = " ▁▂▃▄▅▆▇█"
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [
        math.fsum(part) / len(part) if all(map(math.isfinite, part)) else math.nan
        for part in (values[a:b] for a, b in itertools.pairwise(edges))
    ]
    finite = [m for m in means if math.isfinite(m)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (8 * height - 1) / (high - low) if high > low else 0.0
    # In eighths of a line, at least one, so that it is visible.
    filled = [None if math.isnan(m) else 1 + round((m - low) * scale) for m in means]
    return [
        "".join("!" if f is None else bars[max(0, min(8, f - 8 * line))] for f in filled)
        for line in reversed(range(height))
    ]
