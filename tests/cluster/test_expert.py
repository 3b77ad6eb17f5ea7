"""Expert parallel: the training of one process, whatever it is combined with."""

from __future__ import annotations

from typing import Any

import pytest
from test_parity import (
    GRADIENT_OF_LARGEST,
    LAYOUTS,
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    SELECTIVE,
    Ran,
    _differences,
    _reference,
    _worst,
    assert_same_load,
    read_runs,
)

from conftest import each_case, run_cases, selected_cases

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

EP2 = {"shard": 2, "expert": 2}
FULL = {"activation_checkpointing": "full"}
# Name -> (the case, who must train alike).
EXPERT: dict[str, tuple[dict[str, Any], str]] = {
    "ep2": ({"layout": EP2}, "one"),
    "ep2-tp2-selective": ({"layout": {"tensor": 2, **EP2}, **SELECTIVE}, "one"),
    "ep2-pp2-fsdp2-recompute": ({"layout": {"pipeline": 2, "shard": 4, "expert": 2}, **FULL}, "one"),
    "ep2-replicate2-fsdp2-sharded": (
        {
            "layout": {"replicate": 2, "shard": 4, "expert": 2},
            "accumulate": "sharded",
            "microbatch": 1,
        },
        "one-small",
    ),
    "ep2-zero-bubble": (
        {"layout": {**LAYOUTS["pp2-zero-bubble"], **EP2}, "reshard_after_forward": False},
        "one",
    ),
    "ep2-documents": ({"layout": EP2, "documents": True}, "one-documents"),
    "ep2-one-sided": ({"layout": EP2, "one_sided": True, "steps": 1}, "one-one-sided"),
    "ep4-tied": ({"layout": {"shard": 4, "expert": 4}, "tied": True}, "one-tied"),
    "ep2-pp2": ({"layout": {"pipeline": 2, **EP2}}, "one"),
    "ep2-tp2": ({"layout": {"tensor": 2, **EP2}}, "one"),
    "ep2-fsdp2": ({"layout": {"shard": 4, "expert": 2}}, "one"),
    "ep2-replicate2": ({"layout": {"replicate": 2, **EP2}}, "one"),
    "ep2-recompute": ({"layout": EP2, **FULL}, "one"),
    "ep2-interleaved": ({"layout": {**LAYOUTS["pp2-interleaved"], **EP2}}, "one"),
    "ep2-tp2-pp2-async": (
        {"layout": {"tensor": 2, "pipeline": 2, **EP2}, "async_tensor": True},
        "one",
    ),
    "ep2-zero-bubble-fsdp2-recompute": (
        {
            "layout": {**LAYOUTS["pp2-zero-bubble"], "shard": 4, "expert": 2},
            "reshard_after_forward": False,
            **FULL,
        },
        "one",
    ),
    "ep2-pp2-sharded": ({"layout": {"pipeline": 2, **EP2}, "accumulate": "sharded"}, "one"),
}
# Each part of these is in another one too.
_LONG = {
    *("ep2-pp2", "ep2-tp2", "ep2-fsdp2", "ep2-replicate2", "ep2-recompute", "ep2-interleaved"),
    *("ep2-tp2-pp2-async", "ep2-zero-bubble-fsdp2-recompute", "ep2-pp2-sharded"),
}
ONES: dict[str, dict[str, Any]] = {
    "one": {},
    "one-documents": {"documents": True},
    "one-small": {"microbatch": 1},  # the balance loss is of each microbatch
    "one-tied": {"tied": True},
    "one-one-sided": {"one_sided": True, "steps": 1},
}
OTHERS: dict[str, dict[str, Any]] = {
    "one-bf16": {"layout": {}, "precision": "bf16"},
    "ep2-bf16": {"layout": {"tensor": 2, **EP2}, "precision": "bf16"},
    "sabotage-order": {"layout": EP2, "sabotage": "slots returned in the order of experts", "steps": 1},
    "sabotage-sum": {
        "layout": {"shard": 4, "expert": 2},
        "sabotage": "gradients of experts not summed",
        "steps": 1,
    },
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Every case, run once; of the long ones those that a selected test reads."""
    out = tmp_path_factory.mktemp("expert")
    unwanted = _LONG - selected_cases(request)
    expert = {name: case for name, (case, _) in EXPERT.items() if name not in unwanted}
    ones = {name: {"layout": {}, **case} for name, case in ONES.items()}
    common = {"tied": False, "family": "qwen3_moe", "steps": 2}
    cases = [{**common, "name": name, **case} for name, case in (ones | expert | OTHERS).items()]
    done = run_cases(cases, out, timeout_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return read_runs(out, cases)


@each_case(EXPERT, long=_LONG)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    ran, peer = runs[name], EXPERT[name][1]
    loss, norm = _differences(ran, runs[peer])
    gradient, whose = _worst(ran, "gradients", _reference(runs, peer, "gradients"))
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}, gradient {gradient:.1e} ({whose})")
    assert loss <= LOSS_ABSOLUTE
    assert norm <= NORM_RELATIVE
    assert gradient <= GRADIENT_OF_LARGEST, whose
    first = ran.ranks[0]["history"]
    assert all(history == first for history in ran.histories())
    assert ran.ranks[0]["balance"] == pytest.approx(runs[peer].ranks[0]["balance"], rel=1e-5)
    assert_same_load(ran, runs[peer])


def test_bf16_is_the_same_training(runs: dict[str, Ran]) -> None:
    loss, norm = _differences(runs["ep2-bf16"], runs["one-bf16"])
    assert loss < 0.02
    assert norm < 0.03


def test_experts_that_get_nothing(runs: dict[str, Ran]) -> None:
    """The second rank's experts of `ep2-one-sided`: what is compared there is no accident."""
    for name, _, gradient in runs["ep2-one-sided"].ranks[1]["gradients"]:
        if ".experts." in name:
            assert not gradient.any(), name
    for _, smallest, idle in runs["ep2-one-sided"].ranks[0]["load"]:
        assert (smallest, idle) == (0.0, 4 * 4)  # half of the experts of each layer


@pytest.mark.parametrize(("name", "loss_differs"), [("sabotage-order", True), ("sabotage-sum", False)])
def test_a_fault_is_seen(name: str, loss_differs: bool, runs: dict[str, Ran]) -> None:
    loss, _ = _differences(runs[name], runs["one"])
    gradient, whose = _worst(runs[name], "gradients", _reference(runs, "one", "gradients"))
    assert (loss > LOSS_ABSOLUTE) == loss_differs
    assert gradient > 100 * GRADIENT_OF_LARGEST
    assert loss_differs or ".experts." in whose
