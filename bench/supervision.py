"""CPU cost of supervision and in-memory snapshots: CPU seconds per step of the first-voyage job, compared with an unsupervised run.

    python bench/supervision.py [--rounds 3] [--first 6] [--last 30] [--out FILE]

Alternating: the same 8 ranks under torchrun (none of our agents, heartbeats or checks), supervised without snapshots, and
supervised with a snapshot every 10 steps that is hashed and copied to the other node. Measured is the CPU time of all
processes of the run between two steps: with more ranks than cores it determines the wall time of a step, and is
much less noisy on a shared machine. Wall times are printed too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from recovery import Running, seatrial, torchrun, wait_for
from seatrial.base.process import marked
from seatrial.data.prepare import data_cache, resolve_stores
from seatrial.job import load_job, preset_text

EVERY = 10
JOB = ["train.steps=100000", "optimizer.warmup_steps=20", "train.sample_tokens=0"]
LIMITS = {"supervision": 1.01, "snapshots": 1.03}
_HZ = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: set[int]) -> float:
    """CPU time of the processes so far, including reaped children."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(f) for f in fields[11:15])
    return total / _HZ


def agents_among(pids: set[int]) -> set[int]:
    """Processes that do not train: agents and checkpoint writers."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if {b"seatrial.control.agent", b"seatrial.checkpoint.writer"} & set(arguments):
                found.add(pid)
    return found


def measure(run: Running, mark: str | None, first: int, last: int) -> tuple[float, float, float]:
    """(CPU seconds, wall seconds, agents' CPU seconds) per step, between two steps."""

    def pids() -> set[int]:
        if mark is not None:
            return marked(mark)
        agents = [e["data"]["pid"] for e in run.events("agent_started")]
        marks = set()
        for pid in agents:
            for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if line.startswith(b"SEATRIAL_AGENT="):
                    marks.add(line.partition(b"=")[2].decode())
        return marked(*marks)

    run.wait_step(first)
    members = pids()
    others = agents_among(members)
    before, idle, began = cpu_seconds(members), cpu_seconds(others), run.steps()[-1]
    run.wait_step(last)
    after, busy, ended = cpu_seconds(members), cpu_seconds(others), run.steps()[-1]
    steps = ended["step"] - began["step"]
    return (after - before) / steps, (ended["time"] - began["time"]) / steps, (busy - idle) / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=6)
    parser.add_argument("--last", type=int, default=30)
    parser.add_argument("--out", type=Path, help="add the figures to this JSON of bench/recovery.py")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {"torchrun": [], "supervised": [], "snapshots": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(preset_text("first-voyage"))
        resolve_stores(load_job(folder / "job.toml", JOB).data, data_cache(folder), folder)
        span = (arguments.first, arguments.last)
        for turn in range(arguments.rounds):
            with torchrun(folder, f"torchrun-{turn}", cured=True, overrides=JOB) as run:
                found["torchrun"].append(measure(run, f"bench-{os.getpid()}-torchrun-{turn}", *span))
            for case, every in (("supervised", 0), ("snapshots", EVERY)):
                keys = [f"resilience.snapshot_every_steps={every}"]
                with seatrial(folder, f"{case}-{turn}", *keys, overrides=JOB) as run:
                    wait_for(lambda run=run: run.events("rank_started"), "the ranks")
                    found[case].append(measure(run, None, *span))
    cpu = {case: statistics.median(c for c, *_ in values) for case, values in found.items()}
    for case, values in found.items():
        wall = statistics.median(w for _, w, _ in values)
        agents = statistics.median(a for *_, a in values)
        shown = ", ".join(f"{c:.3f}" for c, *_ in values)
        print(
            f"{case:<11} {cpu[case]:.3f} CPU s per step ({shown}), {wall:.3f} s of wall time; "
            f"agents alone {agents:.4f} s, {agents / cpu[case]:.2%}"
        )
    ratios = {
        "supervision": cpu["supervised"] / cpu["torchrun"],
        "snapshots": cpu["snapshots"] / cpu["supervised"],
    }
    for what, ratio in ratios.items():
        print(f"{what:<11} {ratio:.4f}, limit {LIMITS[what]:.2f}")
    if arguments.out is not None:
        document = json.loads(arguments.out.read_text())
        document["measured"] |= {
            "supervision_overhead": max(0.0, ratios["supervision"] - 1),
            "snapshot_overhead": max(0.0, ratios["snapshots"] - 1),
            "snapshot_every_steps": EVERY,
        }
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(ratio <= LIMITS[what] for what, ratio in ratios.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
