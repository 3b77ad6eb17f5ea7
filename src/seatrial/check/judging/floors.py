"""What healthy GPUs and NICs reach, from floors.toml, and the verdict on a reading. What is not listed is unknown."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from seatrial.check.judging.findings import Direction, Expected, Verdict
from seatrial.hardware.catalogue import find_gpu, normal_name

Board = Literal["switch", "bridge", "mesh", "none", "xgmi"]
What = Literal["nvlink_copy", "all_reduce", "host_to_device", "gemm_bf16"]


@dataclass(frozen=True)
class Floor:
    """One number that healthy hardware reaches, in `unit`, and its meaning."""

    what: What
    kind: Literal["healthy", "gate"]
    value: float
    unit: str
    direction: Direction
    algorithm: str
    size_bytes: int | None
    source: str

    @property
    def broken(self) -> float:
        """Limit below which something is broken."""
        return self.value if self.kind == "gate" else self.value * shares().broken

    @property
    def suspect(self) -> float:
        """Limit below which something is suspect."""
        return self.value if self.kind == "gate" else self.value * shares().suspect

    def verdict(self, measured: float) -> Verdict:
        """PASS, WARN below `suspect`, FAIL below `broken`. NaN is FAIL."""
        if not measured >= self.broken:
            return "FAIL"
        return "WARN" if measured < self.suspect else "PASS"

    def expected(self) -> Expected:
        """For a finding. The value is what healthy hardware reads, not the limit."""
        return Expected(
            self.value, self.unit, self.source, self.direction, self.algorithm, self.size_bytes or None
        )


@dataclass(frozen=True)
class Sku:
    """One kind of GPU as a machine reports it. `links` and `link_gb_s` (one direction, raw) are None if unknown."""

    name: str
    names: tuple[str, ...]
    board: Board
    counts: tuple[int, ...]  # GPUs that one machine can report; empty: any
    links: int | None
    link_gb_s: float | None
    floors: tuple[Floor, ...]
    source: str

    def floor(self, what: What, *, algorithm: str = "", direction: Direction = "") -> Floor | None:
        """The floor for `what`; None if none is known. Without algorithm or direction, the lowest."""
        fit = [
            f
            for f in self.floors
            if f.what == what
            and (not algorithm or f.algorithm == algorithm)
            and (not direction or f.direction == direction)
        ]
        return min(fit, key=lambda f: f.value, default=None)


@dataclass(frozen=True)
class Nic:
    """One kind of NIC. Rates in Gbit/s, one direction; `healthy` is None if no measurement is known."""

    name: str
    gbit_s: float
    layer: Literal["InfiniBand", "Ethernet", "EFA"]
    algorithm: str
    size_bytes: int
    source: str
    healthy: float | None = None


@dataclass(frozen=True)
class Target:
    """A reference target of this project, with its meaning."""

    value: float
    unit: str
    direction: Direction
    algorithm: str
    meaning: str
    source: str


@dataclass(frozen=True)
class Shares:
    """Shares of what healthy hardware reads, or of a NIC's data sheet, below which it is broken or suspect."""

    broken: float
    suspect: float
    source: str


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("seatrial.check.judging").joinpath("floors.toml").read_text(encoding="utf-8"))


@cache
def shares() -> Shares:
    """The shares of floors.toml."""
    return Shares(**_table()["shares"])


@cache
def targets() -> dict[str, Target]:
    """The reference targets: "nvlink" in GB/s, both directions; "inter_node" as a share of the data sheet."""
    return {name: Target(**fields) for name, fields in _table()["target"].items()}


@cache
def skus() -> tuple[Sku, ...]:
    """Every GPU of floors.toml, in its order."""
    found = []
    for entry in _table()["gpu"]:
        names = [*entry["catalogue"], *entry.get("device_names", ())]
        floors = tuple(Floor(**(f | {"size_bytes": f["size_bytes"] or None})) for f in entry["floor"])
        found.append(
            Sku(
                entry["name"],
                tuple(normal_name(n) for n in names),
                entry["board"],
                tuple(entry.get("counts", ())),
                entry.get("links"),
                entry.get("link_gb_s"),
                floors,
                entry["source"],
            )
        )
    return tuple(found)


def find_sku(name: str | None) -> Sku | None:
    """The GPU with this catalogue or device name; None if unknown. Only whole names match, as in the catalogue."""
    if name is None:
        return None
    gpu = find_gpu(name)
    wanted = {normal_name(name), "" if gpu is None else normal_name(gpu.name)}
    return next((s for s in skus() if wanted & {normal_name(s.name), *s.names}), None)


@cache
def nics() -> tuple[Nic, ...]:
    """Every NIC of floors.toml, in its order."""
    return tuple(Nic(**entry) for entry in _table()["nic"])


def judge_share(share: float) -> Verdict:
    """The verdict on the share of what was expected that was measured. NaN is FAIL."""
    if not share >= shares().broken:
        return "FAIL"
    return "WARN" if share < shares().suspect else "PASS"


def highest(what: What, algorithms: Iterable[str]) -> Floor | None:
    """The highest floor for `what` of all known GPUs: a reading above it is good on any of them."""
    wanted = set(algorithms)
    fit = [f for s in skus() for f in s.floors if f.what == what and f.algorithm in wanted]
    return max(fit, key=lambda f: f.value, default=None)
