"""Coverage of the intervals of `seatrial scale`, and its overhead over `seatrial train`.

    python bench/scale.py [--times 10] [--repeats 6] [--steps 20] [--pairs 5] [--out FILE]

A virtual cluster of 1 and 2 nodes with one rank each. The whole measurement is repeated from scratch; the
mean of all efficiencies is taken as the true value, which each interval should cover. Then a run of `scale` and the
same job under `train` alternate; compared are the mean steady step time and the duration of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from seatrial.job import job_from_text, preset_text
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import read_metrics
from seatrial.scale import run
from seatrial.scale.trial import figures_of

JOB = [
    *("cluster.nodes=2", "cluster.gpus_per_node=1", "parallel.tensor=1", "parallel.pipeline=1"),
    *("train.global_batch=8", "optimizer.warmup_steps=5"),
]
COVERED, LIMIT = 9, 1.02  # of ten; of a step's time


def seatrial(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seatrial", *words]
    return subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )


def measured(folder: Path, seed: int, steps: int, repeats: int) -> dict[str, Any]:
    """The report of one measurement."""
    words = ["scale", "job.toml", "--nodes", "1,2", "--steps", str(steps), "--repeats", str(repeats)]
    done = seatrial(*words, "--precision", "2", "--seed", str(seed), "--fresh", "--json", cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def covering(folder: Path, times: int, steps: int, repeats: int) -> dict[str, Any]:
    found = []
    for n in range(times):
        report = measured(folder, n, steps, repeats)
        size = report["sizes"][1]
        found.append({**size["efficiency"], "runs": [s["runs"] for s in report["sizes"]]})
        told = f"{found[-1]['mean']:.4f} ({found[-1]['low']:.4f}-{found[-1]['high']:.4f})"
        print(f"efficiency {told}, {found[-1]['runs']} runs", file=sys.stderr, flush=True)
    mean = statistics.fmean(f["mean"] for f in found)
    return {"mean": mean, "covered": sum(f["low"] <= mean <= f["high"] for f in found), "each": found}


def overhead(folder: Path, pairs: int) -> dict[str, Any]:
    """Ratios of `scale`'s own run to `train` with the same copy of the job."""
    (copy, *_) = sorted((folder / "runs/.scale").glob("*/2-nodes-*.toml"))
    steps_s: dict[str, list[float]] = {"scale": [], "train": []}
    whole_s: dict[str, list[float]] = {"scale": [], "train": []}
    for n in range(2 * pairs):
        kind = ("scale", "train")[(n + n // 2) % 2]  # who is first changes
        runs = folder / f"{kind}-{n}"
        begin = time.perf_counter()
        if kind == "scale":
            command = run.command(copy, runs, None, parent=os.getpid())
            subprocess.run(
                command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
            )
        else:
            seatrial("train", str(copy), "--runs", str(runs), "--plain", cwd=folder)
        whole_s[kind].append(time.perf_counter() - begin)
        records, _ = read_metrics(RunFolder(next(runs.glob("[!.]*"))))
        steps_s[kind].append(figures_of(records, 1).step_s)
    ratios = {}
    for what, values in (("step", steps_s), ("process", whole_s)):
        each = [a / b for a, b in zip(values["scale"], values["train"], strict=True)]
        ratios[what] = {"median": statistics.median(each), "each": each}
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = job_from_text(
            preset_text("first-voyage"), name="job.toml", base_folder=folder, overrides=JOB
        ).to_toml()
        (folder / "job.toml").write_text(text)
        found = {"covering": covering(folder, args.times, args.steps, args.repeats)}
        found["overhead"] = overhead(folder, args.pairs)
    print(json.dumps(found, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    cover = found["covering"]
    fine = 10 * cover["covered"] >= COVERED * args.times and found["overhead"]["step"]["median"] <= LIMIT
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
