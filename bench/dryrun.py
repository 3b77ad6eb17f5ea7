"""The dry run of the reference job: time, memory, and whether extrapolation is exact.

    python bench/dryrun.py [--microbatches 64] [--whole] [--processes 1] [--tensor 8 --pipeline 2 --shard 8 ...]

Qwen2.5-72B on 128 ranks, tensor 8 x pipeline 2 x shard 8, bf16, sequences of 4,096 tokens; one rank per pipeline stage.
Prints what each rank holds and sends, compared with the closed form of `seatrial.plan.cost.memory`. `--whole` also traces every layer
and microbatch, and requires every figure to be equal. Run it on an idle machine, or use the CPU seconds.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

from seatrial.base import units
from seatrial.job import Job, job_from_text
from seatrial.plan.cost.dryrun import DryRun, RankStep, dry_run
from seatrial.plan.cost.memory import rank_memory
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.model.recipe import Recipe

JOB = """
name = "reference"
[model]
preset = "{model}"
[data]
train = "builtin:python-library"
[cluster]
nodes = {nodes}
gpus_per_node = {per_node}
[parallel]
tensor = {tensor}
pipeline = {pipeline}
context = {context}
shard = {shard}
stages_per_rank = {stages_per_rank}
schedule = "{schedule}"
[train]
steps = 1000
sequence_length = {sequence}
global_batch = {batch}
activation_checkpointing = "{recompute}"
recompute_every_layers = {recompute_every}
offload_activations = {offload}
accumulate = "{accumulate}"
[optimizer]
name = "{optimizer}"
lr = 1e-4
[checkpoint]
every_steps = 100
"""


def make_job(args: argparse.Namespace) -> Job:
    world = args.tensor * args.pipeline * args.context * args.shard
    per_node = min(8, world)
    return job_from_text(
        JOB.format(
            **vars(args), nodes=world // per_node, per_node=per_node, batch=args.microbatches * args.shard
        ),
        name="bench/dryrun.py",
        base_folder=Path(),
    )


def same(a: RankStep, b: RankStep) -> bool:
    """Whether all figures are equal, and the peak to the byte; the label of the peak's position may differ."""
    return (
        a.parameter_bytes == b.parameter_bytes
        and a.gradient_bytes == b.gradient_bytes
        and a.optimizer_bytes == b.optimizer_bytes
        and a.peak_bytes == b.peak_bytes
        and a.flops == b.flops
        and a.traffic == b.traffic
    )


def show(job: Job, run: DryRun) -> None:
    model, recipe = job.architecture, Recipe.of(job)
    for step in run.ranks:
        print(f"\nrank {step.rank} (pipeline {step.at.pipeline}), {sum(map(len, step.layers))} layers")
        print(
            f"  parameters {units.memory(step.parameter_bytes)}, gradients {units.memory(step.gradient_bytes)}, "
            f"optimizer {units.memory(step.optimizer_bytes)}; FLOPs {sum(step.flops.values()):.4e}"
        )
        kinds = ", ".join(f"{kind} {units.memory(n)}" for kind, n in step.peak.items())
        print(f"  peak {units.memory(step.peak_bytes)} at {step.peak_label!r}: {kinds}")
        closed = rank_memory(model, recipe, stack_for(recipe), step.at.pipeline).allocated
        print(f"  closed form {units.memory(closed)}, {closed / step.peak_bytes - 1:+.2%}")
        for t in step.traffic:
            print(
                f"  {t.kind:14} {t.dimension:9} {t.dtype:9} {t.calls:6} calls, payload {units.memory(t.payload_bytes)}, "
                f"sent {units.memory(t.sent_bytes)}"
            )
        print(f"  traced (layers, microbatches) {list(step.traced)} in {step.seconds:.1f} s")
    for note in run.notes:
        print(f"note: {note}")


def timed(job: Job, args: argparse.Namespace, *, whole: bool) -> DryRun:
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run = dry_run(job, whole=whole, processes=args.processes, timeout_s=3600)
    spent, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    print(
        f"{'whole' if whole else 'carried over'}: {len(run.ranks)} ranks in {spent:.1f} s with {args.processes} process(es), "
        f"{cpu:.1f} s of CPU, at most {units.memory(run.process_bytes)} resident in one",
        flush=True,
    )
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-72b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=64, help="a step and data-parallel rank")
    for name, size in (("tensor", 8), ("pipeline", 2), ("context", 1), ("shard", 8), ("stages-per-rank", 1)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--recompute-every", type=int, default=1, help="layers")
    parser.add_argument(
        "--offload", default="false", choices=("true", "false"), help="inputs of recomputed layers"
    )
    parser.add_argument("--accumulate", default="whole", choices=("whole", "sharded"))
    parser.add_argument("--whole", action="store_true", help="trace everything too, and compare")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    job = make_job(args)
    run = timed(job, args, whole=False)
    show(job, run)
    if not args.whole:
        return 0
    whole = timed(job, args, whole=True)
    wrong = [a.rank for a, b in zip(run.ranks, whole.ranks, strict=True) if not same(a, b)]
    print(
        f"carried over and whole differ in ranks {wrong}" if wrong else "carried over = whole, every figure"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
