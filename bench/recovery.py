"""Time from a fault to the next finished step: a rank killed, a node lost, the coordinator lost; compared with torchrun.

    python bench/recovery.py [--rounds 3] [--no-torchrun] [--out recovery.json]

8 CPU ranks (tensor 2 x pipeline 2 x shard 2) of the first-voyage model on short sequences, so that a step is short
compared with a recovery. The fault is a `kill -9` after a step has been recorded. Times are from the kill to the timestamp of the first
metrics record of a later generation, including the repeated step. torchrun starts the same
worker with `--max-restarts`, once with defaults and once with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, the known fix
for its restarts; it resumes from the latest checkpoint on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seatrial.base.process import kill_all, living, marked
from seatrial.data.prepare import data_cache, resolve_stores
from seatrial.job import load_job, preset_text
from seatrial.record.run import open_run

TIMEOUT_S = 120.0
HANG_MIN_S = 3.0
OVERRIDES = [
    "train.steps=100000",
    "train.sequence_length=32",
    "train.global_batch=8",
    "train.microbatch=2",
    "train.sample_tokens=0",
    "checkpoint.every_steps=10",
    "resilience.snapshot_every_steps=5",
]
LIMITS = {
    "rank_killed_in_place_s": 1.0,
    "rank_killed_restart_s": 5.0,
    "node_lost_spare_s": 5.0,
    "coordinator_lost_s": 5.0,
    "dead_agent_noticed_s": 2.0,
}


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file that may be growing."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(find: Any, what: str) -> Any:
    """Poll `find` until it returns something."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        found = find()
        if found:
            return found
        time.sleep(0.01)
    raise TimeoutError(f"{what}: nothing within {TIMEOUT_S:.0f} s")


@dataclass
class Running:
    """A run in progress."""

    folder: Path
    process: subprocess.Popen[bytes]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in records(self.folder / "events.jsonl") if e["kind"] == kind]

    def steps(self) -> list[dict[str, Any]]:
        return records(self.folder / "metrics.jsonl")

    def wait_step(self, step: int) -> None:
        wait_for(lambda: any(r["step"] >= step for r in self.steps()), f"step {step}")

    def next_step(self, generation: int) -> dict[str, Any]:
        """The first record of a generation after `generation`."""
        return wait_for(
            lambda: next((r for r in self.steps() if r["generation"] > generation), None), "next step"
        )

    @property
    def generation(self) -> int:
        return max(r["generation"] for r in self.steps())


@contextlib.contextmanager
def seatrial(folder: Path, name: str, *more: str, overrides: Sequence[str] = OVERRIDES) -> Iterator[Running]:
    """A supervised run."""
    command = [sys.executable, "-m", "seatrial", "train", str(folder / "job.toml"), "--runs", str(folder)]
    for override in [*overrides, f'name="{name}"', *more]:
        command += ["--set", override]
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        yield Running(folder / name, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def torchrun(
    folder: Path, name: str, *, cured: bool, overrides: Sequence[str] = OVERRIDES
) -> Iterator[Running]:
    """The same worker under torchrun. With --standalone it has one agent: 8 ranks on one node."""
    job = load_job(folder / "job.toml", [*overrides, f'name="{name}"'])
    (store,) = resolve_stores(job.data, data_cache(folder), folder)
    with open_run(job, folder, data=store.identity()):
        pass  # torchrun starts ranks; the folder is ours to make
    mark = f"bench-{os.getpid()}-{name}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SEATRIAL_DEVICE": "cpu", "SEATRIAL_AGENT": mark}
    if cured:
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    command += ["--max-restarts", "3", "-m", "seatrial.train.worker", str(folder / name)]
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield Running(folder / name, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill_all(lambda: marked(mark))


def torchrun_worker(mark: str) -> int:
    """The process id of one of torchrun's workers."""
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if b"RANK=3" in environment:
                return pid
    raise RuntimeError("no worker found")


def rank_killed(folder: Path, name: str, *overrides: str) -> dict[str, float]:
    with seatrial(folder, name, *overrides) as run:
        run.wait_step(13)
        generation = run.generation
        pid = {e["rank"]: e["data"]["pid"] for e in run.events("rank_started")}[3]
        before = len(run.steps())
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        record = run.next_step(generation)
        noticed = run.events("recovering")[0]["time"] - killed
        redone = max(r["step"] for r in run.steps()[:before]) - record["step"] + 1
        return {"recovered_s": record["time"] - killed, "noticed_s": noticed, "redone": redone}


def agent_killed(folder: Path, name: str, *, coordinator: bool) -> dict[str, float]:
    with seatrial(folder, name, "cluster.spares=1") as run:
        run.wait_step(13)
        wait_for(lambda: len(run.events("agent_started")) == 3, "the spare")
        generation = run.generation
        leader = run.events("coordinator_elected")[-1]["node"]
        slots = run.events("generation_started")[-1]["data"]["slots"]
        node = next(n for n in slots.values() if (n == leader) == coordinator)
        pid = {e["node"]: e["data"]["pid"] for e in run.events("agent_started")}[node]
        ranks = [e["data"]["pid"] for e in run.events("rank_started") if e["node"] == node]
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(p in living() for p in ranks), "its workers' end")
        gone = time.time()
        record = run.next_step(generation)
        lost = run.events("node_lost")[0]["time"]
        return {
            "recovered_s": record["time"] - killed,
            "noticed_s": lost - killed,
            "workers_gone_s": gone - killed,
        }


def rank_frozen(folder: Path, name: str) -> dict[str, float]:
    with seatrial(folder, name, f"resilience.hang_min_s={HANG_MIN_S}") as run:
        run.wait_step(13)
        generation = run.generation
        pid = {e["rank"]: e["data"]["pid"] for e in run.events("rank_started")}[3]
        frozen = time.time()
        os.kill(pid, signal.SIGSTOP)
        record = run.next_step(generation)
        noticed = run.events("recovering")[0]["time"] - frozen
        return {"recovered_s": record["time"] - frozen, "noticed_s": noticed}


def torchrun_killed(folder: Path, name: str, *, cured: bool) -> dict[str, float] | None:
    with torchrun(folder, name, cured=cured) as run:
        run.wait_step(13)
        generation = run.generation
        pid = torchrun_worker(f"bench-{os.getpid()}-{name}")
        killed = time.time()
        os.kill(pid, signal.SIGKILL)

        def recovered_or_ended() -> Any:
            later = [r for r in run.steps() if r["generation"] > generation]
            return later or run.process.poll() is not None

        try:
            found = wait_for(recovered_or_ended, "torchrun's next step")
        except TimeoutError:  # without the cure its workers may wait for each other until their own limit
            return None
        return None if found is True else {"recovered_s": found[0]["time"] - killed}


def median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-torchrun", action="store_true")
    parser.add_argument("--out", type=Path, help="write the medians as JSON, for bench/ettr.py")
    arguments = parser.parse_args()
    ours: dict[str, list[dict[str, float]]] = {}
    theirs: dict[str, list[dict[str, float] | None]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(preset_text("first-voyage"))
        resolve_stores(load_job(folder / "job.toml", OVERRIDES).data, data_cache(folder), folder)
        for turn in range(arguments.rounds):
            for case, measure in {
                "rank_killed_in_place": lambda n: rank_killed(folder, n),
                "rank_killed_restart": lambda n: rank_killed(folder, n, "resilience.in_place=false"),
                "node_lost_spare": lambda n: agent_killed(folder, n, coordinator=False),
                "coordinator_lost": lambda n: agent_killed(folder, n, coordinator=True),
                "rank_frozen": lambda n: rank_frozen(folder, n),
            }.items():
                ours.setdefault(case, []).append(measure(f"{case}-{turn}"))
            if not arguments.no_torchrun:
                for cured in (False, True):
                    case = "torchrun_cured" if cured else "torchrun"
                    theirs.setdefault(case, []).append(torchrun_killed(folder, f"{case}-{turn}", cured=cured))
    measured: dict[str, float] = {}
    for case, results in ours.items():
        measured[f"{case}_s"] = median([r["recovered_s"] for r in results])
        shown = ", ".join(" ".join(f"{k} {v:.2f}" for k, v in r.items()) for r in results)
        print(f"{case:<22} {measured[f'{case}_s']:6.2f} s to the next step   ({shown})")
    noticed = [r["noticed_s"] for c in ("node_lost_spare", "coordinator_lost") for r in ours[c]]
    measured["dead_agent_noticed_s"] = max(noticed)
    # What asking and judging takes, beyond the limit that a step is given.
    measured["hang_detect_s"] = median([r["noticed_s"] for r in ours["rank_frozen"]])
    measured["hang_min_s"] = HANG_MIN_S
    print(f"{'dead agent detected':<22} {max(noticed):6.2f} s at most")
    for case, outcomes in theirs.items():
        times = [o["recovered_s"] for o in outcomes if o is not None]
        text = f"{median(times):6.2f} s" if times else "   -    "
        print(f"{case:<22} {text} to the next step, {len(times)} of {len(outcomes)} restarts worked")
        if times:
            print(f"{'ratio':<22} {median(times) / measured['rank_killed_restart_s']:6.2f}")
    failed = [k for k, limit in LIMITS.items() if measured[k] > limit]
    for key, limit in LIMITS.items():
        print(f"{key:<28} {measured[key]:6.2f} s, limit {limit:.1f} s {'MISSED' if key in failed else 'ok'}")
    if arguments.out is not None:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        document = {
            "measured": measured,
            "machine": machine,
            "date": datetime.date.today().isoformat(),
        }
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
