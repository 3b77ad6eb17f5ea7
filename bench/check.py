"""Accuracy of fault localisation in simulated clusters, the number of rounds, and the time of the check itself.

    python bench/check.py [--nodes 16 128 1000] [--draws 1000] [--hard] [--seed 0] [--json]

Each draw has 1 to 5 random faults of the kinds in check/blame/faults.py, with the noise of check/blame/simulated.py (`--hard`: twice the
noise and six times the disturbances). A blame is correct if its culprit and location are those of the fault. Times are CPU time of the
whole check including the simulation.

    python bench/check.py --node-stage FOLDER [--repeats 5] [--json]

runs the node stage on this machine instead, with FOLDER as checkpoint folder, and prints the time of each part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from seatrial.check.blame.faults import Shape
from seatrial.check.blame.localise import localise
from seatrial.check.blame.simulated import Cluster, Noise, SimulatedBench
from seatrial.check.node.node_stage import NodeOptions
from seatrial.check.node.node_stage import measure as node_stage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sim"))
from random_faults import culprit, draw

HARD = Noise(reading=0.02, outlier=0.02, nothing=0.005, silent=0.001, own_outlier=0.002)


def measure(nodes: int, draws: int, noise: Noise, first: int) -> dict[str, Any]:
    """One row: precision, recall, rounds and CPU seconds over `draws` draws of `nodes` nodes."""
    shape = Shape(nodes, nodes_per_leaf=4 if nodes < 64 else 32)
    right = wrong = missed = 0
    kinds: Counter[str] = Counter()
    rounds, seconds = [], []
    for seed in range(first, first + draws):
        rng = np.random.default_rng([seed, 7])
        faults = draw(shape, int(rng.integers(1, 6)), rng)
        cluster = Cluster(shape, faults, seed=seed, noise=noise)
        topology = cluster.topology()
        start = time.process_time()
        report = localise(SimulatedBench(cluster), cluster.names, topology, cluster.gbit_s)
        seconds.append(time.process_time() - start)
        truth = {culprit(f, shape): f.kind for f in faults}
        blamed = {b.culprit: b.kind for b in report.blames}
        right += len(truth.keys() & blamed.keys())
        wrong += len(blamed.keys() - truth.keys())
        missed += len(truth.keys() - blamed.keys())
        kinds.update(f"missed {truth[k]}" for k in truth.keys() - blamed.keys())
        kinds.update(f"wrong {blamed[k]}" for k in blamed.keys() - truth.keys())
        rounds.append((report.rounds.node, report.rounds.pair, report.rounds.group))
    columns = list(zip(*rounds, strict=True))
    return {
        "nodes": nodes,
        "draws": draws,
        "faults": right + missed,
        "precision": right / max(1, right + wrong),
        "recall": right / max(1, right + missed),
        "rounds_median": [statistics.median(c) for c in columns],
        "rounds_max": [max(c) for c in columns],
        "cpu_s_median": statistics.median(seconds),
        "cpu_s_max": max(seconds),
        "errors": dict(kinds),
    }


def measure_here(folder: str, repeats: int) -> dict[str, Any]:
    """Run the node stage on this machine several times: total seconds, seconds of each part, and measured rates."""
    runs = [node_stage(NodeOptions(storage=folder)) for _ in range(repeats)]
    cpu = [run["rates"]["cpu"] or {} for run in runs]
    rates = {
        name: [round(c[name], 2) for c in cpu if c.get(name) is not None]
        for name in ("gemm_gflop_s", "memory_gb_s", "memory_share", "loopback_gb_s")
    }
    rates |= {
        name: [round(r["storage"].get(name) or 0.0, 2) for r in runs] for name in ("write_gb_s", "read_gb_s")
    }
    return {
        "seconds": [run["seconds"] for run in runs],
        "parts_median": {p: statistics.median(run["parts"][p] for run in runs) for p in runs[0]["parts"]},
        "rates": rates,
        "gpus": [run["rates"]["gpus"] for run in runs if run["rates"]["gpus"]],
    }


def print_here(found: dict[str, Any]) -> None:
    """Print lines for bench/LOG.md."""
    print(
        f"node stage: median {statistics.median(found['seconds']):.2f} s, most {max(found['seconds']):.2f} s"
    )
    for part, seconds in found["parts_median"].items():
        print(f"  {part}: {seconds:.2f} s")
    for name, values in found["rates"].items():
        if values:
            print(f"  {name}: median {statistics.median(values):.4g}, {min(values):.4g} to {max(values):.4g}")
    for gpus in found["gpus"]:
        print(f"  {json.dumps(gpus)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 128, 1000])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--node-stage", metavar="FOLDER")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.node_stage is not None:
        found = measure_here(args.node_stage, args.repeats)
        if args.json:
            print(json.dumps({"schema_version": 1} | found, indent=2))
        else:
            print_here(found)
        return
    rows = [measure(n, args.draws, HARD if args.hard else Noise(), args.seed) for n in args.nodes]
    if args.json:
        print(json.dumps({"schema_version": 1, "rows": rows}, indent=2))
        return
    print(
        "| nodes | draws | faults | precision | recall | rounds node/pair/group: median (most) | CPU s: median (most) | errors |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        rounds = " / ".join(
            f"{m:g} ({x})" for m, x in zip(row["rounds_median"], row["rounds_max"], strict=True)
        )
        print(
            f"| {row['nodes']:,} | {row['draws']:,} | {row['faults']:,} | {row['precision']:.4f} | {row['recall']:.4f} "
            f"| {rounds} | {row['cpu_s_median']:.3f} ({row['cpu_s_max']:.3f}) | {row['errors'] or '-'} |"
        )


if __name__ == "__main__":
    main()
