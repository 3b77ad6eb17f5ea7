"""The rates that a check measured: of single nodes from their findings, and all of them as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from seatrial.base import units
from seatrial.check.judging.compare import HIGHER_IS_BETTER, meaning
from seatrial.check.judging.findings import Expected, Finding

_OF_NODES = "NOD"


def rate(
    values: Sequence[float], unit: str, algorithm: str, direction: str, size_bytes: int | None
) -> dict[str, Any]:
    """One rate: median and minimum of `values`, and what they mean."""
    return {
        "median": float(f"{median(values):.6g}"),
        "min": float(f"{min(values):.6g}"),
        "n": len(values),
        "unit": unit,
        "direction": direction,
        "algorithm": algorithm,
        "size_bytes": size_bytes,
    }


def of_nodes(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Rates that nodes reached by themselves (CPU, memory, storage), in the form of `measured`, grouped by meaning."""
    alike: dict[tuple[object, ...], list[tuple[Finding, float]]] = {}
    for f in findings:
        value = f.measured
        if f.code.startswith(_OF_NODES) and f.unit in HIGHER_IS_BETTER and isinstance(value, int | float):
            alike.setdefault(meaning(f), []).append((f, float(value)))
    found = []
    for group in alike.values():
        (first, _), e = group[0], group[0][0].expected or Expected(None)
        values = rate([v for _, v in group], first.unit, e.algorithm, e.direction, e.size_bytes)
        found.append({"what": first.message.partition(":")[0], "code": first.code, **values})
    return found


def lines(measured: Mapping[str, Any]) -> list[str]:
    """The rates as text: "send_recv: median 3.21 GB/s, minimum 2.9 (one direction, gloo, 64 MiB), 12 values".

    A rate is any table in `measured` that has "median" and "unit"; its name is the path of keys that leads to it.
    """
    return [_line(name, rate) for name, rate in _rates((), measured)]


def _rates(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if "median" in value and "unit" in value:
            yield " ".join(path), value
            return
        for key, inner in value.items():
            yield from _rates((*path, str(key)), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _rates(path, inner)


def _line(path: str, rate: Mapping[str, Any]) -> str:
    name = " ".join(x for x in (path, str(rate.get("what") or rate.get("name") or "")) if x)
    size = rate.get("size_bytes")
    meaning = ", ".join(
        str(x)
        for x in (
            rate.get("direction"),
            rate.get("algorithm"),
            units.memory(size).replace(".00", "") if isinstance(size, int) and size > 0 else None,
        )
        if x
    )
    least = rate.get("min")
    text = f"{name.replace('_', ' ')}: median {_number(rate['median'])} {rate['unit']}"
    if least is not None and least != rate["median"]:
        text += f", minimum {_number(least)}"
    if meaning:
        text += f" ({meaning})"
    n = rate.get("n")
    return text + (f", {n} values" if isinstance(n, int) and n > 1 else "")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "unknown"
