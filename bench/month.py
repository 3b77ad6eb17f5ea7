"""Writes the folder of a run of 1,024 GPUs that has trained for 30 days, as its processes would have: synthetic, no training.

    python bench/month.py FOLDER [--steps 260000] [--nodes 128] [--seed 1]

Steps of 10 s; a failure about every 3 hours, with its recovery, the steps that are done again and a spare in the place of
every third node; a checkpoint every 180 steps, of which 5 are kept; a rank with 6 % more own work than its peers. Ranks
have the stages of the last generation, nodes an hour of telemetry at a sample every 10 s, one rank a log of 5 GB (a hole).
Used by bench/web.py.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from seatrial.job import load_job
from seatrial.record import jsonl
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.series import series
from seatrial.record.stages import StageWriter
from seatrial.record.telemetry_writer import TelemetryWriter

GPUS, BATCH, LENGTH, STEP_S = 8, 1024, 8192, 10.0
JOB = """name = "month"

[model]
family = "llama"
vocab_size = 128256
hidden_size = 8192
intermediate_size = 28672
num_hidden_layers = 80
num_attention_heads = 64
num_key_value_heads = 8
max_position_embeddings = 8192

[data]
train = "corpus"

[cluster]
nodes = {nodes}
gpus_per_node = 8
spares = 4
device = "cuda"
gpu = "H100 SXM"
network = "InfiniBand NDR 400G"

[parallel]
tensor = 8
pipeline = 4
shard = {shard}

[train]
steps = 500000
sequence_length = 8192
global_batch = 1024
microbatch = 1

[optimizer]
lr = 1.5e-4
warmup_steps = 2000

[checkpoint]
every_steps = 180
keep = 5
"""


def write_month(folder: RunFolder, *, steps: int, nodes: int, seed: int, ends: float | None = None) -> None:
    """The run's folder; its last step ended at unix time `ends` (now)."""
    chance, ranks = random.Random(seed), nodes * GPUS
    folder.path.mkdir(parents=True)
    folder.control.mkdir()
    folder.job_toml.write_text(JOB.format(nodes=nodes, shard=nodes // 4))
    job = load_job(folder.job_toml)
    plan = {
        "schema_version": 1,
        "layout": job.layout.as_dict(),
        "architecture": job.architecture.as_dict(),
        "parameters": job.architecture.parameters(),
        "microbatches": job.microbatches,
        "data": {
            "stores": ["/data/corpus"],
            "digests": ["0" * 64],
            "tokens": 15 * 10**12,
            "tokenizer": "llama",
        },
    }
    folder.plan_json.write_bytes(jsonl.encode(plan))
    layout = job.layout.as_dict()
    ends = time.time() if ends is None else ends
    clock, generation, step, worst = ends - steps * STEP_S * 1.02, 0, 0, 0
    slots = {str(slot): slot for slot in range(nodes)}
    spares = list(range(nodes, nodes + 4))
    with (
        open(folder.events, "wb") as file,
        open(folder.metrics, "w") as metrics,
        open(folder.ledger, "w") as ledger,
    ):

        def event(kind: str, message: str, severity: str = "info", **more: object) -> None:
            node, rank, data = more.pop("node", None), more.pop("rank", None), more or None
            file.write(
                jsonl.encode(vars(Event(clock, generation, kind, severity, message, node, rank, data)))
            )  # type: ignore[arg-type]

        def begin(reason: str) -> None:
            nonlocal generation
            generation += 1
            event(
                "generation_started",
                f"generation {generation}: {reason}",
                layout=layout,
                slots=dict(slots),
                reason=reason,
                in_place=False,
            )
            for rank in range(ranks):
                event(
                    "rank_started",
                    f"rank {rank} started",
                    node=slots[str(rank // GPUS)],
                    rank=rank,
                    pid=1000 + rank,
                    in_place=False,
                )

        generation = 1
        event("run_started", f"{ranks} ranks", layout=layout)
        generation = 0
        for node in range(nodes + 4):
            event("node_joined", f"node {node} joined", node=node, spare=node >= nodes)
        begin("first start")
        event("device", "NVIDIA H100 80GB HBM3", device="NVIDIA H100 80GB HBM3", peak_flops=989e12)
        until = chance.expovariate(1 / 1080)
        while step < steps:
            step += 1
            clock += STEP_S * chance.gauss(1, 0.01)
            loss = 1.7 + 9 / (1 + step / 300) + chance.gauss(0, 0.01)
            metrics.write(
                f'{{"step":{step},"tokens":{step * BATCH * LENGTH},"loss":{loss:.6f},"grad_norm":{chance.uniform(0.2, 0.4):.5f},"lr":0.00015,'
                f'"step_time_s":{STEP_S},"data_wait_s":0.01,"tokens_per_s":{BATCH * LENGTH / STEP_S:.1f},"tokens_per_s_per_gpu":{BATCH * LENGTH / STEP_S / ranks:.2f},'
                f'"mfu":0.41,"memory_bytes":68719476736,"time":{clock:.3f},"generation":{generation}}}\n'
            )
            ledger.write(
                f'{{"step":{step},"first_sample":{(step - 1) * BATCH},"end_sample":{step * BATCH},"generation":{generation},"skipped":false}}\n'
            )
            if step % 180 == 0:
                event(
                    "checkpoint_saved",
                    f"checkpoint of step {step} saved in 42.0 s",
                    step=step,
                    folder=str(folder.checkpoints / f"step-{step:08d}"),
                    bytes=980 << 30,
                    seconds=42.0,
                    stalled_s=1.9,
                    rank=0,
                )
            until -= 1
            if until < 0 and step < steps - 2000:
                until = chance.expovariate(1 / 1080)
                slot = chance.randrange(nodes)
                node, rank = slots[str(slot)], slot * GPUS + chance.randrange(GPUS)
                if chance.random() < 0.33 and spares:
                    event(
                        "node_lost",
                        f"node {node} is unreachable",
                        "error",
                        node=node,
                        cause="silence",
                        certain=False,
                    )
                    slots[str(slot)] = spares.pop(0)
                    spares.append(node)  # repaired, it comes back as a spare
                else:
                    event(
                        "rank_failed",
                        f"rank {rank} on node {node}: Xid 79, GPU has fallen off the bus",
                        "error",
                        node=node,
                        rank=rank,
                        cause="xid:79",
                    )
                event(
                    "recovering",
                    f"rank {rank}: Xid 79",
                    "warning",
                    node=node,
                    rank=rank,
                    cause="xid:79",
                    signal="xid:79",
                    action="restart",
                )
                clock += 40
                begin(f"rank {rank}: Xid 79")
                if spares and spares[-1] == node:
                    event("node_joined", f"node {node} joined", node=node, spare=True)
                redone = chance.randrange(1, 10)
                step = max(0, step - redone)
                clock += 30
                event(
                    "recovered",
                    f"resuming after step {step} (from the snapshots in memory), {redone} steps to redo",
                    step=step,
                    redone=redone,
                )
                worst = rank
    for kept in range(5):
        last = steps // 180 * 180 - 180 * kept
        place = folder.checkpoints / f"step-{last:08d}"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
    _write_stages(folder, generation, ranks, steps, worst, chance)
    _write_telemetry(folder, nodes + 4, ends, chance)
    _write_logs(folder, generation, slots, ranks)
    folder.generation_file.write_text(f"{generation}\n")


def _write_stages(
    folder: RunFolder, generation: int, ranks: int, steps: int, worst: int, chance: random.Random
) -> None:
    first = steps - 1000
    for rank in range(ranks):
        writer = StageWriter(
            folder, generation, rank, ranks=ranks, clock="cuda", first_step=first, not_separated={}
        )
        slow = 1.06 if rank == worst else chance.gauss(1, 0.004)
        for step in range(first, steps + 1):
            own = [0.01, 0.03, 2.4 * slow, 5.0 * slow, 0.2, 0.0]
            writer.add(step, [*own, 0.9, 0.6, 0.0, STEP_S - 1.6 - sum(own), 0.1])
        writer.close()


def _write_telemetry(folder: RunFolder, nodes: int, ends: float, chance: random.Random) -> None:
    for node in range(nodes):
        writer = TelemetryWriter(folder, node, 10.0)
        warm = chance.gauss(58, 4)
        values = {"node_cpus": 192.0, "node_cpu_busy_ratio": 0.12, "node_memory_used_bytes": 6e11}
        for number in range(360):
            for gpu in range(GPUS):
                values |= {
                    series("gpu_temperature_celsius", gpu=gpu): warm + gpu % 3,
                    series("gpu_power_watts", gpu=gpu): 640.0,
                    series("gpu_sm_clock_hertz", gpu=gpu): 1.755e9,
                    series("gpu_tensor_active_ratio", gpu=gpu): 0.55,
                    series("gpu_nvlink_sent_bytes_total", gpu=gpu): number * 2e11,
                }
            for port in range(8):
                values[series("port_sent_bytes_total", port=f"mlx5_{port}/1")] = number * 1e11
            writer.add(ends - 3600 + 10 * number, values)
        writer.close()


def _write_logs(folder: RunFolder, generation: int, slots: dict[str, int], ranks: int) -> None:
    for rank in range(ranks):
        path = folder.rank_log(generation, slots[str(rank // GPUS)], rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            if rank == 0:
                file.truncate(5 << 30)
                file.seek(5 << 30)
            file.write(b"\n" + b"".join(b"line %d of rank %d\n" % (n, rank) for n in range(50)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=260_000)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_month(RunFolder(options.folder), steps=options.steps, nodes=options.nodes, seed=options.seed)
