"""The parallel model: this rank's shards, as boxes of the whole parameters, and one forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from seatrial.base.box import Box, chunk
from seatrial.base.errors import InternalError
from seatrial.base.private import keep_compiler_private
from seatrial.data.loader import NO_TARGET
from seatrial.hardware import accelerator
from seatrial.hardware.catalogue import FLASH, AttentionKernel, Precision
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Coordinates, Layout
from seatrial.job.parameters import is_router_bias
from seatrial.job.schema import Accumulate, Fp8Scaling
from seatrial.model.decoder import Block, Decoder, SparseMLP, stored_name, whole_shapes
from seatrial.model.lora import freeze_base
from seatrial.model.source import WeightSource
from seatrial.parallel import packed
from seatrial.parallel.context import apply_context_parallel, own_chunks, own_positions
from seatrial.parallel.expert import apply_expert_parallel
from seatrial.parallel.float8 import Scaling, apply_float8
from seatrial.parallel.loss import LoadBalancing, cross_entropy
from seatrial.parallel.mesh import Mesh
from seatrial.parallel.offload import ActivationOffload, Transfers
from seatrial.parallel.pipeline import Pipeline
from seatrial.parallel.recompute import keep_products, recompute_in_parts
from seatrial.parallel.shard import apply_sharding, free_gathered, prepare_backward
from seatrial.parallel.stage_clock import StageClock
from seatrial.parallel.tensor import apply_tensor_parallel, of_experts, split_dimension, tensor_box
from seatrial.record.stages import BACKWARD, FORWARD, STEP_SUM


@dataclass(frozen=True)
class Settings:
    """The job's settings that `ParallelModel` needs."""

    sequence_length: int
    microbatch: int  # sequences
    masked: bool = False  # some targets may be NO_TARGET: the loss is the mean over the others of the step
    precision: Precision = "fp32"
    fp8_scaling: Fp8Scaling = "rowwise"
    attention: AttentionKernel = "auto"
    activation_checkpointing: str = "none"
    recompute_every_layers: int = 1
    offload_activations: bool = False
    compile: bool = False
    reshard_after_forward: bool = True
    async_tensor: bool = False
    ring_attention: bool = False
    accumulate: Accumulate = "whole"

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def scaling(self) -> Scaling:
        """Of the operands of products in decoder layers."""
        return self.fp8_scaling if self.precision == "fp8" else None


@dataclass(frozen=True)
class Shard:
    """This rank's shard of one parameter."""

    name: str  # as stored: Hugging Face's name
    parameter: nn.Parameter
    local: Tensor  # this rank's values; shares the parameter's memory
    box: Box  # where `local` lies in the whole parameter
    whole: tuple[int, ...]
    holders: int  # ranks of one model replica that hold this same box, this one included
    first: bool  # true in exactly one rank of each model replica for each box
    owner: bool  # true in exactly one rank for each box: that rank saves it
    counted: bool  # its gradient counts in the norm (the second copy of a tied embedding does not)

    @property
    def trained(self) -> bool:
        """Whether it has gradients: with LoRA only adapters have, and routers' biases have none."""
        return self.parameter.requires_grad

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient, of `local`'s shape."""
        grad = self.parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad


class ParallelModel:
    """The pipeline stages of one rank, split and connected as the layout says.

    The order matters: tensor parallel splits whole weights, compilation sees the communication inside a layer, sharding
    wraps the compiled layer, and only then is memory allocated and filled from `source`.
    """

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        settings: Settings,
        source: WeightSource,
        *,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.arch = arch
        self.mesh = mesh
        self.settings = settings
        self.clock = StageClock(mesh.device)
        layout = mesh.layout
        # bf16 always goes through FSDP, also in a group of one: FSDP keeps the fp32 weights next to the bf16 ones.
        sharded = layout.replicate * layout.shard > 1 or settings.precision != "fp32"
        data_mesh = mesh.data_mesh(timeout) if sharded else None
        expert_mesh = mesh.expert_mesh(timeout) if mesh.expert is not None else None
        # Known at the begin of a step. 1 where none counts: loss and gradients are then 0.
        self._divisor = torch.ones((), dtype=torch.float64, device=mesh.device)
        # Targets of the last step, over all ranks.
        self.counted: int | Tensor = 0
        self._packs = settings.attention in FLASH and packed.packs_documents(
            arch, mesh.device, settings.compute_dtype
        )
        self.stages = [
            build_stage(arch, index, mesh, settings, data_mesh, expert_mesh, self._divisor, packs=self._packs)
            for index in layout.stage_indices(mesh.at.pipeline)
        ]
        if settings.offload_activations:
            transfers = Transfers(mesh.device)
            for stage in self.stages:
                stage.layer_context = ActivationOffload(
                    stage.blocks, transfers, receives=stage.model.embed_tokens is None
                )
        for stage in self.stages:
            stage.to_empty(device=mesh.device)
        self.shards = [shard for stage in self.stages for shard in self._shards(stage)]
        self.load(source)
        self._pipeline = self._build_pipeline() if layout.pipeline > 1 else None
        # Summed over the tensor group once per step, in one message, rather than once per microbatch and layer.
        self._partial = [
            s for s in self.shards if mesh.tensor is not None and split_dimension(s.name) is None
        ]
        self._tied = [s for s in self.shards if s.name == "model.embed_tokens.weight"]
        self._ends = mesh.ends if arch.tie_word_embeddings and self._tied else None

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        """Fill every parameter from `source`; only this rank's boxes are read."""
        for shard in self.shards:
            if shard.box.numel:
                shard.local.copy_(source.read(shard.name, shard.box, shard.local.dtype))

    def forward_backward(
        self, ids_BT: Tensor, target_BT: Tensor, document_BT: Tensor | None = None
    ) -> Tensor:
        """Compute the gradients of the mean loss over the global batch into each parameter's `.grad`.

        The mean is over all targets of the step that are not `NO_TARGET`, whichever rank and microbatch has them.
        `ids_BT` and `target_BT` are this data-parallel rank's sequences of the step, as many as every other's: whole
        microbatches, whose number may differ from step to step. With `document_BT`, which numbers the documents in each
        and is on the host, attention stays inside documents. Returns this rank's share of the mean loss: the sum
        over all ranks (`mesh.sum_over_ranks`) is the loss.
        """
        self._count(target_BT)
        balance = self.stages[-1].balance
        if isinstance(balance, LoadBalancing):
            rows = len(ids_BT) * self.mesh.layout.data_parallel
            balance.share = self.settings.microbatch / rows
        ids_BT, target_BT = self._own_positions(ids_BT), self._own_positions(target_BT)
        documents = self._documents(document_BT)
        if self._pipeline is not None:
            loss = self._pipeline.forward_backward(ids_BT, target_BT, documents)
        else:
            loss = self._accumulate(ids_BT, target_BT, documents)
        missing = [s.name for s in self.shards if s.trained and s.box.numel and s.grad is None]
        if missing:
            # Some combinations in torch silently lose gradients; training on would be wrong.
            raise InternalError(
                f"no gradient for {len(missing)} parameters on rank {self.mesh.rank}, {missing[0]} first",
                hint="this combination of schedule, sharding and precision must not be used; report it",
            )
        with self.clock.during(BACKWARD):
            self._sum_partial_gradients()
        # Every tensor-parallel rank has the same loss; only one of them counts.
        return loss if self.mesh.at.tensor == 0 else torch.zeros_like(loss)

    def _count(self, target_BT: Tensor) -> None:
        """Count the targets of the global batch, before the first backward pass needs their number."""
        layout = self.mesh.layout
        if not self.settings.masked:
            self.counted = target_BT.numel() * layout.data_parallel
            self._divisor.fill_(self.counted)
            return
        with self.clock.during(STEP_SUM):
            counted = self.mesh.sum_over_ranks((target_BT != NO_TARGET).sum(dtype=torch.float64))
        # All ranks of a data-parallel rank's tensor, context and pipeline groups have the same targets here.
        self.counted = counted / (layout.world_size // layout.data_parallel)
        self._divisor.copy_(self.counted.clamp(min=1))

    def take_balance_loss(self) -> Tensor | float:
        """This rank's share, fp64, of the load-balancing loss since the last call: the sum over all ranks is the loss.

        Without the coefficient, and 0 where there are no experts. See `LoadBalancing`.
        """
        balance = self.stages[-1].balance
        if not isinstance(balance, LoadBalancing):
            return 0.0
        total, balance.total = balance.total, 0.0
        return total if self.mesh.at.tensor == 0 and self.mesh.context_rank == 0 else 0.0

    def take_expert_counts(self) -> Tensor | None:
        """Positions that this rank has sent to each expert of each layer since the last call, fp64 [L, X]; None: no experts.

        Layers of other stages are 0: the sum over all ranks is that of the whole model and the global batch. So are layers
        without experts.
        """
        if not self.arch.num_experts:
            return None
        shape = self.arch.num_hidden_layers, self.arch.num_experts
        count_LX = torch.zeros(shape, dtype=torch.float64, device=self.mesh.device)
        for stage in self.stages:
            sent_LX, stage.sent_LX = stage.sent_LX, None
            # All ranks of a tensor group route the same positions; only one of them counts.
            if sent_LX is not None and self.mesh.at.tensor == 0:
                count_LX[stage.layer_range.stop - len(sent_LX) : stage.layer_range.stop] = sent_LX
        return count_LX

    @torch.no_grad()
    def validation_loss(self, ids_BT: Tensor, target_BT: Tensor, document_BT: Tensor | None = None) -> Tensor:
        """This rank's share, fp64, of the loss in nats summed over all targets that are not `NO_TARGET`.

        The arguments are shaped as in `forward_backward`; the sum over all ranks is the sum over the global batch.
        Weights and gradients stay as they are. All ranks call it.
        """
        ids_BT, target_BT = self._own_positions(ids_BT), self._own_positions(target_BT)
        documents = self._documents(document_BT)
        try:
            if self._pipeline is not None:
                loss = self._pipeline.forward(ids_BT, target_BT, documents)
            else:
                loss = torch.zeros((), device=self.mesh.device, dtype=torch.float64)
                for ids, target, of_these in self._microbatches(ids_BT, target_BT, documents):
                    loss += self.stages[0](ids, documents=of_these, target_BT=target)
        finally:
            for stage in self.stages:
                free_gathered(stage)
        return loss if self.mesh.at.tensor == 0 else torch.zeros_like(loss)

    def _accumulate(self, ids_BT: Tensor, target_BT: Tensor, documents: Tensor | None) -> Tensor:
        model = self.stages[0]
        total = torch.zeros((), device=self.mesh.device, dtype=torch.float64)
        microbatches = self._microbatches(ids_BT, target_BT, documents)
        for i, (ids, target, of_these) in enumerate(microbatches):
            last = i == len(microbatches) - 1
            prepare_backward(model, last=last, accumulate=self.settings.accumulate)
            with self.clock.during(FORWARD):
                loss = model(ids, documents=of_these, target_BT=target)
            with self.clock.during(BACKWARD):
                loss.backward()
            total += loss.detach()  # NaN until the backward pass, see `loss.cross_entropy`
        return total

    def _microbatches(
        self, ids_BT: Tensor, target_BT: Tensor, documents: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        size = self.settings.microbatch
        ids, targets = ids_BT.split(size), target_BT.split(size)
        of_each = [None] * len(ids) if documents is None else documents.chunk(len(ids))
        return list(zip(ids, targets, of_each, strict=True))

    def _documents(self, document_BT: Tensor | None) -> Tensor | None:
        """What the stages take for the documents of a step; each microbatch has as many rows of it."""
        if document_BT is None:
            return None
        if self._packs:
            T, size = document_BT.shape[1], self.mesh.layout.context
            chunks = [range(T)] if size == 1 else own_chunks(T, size=size, rank=self.mesh.context_rank)
            document_BT = packed.document_bounds(document_BT, self.settings.microbatch, chunks)
        return accelerator.upload(document_BT, self.mesh.device)

    def _own_positions(self, x_BT: Tensor) -> Tensor:
        size = self.mesh.layout.context
        return x_BT if size == 1 else own_positions(x_BT, 1, size=size, rank=self.mesh.context_rank)

    @torch.no_grad()
    def _sum_partial_gradients(self) -> None:
        if self._partial:
            _all_reduce_together([s.grad for s in self._partial], self.mesh.tensor)
        if self._ends is not None:
            # Embedding and head are one weight held by two stages: both copies get the sum of both gradients.
            _all_reduce_together([s.grad for s in self._tied], self._ends)

    def _build_pipeline(self) -> Pipeline:
        s, layout = self.settings, self.mesh.layout
        assert self.mesh.pipeline is not None
        positions = s.sequence_length // layout.context
        return Pipeline(
            self.stages,
            layout,
            self.mesh.pipeline,
            self.mesh.at.pipeline,
            device=self.mesh.device,
            input_shape_BT=(s.microbatch, positions),
            hidden_shape_BTD=(s.microbatch, positions // layout.tensor, self.arch.hidden_size),
            experts=self.arch.num_experts,
            compute_dtype=s.compute_dtype,
            accumulate=s.accumulate,
            clock=self.clock,
        )

    def _shards(self, stage: Decoder) -> list[Shard]:
        mesh, layout = self.mesh, self.mesh.layout
        shapes = whole_shapes(self.arch)
        out = []
        for own_name, parameter in stage.named_parameters():
            name = stored_name(own_name, self.arch)
            copy = name != own_name
            box = held_box(own_name, shapes[name], layout, mesh.at)
            local = parameter.detach()
            if isinstance(local, DTensor):
                local = local.to_local()
            assert tuple(local.shape) == box.sizes, f"{name}: {tuple(local.shape)} is not {box}"
            # The dimensions of a replica along which all ranks hold this box.
            along_tensor = split_dimension(own_name) is None
            along_shard = is_router_bias(name)
            first = (
                not copy
                and (not along_tensor or mesh.at.tensor == 0)
                and (not along_shard or mesh.at.shard == 0)
            )
            out.append(
                Shard(
                    name=name,
                    parameter=parameter,
                    local=local,
                    box=box,
                    whole=shapes[name],
                    holders=(layout.tensor if along_tensor else 1) * (layout.shard if along_shard else 1),
                    first=first,
                    owner=first and mesh.at.replicate == 0,
                    counted=not copy,
                )
            )
        return out


def held_box(name: str, whole: tuple[int, ...], layout: Layout, at: Coordinates) -> Box:
    """The part of parameter `name` that the rank at `at` holds, if its stage has it."""
    box = tensor_box(name, whole, layout.tensor, at.tensor)
    if is_router_bias(name):
        return box
    index = layout.expert_shard(at.shard) if of_experts(name) else at.shard
    return box.narrow(0, *chunk(box.sizes[0], layout.shard, index))


def compile_block(block: Block, backend: str) -> None:
    """Compile a layer. With experts: attention with both norms, each expert's SwiGLU, and shared experts.

    The rest of them are sorting, grouped products and exchanges, whose sizes differ in every step; of `grouped_mm` torch
    compiles only that of bf16.
    """
    # A graph break would silently cost speed.
    compiled = partial(torch.compile, fullgraph=True, backend=backend)
    if not isinstance(block.mlp, SparseMLP):
        block.compile(fullgraph=True, backend=backend)
        return
    if block.recompute and block.contexts is not None:
        recompute_in_parts(block)
    block.attend = compiled(block.attend)  # type: ignore[method-assign]
    block.mlp.experts.activate = compiled(block.mlp.experts.activate, dynamic=True)
    if block.mlp.shared_experts is not None:
        block.mlp.shared_experts.compile(fullgraph=True, backend=backend)


def build_stage(
    arch: Architecture,
    index: int,
    mesh: Mesh,
    settings: Settings,
    data_mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
    tokens: Tensor,
    *,
    packs: bool,
) -> Decoder:
    """Build pipeline stage `index` on the meta device: split, compiled and, with a `data_mesh`, sharded; no memory.

    `tokens`: what the loss is divided by, see `cross_entropy`. `packs`: see `packed`.
    """
    layout = mesh.layout
    with torch.device("meta"):
        model = Decoder(
            arch,
            layout.stage_layers(index, arch.num_hidden_layers),
            first=index == 0,
            last=index == layout.stages - 1,
        )
    if model.lm_head is not None:
        model.lm_head.loss = partial(cross_entropy, tokens=tokens, group=mesh.tensor, rank=mesh.at.tensor)
        if arch.num_experts:
            model.balance = LoadBalancing(
                arch.router_aux_loss_coef,
                rows=settings.microbatch * settings.sequence_length * arch.sparse_layers,
                ranks=layout.tensor,
                group=mesh.context,
            )
    if mesh.tensor is not None:
        apply_tensor_parallel(
            model,
            mesh.tensor,
            mesh.at.tensor,
            settings.sequence_length,
            in_parts=settings.async_tensor,
            opaque=settings.activation_checkpointing == "selective",
            scaling=settings.scaling,
        )
    elif settings.scaling is not None:
        apply_float8(model, settings.scaling)
    if mesh.expert is not None:
        apply_expert_parallel(model, mesh.expert)
    if arch.lora is not None:
        freeze_base(model)
    if packs:
        packed.apply_packed_attention(model)
    if mesh.context is not None:
        apply_context_parallel(
            model,
            mesh.context,
            mesh.context_rank,
            settings.sequence_length,
            mesh.device,
            packs=packs,
            ring=settings.ring_attention,
        )
    if settings.compile:
        keep_compiler_private()
    # What Inductor's C++ makes of FP8 gave NaN gradients on one CPU, and right ones on others (torch 2.13).
    without_inductor = settings.scaling is not None and not accelerator.is_accelerator(mesh.device)
    for number, block in enumerate(model.blocks):
        if settings.activation_checkpointing != "none":
            block.recompute = number % settings.recompute_every_layers == 0
        if settings.activation_checkpointing == "selective":
            widths = (
                (arch.moe_intermediate_size, arch.shared_width)
                if isinstance(block.mlp, SparseMLP)
                else (arch.intermediate_size,)
            )
            rank = None if arch.lora is None else arch.lora.rank
            keep_products(block, [width // layout.tensor for width in widths], rank)
        if settings.compile:
            compile_block(block, "aot_eager" if without_inductor else "inductor")
    if data_mesh is not None:
        apply_sharding(
            model,
            data_mesh,
            expert_mesh,
            compute_dtype=settings.compute_dtype,
            reshard_after_forward=settings.reshard_after_forward,
        )
    return model


def _all_reduce_together(grads: list[Tensor | None], group: dist.ProcessGroup | None) -> None:
    present = [g for g in grads if g is not None and g.numel()]
    if not present:
        return
    flat = torch.cat([g.flatten() for g in present])
    dist.all_reduce(flat, group=group)
    for grad, part in zip(present, flat.split([g.numel() for g in present]), strict=True):
        grad.copy_(part.view_as(grad))
