"""Overhead of our training loop over a hand-written one: same model, same batches, same process, one ratio.

    python bench/overhead.py [--rounds 12] [--steps 3] [--device cpu|cuda]

The two loops alternate, a few steps each, so that noise of the machine affects both equally; the ratio is of medians.
The hand-written loop is plain torch: accumulate, clip, AdamW, print nothing. Ours also reads the
data by position, sums over ranks, and writes metrics and ledger.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from seatrial.base.box import Box
from seatrial.data.loader import BatchLoader
from seatrial.data.prepare import resolve_stores
from seatrial.job import Job, job_from_text, preset_text
from seatrial.model.decoder import Decoder, stored_name
from seatrial.model.initialise import RandomWeights
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.mesh import build_mesh
from seatrial.record.run import open_run
from seatrial.train.loop import Loop
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.rank import settings_of
from seatrial.train.records import into_file
from seatrial.train.schedule import learning_rate

LIMIT = 1.03


class HandWritten:
    """A hand-written training loop for one device."""

    def __init__(self, job: Job, loader: BatchLoader, device: torch.device) -> None:
        self.job, self.loader, self.device = job, loader, device
        self.model = Decoder(job.architecture).to(device)
        source = RandomWeights(job.architecture, job.train.seed)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(source.read(stored_name(name, job.architecture), Box.whole(p.shape), p.dtype))
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=job.optimizer.lr,
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(self, step: int) -> float:
        ids, target, _ = self.loader.batch(step, 0, self.job.train.global_batch)
        ids, target = ids.to(self.device), target.to(self.device)
        n = self.job.microbatches
        total = torch.zeros((), device=self.device)
        for x, y in zip(ids.chunk(n), target.chunk(n), strict=True):
            loss = F.cross_entropy(self.model(x).flatten(0, 1).float(), y.flatten()) / n
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.job.train.steps, self.job.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)


def train_one(loop: Loop, step: int) -> None:
    """A step of `Loop.run` without a save."""
    loop._start(step)
    loop._read_results(leave=loop._max_in_flight)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        total = (arguments.rounds + 1) * arguments.steps
        job = job_from_text(
            preset_text("first-voyage"),
            name="first-voyage",
            base_folder=Path(folder),
            overrides=[
                *("cluster.nodes=1", "cluster.gpus_per_node=1"),
                *("parallel.tensor=1", "parallel.pipeline=1", "parallel.shard=1"),
                *(f"train.steps={max(200, total)}", "optimizer.warmup_steps=0"),
            ],
        )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        (store,) = resolve_stores(job.data, Path(folder) / ".data", Path(folder))
        loader = BatchLoader(
            store,
            sequence_length=job.train.sequence_length,
            batches=job.train.batches,
            seed=job.train.seed,
            vocab_size=job.architecture.vocab_size,
        )
        mesh = build_mesh(job.layout, device, timedelta(minutes=1))
        model = ParallelModel(
            job.architecture,
            mesh,
            settings_of(job, mesh.device),
            RandomWeights(job.architecture, job.train.seed),
        )
        with open_run(job, Path(folder)) as opened:
            records = into_file(opened.folder, 1, 0)
            optimizer = ShardedAdamW(model.shards, job.optimizer)
            ours = Loop(job, opened.folder, records, model, optimizer, loader)
            theirs = HandWritten(job, loader, device)
            times: dict[str, list[float]] = {"ours": [], "hand-written": []}
            step = 1
            for turn in range(arguments.rounds + 1):
                # The order changes from turn to turn: what comes second finds warmer caches.
                both = [("ours", partial(train_one, ours)), ("hand-written", theirs.step)]
                for name, one in both if turn % 2 else reversed(both):
                    for i in range(arguments.steps):
                        begin = time.perf_counter()
                        one(step + i)
                        if device.type == "cuda":
                            torch.cuda.synchronize()
                        if turn:  # the first turn warms up
                            times[name].append(time.perf_counter() - begin)
                step += arguments.steps
        dist.destroy_process_group()
    middle = {name: statistics.median(values) for name, values in times.items()}
    ratio = middle["ours"] / middle["hand-written"]
    for name, value in middle.items():
        spread = (max(times[name]) - min(times[name])) / value
        print(
            f"{name:<13} {value * 1000:8.1f} ms per step (median of {len(times[name])}, spread {spread:.0%})"
        )
    print(f"ratio         {ratio:8.3f}    (limit {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
