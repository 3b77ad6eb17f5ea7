"""An optimizer: SGD with momentum, and with weight decay as AdamW has it. `name = "momentum"` in [optimizer]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seatrial.train.optimizer import ElementwiseOptimizer

if TYPE_CHECKING:
    from torch import Tensor


class Momentum(ElementwiseOptimizer):
    def rule(
        self,
        values: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        decay: float,
        count: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = self.settings.beta1 * state["velocity"] + gradient
        return values * (1 - lr * decay) - lr * velocity, {"velocity": velocity}
