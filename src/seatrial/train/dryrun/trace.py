"""One training step of one rank in a world of any size: the trainer's own code, on fake tensors.

A fake process group has the full world's size, so that models are sharded as in training; tensors have a shape but no
data. It runs `rank.build` and `step.train_step`, as in training. Four things are replaced: CUDA's kernels, if the job
is for CUDA (`dryrun.kernels`); a pipeline's first message, whose value is read; how many positions ranks send each other's
experts, which is read too; and the all-reduce of a step's vector, which depends on the device type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import _utils as pipelining
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from seatrial.base.box import Box
from seatrial.job.job import Job
from seatrial.job.optimizers import optimizer_named
from seatrial.model.decoder import Decoder
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.train.dryrun.kernels import balanced_experts, cuda_kernels, host_memory_apart
from seatrial.train.dryrun.recorder import GRADIENTS, Counts, Recorder, dimensions
from seatrial.train.dryrun.timeline import Peak, Timeline, microbatch_label, position
from seatrial.train.optimizer import ShardedOptimizer
from seatrial.train.rank import build
from seatrial.train.step import train_step

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(minutes=1)  # never reached: fake groups do not wait
# CUDA's caching allocator allocates multiples of this (c10/cuda/CUDACachingAllocator: kMinBlockSize).
_CUDA_BLOCK_BYTES = 512

PARAMETERS, OPTIMIZER, INPUTS = "parameters", "optimizer", "inputs"


@dataclass(frozen=True)
class Traced:
    """Memory and traffic of one step of one rank, in bytes."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    counts: Counts
    peaks: dict[str, Peak]  # label of a part of the step -> its peak, see dryrun.timeline


class _DryMesh(Mesh):
    """A mesh of fake groups, whose ranks would compute on device type `kind`."""

    kind: str

    def _mesh(self, *args: Any) -> DeviceMesh:
        with unset_fake_temporarily():  # it reads the ranks back from a tensor
            return super()._mesh(*args)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.kind == "cuda" and self.layout.world_size > 1:
            dist.all_reduce(values)  # as Mesh does on CUDA
            return values
        return super().sum_over_ranks(values)


class _NoWeights:
    """A weight source without values."""

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        return torch.empty(box.sizes, dtype=dtype)


@contextmanager
def _plain_memory() -> Iterator[None]:
    """Replace `to_empty` for unsharded parameters: torch swaps them in place, which fake tensors do not support."""
    whole = Decoder.to_empty

    def to_empty(stage: Decoder, *, device: torch.device) -> Decoder:
        plain = [
            (module, name, p)
            for module in stage.modules()
            for name, p in module.named_parameters(recurse=False)
            if not isinstance(p, DTensor)
        ]
        for module, name, _ in plain:
            module.register_parameter(name, None)
        whole(stage, device=device)
        for module, name, p in plain:
            empty = torch.empty(p.shape, dtype=p.dtype, device=device)
            module.register_parameter(name, nn.Parameter(empty, p.requires_grad))
        return stage

    Decoder.to_empty = to_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Decoder.to_empty  # restores the inherited one


@contextmanager
def _padded_once() -> Iterator[None]:
    """Keep the padding that unevenly divided shards get when they are allocated.

    Before the first step torch compares addresses to see whether they changed; fake tensors have none, so it would
    allocate a second padded copy of each.
    """
    again = FSDPParam.reset_sharded_param
    FSDPParam.reset_sharded_param = lambda _: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParam.reset_sharded_param = again  # type: ignore[method-assign]


def at_size(job: Job, layers: int, microbatches: int) -> Job:
    """The same job with another number of layers, and of microbatches on each data-parallel rank."""
    batch = microbatches * job.train.microbatch * job.layout.data_parallel
    train = job.train.model_copy(update={"global_batch": batch})
    file = job.file.model_copy(update={"train": train})
    return replace(job, file=file, architecture=replace(job.architecture, num_hidden_layers=layers))


@contextmanager
def fake_world(job: Job, rank: int, kind: str) -> Iterator[Mesh]:
    """The mesh of `rank`, as if all ranks of the job existed."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.layout.world_size)
    try:
        whole = optimizer_named(job.optimizer.name).matrix_states is not None
        mesh = build_mesh(job.layout, _CPU, _TIMEOUT, with_stage=whole)
        dry = _DryMesh(**{f.name: getattr(mesh, f.name) for f in fields(mesh)})
        object.__setattr__(dry, "kind", kind)
        yield dry
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # init_process_group installs one that prefixes tracebacks with the rank


def trace(job: Job, rank: int, kind: str, *, steps: int = 1, edges: tuple[int, int] = (2, 2)) -> Traced:
    """Trace the last of `steps` steps of `rank`, as it would be on `kind` ("cuda" or "cpu").

    On CUDA, memory is what torch's allocator would have allocated; CUDA itself, NCCL and cuBLAS need more.
    `edges`: how many microbatches at the beginning and at the end have labels of their own.
    """
    job = replace(job, file=job.file.model_copy(update={"train": _eager(job)}))
    with fake_world(job, rank, kind) as mesh, ExitStack() as modes:
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if kind == "cuda":
            modes.enter_context(cuda_kernels(job.train.attention))
            modes.enter_context(host_memory_apart())
        modes.enter_context(balanced_experts())
        with _plain_memory():
            model, optimizer = build(job, mesh, _NoWeights())
        if model._pipeline is not None:
            _no_first_exchange(model._pipeline.schedule(job.microbatches))
        modes.enter_context(_padded_once())
        block = _CUDA_BLOCK_BYTES if kind == "cuda" else 1
        return measure_steps(job, model, optimizer, round_to=block, steps=steps, edges=edges)


def measure_steps(
    job: Job,
    model: ParallelModel,
    optimizer: ShardedOptimizer,
    *,
    round_to: int = 1,
    steps: int = 1,
    edges: tuple[int, int] = (2, 2),
    before_last: Callable[[], None] = lambda: None,
) -> Traced:
    """Run `steps` training steps and measure the last; on fake tensors or, for comparison, on real ones."""
    state = [*optimizer.counts(), *(values for _, _, values in optimizer.state())]
    timeline = Timeline(round_to=round_to)
    recorder = Recorder(timeline, dimensions(model.mesh))
    recorder.add([s.local for s in model.shards], PARAMETERS)
    recorder.add([optimizer._refused, *state], OPTIMIZER)
    gradient_bytes = 0

    def before_update() -> None:
        nonlocal gradient_bytes
        gradients = [s.grad for s in model.shards if s.grad is not None]
        gradient_bytes = sum(g.nbytes for g in gradients)
        recorder.add(gradients, GRADIENTS)

    # All steps are recorded: allocations of the first one, such as a pipeline's buffers, live on in the others.
    with Marks(model, optimizer, recorder, before_update, job.microbatches, edges), recorder:
        for step in range(steps):
            if step == steps - 1:
                before_last()
            recorder.restart()
            _step(job, model, optimizer, recorder, step)
    return Traced(
        parameter_bytes=sum(s.local.nbytes for s in model.shards),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=sum(t.nbytes for t in state),
        counts=recorder.counts,
        peaks=timeline.peaks(),
    )


def _step(job: Job, model: ParallelModel, optimizer: ShardedOptimizer, recorder: Recorder, step: int) -> None:
    shape = (job.microbatches * job.train.microbatch, job.train.sequence_length)
    ids_BT, target_BT = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    document_BT = None if job.data.attend_across_documents else torch.zeros(shape, dtype=torch.int32)
    recorder.add([t for t in (ids_BT, target_BT, document_BT) if t is not None], INPUTS)
    clip_norm = job.optimizer.clip_norm or None
    train_step(
        model,
        optimizer,
        ids_BT,
        target_BT,
        document_BT,
        lr=job.optimizer.lr / (step + 1),
        clip_norm=clip_norm,
    )


class Marks:
    """Marks the position in the step for a recorder: which stage, which layer, forward or backward."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        recorder: Recorder,
        before_update: Callable[[], None],
        microbatches: int,
        edges: tuple[int, int],
    ) -> None:
        self._model, self._optimizer, self._recorder = model, optimizer, recorder
        self._before_update, self._microbatches, self._edges = before_update, microbatches, edges
        self._handles: list[Any] = []

    def __enter__(self) -> Marks:
        for number, stage in enumerate(self._model.stages):
            self._watch_stage(number, stage)
        squared_norm, update = self._optimizer.squared_norm, self._optimizer.update
        prepare = self._optimizer.prepare

        def marked_norm() -> Tensor:
            self._before_update()
            self._mark("norm")
            return squared_norm()

        def marked_prepare(scale: Tensor | None) -> None:
            self._mark("prepare")
            prepare(scale)

        def marked_update(lr: float, scale: Tensor | None) -> None:
            self._mark("update")
            update(lr, scale)

        self._optimizer.squared_norm = marked_norm  # type: ignore[method-assign]
        self._optimizer.prepare = marked_prepare  # type: ignore[method-assign]
        self._optimizer.update = marked_update  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        del self._optimizer.squared_norm, self._optimizer.prepare, self._optimizer.update

    def _watch_stage(self, number: int, stage: Decoder) -> None:
        blocks = stage.blocks
        begun = count()
        microbatch = ""  # the microbatch in its forward pass

        def begin(_module: nn.Module, _args: Any) -> None:
            nonlocal microbatch
            n = self._microbatches
            microbatch = microbatch_label(next(begun) % n, n, self._edges)
            self._mark(f"forward {number} {microbatch} in")

        def forward(where: str) -> Any:
            def hook(_module: nn.Module, *_: Any) -> None:
                self._mark(f"forward {number} {microbatch} {where}")

            return hook

        def backward(where: str) -> Any:
            def hook(_module: nn.Module, _args: Any, out: Any) -> None:
                hidden = out[0] if isinstance(out, tuple) else out  # beside it, what experts' routers return
                self._when_gradient(hidden, f"backward {number} {microbatch} {where}")

            return hook

        def enter(_module: nn.Module, args: Any) -> None:
            self._when_gradient(args[0], f"backward {number} {microbatch} in")

        hooks = [stage.register_forward_pre_hook(begin), blocks[0].register_forward_pre_hook(enter)]
        if stage.lm_head is not None:  # elsewhere the last layer's output is the stage's
            hooks.append(stage.register_forward_hook(backward("out")))
        for index, block in enumerate(blocks):
            where = position(index, len(blocks), max(2, self._model.settings.recompute_every_layers))
            hooks.append(block.register_forward_pre_hook(forward(where)))
            hooks.append(block.register_forward_hook(backward(where)))
        hooks.append(blocks[-1].register_forward_hook(forward("out")))
        self._handles += hooks

    def _mark(self, label: str) -> None:
        self._recorder.timeline.mark(label)
        phase = label.partition(" ")[0]
        self._recorder.phase = phase if phase in ("forward", "backward") else "update"

    def _when_gradient(self, tensor: Tensor, label: str) -> None:
        if tensor.requires_grad:

            def hook(_grad: Tensor) -> None:
                self._mark(label)

            tensor.register_hook(hook)


def _eager(job: Job) -> Any:
    # The compiler would run for minutes, and what it fuses depends on the GPU.
    return job.train.model_copy(update={"compile": False})


def _no_first_exchange(schedule: Any) -> None:
    """Skip the first step's messages about whether neighbours know their shapes. Ours do: see `parallel.pipeline`."""
    modes = getattr(pipelining, "InferenceMode", None)
    if modes is None:
        return  # an older torch, without these messages

    def settle(stages: list[Any], *_: object) -> None:
        for stage in stages:
            stage._inference_mode = modes.STATIC

    schedule._warmup_p2p = settle
