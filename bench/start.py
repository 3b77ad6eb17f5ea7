"""Time from `seatrial train` to the first finished step of 8 ranks, compared with torchrun starting the same worker.

    python bench/start.py [--rounds 3] [--no-torchrun] [--slurm]

Both run the first step of the first-voyage job on the same virtual cluster of 8 CPU ranks, alternating. The time
is from the start of the command to the timestamp of the first line in metrics.jsonl. The data is already
prepared, as on every start but the first. --slurm also measures sbatch and srun of a real Slurm that is started on
this machine (root, slurm-wlm and munge): two nodes with four ranks each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from seatrial.data.prepare import data_cache, resolve_stores
from seatrial.data.store import TokenStore
from seatrial.job import Job, load_job, preset_text
from seatrial.record.run import open_run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))
import slurm_cluster

LIMIT_S = 8.0
SLURM_LIMIT_S = 3.0  # more than on the virtual cluster
OVERRIDES = ["train.steps=1", "optimizer.warmup_steps=0", "train.sample_tokens=0"]


def first_step(run: Path, began: float) -> float:
    """Seconds from `began` (unix) to the first metrics record."""
    line = (run / "metrics.jsonl").read_text().splitlines()[0]
    return float(json.loads(line)["time"]) - began


def seatrial(folder: Path, turn: int, *more: str) -> float:
    runs = folder / f"ours-{turn}-{len(more)}"
    runs.mkdir()
    (runs / ".data").symlink_to(data_cache(folder))
    began = time.time()
    command = [sys.executable, "-m", "seatrial", "train", str(folder / "job.toml"), "--runs", str(runs)]
    for override in [*OVERRIDES, *more]:
        command += ["--set", override]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return first_step(runs / "first-voyage", began)


def torchrun(folder: Path, turn: int, job: Job, store: TokenStore) -> float:
    runs = folder / f"torchrun-{turn}"
    runs.mkdir()
    (runs / ".data").symlink_to(data_cache(folder))
    with open_run(job, runs, data=store.identity()):
        pass  # torchrun starts ranks; the folder is ours to make
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    command += ["-m", "seatrial.train.worker", str(runs / "first-voyage")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SEATRIAL_DEVICE": "cpu"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        if process.wait(timeout=180) != 0:
            raise SystemExit("torchrun failed; run it by hand to see why: " + " ".join(command))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return first_step(runs / "first-voyage", began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-torchrun", action="store_true")
    parser.add_argument("--slurm", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "job.toml").write_text(preset_text("first-voyage"))
        job = load_job(folder / "job.toml", OVERRIDES)
        (store,) = resolve_stores(job.data, data_cache(folder), folder)
        contenders: dict[str, Callable[[int], float]] = {"seatrial": lambda turn: seatrial(folder, turn)}
        if not arguments.no_torchrun:
            contenders["torchrun"] = lambda turn: torchrun(folder, turn, job, store)
        if arguments.slurm:
            cluster = stack.enter_context(slurm_cluster.slurm(folder / "slurm", ("n1", "n2")))
            os.environ |= cluster.environment
            options = ("cluster.launcher=slurm", "cluster.device=cpu", "slurm.follow_up=false")
            contenders["slurm"] = lambda turn: seatrial(folder, turn, *options)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(arguments.rounds):
            for name, contender in contenders.items():
                times[name].append(contender(turn))
    for name, values in times.items():
        shown = ", ".join(f"{v:.2f}" for v in values)
        print(
            f"{name:<9} {statistics.median(values):6.2f} s to the first step of 8 ranks (median of {shown})"
        )
    ours = statistics.median(times["seatrial"])
    if "torchrun" in times:
        print(f"ratio     {statistics.median(times['torchrun']) / ours:6.2f} times as fast as torchrun")
    print(f"limit     {LIMIT_S:6.2f} s")
    within = ours <= LIMIT_S
    if "slurm" in times:
        more = statistics.median(times["slurm"]) - ours
        print(f"slurm     {more:6.2f} s more than on the virtual cluster; limit {SLURM_LIMIT_S:.2f} s")
        within = within and more <= SLURM_LIMIT_S
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
