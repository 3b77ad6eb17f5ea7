"""Sharded data parallel (FSDP2) over one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import Shard

from seatrial.job.parameters import is_router_bias
from seatrial.job.schema import Accumulate
from seatrial.model.decoder import Decoder, SparseMLP
from seatrial.parallel.collectives import all_gather_single, reduce_scatter_single


def apply_sharding(
    model: Decoder,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shard each decoder layer and then the rest of `model` over `mesh`.

    Weights, gradients and optimizer state stay fp32 shards; layers compute in `compute_dtype`, gradients are reduced
    in fp32. Gradients are summed over ranks, not averaged: the loss is already divided by the tokens of the global
    batch. With an `expert_mesh` (expert parallel) a layer's experts are sharded over that one: the other ranks' share of their
    gradients has come with the positions. Routers' biases stay whole and in fp32.
    """
    placed = None if expert_mesh is None else _experts_over(model, expert_mesh)
    policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        # Hidden states have the right dtype; experts' counts, which a stage of a pipeline gets, must stay fp32.
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    whole = {p for name, p in model.named_parameters() if is_router_bias(name)}
    for block in model.blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placed,
            ignored_params=whole,
        )
    # The root's own weights (embedding, last norm, head) are needed again at once by the backward pass.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Plain SUM: gloo has no PREMUL_SUM, which torch would use for a factor of its own.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            if mesh.device_type == "cpu" and expert_mesh is None:  # with two meshes torch refuses it
                module.set_custom_all_gather(_CpuAllGather())
                module.set_custom_reduce_scatter(_CpuReduceScatter())


class _CpuAllGather(DefaultAllGather):
    """FSDP2's all-gather as `collectives` does it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        return all_gather_single(output_tensor, input_tensor, group, async_op)


class _CpuReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter as `collectives` does it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return reduce_scatter_single(output_tensor, input_tensor, group, async_op)


def _experts_over(model: Decoder, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """FSDP2's argument that shards experts over `mesh`. Needs torch 2.12 (`launch.preflight`).

    Experts as a module of their own would be gathered inside the layer, where recomputation sees it.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)
    experts = {p for b in model.blocks if isinstance(b.mlp, SparseMLP) for p in b.mlp.experts.parameters()}
    return lambda parameter: ShardPlacementResult(Shard(0), info) if parameter in experts else None


def free_gathered(model: Decoder) -> None:
    """Free weights that forward passes without a backward pass left gathered: they would be stale after the update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def prepare_backward(model: nn.Module, *, last: bool, accumulate: Accumulate) -> None:
    """Set what the next backward pass does with its gradients; `last`: it is that of the step's last microbatch.

    "whole": they are accumulated unsharded in fp32, and reduced over ranks in the last microbatch.
    "sharded": each layer's are reduce-scattered over `shard` in every microbatch and added to this rank's shard, so that
    no unsharded gradient stays. Over `replicate`, which would save no memory, both reduce once.
    """
    if isinstance(model, FSDPModule):
        reduces = last or accumulate == "sharded"
        # As after the last pass: the buffer of the last reduce-scatter, the largest, is not kept until the next pass.
        model.set_is_last_backward(reduces)
        model.set_requires_gradient_sync(reduces)
        model.set_requires_all_reduce(last)
