"""The learning rate of each step: a pure function."""

from __future__ import annotations

import math

from seatrial.job.schema import OptimizerSection


def learning_rate(step: int, steps: int, optimizer: OptimizerSection) -> float:
    """The learning rate of `step` (1 is the first) in a run of `steps`.

    Linear warm-up to `lr` at step `warmup_steps`; then `cosine` decays to `lr x min_lr_ratio` at the last step
    (arXiv:1608.03983), `wsd` is constant and decays linearly over the last `decay_steps` (arXiv:2404.06395), `constant`
    does not decay.
    """
    peak, floor = optimizer.lr, optimizer.lr * optimizer.min_lr_ratio
    warmup = optimizer.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if optimizer.decay == "constant":
        return peak
    if optimizer.decay == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    length = optimizer.decay_steps or max(1, steps // 10)
    done = (step - (steps - length)) / length
    return peak + (floor - peak) * min(1.0, max(0.0, done))
