"""The interface of weight sources: a checkpoint, a Hugging Face folder or a random initialisation."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from seatrial.base.box import Box


class WeightSource(Protocol):
    """Provides the values of any box of a parameter."""

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of the parameter stored as `name`: a CPU tensor of `box.sizes` and `dtype`."""
        ...
