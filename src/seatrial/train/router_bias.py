"""The update of routers' biases: a balanced use of experts without a loss (arXiv:2408.15664).

A position's experts are chosen by score + bias; the bias is in no weight and has no gradient. After each step it rises by a
fixed rate for every expert of a layer that got fewer positions of the global batch than the mean, and falls for the others
that did not get exactly as many.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from seatrial.job.parameters import is_router_bias
from seatrial.model.lora import is_adapter
from seatrial.parallel.build import Shard


class RouterBiases:
    """The biases of this rank's layers."""

    def __init__(self, shards: Sequence[Shard], rate: float) -> None:
        self._rate = rate
        biases = [s for s in shards if is_router_bias(s.name)]
        if any(is_adapter(s.name) for s in shards):
            biases = []  # all else is frozen
        self._of_layer = {int(s.name.split(".layers.")[1].partition(".")[0]): s.local for s in biases}
        self._changes: dict[int, Tensor] = {}

    def prepare(self, count_LX: Tensor) -> None:
        """Take the counts of the whole model and the global batch, which are equal in all ranks; changes no bias."""
        mean_L1 = count_LX.mean(1, keepdim=True)
        change_LX = (mean_L1 - count_LX).sign() * self._rate
        self._changes = {layer: change_LX[layer] for layer in self._of_layer}

    def update(self, refused: Tensor) -> None:
        """Change the biases as prepared, unless the scalar `refused` is 1."""
        for layer, change_X in self._changes.items():
            self._of_layer[layer].add_(change_X.to(refused.dtype) * (1 - refused))
        self._changes = {}
