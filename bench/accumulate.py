"""A step with gradients reduced in every microbatch beside one that accumulates whole ones, on gloo ranks of this machine.

    python bench/accumulate.py [--rounds 8] [--microbatches 4] [--width 256] [--layers 4] [--sequence 128]

Both models train in the same processes on the same groups and batches and take turns, a step each, so that a noisy machine disturbs both
alike; the ratio is the median of the pairs'. "CPU" is the same of the CPU seconds of rank 0. Also the largest differences of loss and of any parameter's gradient between the two, the
latter as a part of the parameter's largest entry.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from seatrial.control.agent.ports import free_port
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.schema import Accumulate, OptimizerSection
from seatrial.model.initialise import RandomWeights
from seatrial.parallel.build import ParallelModel, Settings
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.train.optimizer import ShardedOptimizer, build_optimizer
from seatrial.train.step import train_step

TIMEOUT = timedelta(minutes=5)
WAYS: tuple[Accumulate, ...] = ("whole", "sharded")
LAYOUTS = {
    "FSDP2": Layout(shard=2),
    "TP2 x FSDP2": Layout(tensor=2, shard=2),
    "PP2 x FSDP2": Layout(pipeline=2, shard=2),
}


def build(mesh: Mesh, options: argparse.Namespace, how: Accumulate) -> tuple[ParallelModel, ShardedOptimizer]:
    arch = Architecture(
        family="llama",
        vocab_size=2048,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=options.width // 8,
        max_position_embeddings=options.sequence,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        initializer_range=0.05,
    )
    settings = Settings(
        sequence_length=options.sequence,
        microbatch=1,
        reshard_after_forward=mesh.layout.pipeline == 1,
        accumulate=how,
    )
    model = ParallelModel(arch, mesh, settings, RandomWeights(arch, 1), timeout=TIMEOUT)
    return model, build_optimizer(model.shards, OptimizerSection(lr=1e-3))


def rank_main(rank: int, port: int, name: str, options: argparse.Namespace) -> None:
    """Both ways in turn; rank 0 prints a line."""
    torch.set_num_threads(1)
    layout = LAYOUTS[name]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=layout.world_size, timeout=TIMEOUT
    )
    mesh = build_mesh(layout, torch.device("cpu"), TIMEOUT)
    trained = {way: build(mesh, options, way) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    used: dict[str, list[float]] = {way: [] for way in WAYS}
    generator = torch.Generator().manual_seed(1 + mesh.data_rank)
    apart = torch.zeros(2)
    for step in range(options.rounds + 1):
        rows = torch.randint(0, 2048, (options.microbatches, options.sequence + 1), generator=generator)
        batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if step == 0:
            apart = differences([model for model, _ in trained.values()], *batch)
            for _, optimizer in trained.values():
                optimizer.clear_gradients()
        for way in sorted(WAYS, reverse=bool(step % 2)):  # neither always goes first
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            train_step(*trained[way], *batch, lr=1e-3, clip_norm=1.0).read()
            if step:  # the first one also connects ranks
                seconds[way].append(time.perf_counter() - begin)
                used[way].append(time.process_time() - cpu)
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    if rank == 0:
        pairs = [s / w for s, w in zip(seconds["sharded"], seconds["whole"], strict=True)]
        whole, sharded = (statistics.median(seconds[way]) for way in WAYS)
        cpu = sum(used["sharded"]) / sum(used["whole"])
        print(
            f"{name:12} {whole:9.3f} {sharded:10.3f} {statistics.median(pairs):14.3f} {min(pairs):8.3f}-{max(pairs):.3f}"
            f" {cpu:10.3f} {apart[0]:12.1e} {apart[1]:12.1e}",
            flush=True,
        )
    dist.destroy_process_group()


def differences(models: list[ParallelModel], ids_BT: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
    """[largest difference of the loss, of a gradient] between two models with the same weights, on this rank."""
    losses = [model.forward_backward(ids_BT, target_BT) for model in models]
    gradients: list[Any] = [[s.grad for s in model.shards if s.box.numel] for model in models]
    worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*gradients, strict=True))
    return torch.tensor([float((losses[0] - losses[1]).abs()), worst])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in (("rounds", 8), ("microbatches", 4), ("width", 256), ("layers", 4), ("sequence", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    print(
        f"{options.layers} layers of width {options.width}, {options.microbatches} microbatches of {options.sequence} tokens a rank, fp32; "
        f"torch {torch.__version__}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    )
    print(
        f"{'':12} {'whole s':>9} {'sharded s':>10} {'sharded/whole':>14} {'range of pairs':>14} {'CPU':>10} {'loss apart':>12} {'gradient':>12}"
    )
    for name, layout in LAYOUTS.items():
        mp.spawn(rank_main, args=(free_port(), name, options), nprocs=layout.world_size)


if __name__ == "__main__":
    main()
