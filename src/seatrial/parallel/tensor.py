"""Tensor parallel with sequence parallel: which dimension of each weight is split, and where ranks communicate.

Between the regions marked here, activations hold T/n positions each (sequence parallel, arXiv:2205.05198); inside
them, all positions and 1/n of the heads, of the MLP or of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seatrial.base.box import Box
from seatrial.model.decoder import Decoder, SparseMLP
from seatrial.parallel.collectives import AllGatherPositions, ReduceScatterPositions
from seatrial.parallel.float8 import Scaling
from seatrial.parallel.lora import adapted, row_parallel
from seatrial.parallel.overlap_grad import Overlap

_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_ROW = ("o_proj", "down_proj")
_OF_EXPERTS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}  # the experts are the first dimension of each


def of_experts(name: str) -> bool:
    """Whether parameter `name` has a layer's experts as its first dimension."""
    return name.rpartition(".")[0].endswith(".experts")


def split_dimension(name: str) -> int | None:
    """The dimension of parameter `name` that tensor parallel splits; None where it is replicated.

    Replicated are the norms, the experts' router, and of an adapter the matrix whose product with the other one is split.
    Norms and adapters see only part of the positions or heads. The router sees all positions, and each rank's gradient of it
    comes through that rank's part of every expert. So all of these gradients must be summed over the group: see
    `ParallelModel`.
    """
    module, _, kind = name.rpartition(".")
    *_, layer, module = "", *module.split(".")
    if of_experts(name):
        return _OF_EXPERTS[kind]
    if module == "lora_A":
        return 1 if layer in _ROW else None
    if module == "lora_B":
        return 0 if layer in _COLUMN else None
    if module in _COLUMN:
        return 0  # output features: weight rows, and bias
    if module in _ROW:
        assert kind == "weight", f"{name}: a bias here would be added once for every rank"
        return 1  # input features
    return None


def tensor_box(name: str, shape: tuple[int, ...], size: int, rank: int) -> Box:
    """The part of the whole parameter that tensor-parallel `rank` of `size` holds."""
    box = Box.whole(shape)
    dim = split_dimension(name)
    if dim is None or size == 1:
        return box
    if shape[dim] % size:
        raise ValueError(
            f"{name}: {shape[dim]} does not divide by {size} (the job's rules should have refused it)"
        )
    part = shape[dim] // size
    return box.narrow(dim, rank * part, part)


class VocabParallelEmbedding(nn.Module):
    """A token embedding of which each rank holds V/n rows; it returns this rank's part of the positions."""

    def __init__(self, weight: Tensor, group: ProcessGroup, rank: int) -> None:
        super().__init__()
        self.weight = weight
        self._group = group
        self._first_id = rank * weight.shape[0]

    def forward(self, ids_BT: Tensor) -> Tensor:
        local_BT = ids_BT - self._first_id
        outside_BT = (local_BT < 0) | (local_BT >= self.weight.shape[0])
        rows_BTD = F.embedding(local_BT.masked_fill(outside_BT, 0), self.weight)
        rows_BTD = rows_BTD.masked_fill(outside_BT[:, :, None], 0)
        return ReduceScatterPositions.apply(rows_BTD, self._group)


def _on_group(function: type[torch.autograd.Function], group: ProcessGroup, x: Tensor) -> Tensor:
    result: Tensor = function.apply(x, group)
    return result


def apply_tensor_parallel(
    model: Decoder,
    group: ProcessGroup,
    rank: int,
    sequence_length: int,
    *,
    in_parts: bool,
    opaque: bool = False,
    scaling: Scaling = None,
) -> None:
    """Replace the weights of `model` (on the meta device) by this rank's parts, and insert the communication.

    `in_parts`: the layers' communication is overlapped with their matrix products, part by part (see `overlap`).
    `opaque`, `scaling`: see `Overlap`.
    """
    size = group.size()
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        box = tensor_box(name, tuple(parameter.shape), size, rank)
        empty = torch.empty(box.sizes, dtype=parameter.dtype, device=parameter.device)
        local = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(path), leaf, local)

    def gather_for_logits(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # `cross_entropy` gathers its own parts.
        return (AllGatherPositions.apply(args[0], group), *args[1:]) if args[2] is None else args

    overlap = Overlap(group, in_parts=in_parts, opaque=opaque, scaling=scaling)
    # One all-gather for q, k and v, and one for gate and up.
    for block in model.blocks:
        attention, mlp = block.self_attn, block.mlp
        attention.project = adapted(overlap.project_in_order, overlap, in_order=True)
        attention.o_proj = row_parallel(attention.o_proj, overlap, in_order=True)
        if isinstance(mlp, SparseMLP):
            mlp.gather = partial(_on_group, AllGatherPositions, group)
            mlp.scatter = partial(_on_group, ReduceScatterPositions, group)
        else:
            mlp.project = adapted(overlap.project, overlap, in_order=False)
            mlp.down_proj = row_parallel(mlp.down_proj, overlap, in_order=False)
    trunk = model.model
    if trunk.embed_tokens is not None:
        trunk.embed_tokens = VocabParallelEmbedding(trunk.embed_tokens.get_parameter("weight"), group, rank)
    if model.lm_head is not None:
        model.lm_head.register_forward_pre_hook(gather_for_logits)
    model.sequence_length = sequence_length
