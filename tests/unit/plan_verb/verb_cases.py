"""Jobs that the tests of the verb plan, each answered once."""

from __future__ import annotations

from functools import cache

from presets import preset_job
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.report.advice import TargetValue
from seatrial.plan.report.answer import Answer, PlanOptions, answer

NDR = "InfiniBand NDR 8x400"


@cache
def reference() -> Answer:
    """The reference plan, with its targets; docs/plan.md shows it."""
    of = preset_job("qwen2.5-72b-b300")
    wishes = PlanOptions(targets=(TargetValue(2500, "tokens/s/GPU"), TargetValue(0.45, "MFU")))
    return answer(of, hardware_of(of), wishes)


@cache
def small() -> Answer:
    """One node, with the price of a GPU hour."""
    of = preset_job("llama3-8b-h100")
    return answer(of, hardware_of(of), PlanOptions(price=3.0))


@cache
def nowhere() -> Answer:
    """CPU ranks: nothing is known of their speed."""
    of = preset_job("first-voyage")
    return answer(of, hardware_of(of))


@cache
def too_large() -> Answer:
    """72B on one node of 40 GB: no layout fits."""
    of = preset_job("qwen2.5-72b-b300", "cluster.nodes=1", "parallel.pipeline=1", "cluster.gpu=A100-40GB SXM")
    return answer(of, hardware_of(of))


@cache
def must_change() -> Answer:
    """Its own layout does not fit; others do."""
    of = preset_job("llama3-8b-h100", "train.activation_checkpointing=none", "train.microbatch=4")
    return answer(of, hardware_of(of))


EVERY = (reference, small, nowhere, too_large, must_change)
