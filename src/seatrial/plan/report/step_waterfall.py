"""Measured steps in the categories of the planner's waterfall, compared with its prediction. Pure.

The table below maps stages of a measured step (`record.stages`) to parts of a predicted one. Parts that cannot be measured
separately are one row: forward and backward are timed as a whole, and a wait for another pipeline rank includes its
message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from seatrial.plan.cost.predict import Prediction, Share
from seatrial.record.frontier import Account

RESULT = "model FLOPs"
_BELOW_PEAK, _PASSES = "computation below peak", "forward and backward"
_KERNELS = (
    "GEMMs below peak",
    "attention below peak",
    "memory-bound operators",
    "recomputation",
    "compute slowed by overlap",
)
_PIPELINE = "pipeline bubble and communication"

# (row, parts of a predicted step, stages of a measured one). Without parts: not predicted.
TABLE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (_BELOW_PEAK, _KERNELS, ("forward", "backward")),
    ("tensor-parallel communication", ("tensor-parallel communication",), ("tensor",)),
    ("expert-parallel communication", (), ("expert",)),
    ("context-parallel communication", ("context-parallel communication",), ("context",)),
    (_PIPELINE, ("pipeline bubble and uneven stages", "pipeline communication"), ("pipeline",)),
    ("data-parallel communication", ("data-parallel communication",), ("shard", "replicate")),
    ("optimizer", ("optimizer",), ("optimizer",)),
    ("saving checkpoints", (), ("save",)),
    ("waiting for data", (), ("data",)),
    ("host", (), ("host",)),
    ("sum of loss and gradient norm", (), ("step_sum",)),
    ("validation", (), ("validation",)),
)


@dataclass(frozen=True)
class Row:
    """A part of a step, seconds. `seconds`: None if it cannot be measured; `predicted_s`: None if nothing is predicted."""

    name: str
    seconds: float | None
    predicted_s: float | None
    parts: tuple[str, ...]  # of the prediction
    stages: tuple[str, ...]  # of the measurement

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None unless both are known."""
        if self.seconds is None or not self.predicted_s:
            return None
        return self.seconds / self.predicted_s


@dataclass(frozen=True)
class StepWaterfall:
    """The measured `rows` add up to `step_s`, the predicted ones to `predicted_step_s`. The first is model FLOPs at the peak."""

    rows: tuple[Row, ...]
    step_s: float
    predicted_step_s: float | None

    @property
    def mfu(self) -> float | None:
        """MFU, None if no dense peak is known."""
        seconds = self.rows[0].seconds
        return None if seconds is None else seconds / self.step_s

    @property
    def whole(self) -> str:
        """The first bar of the chart."""
        return "step" if self.mfu is None else "dense peak"

    @property
    def shown(self) -> tuple[Row, ...]:
        """The rows that take time."""
        return tuple(r for r in self.rows if r.seconds or r.predicted_s or r.name == RESULT)

    @property
    def total(self) -> Row:
        """The whole step."""
        return Row("step", self.step_s, self.predicted_step_s, (), ())

    def shares(self, *, predicted: bool = False) -> tuple[Share, ...]:
        """For `waterfall_of`: the result first. Without a known peak that is forward and backward."""
        rows = self.shown if self.mfu is not None else self.shown[1:]
        whole = self.predicted_step_s if predicted else self.step_s
        assert whole is not None
        each = [(r.name, r.predicted_s if predicted else r.seconds) for r in rows]
        return tuple(Share(name, s / whole, s) for name, s in each if s is not None)

    def notes(self) -> Iterator[str]:
        """Notes on parts that are unknown, not separated, or not predicted."""
        if self.mfu is None:
            yield "MFU unknown: no dense peak is known for this device and precision"
        for row in self.shown:
            if len(row.parts) > 1:
                yield f"{row.name}: {', '.join(row.parts)} are not separated"
        alone = [r.name for r in self.shown if not r.parts and r.seconds]
        if alone and self.predicted_step_s is not None:
            yield f"not part of a predicted step: {', '.join(alone)}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "step_s": self.step_s,
            "predicted_step_s": self.predicted_step_s,
            "mfu": self.mfu,
            "rows": [vars(row) | {"ratio": row.ratio} for row in self.rows],
            "notes": list(self.notes()),
        }


def step_waterfall(
    account: Account, pipeline: int, *, model_flops_s: float | None, prediction: Prediction | None
) -> StepWaterfall:
    """The waterfall of `account`, of ranks in a pipeline of `pipeline`, with `prediction` for the same layout.

    `model_flops_s`: seconds of a step's model FLOPs at the dense peak, None if that is unknown. Computation is the mean
    over pipeline ranks, as in a prediction; the excess of the busiest counts as uneven stages.
    """
    seconds = {**dict.fromkeys(("forward", "pipeline"), 0.0), **account.seconds}
    compute = seconds["forward"] + seconds.get("backward", 0.0)
    # The median, so that a straggler does not count as uneven stages.
    busy = np.median(account.split.passes_s.reshape(pipeline, -1), axis=1)
    uneven = min(float(busy.max() - busy.mean()), compute)
    seconds["forward"] -= uneven
    seconds["pipeline"] += uneven
    expected = {} if prediction is None else {s.name: s.seconds for s in prediction.waterfall}

    def row(name: str, parts: tuple[str, ...], stages: tuple[str, ...], less: float = 0.0) -> Row:
        measured = sum(seconds.get(stage, 0.0) for stage in stages) - less
        wanted = sum(expected.get(part, 0.0) for part in parts) if expected and parts else None
        return Row(name, measured, wanted, parts, stages)

    (name, parts, stages), *others = TABLE
    if "tensor" in account.not_separated:
        title, more, also = others.pop(0)
        name, parts, stages = f"{name}, {title}", parts + more, stages + also
    if model_flops_s is None:
        name = name.replace(_BELOW_PEAK, _PASSES)
        first = [Row(RESULT, None, None, (), ()), row(name, (RESULT, *parts), stages)]
    else:
        result = Row(RESULT, model_flops_s, expected.get(RESULT), (RESULT,), ())
        first = [result, row(name, parts, stages, model_flops_s)]
    rest = [row(*each) for each in others]
    step_s = account.split.step_s
    return StepWaterfall((*first, *rest), step_s, None if prediction is None else prediction.step_s)
