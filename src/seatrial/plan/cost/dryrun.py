"""Dry run: one training step by the trainer's own code on fake tensors, for any rank of any world, without GPUs.

Its results are counted, not modelled: bytes of parameters, gradients and optimizer state, peak memory and its
composition, FLOPs, and every collective by dimension of the layout. Time is predicted by the closed form only, which the
dry run checks.

torch runs in separate processes (`seatrial.train.dryrun.process`); nothing here imports it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from seatrial.base.errors import InputError, InternalError, RunFailed, address_limit
from seatrial.base.process import python
from seatrial.hardware.catalogue import FLASH
from seatrial.job.job import Job
from seatrial.job.layout import Coordinates
from seatrial.job.optimizers import optimizer_named
from seatrial.plan.cost.dryrun_extrapolate import Grid, extrapolate, extrapolate_peak, grid

Device = Literal["cuda", "cpu"]

_WORKER = "seatrial.train.dryrun.process"


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over one dimension, in one step of one rank."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, send, receive, broadcast
    # tensor, pipeline, context, expert, shard, replicate, ends (of the pipeline: a tied embedding), stage (all ranks of a
    # pipeline stage), world, expert_shard (the ranks of `shard` with the same experts)
    dimension: str
    dtype: str
    ranks: int  # participating
    calls: int
    payload_bytes: (
        int  # of whole tensors: the output of an all-gather, the input of a reduce-scatter or all-to-all
    )

    @property
    def sent_bytes(self) -> float:
        """Bytes this rank sends at least: (n-1)/n of the payload, twice that for an all-reduce, all of a message.

        The lower bound of any algorithm, reached by rings (Patarasuk and Yuan 2009; bus bandwidth of nccl-tests). A
        broadcast is forwarded once.
        """
        part = (self.ranks - 1) / self.ranks
        factor = dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all"), part)
        factor |= {"all-reduce": 2 * part, "receive": 0.0}
        return self.payload_bytes * factor.get(self.kind, 1.0)


@dataclass(frozen=True)
class RankStep:
    """One step of one rank."""

    rank: int
    at: Coordinates
    layers: tuple[range, ...]  # of each of its stages
    parameter_bytes: int  # fp32 shards
    gradient_bytes: int  # as the optimizer sees them
    optimizer_bytes: int
    peak_bytes: int
    peak_label: str  # where in the step the peak is
    peak: Mapping[str, int]  # bytes by kind
    flops: Mapping[tuple[str, str], int]  # (forward, backward or update; matmul, attention, other)
    traffic: tuple[Traffic, ...]
    traced: tuple[tuple[int, int], ...]  # (layers, microbatches) of the traces it is derived from
    seconds: float  # spent tracing

    def sent_bytes(self, dimension: str) -> float:
        """Bytes that this rank sends at least over `dimension` in a step."""
        return sum(t.sent_bytes for t in self.traffic if t.dimension == dimension)


@dataclass(frozen=True)
class DryRun:
    """The results of the requested ranks."""

    ranks: tuple[RankStep, ...]
    process_bytes: int  # largest resident memory of a tracing process
    notes: tuple[str, ...]  # what is unknown, or differs from the job

    @property
    def worst(self) -> RankStep:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda r: r.peak_bytes)


def one_of_each(job: Job) -> list[int]:
    """One rank per pipeline rank; all others are equivalent to one of these.

    Rank 0 of the shard group, whose shards are the largest if a dimension does not divide evenly.
    """
    return [job.layout.rank(Coordinates(p, 0, 0, 0)) for p in range(job.layout.pipeline)]


def dry_run(
    job: Job,
    *,
    device: Device = "cuda",
    ranks: Sequence[int] | None = None,
    whole: bool = False,
    processes: int | None = None,
    timeout_s: float = 600.0,
) -> DryRun:
    """Trace one step of `ranks` (if None: `one_of_each`) as it would run on `device`.

    `whole` traces all layers and microbatches instead of extrapolating from a few; the result is the same. Peak memory
    on "cuda" is torch's `torch.cuda.max_memory_allocated`; memory of CUDA, NCCL and cuBLAS, and fragmentation, are not
    included.

    Raises InputError for a rank that does not exist and for experts in fp32, RunFailed if a process was killed by a
    signal or timed out, InternalError if it failed.
    """
    world = job.layout.world_size
    wanted = one_of_each(job) if ranks is None else list(ranks)
    if job.architecture.num_experts and job.train.precision == "fp32":
        raise InputError(
            "the dry run cannot trace experts in fp32: torch has shapes without data of grouped matrix products in bf16 only",
            hint='set train.precision = "bf16" for the dry run',
        )
    wrong = [r for r in wanted if not 0 <= r < world]
    if wrong:
        raise InputError(f"there is no rank {wrong[0]}: the layout has ranks 0 to {world - 1}")
    period = job.train.recompute_every_layers
    if optimizer_named(job.optimizer.name).matrix_states is not None:
        # A rank orthogonalises each n-th matrix: only every n more layers add the same to it.
        period = math.lcm(period, world // job.layout.pipeline)
    arch = job.architecture
    at = grid(
        job.layout,
        arch.num_hidden_layers,
        job.microbatches,
        period,
        dense=arch.first_k_dense_replace,
        whole=whole,
    )
    traces = [[rank, *point] for rank in wanted for point in at.points]
    workers = max(1, min(processes or os.cpu_count() or 1, len(traces)))
    shares = [traces[i::workers] for i in range(workers)]
    started: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            answers = list(pool.map(lambda share: _ask(job, device, at, share, timeout_s, started), shares))
        except BaseException:  # Ctrl-C, or one process failed: do not wait for the others
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                process.kill()
            raise
    found = {
        tuple(point): traced
        for share, answer in zip(shares, answers, strict=True)
        for point, traced in zip(share, answer["traces"], strict=True)
    }
    return DryRun(
        ranks=tuple(_rank(job, at, rank, [found[rank, *point] for point in at.points]) for rank in wanted),
        process_bytes=max(answer["memory_bytes"] for answer in answers),
        notes=tuple(_notes(job, device)),
    )


def _ask(
    job: Job,
    device: Device,
    at: Grid,
    traces: list[list[int]],
    timeout_s: float,
    started: list[subprocess.Popen[str]],
) -> dict[str, Any]:
    request = {
        "file": job.file.model_dump(mode="json"),
        "architecture": job.architecture.as_dict(),
        "layout": vars(job.layout),
        "device": device,
        "edges": at.edges,
        "traces": traces,
    }
    tempfile.gettempdir()  # fail early: torch cannot start without a temporary folder, and its message is less clear
    command = python(_WORKER, "--parent", str(os.getpid()))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as done:
        started.append(done)
        try:
            out, err = done.communicate(json.dumps(request), timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            done.kill()
            raise RunFailed(
                f"the dry run took longer than {timeout_s:.0f} s", hint="request fewer ranks at once"
            ) from error
        except BaseException:
            done.kill()
            raise
    if done.returncode < 0:
        raise RunFailed(
            f"the dry run's process was ended by signal {-done.returncode}",
            hint="if the kernel killed it (out of memory), run fewer processes at once",
        )
    if done.returncode:
        last = err.strip().splitlines()
        text = f"the dry run failed: {last[-1] if last else f'exit code {done.returncode}'}"
        if (limit := address_limit()) is not None:
            raise RunFailed(text, hint=limit)
        raise InternalError(text, hint="report it, with the job file")
    return dict(json.loads(out))


def _rank(job: Job, at: Grid, rank: int, traces: list[dict[str, Any]]) -> RankStep:
    layout = job.layout
    place = layout.coordinates(rank)
    held = extrapolate(at, [t["bytes"] for t in traces])
    label, peak = extrapolate_peak(at, [t["peaks"] for t in traces])
    return RankStep(
        rank=rank,
        at=place,
        layers=tuple(
            layout.stage_layers(stage, job.architecture.num_hidden_layers)
            for stage in layout.stage_indices(place.pipeline)
        ),
        parameter_bytes=held["parameters"],
        gradient_bytes=held["gradients"],
        optimizer_bytes=held["optimizer"],
        peak_bytes=sum(peak.values()),
        peak_label=label,
        peak=peak,
        flops=extrapolate(at, [{(phase, kind): n for phase, kind, n in t["flops"]} for t in traces]),
        traffic=_traffic(job, at, traces),
        traced=tuple(at.points),
        seconds=sum(t["seconds"] for t in traces),
    )


def _traffic(job: Job, at: Grid, traces: list[dict[str, Any]]) -> tuple[Traffic, ...]:
    # A message may grow with the number of layers (all norms' gradients are in one), so sums are extrapolated.
    calls: list[dict[tuple[str, str, str], int]] = []
    payload: list[dict[tuple[str, str, str], int]] = []
    for trace in traces:
        calls.append({})
        payload.append({})
        for kind, dimension, dtype, n_bytes, n in trace["collectives"]:
            key = (kind, dimension, dtype)
            calls[-1][key] = calls[-1].get(key, 0) + n
            payload[-1][key] = payload[-1].get(key, 0) + n * n_bytes
    all_calls, all_payload = extrapolate(at, calls), extrapolate(at, payload)
    layout = job.layout
    sizes = {"world": layout.world_size, "ends": 2, "stage": layout.world_size // layout.pipeline}
    sizes["expert_shard"] = layout.shard // layout.expert
    return tuple(
        Traffic(
            kind,
            dimension,
            dtype,
            ranks=sizes.get(dimension) or getattr(layout, dimension),
            calls=all_calls[kind, dimension, dtype],
            payload_bytes=all_payload[kind, dimension, dtype],
        )
        for kind, dimension, dtype in sorted(all_calls)
    )


def _notes(job: Job, device: Device) -> list[str]:
    notes = []
    if job.compiles(device):
        notes.append(
            "torch.compile is not traced: memory and FLOPs are those without compilation, which needs more memory; "
            "collectives are the same"
        )
    if device == "cuda" and not job.data.attend_across_documents:
        flash = job.train.attention in FLASH and job.train.precision != "fp32"
        if flash and job.architecture.flash_heads:
            notes.append("attend_across_documents = false: FLOPs are those of one document a sequence")
        else:
            notes.append(
                "attend_across_documents = false: flash attention takes bf16 and heads of up to 256, in multiples of 8; which "
                "kernel CUDA uses with a bias instead, and what it saves, is unknown; the memory of flash attention and of "
                "the bias is counted"
            )
    if job.layout.expert > 1:
        notes.append(
            "the positions are spread evenly over the experts: where they are not, some ranks get and hold more"
        )
    return notes
