"""Asynchronous tensor parallel compared with plain tensor parallel, on gloo ranks with a limited network rate.

    python bench/overlap.py [--rates 0 2000 1000 500] [--rounds 6] [--microbatch 4] [--sequence 512] [--width 512] [--layers 4]

Each rank is a separate host (a network namespace; needs root), joined by a bridge; `--rates` are Mbit/s of each link, 0:
unlimited. Both models train in the same processes on the same groups and batches and alternate step by step, so that
noise affects both equally; the ratio is the median over pairs. The losses are compared as well. There are two ranks
with one thread each: with fewer free cores, computation is slower and hides more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from seatrial.base import process
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.parts import parts
from seatrial.job.schema import OptimizerSection
from seatrial.launch.netns import Hosts, Unavailable
from seatrial.model.initialise import RandomWeights
from seatrial.parallel.build import ParallelModel, Settings
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.step import train_step

RANKS = 2
TIMEOUT = timedelta(minutes=5)
WAYS = {"plain": False, "async": True}


def main() -> int:
    """Measure all rates in sequence; with --rank run one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 2000, 1000, 500])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        process.die_with_parent(options.parent)
        return rank_main(options)
    try:
        with Hosts(RANKS) as hosts:
            return conduct(hosts, options)
    except Unavailable as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1


def conduct(hosts: Hosts, options: argparse.Namespace) -> int:
    """Start the ranks once for each rate, and print a line for each."""
    number = parts(options.microbatch, options.sequence // RANKS)
    print(
        f"{RANKS} ranks, {options.layers} layers of width {options.width}, {options.microbatch} x {options.sequence} tokens, "
        f"{number} parts; torch {torch.__version__}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    )
    print(f"{'Mbit/s':>8} {'plain s':>9} {'async s':>9} {'async/plain':>12} {'range of pairs':>16}")
    for rate in options.rates:
        for host in range(RANKS):
            if rate:
                hosts.slow(host, rate)
            else:
                hosts.fast(host)
        times = measure(hosts, options)
        pairs = [a / p for a, p in zip(times["async"], times["plain"], strict=True)]
        plain, ours = (statistics.median(times[way]) for way in WAYS)
        print(
            f"{rate or 'free':>8} {plain:9.3f} {ours:9.3f} {statistics.median(pairs):12.3f} {min(pairs):8.3f}-{max(pairs):.3f}",
            flush=True,
        )
    return 0


def measure(hosts: Hosts, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step of rank 0, by way."""
    ranks = []
    for rank in range(RANKS):
        given = [f"--{k}={v}" for k, v in vars(options).items() if k not in ("rates", "rank", "parent")]
        ranks.append(
            subprocess.Popen(
                [
                    *hosts.prefix(rank),
                    sys.executable,
                    __file__,
                    f"--rank={rank}",
                    f"--parent={os.getpid()}",
                    *given,
                ],
                env={
                    **os.environ,
                    "MASTER_ADDR": hosts.address(0),
                    "MASTER_PORT": "29400",
                    "GLOO_SOCKET_IFNAME": Hosts.interface,
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    told: dict[str, list[float]] = json.loads(said[0].splitlines()[-1])
    return told


def rank_main(options: argparse.Namespace) -> int:
    """Both ways in turn; rank 0 prints the seconds of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=options.rank, world_size=RANKS, timeout=TIMEOUT)
    mesh = build_mesh(Layout(tensor=RANKS), torch.device("cpu"), TIMEOUT)
    trained = {way: build(mesh, options, asynchronous) for way, asynchronous in WAYS.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    generator = torch.Generator().manual_seed(1)
    for step in range(options.rounds + 1):
        rows = torch.randint(0, 256, (options.microbatch, options.sequence + 1), generator=generator)
        losses = {}
        # Who goes first changes, so that neither always meets what the other has left in the caches.
        for way in sorted(WAYS, reverse=bool(step % 2)):
            model, optimizer = trained[way]
            dist.barrier()
            begin = time.perf_counter()
            result = train_step(
                model,
                optimizer,
                rows[:, :-1].contiguous(),
                rows[:, 1:].contiguous(),
                None,
                lr=1e-3,
                clip_norm=1.0,
            )
            losses[way] = result.read()[0]
            if step:  # the first one warms up
                times[way].append(time.perf_counter() - begin)
        difference = abs(losses["plain"] - losses["async"])
        assert difference < 1e-4, f"the losses of the two differ: {losses}"
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(times))
    return 0


def build(mesh: Mesh, options: argparse.Namespace, asynchronous: bool) -> tuple[ParallelModel, ShardedAdamW]:
    """A Qwen2.5 decoder with the same weights for both ways."""
    heads = options.width // 64
    arch = Architecture(
        family="qwen2",
        vocab_size=264,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=options.sequence,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qkv_bias=True,
        qk_norm=False,
        initializer_range=0.02,
    )
    settings = Settings(
        sequence_length=options.sequence,
        microbatch=options.microbatch,
        async_tensor=asynchronous,
    )
    model = ParallelModel(arch, mesh, settings, RandomWeights(arch, seed=1))
    return model, ShardedAdamW(model.shards, OptimizerSection(lr=1e-3))


if __name__ == "__main__":
    sys.exit(main())
