"""Low-rank adapters in the decoder: y = W x + (alpha / rank) B A x, with W frozen (arXiv:2106.09685).

Parameters are named as in PEFT: `...q_proj.lora_A.weight` [rank, I] and `...q_proj.lora_B.weight` [O, rank], beside
`...q_proj.weight` [O, I]. A is drawn as `nn.Linear` draws weights and B is 0, so that training starts from the base
model (`model.initialise`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seatrial.base.box import Box
from seatrial.job.architecture import Architecture
from seatrial.job.lora import Lora
from seatrial.model.source import WeightSource

A, B = ".lora_A.weight", ".lora_B.weight"  # ends of parameter names


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((A, B))


class LoraLinear(nn.Linear):
    """A linear layer with an adapter."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        """With the shape of `linear`; weights are uninitialised."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False)
        self.scale = lora.scale
        # With the weight and bias; or a replacement in another precision.
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        # The adapter first: recomputation then stops before the product with W, whose result no gradient needs.
        return self.scale * self.lora_B(self.lora_A(x)) + self.multiply(x, self.weight, self.bias)


def add_adapters(block: nn.Module, lora: Lora) -> None:
    """Replace the linear layers of a decoder layer that `lora` names."""
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if name in lora.targets and isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, lora))


def freeze_base(model: nn.Module) -> None:
    """Leave only adapters trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


class MergedWeights:
    """The weights of a model with adapters as those of its base model: W + (alpha / rank) B A, computed in fp32."""

    def __init__(self, source: WeightSource, arch: Architecture) -> None:
        """`source` has the weights of `arch`."""
        assert arch.lora is not None
        self._source, self._lora = source, arch.lora

    def dtype(self, name: str) -> torch.dtype:
        """As the source has it."""
        stored: torch.dtype = getattr(self._source, "dtype", lambda _: torch.float32)(name)
        return stored

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of parameter `name` of the base model."""
        layer, _, leaf = name.rpartition(".")
        target = layer.rpartition(".")[2]
        if leaf != "weight" or target not in self._lora.targets:
            return self._source.read(name, box, dtype)
        rank = self._lora.rank
        rows, columns = zip(box.offsets, box.sizes, strict=True)
        b_Or = self._source.read(layer + B, Box((rows[0], 0), (rows[1], rank)), torch.float32)
        a_rI = self._source.read(layer + A, Box((0, columns[0]), (rank, columns[1])), torch.float32)
        weight_OI = self._source.read(name, box, torch.float32)
        return torch.addmm(weight_OI, b_Or, a_rI, alpha=self._lora.scale).to(dtype)
