"""What to do about a step whose numbers cannot be right: redo it, roll back and replay, leave its samples out, stop.

Pure decisions. Every rank judges the same summed values with the same memory, so every rank decides alike without
asking the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from seatrial.job.schema import ResilienceSection

WINDOW = 64  # steps that a spike is compared with
LEAST = 16  # so many must be known before a step can be a spike

# Median absolute deviations that make three standard deviations of a normal distribution.
_ROBUST = 3 * 1.4826
# What it costs and finds, by simulation, where norms scatter log-normally by 0.3 and the factor is 3: of noise 5 steps
# in 100,000 are told, of norms that are six times as large 94 in 100. Measured on a logarithmic scale instead, half as
# many false alarms cost a fifth of the six-fold ones; twice the window changes next to nothing.
# A spread is at least this part of the median: a loss that hardly moves is not spiking at its second digit, and
# gradient norms double now and then without harm.
_LEAST_SPREAD = {"loss": 0.02, "gradient norm": 1 / 3}

HINT = (
    "lower optimizer.lr, or raise optimizer.warmup_steps, and start over with --fresh: "
    "a resumed run keeps its optimizer settings"
)

Action = Literal["accept", "redo", "back", "skip", "fail"]


@dataclass(frozen=True)
class Verdict:
    """What follows a step. A finding is to be told where `signal` is not None."""

    action: Action
    signal: Literal["nonfinite", "loss_spike"] | None = None
    reason: str = ""
    data: dict[str, float | str] = field(default_factory=dict)


class Guard:
    """The memory of the decisions: recent values, tries of each step, steps that were left out."""

    def __init__(
        self,
        settings: ResilienceSection,
        *,
        skipped: Mapping[int, str] | None = None,
        recent: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """`skipped`: steps left out so far, with reasons; `recent`: step -> (loss, gradient norm). Alike in all ranks."""
        self.skipped = dict(skipped or {})
        self._settings = settings
        self._recent = dict(recent or {})
        self._tries: dict[int, int] = {}
        self._condemned: dict[int, str] = {}  # to be left out when met again
        self._in_episode = False

    def leaves_out(self, step: int) -> str | None:
        """Why `step` is not to be done at all: decided before, or found in the ledger."""
        return self.skipped.get(step) or self._condemned.get(step)

    def left_out(self, step: int, reason: str) -> None:
        """`step` was left out; the budget is one smaller, unless it was left out before."""
        self._condemned.pop(step, None)
        self.skipped.setdefault(step, reason)

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """What to do after `step` had these values. Whatever is not finite has not been applied."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._ladder(step, loss, grad_norm)
        spike = self._spike(step, loss, grad_norm)
        verdict = Verdict("accept")
        if spike is not None:
            verdict = self._on_spike(step, *spike)
        if verdict.action == "accept":
            self._in_episode = spike is not None
            self._remember(step, loss, grad_norm)
        return verdict

    def cannot_go_back(self, step: int, loss: float, grad_norm: float, verdict: Verdict) -> Verdict:
        """In place of a "back" where there is no state to go back to."""
        if verdict.signal == "nonfinite":
            return self._leave_out(step, verdict.reason)
        # Its update has been made, and nothing can take it back.
        self._condemned.pop(step, None)
        self._remember(step, loss, grad_norm)
        return replace(verdict, action="accept", data={**verdict.data, "action": "warn"})

    def _ladder(self, step: int, loss: float, grad_norm: float) -> Verdict:
        reason = f"the loss is {loss} and the gradient norm {grad_norm} at step {step}"
        tries = self._tries[step] = self._tries.get(step, 0) + 1
        if tries == 1:
            return Verdict("redo", "nonfinite", reason, {"action": "redo"})
        if tries == 2:
            return Verdict("back", "nonfinite", reason, {"action": "roll back"})
        return self._leave_out(step, reason)

    def _on_spike(self, step: int, what: str, value: float, usual: float, spread: float) -> Verdict:
        reason = (
            f"the {what} of step {step} is {value:.4g}; recent steps had {usual:.4g}, "
            f"give or take {spread:.2g}"
        )
        data: dict[str, float | str] = {"what": what, "value": value, "median": usual, "spread": spread}
        if self._settings.on_spike == "warn":
            if self._in_episode:
                return Verdict("accept")
            return Verdict("accept", "loss_spike", reason, {**data, "action": "warn"})
        tries = self._tries[step] = self._tries.get(step, 0) + 1
        if tries > 1:
            if len(self.skipped) >= self._settings.max_skipped_steps:
                return Verdict("fail", "loss_spike", reason, {**data, "action": "stop"})
            self._condemned[step] = reason
        return Verdict("back", "loss_spike", reason, {**data, "action": "roll back"})

    def _leave_out(self, step: int, reason: str) -> Verdict:
        if len(self.skipped) >= self._settings.max_skipped_steps:
            return Verdict("fail", "nonfinite", reason, {"action": "stop"})
        return Verdict("skip", "nonfinite", reason, {"action": "skip"})

    def _spike(self, step: int, loss: float, grad_norm: float) -> tuple[str, float, float, float] | None:
        """(what, value, median, spread) if one of them lies `spike_factor` spreads above the median."""
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
