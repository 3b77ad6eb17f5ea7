"""The learning rate of each step: a pure function."""

from __future__ import annotations

import math

from seatrial.job.schema import OptimizerSection


def learning_rate(step: int, steps: int, optimizer: OptimizerSection) -> float:
    """The learning rate of `step` (1 is the first) in a run of `steps`.

    Linear warm-up to `lr` at step `warmup_steps`; then `cosine` (arXiv:1608.03983) and `linear` decay to `lr x
    min_lr_ratio` at the last step; `wsd` is constant and decays to it over the last `decay_steps` (arXiv:2404.06395; by one
    minus a square root: arXiv:2405.18392); `inverse_sqrt` is `lr x sqrt(warmup_steps / step)`, at least `lr x min_lr_ratio`;
    `constant` does not decay.
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
    if optimizer.decay == "inverse_sqrt":
        return max(floor, peak * math.sqrt(warmup / step))
    length = steps - warmup if optimizer.decay == "linear" else optimizer.decay_steps or max(1, steps // 10)
    done = min(1.0, max(0.0, (step - (steps - length)) / max(1, length)))
    if optimizer.decay == "wsd" and optimizer.decay_form == "cosine":
        done = 0.5 * (1 - math.cos(math.pi * done))
    elif optimizer.decay == "wsd" and optimizer.decay_form == "1-sqrt":
        done = math.sqrt(done)
    return peak + (floor - peak) * done
