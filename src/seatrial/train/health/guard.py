"""Decides how to handle a non-finite step or a loss spike: redo it, roll back and replay, skip its samples, or stop.

Pure. Every rank has the same summed values and the same history, so all ranks decide alike without communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from seatrial.job.schema import ResilienceSection

WINDOW = 64  # steps that a spike is compared with
LEAST = 16  # steps that must be known before a step can be a spike

# Three standard deviations of a normal distribution, in median absolute deviations.
_ROBUST = 3 * 1.4826
# Simulated with log-normal norms (sigma 0.3) and a factor of 3: 5 false alarms in 100,000 steps; 94 % of norms that are
# six times as large are detected. A logarithmic scale would halve the false alarms but miss a fifth of these; doubling
# the window changes almost nothing.
# A spread is at least this fraction of the median: a nearly constant loss must not spike at its second digit, and
# gradient norms occasionally double without harm.
_LEAST_SPREAD = {"loss": 0.02, "gradient norm": 1 / 3}

HINT = (
    "lower optimizer.lr, or raise optimizer.warmup_steps, and start over with --fresh: "
    "a resumed run keeps its optimizer settings"
)

Action = Literal["accept", "redo", "back", "skip", "fail"]


@dataclass(frozen=True)
class StepDecision:
    """The decision after a step. `signal`, if not None, is to be reported."""

    action: Action
    signal: Literal["nonfinite", "loss_spike"] | None = None
    reason: str = ""
    data: dict[str, float | str] = field(default_factory=dict)


class Guard:
    """Decides on each step from the history: recent values, attempts at each step, skipped steps."""

    def __init__(
        self,
        settings: ResilienceSection,
        *,
        skipped: Mapping[int, str] | None = None,
        recent: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """`skipped`: steps skipped so far, with reasons; `recent`: step -> (loss, gradient norm). Same in all ranks."""
        self.skipped = dict(skipped or {})
        self._settings = settings
        self._recent = dict(recent or {})
        self._tries: dict[int, int] = {}
        self._to_skip: dict[int, str] = {}  # to be skipped when reached again
        self._in_episode = False

    def skip_reason(self, step: int) -> str | None:
        """Why `step` is to be skipped, as decided earlier or recorded in the ledger; None if it is not."""
        return self.skipped.get(step) or self._to_skip.get(step)

    def mark_skipped(self, step: int, reason: str) -> None:
        """Record that `step` was skipped; it counts once against `max_skipped_steps`."""
        self._to_skip.pop(step, None)
        self.skipped.setdefault(step, reason)

    def judge(self, step: int, loss: float, grad_norm: float) -> StepDecision:
        """Decide what follows `step` with these values. A non-finite update was not applied."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._on_nonfinite(step, loss, grad_norm)
        spike = self._spike(step, loss, grad_norm)
        decision = StepDecision("accept")
        if spike is not None:
            decision = self._on_spike(step, *spike)
        if decision.action == "accept":
            self._in_episode = spike is not None
            self._remember(step, loss, grad_norm)
        return decision

    def without_rollback(
        self, step: int, loss: float, grad_norm: float, decision: StepDecision
    ) -> StepDecision:
        """The decision instead of "back" if there is no state to roll back to."""
        if decision.signal == "nonfinite":
            return self._skip_step(step, decision.reason)
        # Its update has been applied and cannot be undone.
        self._to_skip.pop(step, None)
        self._remember(step, loss, grad_norm)
        return replace(decision, action="accept", data={**decision.data, "action": "warn"})

    def _on_nonfinite(self, step: int, loss: float, grad_norm: float) -> StepDecision:
        reason = f"the loss is {loss} and the gradient norm {grad_norm} at step {step}"
        tries = self._tries[step] = self._tries.get(step, 0) + 1
        if tries == 1:
            return StepDecision("redo", "nonfinite", reason, {"action": "redo"})
        if tries == 2:
            return StepDecision("back", "nonfinite", reason, {"action": "roll back"})
        return self._skip_step(step, reason)

    def _on_spike(self, step: int, what: str, value: float, usual: float, spread: float) -> StepDecision:
        reason = f"the {what} of step {step} is {value:.4g}; recent steps had {usual:.4g}, +/- {spread:.2g}"
        data: dict[str, float | str] = {"what": what, "value": value, "median": usual, "spread": spread}
        if self._settings.on_spike == "warn":
            if self._in_episode:
                return StepDecision("accept")
            return StepDecision("accept", "loss_spike", reason, {**data, "action": "warn"})
        tries = self._tries[step] = self._tries.get(step, 0) + 1
        if tries > 1:
            if len(self.skipped) >= self._settings.max_skipped_steps:
                return StepDecision("fail", "loss_spike", reason, {**data, "action": "stop"})
            self._to_skip[step] = reason
        return StepDecision("back", "loss_spike", reason, {**data, "action": "roll back"})

    def _skip_step(self, step: int, reason: str) -> StepDecision:
        if len(self.skipped) >= self._settings.max_skipped_steps:
            return StepDecision("fail", "nonfinite", reason, {"action": "stop"})
        return StepDecision("skip", "nonfinite", reason, {"action": "skip"})

    def _spike(self, step: int, loss: float, grad_norm: float) -> tuple[str, float, float, float] | None:
        """(name, value, median, spread) of the first value more than `spike_factor` spreads above its median."""
        before = [self._recent[s] for s in range(step - WINDOW, step) if s in self._recent]
        if len(before) < LEAST:
            return None
        for index, (what, value) in enumerate((("loss", loss), ("gradient norm", grad_norm))):
            known = [values[index] for values in before]
            usual = median(known)
            spread = _ROBUST * median(abs(v - usual) for v in known)
            spread = max(spread, _LEAST_SPREAD[what] * abs(usual))
            if value - usual > self._settings.spike_factor * spread:
                return what, value, usual, spread
        return None

    def _remember(self, step: int, loss: float, grad_norm: float) -> None:
        self._recent[step] = (loss, grad_norm)
        self._recent.pop(step - 2 * WINDOW, None)  # a rollback may go back some steps
