"""One rank: process group, data, model, training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from seatrial.base.batches import BatchSizes
from seatrial.base.errors import InputError, RunFailed
from seatrial.checkpoint.manifest import Progress
from seatrial.data.loader import BatchLoader
from seatrial.data.prepare import (
    blend_of,
    check_stores,
    check_validation,
    data_cache,
    open_stores,
    resolve_stores,
    resolve_validation,
    stores_identity,
)
from seatrial.hardware import accelerator
from seatrial.job import Job, load_job
from seatrial.job.families import family_named
from seatrial.job.optimizers import optimizer_named
from seatrial.model.hf import HuggingFaceWeights
from seatrial.model.initialise import FreshAdapters, RandomWeights
from seatrial.model.source import WeightSource
from seatrial.parallel.build import ParallelModel, Settings
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.record.folder import RunFolder
from seatrial.record.run import open_run, read_plan
from seatrial.train.checkpointing import state
from seatrial.train.loop import Loop
from seatrial.train.optimizer import ShardedOptimizer, build_optimizer
from seatrial.train.records import into_file
from seatrial.train.recovery.recover import Unfilled
from seatrial.train.recovery.resume import Resume
from seatrial.train.sample import write_sample
from seatrial.train.validation import ValidationSet


@dataclass(frozen=True)
class RankEnvironment:
    """torchrun's environment variables of this process."""

    rank: int
    local_rank: int
    world_size: int
    node: int
    device: str

    @classmethod
    def from_environment(cls) -> RankEnvironment:
        """Raises InputError naming every variable that is missing."""
        missing = [
            k
            for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            if k not in os.environ
        ]
        if missing:
            raise InputError(
                f"the environment has no {', '.join(missing)}",
                hint="start ranks with `seatrial train JOB`, or with torchrun -m seatrial.train.worker RUN_FOLDER",
            )
        device = os.environ.get("SEATRIAL_DEVICE") or accelerator.default_kind()
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            node=int(os.environ.get("GROUP_RANK", "0")),
            device=device,
        )


def train_rank(folder: RunFolder, generation: int | None, environment: RankEnvironment) -> None:
    """Train the job of `folder` as the rank in `environment`; `generation` None: started by hand, unsupervised."""
    job = load_job(RunFolder.open(folder.path).job_toml)
    if environment.world_size != job.layout.world_size:
        raise InputError(
            f"the job has {job.layout.world_size} ranks, the environment has {environment.world_size}",
            hint="start as many ranks as cluster.nodes x cluster.gpus_per_node",
        )
    mesh = init_distributed(job, environment)
    plan = read_plan(folder)
    loader = make_loader(job, folder, plan)
    validation = make_validation(job, folder, plan, loader)
    started = nullcontext(generation) if generation is not None else _unsupervised(job, folder, mesh, loader)
    with started as number:
        _train(job, folder, number, mesh, loader, validation)


def _train(
    job: Job,
    folder: RunFolder,
    generation: int,
    mesh: Mesh,
    loader: BatchLoader,
    validation: ValidationSet | None,
) -> None:
    records = into_file(folder, generation, mesh.rank)
    resume = Resume(job, folder, records, mesh)
    found = load(job, mesh, resume, loader)
    if found is not None:
        model, optimizer, progress = found
        first_step = progress.step + 1
    else:
        (model, optimizer), first_step = build_first(job, mesh, resume, loader), 1
    del found
    Loop(job, folder, records, model, optimizer, loader, validation=validation).run(first_step)
    dist.barrier()
    dist.destroy_process_group()
    if mesh.rank == 0:
        del model, optimizer  # the sample needs the memory
        write_sample(job, folder, records, mesh.device)


def build(
    job: Job, mesh: Mesh, source: WeightSource, *, masked: bool = False
) -> tuple[ParallelModel, ShardedOptimizer]:
    """Build the model of `job` with the weights of `source`, and its optimizer; `masked` as of the `BatchLoader`."""
    settings = replace(settings_of(job, mesh.device), masked=masked)
    model = ParallelModel(job.architecture, mesh, settings, source, timeout=timeout_of(job))
    return model, build_optimizer(model.shards, job.optimizer, mesh)


def build_first(
    job: Job, mesh: Mesh, resume: Resume, loader: BatchLoader
) -> tuple[ParallelModel, ShardedOptimizer]:
    """Build model and optimizer for a fresh start. Raises RunFailed if the run has saved a checkpoint.

    All ranks call it.
    """
    resume.refuse_fresh_start()
    return build(job, mesh, first_weights(job), masked=loader.masked)


def load(
    job: Job,
    mesh: Mesh,
    resume: Resume,
    loader: BatchLoader,
    accept: Callable[[int], bool] = lambda step: True,
) -> tuple[ParallelModel, ShardedOptimizer, Progress] | None:
    """Model and optimizer from the newest undamaged checkpoint whose step passes `accept`; None if there is none.

    All ranks call it. Raises RunFailed if the checkpoint's next sample is not this job's.
    """
    built = None
    while (step := resume.find_newest()) and accept(step):
        built = built or build(job, mesh, Unfilled(), masked=loader.masked)
        progress = resume.fill(partial(state.restore, *built))
        if progress is None:
            continue
        first = loader.samples(progress.step + 1)[0]
        if progress.next_sample != first:
            raise RunFailed(
                f"the checkpoint continues at sample {progress.next_sample}, but step {progress.step + 1} of this job "
                f"starts at {first}",
                hint="the job's global_batch or batch_ramp is not the one it was trained with: start over with --fresh",
            )
        return *built, progress
    return None


@contextmanager
def _unsupervised(job: Job, folder: RunFolder, mesh: Mesh, loader: BatchLoader) -> Iterator[int]:
    """A generation of ranks started by hand: rank 0 opens and locks the run, as any other start does."""
    if folder.path.name != job.name:
        raise InputError(
            f"{folder.path} belongs to the job {job.name!r}: the folder was renamed",
            hint=f"rename it to {folder.path.parent / job.name}",
        )
    data = stores_identity(loader.stores)
    opened = open_run(job, folder.path.parent, data=data) if mesh.rank == 0 else None
    number = torch.tensor([opened.generation if opened is not None else 0], device=mesh.device)
    generation = int(mesh.sum_over_ranks(number).item())

    def report(kind: str, message: str) -> None:
        if opened is not None:
            print(f"seatrial: {message}", file=sys.stderr, flush=True)
            into_file(folder, generation, None).event(kind, message)

    report("run_started", f"{mesh.layout.world_size} ranks, started by hand, unsupervised")
    try:
        yield generation
        report("run_finished", f"all {job.train.steps} steps are done")
    finally:
        if opened is not None:
            opened.close()


def timeout_of(job: Job) -> timedelta:
    """Timeout of collectives."""
    return timedelta(seconds=job.collective_timeout_s)


def init_distributed(job: Job, environment: RankEnvironment, store: Store | None = None) -> Mesh:
    """Join the process group (see `join`), build the mesh of the job's layout, and seed torch; returns the mesh."""
    timeout = timeout_of(job)
    train = job.train
    if environment.device != "cpu":
        accelerator.choose_attention(train.attention, deterministic=train.deterministic)
        if train.deterministic:
            accelerator.make_deterministic()
    elif train.attention != "auto":
        raise InputError(
            f'train.attention = "{train.attention}" needs GPUs, and the ranks run on CPUs', hint='use "auto"'
        )
    if job.compiles(environment.device):
        accelerator.check_compiler(environment.device)
    whole = optimizer_named(job.optimizer.name).matrix_states is not None
    mesh = build_mesh(job.layout, join(environment, timeout, store), timeout, with_stage=whole)
    torch.manual_seed(train.seed + mesh.rank)
    return mesh


def join(environment: RankEnvironment, timeout: timedelta, store: Store | None = None) -> torch.device:
    """Join the process group; returns this rank's device. Without a `store`, use the one of torchrun."""
    device = accelerator.claim(environment.device, environment.local_rank)
    on_accelerator = accelerator.is_accelerator(device)
    threads = os.environ.get("OMP_NUM_THREADS", "" if on_accelerator else "1")
    if threads:  # torch read OMP_NUM_THREADS when the fork server imported it
        torch.set_num_threads(int(threads.partition(",")[0]))
    given: dict[str, Any] = {}
    if store is not None:
        given = {"store": store, "rank": environment.rank, "world_size": environment.world_size}
    try:
        dist.init_process_group(
            "nccl" if on_accelerator else "gloo",
            timeout=timeout,
            # With a device NCCL connects now, not in the first collective.
            device_id=device if on_accelerator else None,
            **given,
        )
    except dist.DistNetworkError as error:
        if store is None and ("EADDRINUSE" in str(error) or "in use" in str(error)):
            raise InputError(
                f"port {os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']} is in use",
                hint="leave cluster.port out to use a free port",
            ) from error
        raise
    if on_accelerator:
        # With a bound device `new_group` splits the world's communicator, a collective over all ranks. Our groups are
        # created by their members alone (`parallel.mesh`) and would wait forever.
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = None
    return device


def make_loader(job: Job, folder: RunFolder, plan: Mapping[str, Any]) -> BatchLoader:
    """The run's data loader, over the stores in plan.json or, without them, stores prepared here."""
    train = job.train
    cache, blend = data_cache(folder.path.parent), blend_of(job.data)
    known = plan.get("data")
    if known is not None:
        # Prepared and checked by the launcher.
        stores = open_stores(known["stores"], cache, job.data.cache_gb)
    else:
        stores = resolve_stores(job.data, cache, folder.path)
        check_stores(
            stores,
            blend,
            vocab_size=job.architecture.vocab_size,
            sequence_length=train.sequence_length,
            global_batch=train.global_batch,
            tokenizer_spec=job.data.tokenizer,
        )
    return BatchLoader(
        stores,
        sequence_length=train.sequence_length,
        batches=train.batches,
        seed=train.seed,
        vocab_size=job.architecture.vocab_size,
        blend=blend,
        attend_across_documents=job.data.attend_across_documents,
        ahead=max(store.ahead for store in stores),
        last_step=train.steps,
        loss=job.data.loss,
    )


def make_validation(
    job: Job, folder: RunFolder, plan: Mapping[str, Any], loader: BatchLoader
) -> ValidationSet | None:
    """The run's validation data, from the store in plan.json or else prepared here; `loader`: the training data."""
    cache, train, arch = data_cache(folder.path.parent), job.train, job.architecture
    known = plan.get("data", {}).get("validation")
    if known is not None:
        (store,) = open_stores([known["store"]], cache, job.data.cache_gb)
    else:
        found = resolve_validation(job.data, cache, folder.path)
        if found is None:
            return None
        store = found
        check_validation(
            store,
            loader.stores,
            vocab_size=arch.vocab_size,
            sequence_length=train.sequence_length,
            samples=train.validate_samples,
            tokenizer_spec=job.data.tokenizer,
        )
    available = max(0, store.n_tokens - 1) // train.sequence_length
    samples = train.validation_samples(available)
    validation = BatchLoader(
        store,
        sequence_length=train.sequence_length,
        batches=BatchSizes.of(train.global_batch),
        seed=0,  # not the run's: all runs are validated on the same samples
        vocab_size=arch.vocab_size,
        attend_across_documents=job.data.attend_across_documents,
        ahead=store.ahead,
        last_step=-(-samples // train.global_batch),
        loss=job.data.loss,
    )
    return ValidationSet(validation, samples)


def first_weights(job: Job) -> WeightSource:
    """The initial weights of a fresh run."""
    if job.model.init_from is None:
        return RandomWeights(job.architecture, job.train.seed)
    tensor_name = family_named(job.architecture.family).tensor_name
    weights = HuggingFaceWeights(Path(job.model.init_from), tensor_name)
    weights.check(job.architecture.base)
    if job.architecture.lora is not None:
        return FreshAdapters(weights, job.architecture, job.train.seed)
    return weights


def settings_of(job: Job, device: torch.device) -> Settings:
    """The settings of a job's parallel model on `device`."""
    train = job.train
    return Settings(
        sequence_length=train.sequence_length,
        microbatch=train.microbatch,
        precision=train.precision,
        fp8_scaling=train.fp8_scaling,
        attention=train.attention,
        activation_checkpointing=train.activation_checkpointing,
        recompute_every_layers=train.recompute_every_layers,
        offload_activations=train.offload_activations,
        compile=job.compiles(device.type),
        reshard_after_forward=job.parallel.reshards,
        async_tensor=job.parallel.async_tensor,
        ring_attention=job.ring_rule.holds(train.sequence_length, job.layout.tensor, job.layout.context),
        # "auto" only in a job.toml older than the key, when it was always "whole".
        accumulate="sharded" if train.accumulate == "sharded" else "whole",
    )
