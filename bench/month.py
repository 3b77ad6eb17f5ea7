"""Writes the folder of a run of 1,024 GPUs that has trained for 30 days, with the records its processes would write: synthetic, no training.

    python bench/month.py ROOT [--steps 260000] [--nodes 128] [--seed 1]

The run is ROOT/month: the reference job on 128 nodes and 4 spares, steps of 10 s, a checkpoint every 180 steps, 40
failures of six classes with their recoveries, one preemption, alerts, a rank with 6 % more own work than its peers; stages
of all ranks for the last three generations, telemetry of all nodes, a log of 1 GB (a sparse file), the reports
of a check, a drill and a scaling test. Lines of metrics and ledger are made by the writers' encoder and written in bulk. Telemetry
repeats the same six simulated hours on all nodes; only files, times and names differ. Takes about 2 GB of disk. Used by bench/web.py.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from seatrial.base import atomic
from seatrial.check.blame.faults import Fault, Shape
from seatrial.check.blame.localise import localise
from seatrial.check.blame.simulated import Cluster, Noise, SimulatedBench
from seatrial.check.judging.check_run import CheckRun
from seatrial.check.judging.report import Report
from seatrial.check.reports import report_json
from seatrial.checkpoint.manifest import LATEST, MANIFEST, Manifest, Progress
from seatrial.job import load_job, preset_text
from seatrial.job.job import Job
from seatrial.record import jsonl
from seatrial.record.collectives import CollectivesWriter
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, write_launch
from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord
from seatrial.record.run import add_to_plan, open_run
from seatrial.record.stages import STAGES, StageWriter
from seatrial.record.telemetry import read_chunk, thinned
from seatrial.record.telemetry_format import Header, chunks, packed
from seatrial.record.telemetry_writer import CHUNK_S, THIN, THIN_AFTER_S, TelemetryWriter
from seatrial.watch.columns import ColumnCacheWriter
from telemetry import samples

NAME, PRESET = "month", "qwen2.5-72b-b300"
GPUS, SPARES, STEP_S = 8, 4, 10.0
SAVE_EVERY, SNAPSHOT_EVERY, KEPT = 180, 5, 5
FAILURES, LAST = 40, (1300, 2500, 3700)  # the last failures, in steps before the end
RECORDED = 3  # generations with stages
LOG_BYTES = 1 << 30
# signal -> class and action of control/machine/policy.toml, its evidence in words, seconds until it is detected
FAULTS = {
    "worker_killed": ("process", "restart", "was killed by SIGKILL", 0.1),
    "xid:79": ("gpu", "reset", "Xid 79, GPU has fallen off the bus", 2.0),
    "hang": ("process", "restart", "waits in all_gather on the shard group", 95.0),
    "node_silent": ("node", "evict", "silent for 30 s", 30.0),
    "link_down": ("network", "restart", "port mlx5_3/1 is down", 8.0),
    "storage_error": ("storage", "restart", "OSError: [Errno 5] Input/output error", 0.5),
}
ALERTS = {
    "throughput_drop": ("warning", "tokens/s are 12 % below the median of the last hour"),
    "gpu_hot": ("warning", "GPU 3 of node {node} has 88 degrees"),
    "link_errors": ("warning", "port mlx5_5/1 of node {node} counts errors"),
    "straggler": ("warning", "a rank of node {node} needs 6 % longer than its peers"),
    "checkpoint_overdue": ("error", "no checkpoint for 65 minutes"),
}


class Month:
    """Simulates the run step by step and writes its records."""

    def __init__(self, folder: RunFolder, job: Job, steps: int, seed: int, begins: float) -> None:
        self.folder, self.job, self.steps = folder, job, steps
        self.nodes = job.cluster.nodes
        self.ranks = self.nodes * GPUS
        self.random = random.Random(seed)
        self.now = begins
        self.generation = self.step = self.snapshot = self.saved = 0
        self.slots = list(range(self.nodes))
        self.spares = list(range(self.nodes, self.nodes + SPARES))
        self.first_steps = {1: 1}  # of each generation
        self.worst = 0
        self._files: dict[Path, BinaryIO] = {}  # none: nothing is written, only the time it takes is found

    def write(self) -> None:
        """Simulate the run, and write its records."""
        paths = (self.folder.events, self.folder.metrics, self.folder.ledger)
        self._files = {path: open(path, "wb") for path in paths}  # noqa: SIM115 - closed below
        self.play()
        for file in self._files.values():
            file.close()
        self.folder.generation_file.write_text(f"{self.generation}\n")

    def put(self, path: Path, record: Event | MetricsRecord | LedgerRecord) -> None:
        """Write one line, encoded as by the real writers."""
        if path in self._files:
            values = {key: value for key, value in vars(record).items() if key != "extra"}
            self._files[path].write(jsonl.encode(values))

    def event(
        self,
        kind: str,
        message: str,
        severity: Any = "info",
        node: int | None = None,
        rank: int | None = None,
        /,
        **data: Any,
    ) -> None:
        event = Event(self.now, self.generation, kind, severity, message, node, rank, data or None)
        self.put(self.folder.events, event)

    def play(self) -> None:
        chance = self.random
        early = sorted(chance.sample(range(2000, self.steps - max(LAST) - 500), FAILURES - len(LAST)))
        faults = dict.fromkeys([*early, *(self.steps - last for last in LAST)], "")
        faults |= {step: list(FAULTS)[i % len(FAULTS)] for i, step in enumerate(faults)}
        skipped = {early[10] + 700, early[20] + 900}
        preempted = early[15] + 400
        self.start(None)
        while self.step < self.steps:
            self.one_step(skipped=self.step + 1 in skipped)
            if self.step % SAVE_EVERY == 0 and self.step > self.saved:
                self.save()
            signal = faults.pop(self.step, None)
            if signal is not None:
                self.fail(signal)
            if self.step == preempted:
                preempted = 0
                self.preempt()
            if chance.random() < 50 / self.steps:
                self.alert("resolved")
        for _ in range(3):
            self.alert("firing")

    def start(self, how: str | None) -> None:
        self.generation += 1
        self.event(
            "run_started",
            f"{self.ranks} ranks",
            layout=self.job.layout.as_dict(),
            **({"scheduled": how} if how else {}),
        )
        self.now += 90
        self.event(
            "coordinator_elected",
            "node 0 coordinates (term 1)",
            "info",
            0,
            term=1,
            address="10.0.0.1",
            port=41000,
        )
        for node in sorted([*self.slots, *self.spares]):
            self.join(node, spare=node in self.spares)
        self.begin("start", in_place=False)

    def join(self, node: int, *, spare: bool) -> None:
        self.event(
            "agent_started", f"agent of node {node} started", "info", node, pid=900 + node, incarnation=f"{node:x}",
            told=f"{self.generation}-{node}",
        )  # fmt: skip
        self.event("node_joined", f"node {node} joined", "info", node, spare=spare)

    def begin(self, reason: str, *, in_place: bool) -> None:
        self.event(
            "generation_started",
            f"generation {self.generation}: {reason}",
            layout=self.job.layout.as_dict(),
            slots={str(slot): node for slot, node in enumerate(self.slots)},
            reason=reason,
            in_place=in_place,
        )
        self.first_steps[self.generation] = self.step + 1
        for rank in range(self.ranks):
            node = self.slots[rank // GPUS]
            self.event(
                "rank_started", f"rank {rank} on node {node} started", "info", node, rank, pid=2000 + rank,
                in_place=in_place,
            )  # fmt: skip
        if self.step == 0:
            self.event(
                "device",
                "NVIDIA B300 SXM6 AC",
                "info",
                None,
                0,
                device="NVIDIA B300 SXM6 AC",
                peak_flops=2.25e15,
            )

    def one_step(self, *, skipped: bool) -> None:
        chance, batch = self.random, self.job.train.global_batch
        took = STEP_S * chance.gauss(1, 0.005)
        self.now += took
        self.step += 1
        step, tokens = self.step, batch * self.job.train.sequence_length
        if skipped:
            self.numerics()
        else:
            loss = 1.7 + 9 / (1 + step / 300) + chance.gauss(0, 0.01)
            record = MetricsRecord(
                step, step * tokens, loss, chance.uniform(0.2, 0.4), 1.5e-4, took, took / 500, tokens / took,
                tokens / took / self.ranks, 0.38 + chance.random() / 100, 221_000_000_000, self.now, self.generation,
            )  # fmt: skip
            self.put(self.folder.metrics, record)
        self.put(
            self.folder.ledger, LedgerRecord(step, (step - 1) * batch, step * batch, self.generation, skipped)
        )
        if step % SNAPSHOT_EVERY == 0:
            self.snapshot = step

    def numerics(self) -> None:
        reason = f"step {self.step}: the loss is not finite"
        self.event(
            "nonfinite", reason, "warning", signal="nonfinite", action="tolerate", evidence={"action": "skip"},
            **{"class": "numerics"},
        )  # fmt: skip
        self.event("step_skipped", f"step {self.step} was skipped", "warning", step=self.step, reason=reason)

    def save(self) -> None:
        seconds, stalled = self.random.uniform(35, 60), self.random.uniform(1, 3)
        self.now += stalled
        self.saved = self.step
        self.event(
            "checkpoint_saved",
            f"checkpoint of step {self.step} saved in {seconds:.2f} s, training waited {stalled:.2f} s",
            step=self.step,
            folder=str(self.folder.checkpoints / f"step-{self.step:08d}"),
            bytes=872 * 10**9,
            seconds=seconds,
            stalled_s=stalled,
            fallback=False,
        )

    def fail(self, signal: str) -> None:
        """One failure: detection, end of the generation, and the next one, resumed from memory, or from disk after a storage fault."""
        chance, (cls, action, what, after) = self.random, FAULTS[signal]
        slot = chance.randrange(self.nodes)
        node, rank = self.slots[slot], slot * GPUS + chance.randrange(GPUS)
        self.now += after
        self.worst = rank
        if signal == "node_silent":
            self.event("node_lost", f"node {node} is lost: {what}", "error", node, cause=what, certain=False)
            self.slots[slot] = self.spares.pop(0)
            self.spares.append(node)
        elif signal == "hang":
            text = f"no step has completed for {after:.1f} s since step {self.step}: querying all ranks"
            self.event("step_overdue", text, "warning", step=self.step, waited_s=after, deadline_s=90.0)
            self.event(
                "hang_blamed", f"rank {rank} {what}", "error", node, rank, ranks=[rank], kind="not_arrived",
                evidence=[f"rank {rank} has not entered all_gather 4711"], operation="all_gather",
            )  # fmt: skip
        elif signal in ("xid:79", "link_down"):
            self.event(
                "signal", f"node {node}: {what}", "warning", node, signal=signal, action=action,
                evidence={"source": "kernel log", "code": 79}, step=self.step, told=f"s{self.step}", **{"class": cls},
            )  # fmt: skip
        else:
            log = str(self.folder.rank_log(self.generation, node, rank))
            self.event(
                "rank_failed",
                f"rank {rank} on node {node} {what}",
                "error",
                node,
                rank,
                status=-9,
                pid=2000 + rank,
                log=log,
            )
        self.event(
            "recovering", f"rank {rank}: {what}", "warning", node, rank, signal=signal, cause=what, action=action,
            step=self.step, restarts=self.generation, node=node, rank=rank, **{"class": cls},
        )  # fmt: skip
        done = self.step
        source = "disk" if cls == "storage" else "memory"
        self.step = self.saved if source == "disk" else min(self.snapshot, self.step)
        self.snapshot = self.step
        self.now += chance.uniform(8, 40)
        if signal == "xid:79":
            self.event(
                "gpu_reset", f"node {node}: GPU reset", "warning", node, done=True, output="", cause=what
            )
            self.event(
                "node_requalified",
                f"node {node} passed its test",
                "info",
                node,
                ok=True,
                checks=["gemm"],
                message="",
            )
        self.generation += 1
        self.begin(f"rank {rank}: {what}", in_place=cls == "process")
        self.now += chance.uniform(15, 60)
        self.event(
            "recovered", f"resuming after step {self.step} (from {source}), {done - self.step} steps to redo",
            step=self.step, source=source, redone=done - self.step,
        )  # fmt: skip
        if signal == "node_silent":
            self.now += 300
            self.join(node, spare=True)

    def preempt(self) -> None:
        self.save()
        self.now += 5
        self.event("run_interrupted", "preempted by the scheduler", "warning", preempted=True)
        self.now += 1800
        self.start("continued")

    def alert(self, state: str) -> None:
        """An alert that fires; `resolved`: and is resolved immediately."""
        rule = self.random.choice(list(ALERTS))
        severity, message = ALERTS[rule]
        node = self.random.choice(self.slots)
        alone = "{node}" in message
        since = self.now - 60
        data = {
            "rule": rule, "key": f"{rule}:{node if alone else 'run'}:{since:.0f}", "since": since,
            "evidence": {"value": 88.0, "limit": 85.0}, "nodes": [node] if alone else [],
        }  # fmt: skip
        where = node if alone else None
        command = f"seatrial logs {self.folder.path} --node {node}" if alone else None
        self.event(
            "alert", message.format(node=node), severity, where, state="firing", command=command, **data
        )
        if state == "resolved":
            self.event(
                "alert", message.format(node=node), "info", where, state="resolved", command=None, **data
            )


def write_month(root: Path, *, steps: int, nodes: int, seed: int, ends: float | None = None) -> RunFolder:
    """The run ROOT/month; its last step ended at unix time `ends` (now)."""
    ends = time.time() if ends is None else ends
    source = root / "month.toml"
    root.mkdir(parents=True, exist_ok=True)
    source.write_text(preset_text(PRESET))
    keys = [f"name={NAME}", f"cluster.nodes={nodes}", f"cluster.spares={SPARES}", "train.steps=500000"]
    keys += [
        f"checkpoint.every_steps={SAVE_EVERY}",
        f"checkpoint.keep={KEPT}",
        "data.tokenizer=tokenizer.json",
    ]
    job = load_job(source, keys)
    with open_run(job, root) as opened:
        folder = opened.folder
    data = {
        "stores": ["/data/tokens"], "digests": ["5e" * 32], "tokens": 15 * 10**12, "tokenizer": "qwen2.5",
    }  # fmt: skip
    add_to_plan(folder, "data", data)
    rehearsed = Month(folder, job, steps, seed, 0.0)
    rehearsed.play()
    month = Month(folder, job, steps, seed, ends - rehearsed.now)
    write_launch(folder, Launch("local", 1, month.now, "login1", False))
    month.write()
    _write_checkpoints(month)
    _write_ranks(month)
    _write_logs(month)
    _keep_columns(month.folder)
    _write_telemetry(folder, nodes + SPARES, ends - rehearsed.now, ends)
    _write_reports(root, folder, nodes, month.now)
    return folder


def _write_checkpoints(month: Month) -> None:
    folder, job = month.folder, month.job
    for number in range(KEPT):
        step = month.saved - SAVE_EVERY * number
        batch = job.train.global_batch
        progress = Progress(step, step * batch * job.train.sequence_length, step * batch, month.generation)
        manifest = Manifest(
            progress, month.now - number * 1800, job.train.seed, job.architecture.as_dict(), job.layout.as_dict(),
            "0" * 64, "seatrial", True, [], {},
        )  # fmt: skip
        place = folder.checkpoints / f"step-{step:08d}"
        place.mkdir()
        (place / MANIFEST).write_text(manifest.to_text())
    (folder.checkpoints / LATEST).write_text(f"step-{month.saved:08d}\n")


def _write_ranks(month: Month) -> None:
    """Stages and collectives of all ranks: pipeline stages differ, ranks by 0.4 %, one is 6 % slow."""
    random = np.random.default_rng(1)
    job, ranks = month.job, month.ranks
    shares = np.array([0.002, 0.01, 0.25, 0.45, 0.02, 0.001, 0.1, 0.08, 0.0, 0.07, 0.017, 0.0])
    own, waits = slice(0, 6), STAGES.index("step_sum")
    usual = {
        "tensor": (1280, 171_798_691_840),
        "shard": (320, 36_350_000_000),
        "pipeline": (64, 8_589_934_592),
    }
    usual |= {"step_sum": (2, 464)}
    for generation in range(month.generation - RECORDED + 1, month.generation + 1):
        first = month.first_steps[generation]
        last = (
            month.first_steps.get(generation + 1, month.steps + 1) + SNAPSHOT_EVERY
        )  # steps that are redone
        numbers = range(first, min(last, month.steps + 1))
        rows = shares * STEP_S * random.normal(1, 0.01, (len(numbers), len(STAGES)))
        for rank in range(ranks):
            writer = StageWriter(
                month.folder, generation, rank, ranks=ranks, clock="cuda", first_step=first, not_separated={},
                gpu=f"0000:{rank % GPUS:02x}:00",
            )  # fmt: skip
            mine = rows.copy()
            mine[:, own] *= 1.06 if rank == month.worst else random.normal(1, 0.004)
            mine[:, waits] = np.maximum(0.0, STEP_S - mine.sum(axis=1) + mine[:, waits])
            for step, row in zip(numbers, mine.tolist(), strict=True):
                writer.add(step, row)
            writer.close()
            issued = CollectivesWriter(
                month.folder, generation, rank,
                {"tensor": job.layout.tensor, "shard": job.layout.shard, "pipeline": job.layout.pipeline},
            )  # fmt: skip
            for step in range(first, first + 8):  # a line applies to all following equal steps
                issued.add(step, usual)
            issued.close()


def _write_logs(month: Month) -> None:
    lines = b"".join(
        b"2026-11-25 12:00:%02d INFO step %d: loss 1.7312, 10.02 s\n" % (n % 60, n) for n in range(20_000)
    )
    for generation in range(max(1, month.generation - 9), month.generation + 1):
        for rank in range(month.ranks):
            path = month.folder.rank_log(generation, month.slots[rank // GPUS], rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(lines[:4096])
    with open(month.folder.rank_log(month.generation, month.slots[0], 0), "wb") as file:
        file.write(lines)
        file.seek(LOG_BYTES - len(lines))
        file.write(b"\n" + lines)


def _keep_columns(folder: RunFolder) -> None:
    """Write the column cache, as the monitor would have."""
    kept = ColumnCacheWriter(folder)
    for _ in range(2 + folder.metrics.stat().st_size // jsonl.PIECE_BYTES):
        kept.poll(0.0)


def _write_telemetry(folder: RunFolder, nodes: int, begin: float, end: float) -> None:
    """Telemetry chunks as a node leaves them: thinned when older than a day, compressed, or still open."""
    sampled = TelemetryWriter(folder, 0, 10.0)
    for at, row in samples(CHUNK_S / 86400):
        sampled.add(at, row)
    sampled.close()
    (path,) = chunks(folder, 0)
    header, table = read_chunk(path)
    path.unlink()
    thin_header, thin_table = thinned(header, table, THIN)
    grown = 8640e9  # bytes; counters go on from chunk to chunk
    for node in range(nodes):
        folder.telemetry_of(node).mkdir(parents=True, exist_ok=True)
    starts = np.arange(begin, end, CHUNK_S)
    for number, start in enumerate(starts.tolist()):
        thin = end - start >= CHUNK_S + THIN_AFTER_S
        head, rows = (thin_header, thin_table.copy()) if thin else (header, table.copy())
        rows["time"] += start - table["time"][0]
        rows["counters"] += number * grown
        is_open = number == len(starts) - 1
        if is_open:
            rows = rows[rows["time"] <= end]
        data = rows.tobytes()
        body = data if is_open else packed(head, data).partition(b"\n")[2]
        name = f"{start * 1000:013.0f}.samples{'' if is_open else '.zst'}"
        for node in range(nodes):
            own = Header(node, 10.0, head.counters, head.gauges, head.thin, 0 if is_open else len(rows))
            (folder.telemetry_of(node) / name).write_bytes(own.line() + body)


def _write_reports(root: Path, folder: RunFolder, nodes: int, now: float) -> None:
    """Reports: a real check of a simulated cluster, and synthetic documents of a drill and a scaling test."""
    shape = Shape(nodes, nodes_per_leaf=32)
    faults = [
        Fault("nic_slow", node=3, rail=5, share=0.7),
        Fault("gpu_slow", node=min(20, nodes - 1), gpu=2, share=0.8),
    ]
    cluster = Cluster(shape, faults, seed=1, noise=Noise())
    found = localise(SimulatedBench(cluster), cluster.names, cluster.topology(), cluster.gbit_s)
    blames = tuple(blame.record() for blame in found.blames)
    ran = CheckRun(
        tuple(cluster.names), asdict(found.rounds), {"total": 95.0}, blames, found.unsettled, {}, "month.toml"
    )
    text = report_json.text(Report((), found.findings, ran), time=now - 30 * 86400)
    (folder.reports / "check.json").write_text(text)
    scenarios = [
        {
            "name": f"scenario-{number}", "about": "a rank is killed", "expected": "restart", "verdict": "PASS",
            "detected_in_s": 0.1, "recovered_in_s": 0.8, "steps_redone": 2, "why": "", "seconds": 20.0,
            "folder": None, "changes": [], "injections": [], "checks": [],
        }
        for number in range(30)
    ]  # fmt: skip
    drill = {
        "schema_version": 1,
        "job": NAME,
        "time": now - 31 * 86400,
        "seconds": 900.0,
        "scenarios": scenarios,
    }
    drill |= {"verdicts": {"PASS": 30, "FAIL": 0, "UNJUDGED": 0}}
    atomic.write_json(folder.reports / "drill-20261020-120000.json", drill)
    sizes = []
    for power in range(8):
        speed = 2500.0 * GPUS * 2**power * 0.985**power
        sizes.append(
            {
                "nodes": 2**power, "gpus": GPUS * 2**power, "global_batch": 16 * 2**power, "runs": 3,
                "tokens_per_s": {"mean": speed, "low": 0.98 * speed, "high": 1.02 * speed},
                "tokens_per_s_per_gpu": speed / GPUS / 2**power, "mfu": 0.4 * 0.985**power,
                "efficiency": {"mean": 0.985**power, "low": 0.96 * 0.985**power, "high": 1.02 * 0.985**power},
                "efficiency_of_doubling": {"mean": 0.985, "low": 0.97, "high": 1.0} if power else None,
                "problem": None, "causes": [], "counters": [], "groups": [], "collectives": [],
            }
        )  # fmt: skip
    scaling = {
        "schema_version": 1, "job": NAME, "time": now - 31 * 86400, "scaling": "weak", "repeats": 3, "sizes": sizes,
        "spent_gpu_hours": 112.0, "stopped": None, "losses": [], "fits": [],
        "gates": [{"name": "efficiency", "verdict": "PASS", "text": "90.0 % at 128 nodes, at least 85 %"}],
    }  # fmt: skip
    place = root / ".scale" / f"{NAME}-20261020-120000"
    place.mkdir(parents=True)
    atomic.write_json(place / "report.json", scaling)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int, default=260_000)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.nice(10)
    folder = write_month(options.root, steps=options.steps, nodes=options.nodes, seed=options.seed)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{folder.path}: {used.ru_utime + used.ru_stime:.0f} s of CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
