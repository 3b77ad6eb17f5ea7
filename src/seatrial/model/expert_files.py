"""The experts' weights in Hugging Face's files: a tensor for each matrix of each expert, where the decoder has one parameter.

"model.layers.3.mlp.experts.gate_proj" [X, F, D] is stored as X tensors "model.layers.3.mlp.experts.7.gate_proj.weight" [F, D].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from seatrial.base.box import Box
from seatrial.job.architecture import Architecture
from seatrial.model.decoder import whole_shapes
from seatrial.model.source import WeightSource

_JOINED = re.compile(r"(.+\.experts)\.(\w+)")
_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def single_name(name: str, expert: int) -> str:
    """The name in files of one expert's matrix of parameter `name`; any other parameter's is its own."""
    joined = _JOINED.fullmatch(name)
    return name if joined is None else f"{joined[1]}.{expert}.{joined[2]}.weight"


def joined_name(name: str) -> str:
    """The inverse of `single_name`: the parameter to which the tensor `name` of a file belongs."""
    single = _SINGLE.fullmatch(name)
    return name if single is None else f"{single[1]}.{single[3]}"


@cache
def file_shapes(arch: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Name in files -> shape of every tensor of the whole model, in the order of `whole_shapes`."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in whole_shapes(arch).items():
        if single_name(name, 0) == name:
            found[name] = shape
        else:
            found |= {single_name(name, expert): shape[1:] for expert in range(shape[0])}
    return MappingProxyType(found)


def read_joined(
    read: Callable[[str, Box, torch.dtype], Tensor], name: str, box: Box, dtype: torch.dtype
) -> Tensor:
    """`box` of parameter `name`, by `read`, which knows tensors as files have them."""
    if single_name(name, 0) == name:
        return read(name, box, dtype)
    out = torch.empty(box.sizes, dtype=dtype)
    part = Box(box.offsets[1:], box.sizes[1:])
    for index in range(box.sizes[0]):
        out[index] = read(single_name(name, box.offsets[0] + index), part, dtype)
    return out


def read_single(source: WeightSource, name: str, box: Box, dtype: torch.dtype) -> Tensor:
    """`box` of the tensor `name` of a file, from a source that knows parameters."""
    single = _SINGLE.fullmatch(name)
    if single is None:
        return source.read(name, box, dtype)
    within = Box((int(single[2]), *box.offsets), (1, *box.sizes))
    return source.read(joined_name(name), within, dtype)[0]
