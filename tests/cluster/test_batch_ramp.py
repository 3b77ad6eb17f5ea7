"""A batch that grows during training: every layout against one process, and each batch as if all were like it."""

from __future__ import annotations

import pytest
import torch
from parity import FULL, INTERLEAVED, LAYOUTS, ZERO_BUBBLE, Case, Ran, assert_trains_alike, run_layouts

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

# So small that the second step has the weights of the first, and gradients can be compared as closely.
STILL = {"optimizer": {"lr": 1e-12, "weight_decay": 0.0}}
GROWS = {"ramp": [8, 16], **STILL}
SHRINKS = {"ramp": [16, 8], **STILL}  # as at a validation during the ramp
EXPERTS = {"family": "qwen3_moe", "peer": "one-experts"}
MASKED = {"masked": True, "peer": "one-masked"}
CASES: dict[str, Case] = {
    "fsdp2-sharded": {"layout": LAYOUTS["fsdp2"], "accumulate": "sharded"},
    "pp2": {"layout": LAYOUTS["pp2"]},
    "pp2-shrinks": {"layout": LAYOUTS["pp2"], **SHRINKS, "peer": "one-shrinks"},
    "pp2-interleaved": {"layout": INTERLEAVED},
    "pp2-zero-bubble": {"layout": ZERO_BUBBLE},
    "tp2-pp2-fsdp2-masked": {"layout": FULL, **MASKED},
    "tp2-compiled": {"layout": LAYOUTS["tp2"], "compile": True},
    "pp2-ep2-experts": {"layout": {"pipeline": 2, "shard": 2, "expert": 2}, **EXPERTS},
}
OTHERS: dict[str, Case] = {
    "one": {},
    "one-shrinks": SHRINKS,
    "one-masked": MASKED,
    "one-experts": EXPERTS,
    "one-always-16": {"ramp": [16, 16]},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return run_layouts(request, OTHERS | CASES, optional=CASES, **{"steps": 2, **GROWS})


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)
    if "experts" in name:
        ours, theirs = (sum(rank["balance"][1] for rank in runs[n].ranks) for n in (name, "one-experts"))
        assert ours / len(runs[name].ranks) == pytest.approx(theirs, rel=1e-6)


def test_a_step_is_the_mean_over_its_own_batch(runs: dict[str, Ran]) -> None:
    grows, always = runs["one"], runs["one-always-16"]
    assert grows.ranks[0]["tokens"] == [8 * 64, 16 * 64]
    assert grows.history[0] != always.history[0]
    assert grows.history[1] == pytest.approx(always.history[1], rel=1e-9)
    whole = always.tensors("gradients")
    for name, gradient in grows.tensors("gradients").items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-9)
