"""Random weights that do not depend on the layout: each block of rows has its own seed, derived from its name.

A rank draws only the blocks that overlap its shard, and every way to shard the model gives bit-identical weights.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from seatrial.base.box import Box
from seatrial.job.architecture import Architecture
from seatrial.job.parameters import is_router_bias
from seatrial.model import lora
from seatrial.model.expert_files import file_shapes, read_joined
from seatrial.model.source import WeightSource

# Rows drawn with one seed. Changing it changes every initial weight.
_ROWS = 256


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    # Always the CPU's generator: a CUDA one gives other numbers, and the model would depend on the device.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class RandomWeights:
    """The weight source of a model that is trained from scratch.

    Matrices are normal with `initializer_range`; those that write into the residual stream (o_proj, down_proj) are
    scaled down by sqrt(2 x layers), as in GPT-2; norms are 1 and biases 0. Of adapters A is uniform within 1 / sqrt(its
    inputs), as in PEFT (Kaiming with a = sqrt(5)), and B is 0.
    """

    def __init__(self, arch: Architecture, seed: int) -> None:
        self._arch = arch
        self._seed = seed
        self._shapes = file_shapes(arch)

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of parameter `name`."""
        return read_joined(self._read, name, box, dtype)

    def _read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(box.sizes, dtype=dtype)
        if name.endswith((".bias", lora.B)) or is_router_bias(name):
            return torch.zeros(box.sizes, dtype=dtype)
        std = self._arch.initializer_range
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * self._arch.num_hidden_layers) ** 0.5
        rows, columns = self._shapes[name]
        out = torch.empty(box.sizes, dtype=dtype)
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
        for block in range(first // _ROWS, -(-last // _ROWS)):
            start = block * _ROWS
            height = min(_ROWS, rows - start)
            generator = _generator(self._seed, name, block)
            if name.endswith(lora.A):
                values = (torch.rand(height, columns, generator=generator) * 2 - 1) / columns**0.5
            else:
                values = torch.randn(height, columns, generator=generator) * std
            lo, hi = max(first, start), min(last, start + height)
            part = values[lo - start : hi - start, box.offsets[1] : box.offsets[1] + box.sizes[1]]
            out[lo - first : hi - first] = part.to(dtype)
        return out


class FreshAdapters:
    """The weights of a base model with new adapters: the start of training with LoRA."""

    def __init__(self, base: WeightSource, arch: Architecture, seed: int) -> None:
        self._base, self._new = base, RandomWeights(arch, seed)

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of parameter `name`."""
        return (self._new if lora.is_adapter(name) else self._base).read(name, box, dtype)
