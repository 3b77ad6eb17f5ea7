"""Seconds of an update by each optimizer beside AdamW's, and the bytes of its states, for one layer's matrices several times.

    python bench/update.py [--model qwen2.5-tiny] [--layers 4] [--ranks 1] [--rounds 5] [--device cpu]

The optimizers take turns, so that a noisy machine disturbs all alike; a ratio is the median of its turns'. With ranks, on gloo,
weights are sharded over them, and a turn ends when the last one is done. `prepare` is the part of Muon that communicates.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from seatrial.control.agent.ports import free_port
from seatrial.hardware import accelerator
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.job.optimizers import OPTIMIZERS
from seatrial.job.schema import OptimizerSection
from seatrial.model.decoder import whole_shapes
from seatrial.parallel.build import Shard, held_box
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.train.optimizer import ShardedOptimizer, build_optimizer

TIMEOUT = timedelta(minutes=10)


def make_shards(mesh: Mesh, options: argparse.Namespace) -> list[Shard]:
    arch = replace(model_presets()[options.model], num_hidden_layers=options.layers, vocab_size=1024)
    shards = []
    for name, whole in whole_shapes(arch).items():
        box = held_box(name, whole, mesh.layout, mesh.at)
        p = nn.Parameter(0.02 * torch.randn(box.sizes, device=mesh.device))
        shards.append(Shard(name, p, p.detach(), box, whole, 1, owner=True, counted=True))
    return shards


def turn(optimizer: ShardedOptimizer, shards: list[Shard], mesh: Mesh) -> tuple[float, float]:
    """Seconds of one update, and of its `prepare`."""
    for s in shards:
        s.parameter.grad = torch.randn_like(s.local)
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    scale = torch.ones((), device=mesh.device)
    optimizer.prepare(scale)
    _done(mesh)
    prepared = time.perf_counter()
    optimizer.update(1e-4, scale)
    _done(mesh)
    return time.perf_counter() - begin, prepared - begin


def _done(mesh: Mesh) -> None:
    if accelerator.is_accelerator(mesh.device):
        torch.accelerator.synchronize()
    elif dist.is_initialized():
        dist.barrier()


def run(rank: int, port: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    layout, device = Layout(shard=options.ranks), torch.device(options.device)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks, timeout=TIMEOUT)
    mesh = build_mesh(layout, device, TIMEOUT, with_stage=True)
    shards = {name: make_shards(mesh, options) for name in OPTIMIZERS.own}
    made = {n: build_optimizer(s, OptimizerSection(name=n, lr=1e-4), mesh) for n, s in shards.items()}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for each in range(options.rounds + 1):
        for name, optimizer in made.items():
            found = turn(optimizer, shards[name], mesh)
            if each:
                took[name].append(found)
    if rank == 0:
        n = sum(s.local.numel() for s in shards["adamw"])
        print(
            f"{options.layers} layers of {options.model}, {n / 1e6:.1f} M parameters on each of {options.ranks} rank(s)"
        )
        for name, optimizer in made.items():
            seconds, prepared = (statistics.median(each) for each in zip(*took[name], strict=True))
            ratios = [a[0] / b[0] for a, b in zip(took[name], took["adamw"], strict=True)]
            state = sum(values.nbytes for _, _, values in optimizer.state()) / n
            print(
                f"{name:11} {1000 * seconds:9.1f} ms, {statistics.median(ratios):6.2f} x adamw; {1000 * prepared:9.1f} ms of it prepare; "
                f"{state:.2f} bytes of states a parameter"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-tiny")
    for name, size in (("layers", 4), ("ranks", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    mp.spawn(run, args=(free_port(), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
