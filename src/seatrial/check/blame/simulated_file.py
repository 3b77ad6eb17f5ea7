"""A cluster to simulate from a TOML or JSON file (`seatrial check --simulate FILE`).

    [cluster]
    nodes = 16                  # required; node0000, node0001, ...
    gpu = "H100 SXM"            # of the catalogue
    gpus = 8                    # a node
    rails = 8                   # ports a node, mlx5_0 ...
    gbit_s = 400.0              # of a port
    nodes_per_leaf = 8          # a block; each rail of it has its own leaf switch
    topology = true             # whether the check knows which port is on which leaf
    seed = 1
    [noise]                     # fields of `simulated.Noise`
    outlier = 0.01
    [[fault]]                   # fields of `faults.Fault`: kind, node, gpu, link, rail, leaf, share, after
    kind = "nic_slow"
    node = 3
    rail = 5
    share = 0.7
    [[node]]                    # replaces random values; rates by GPU or rail
    node = 4
    gemm_tflops = [790, 790, 790, 790, 790, 790, 790, 790]   # also hbm_gb_s, h2d_gb_s, rail_gbit_s
    kernel_log = ["NVRM: Xid (PCI:0000:0f:00): 31, pid=7, name=python"]
    counters = { 2 = { symbol_error = [0, 4000] } }           # rail -> counter -> before and after a load of 10 s

All problems are reported at once. JSON has the same keys ("fault" and "node" are lists).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import parse_json, parse_toml, read_named
from seatrial.check.blame.faults import Fault, Shape, verify
from seatrial.check.blame.localise import Report, localise
from seatrial.check.blame.simulated import Cluster, NodeOverrides, Noise, SimulatedBench
from seatrial.check.judging import report
from seatrial.check.judging.check_run import CheckRun
from seatrial.hardware.catalogue import find_gpu

MOST_NODES = 100_000
_RATES = {"gemm_tflops": "gemm", "hbm_gb_s": "hbm", "h2d_gb_s": "h2d"}
_SHAPE = {"nodes": MOST_NODES, "gpus": 64, "rails": 64, "links": 64, "nodes_per_leaf": MOST_NODES}


@dataclass(frozen=True)
class Scenario:
    """The content of a file: a cluster, and whether the check knows its topology."""

    cluster: Cluster
    topology: bool

    def run(self) -> Report:
        """Check it."""
        cluster = self.cluster
        known = cluster.topology() if self.topology else None
        return localise(SimulatedBench(cluster), cluster.names, known, cluster.gbit_s)


def read_scenario(path: Path) -> Scenario:
    """Read the scenario in a file. Raises InputError with every problem."""
    try:
        text = read_named(path).decode("utf-8")
        table = parse_json(text) if path.suffix == ".json" else parse_toml(text)
    except OSError as error:
        raise InputError(Diagnostic(f"cannot be read: {error.strerror}", file=str(path))) from error
    except json.JSONDecodeError as error:
        raise InputError(
            Diagnostic(f"not JSON: {error.msg}", str(path), error.lineno, error.colno)
        ) from error
    except ValueError as error:
        raise InputError(Diagnostic(f"cannot be read: {error}", file=str(path))) from error
    return _Reader(str(path)).scenario(table)


def simulate(path: Path) -> report.Report:
    """Check the cluster of a file; a report for all output formats. Raises InputError with all the file's problems."""
    scenario = read_scenario(path)
    started_at = time.monotonic()
    found = scenario.run()
    check_run = CheckRun(
        tuple(scenario.cluster.names),
        dataclasses.asdict(found.rounds),
        {"total": round(time.monotonic() - started_at, 3)},
        tuple(blame.record() for blame in found.blames),
        found.unsettled,
        {},  # the cluster's rates are invented
        str(path),
    )
    return report.Report((), found.findings, check_run)


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Diagnostic] = []

    def scenario(self, table: Any) -> Scenario:
        table = self._table(table, "the file", ("cluster", "noise", "fault", "node"))
        head = self._table(table.get("cluster"), "[cluster]", (*_SHAPE, "gpu", "gbit_s", "topology", "seed"))
        if "nodes" not in head:
            self._problem("[cluster] needs nodes", "nodes = 16")
        sizes = {}
        for key, most in _SHAPE.items():
            if key in head and self._number(head[key], f"[cluster] {key}", 1, most, whole=True):
                sizes[key] = head[key]
        shape = Shape(**({"nodes": 1} | sizes))
        gpu = head.get("gpu", "H100 SXM")
        if not isinstance(gpu, str) or find_gpu(gpu) is None:
            self._problem(
                f"[cluster] gpu: unknown GPU {gpu!r}", "name one of the catalogue, such as 'H100 SXM'"
            )
        rate, seed, topology = head.get("gbit_s", 400.0), head.get("seed", 0), head.get("topology", True)
        self._number(rate, "[cluster] gbit_s", 1, 100_000)
        self._number(seed, "[cluster] seed", 0, 2**63 - 1, whole=True)
        if not isinstance(topology, bool):
            self._problem("[cluster] topology must be true or false")
        noise = self._noise(table.get("noise", {}))
        faults = self._faults(table.get("fault", []), shape)
        overrides = self._overrides(table.get("node", []), shape)
        if self.problems:
            raise InputError(self.problems)
        return Scenario(Cluster(shape, faults, gpu, float(rate), seed, noise, overrides), topology)

    def _problem(self, text: str, hint: str | None = None) -> None:
        self.problems.append(Diagnostic(text, file=self.file, hint=hint))

    def _table(self, value: Any, what: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self._problem(f"{what} is missing or not a table")
            return {}
        for key in value:
            if key not in keys:
                self._problem(f"{what}: unknown key {key!r}", f"known: {', '.join(keys)}")
        return {k: v for k, v in value.items() if k in keys}

    def _number(self, value: Any, what: str, low: float, high: float, *, whole: bool = False) -> bool:
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not fits or not low <= value <= high:
            self._problem(
                f"{what}: {value!r} is not {'an integer' if whole else 'a number'} in {low:g}..{high:g}"
            )
            return False
        return True

    def _noise(self, value: Any) -> Noise:
        names = tuple(f.name for f in dataclasses.fields(Noise))
        table = self._table(value, "[noise]", names)
        good = {k: float(v) for k, v in table.items() if self._number(v, f"[noise] {k}", 0, 1)}
        return Noise(**good)

    def _list(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            self._problem(f"{what} is not a list of tables")
            return []
        return value

    def _faults(self, value: Any, shape: Shape) -> tuple[Fault, ...]:
        found = []
        names = tuple(f.name for f in dataclasses.fields(Fault))
        for i, entry in enumerate(self._list(value, "[[fault]]"), 1):
            where = f"[[fault]] {i}"
            table = dict(self._table(entry, where, names))
            good = isinstance(table.get("kind"), str)
            if not good:
                self._problem(f"{where} needs kind")
            if "leaf" in table:
                pair = table["leaf"]
                if isinstance(pair, list) and len(pair) == 2 and all(type(v) is int for v in pair):
                    table["leaf"] = (pair[0], pair[1])
                else:
                    self._problem(f"{where} leaf: [block, rail] is needed")
                    good = False
            for key in ("node", "gpu", "link", "rail", "after"):
                if key in table:
                    good &= self._number(table[key], f"{where} {key}", 0, MOST_NODES, whole=True)
            if "share" in table:
                good &= self._number(table["share"], f"{where} share", 0, 1)
            if good:
                found.append(Fault(**table))
        for text in verify(found, shape):
            self._problem(text)
        return tuple(found)

    def _overrides(self, value: Any, shape: Shape) -> dict[int, NodeOverrides]:
        found: dict[int, NodeOverrides] = {}
        keys = ("node", *_RATES, "rail_gbit_s", "kernel_log", "counters")
        for i, entry in enumerate(self._list(value, "[[node]]"), 1):
            where = f"[[node]] {i}"
            table = self._table(entry, where, keys)
            if not self._number(table.get("node"), f"{where} node", 0, shape.nodes - 1, whole=True):
                continue
            rates = {
                name: self._row(table[key], f"{where} {key}", shape.gpus)
                for key, name in _RATES.items()
                if key in table
            }
            rails = table.get("rail_gbit_s")
            lines = table.get("kernel_log", [])
            if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
                self._problem(f"{where} kernel_log is not a list of lines")
                lines = []
            if table["node"] in found:
                self._problem(f"{where}: node {table['node']} is listed twice")
            found[table["node"]] = NodeOverrides(
                rates,
                None if rails is None else self._row(rails, f"{where} rail_gbit_s", shape.rails),
                tuple(lines),
                self._counters(table.get("counters", {}), where, shape),
            )
        return found

    def _row(self, value: Any, what: str, length: int) -> tuple[float, ...]:
        if not isinstance(value, list) or len(value) != length:
            self._problem(f"{what}: {length} numbers are required")
            return (0.0,) * length
        for v in value:
            self._number(v, what, 0, 1e9)
        return tuple(float(v) if isinstance(v, int | float) else 0.0 for v in value)

    def _counters(
        self, value: Any, where: str, shape: Shape
    ) -> dict[int, tuple[dict[str, int], dict[str, int]]]:
        found: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
        rails = tuple(str(r) for r in range(shape.rails))
        for rail, counters in self._table(value, f"{where} counters", rails).items():
            before: dict[str, int] = {}
            after: dict[str, int] = {}
            for name, pair in counters.items() if isinstance(counters, dict) else ():
                if not isinstance(pair, list) or len(pair) != 2:
                    self._problem(f"{where} counters {rail} {name}: [before, after] is needed")
                else:
                    good = [
                        self._number(v, f"{where} counters {rail} {name}", 0, 2**64, whole=True) for v in pair
                    ]
                    if all(good):
                        before[name], after[name] = pair
            if not isinstance(counters, dict):
                self._problem(f"{where} counters {rail} is not a table")
            found[int(rail)] = (before, after)
        return found
