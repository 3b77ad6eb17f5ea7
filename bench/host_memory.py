"""Host memory of a run on the virtual cluster: the prediction of `seatrial validate`, and the memory measured while it trains.

    python bench/host_memory.py [--json FILE]

A few small jobs of a dozen steps with copies in memory and checkpoints. Sampled a few times per second from the first step on: the
peak anonymous memory of each process, the blocks of each memory file (memfd), and the pages of libraries
once. Sampling briefly stops a process, so steps are slower than usual.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seatrial.base import units
from seatrial.base.process import descendants
from seatrial.job import load_job, preset_text
from seatrial.plan.cost.host import host_need

EVERY_S = 0.25
SETTINGS = [
    *("train.steps=12", "train.sample_tokens=0", "optimizer.warmup_steps=2", "checkpoint.every_steps=5"),
    *("resilience.snapshot_every_steps=2", "resilience.silence_s=120", "resilience.hang_min_s=600"),
]
ONE = [
    "cluster.nodes=1",
    "cluster.gpus_per_node=1",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.shard=1",
]
WIDE = [
    "model.hidden_size=1024",
    "model.head_dim=256",
    "model.intermediate_size=4096",
    "model.num_hidden_layers=8",
]
CASES: dict[str, list[str]] = {
    "first-voyage, 8 ranks on 2 nodes": [],
    "one rank, small batches": [*ONE, "train.global_batch=8", "train.microbatch=2"],
    "one rank, activations": [
        *ONE,
        *("model.hidden_size=512", "model.head_dim=128", "model.intermediate_size=1536"),
        *("train.sequence_length=1024", "train.global_batch=4", "train.microbatch=2"),
    ],
    "one rank, 126M parameters": [*ONE, *WIDE, "train.global_batch=2", "train.microbatch=1"],
    "126M parameters, 4 ranks on 2 nodes": [
        *WIDE,
        *("cluster.gpus_per_node=2", "parallel.pipeline=1", "train.global_batch=2", "train.microbatch=1"),
    ],
}


class Peaks:
    """Peaks of each process and each memory file."""

    def __init__(self) -> None:
        self.private: dict[int, int] = {}
        self.files: dict[int, tuple[str, int]] = {}
        self.shared: dict[int, int] = {}

    def look(self, root: int) -> None:
        for pid in [root, *descendants(root)]:
            try:
                self._look(pid)
            except (OSError, KeyError):
                continue  # it has ended

    def _look(self, pid: int) -> None:
        part = dict(_kib(Path(f"/proc/{pid}/smaps_rollup")))
        self.private[pid] = max(self.private.get(pid, 0), part["Pss_Anon"])
        self.shared[pid] = max(self.shared.get(pid, 0), part["Pss_File"])
        for fd in os.listdir(f"/proc/{pid}/fd"):
            place = f"/proc/{pid}/fd/{fd}"
            name = os.readlink(place)
            if name.startswith("/memfd:seatrial-"):
                file = os.stat(place)
                old = self.files.get(file.st_ino, ("", 0))[1]
                self.files[file.st_ino] = (name[16:21], max(old, file.st_blocks * 512))

    def of_files(self, *kinds: str) -> int:
        return sum(size for kind, size in self.files.values() if kind.startswith(kinds))


def _kib(path: Path) -> Iterator[tuple[str, int]]:
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            yield name, int(rest.split()[0]) * 1024


def run(folder: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    """One case: bytes predicted and measured."""
    file = folder / "job.toml"
    file.write_text(preset_text("first-voyage"))
    wanted = [*SETTINGS, *overrides]
    need = host_need(job := load_job(file, wanted), "cpu")
    words = [w for each in wanted for w in ("--set", each)]
    log = folder / "log"
    with log.open("w") as err:
        command = [sys.executable, "-m", "seatrial", "train", str(file), "--fresh", "--plain", *words]
        running = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=err)
        peaks = Peaks()
        while running.poll() is None:
            if "\nstep " in log.read_text():
                peaks.look(running.pid)
            time.sleep(EVERY_S)
    if running.returncode != 0:
        raise SystemExit(f"{name}: exit {running.returncode}\n{log.read_text()[-2000:]}")
    states = peaks.of_files("local", "copy")
    # Of the copies one state is a rank's own memory.
    own = states / (4 if job.cluster.nodes > 1 else 2)
    staging = peaks.of_files("stagi")
    processes = sum(peaks.private.values()) + max(peaks.shared.values()) - own
    return {
        "name": name,
        "predicted": {
            "processes and ranks": need.processes + need.ranks,
            "copies": need.copies(2),
            "staging": need.staging,
            "all": need.total(2),
        },
        "measured": {
            "processes and ranks": processes,
            "copies": states + own,
            "staging": staging,
            "all": processes + states + own + staging,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    done = []
    for name, overrides in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            case = run(Path(folder), name, overrides)
        done.append(case)
        print(name)
        for part, predicted in case["predicted"].items():
            measured = case["measured"][part]
            ratio = f"{predicted / measured:.2f}" if measured else "-"
            print(
                f"  {part:<20} predicted {units.memory(predicted):>10}  measured {units.memory(measured):>10}  {ratio}"
            )
    if args.json is not None:
        args.json.write_text(json.dumps(done, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
