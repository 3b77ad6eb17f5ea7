"""Context parallel: the training of one process, whatever it is combined with."""

from __future__ import annotations

from typing import Any

import pytest
from test_parity import (
    GRADIENT_OF_LARGEST,
    LAYOUTS,
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    Ran,
    _differences,
    _reference,
    _worst,
    read_runs,
)

from conftest import each_case, run_cases, selected_cases

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

CP2 = {"shard": 2, "context": 2}
ZERO_BUBBLE = {**LAYOUTS["pp2-zero-bubble"], **CP2}
INTERLEAVED = {**LAYOUTS["pp2-interleaved"], **CP2}
# Name -> (the case, who must train alike).
CONTEXT: dict[str, tuple[dict[str, Any], str]] = {
    "cp2": ({"layout": CP2}, "one"),
    "cp2-tp2-documents": ({"layout": {"tensor": 2, **CP2}, "documents": True}, "one-documents"),
    "cp2-pp2-fsdp2": ({"layout": {"pipeline": 2, "shard": 4, "context": 2}}, "one"),
    "cp4-tied-qwen3": (
        {"layout": {"shard": 4, "context": 4}, "tied": True, "family": "qwen3", "accumulate": "sharded"},
        "one-tied-qwen3",
    ),
    "cp2-tp2-pp2-async-recompute": (
        {
            "layout": {"tensor": 2, "pipeline": 2, **CP2},
            "async_tensor": True,
            "activation_checkpointing": "full",
        },
        "one",
    ),
    "cp2-tp2-compiled": ({"layout": {"tensor": 2, **CP2}, "compile": True}, "one"),
    "cp2-compiled-documents": ({"layout": CP2, "compile": True, "documents": True}, "one-documents"),
    "cp2-documents": ({"layout": CP2, "documents": True}, "one-documents"),
    "cp2-tp2": ({"layout": {"tensor": 2, **CP2}}, "one"),
    "cp2-pp2": ({"layout": {"pipeline": 2, **CP2}}, "one"),
    "cp2-fsdp2": ({"layout": {"shard": 4, "context": 2}}, "one"),
    "cp2-replicate2": ({"layout": {"replicate": 2, **CP2}}, "one"),
    "cp2-interleaved": ({"layout": INTERLEAVED}, "one"),
    "cp2-zero-bubble": ({"layout": ZERO_BUBBLE, "reshard_after_forward": False}, "one"),
    "cp2-recompute": ({"layout": CP2, "activation_checkpointing": "full"}, "one"),
    "cp2-tp2-selective-every2-documents": (
        {
            "layout": {"tensor": 2, **CP2},
            "activation_checkpointing": "selective",
            "recompute_every_layers": 2,
            "documents": True,
        },
        "one-documents",
    ),
    "cp2-selective": ({"layout": CP2, "activation_checkpointing": "selective"}, "one"),
    "cp2-selective-compiled": (
        {"layout": CP2, "activation_checkpointing": "selective", "compile": True},
        "one",
    ),
    "cp2-pp2-sharded": ({"layout": {"pipeline": 2, **CP2}, "accumulate": "sharded"}, "one"),
}
# Each part of these is in another one too.
_LONG = {
    *("cp2-documents", "cp2-tp2", "cp2-pp2", "cp2-fsdp2", "cp2-replicate2", "cp2-interleaved"),
    *("cp2-recompute", "cp2-pp2-sharded", "cp2-selective", "cp2-selective-compiled"),
}
ONES: dict[str, dict[str, Any]] = {
    "one": {},
    "one-documents": {"documents": True},
    "one-tied-qwen3": {"tied": True, "family": "qwen3"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "one-bf16": {"layout": {}, "precision": "bf16"},
    "cp2-bf16": {"layout": {"tensor": 2, **CP2}, "precision": "bf16"},
    "sabotage-order": {"layout": CP2, "sabotage": "keys in the order of ranks", "steps": 1},
    "sabotage-sum": {"layout": CP2, "sabotage": "gradients of keys not summed", "steps": 1},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Every case, run once; of the long ones those that a selected test reads."""
    out = tmp_path_factory.mktemp("context")
    unwanted = _LONG - selected_cases(request)
    context = {name: case for name, (case, _) in CONTEXT.items() if name not in unwanted}
    ones = {name: {"layout": {}, **case} for name, case in ONES.items()}
    cases = [
        {"tied": False, "steps": 2, "name": name, **case} for name, case in (ones | context | OTHERS).items()
    ]
    done = run_cases(cases, out, timeout_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return read_runs(out, cases)


@each_case(CONTEXT, long=_LONG)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    ran, peer = runs[name], CONTEXT[name][1]
    loss, norm = _differences(ran, runs[peer])
    gradient, whose = _worst(ran, "gradients", _reference(runs, peer, "gradients"))
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}, gradient {gradient:.1e} ({whose})")
    assert loss <= LOSS_ABSOLUTE
    assert norm <= NORM_RELATIVE
    assert gradient <= GRADIENT_OF_LARGEST, whose
    first = ran.ranks[0]["history"]
    assert all(history == first for history in ran.histories())


def test_bf16_is_the_same_training(runs: dict[str, Ran]) -> None:
    loss, norm = _differences(runs["cp2-bf16"], runs["one-bf16"])
    assert loss < 0.02
    assert norm < 0.03


@pytest.mark.parametrize(("name", "loss_differs"), [("sabotage-order", True), ("sabotage-sum", False)])
def test_a_fault_is_seen(name: str, loss_differs: bool, runs: dict[str, Ran]) -> None:
    loss, _ = _differences(runs[name], runs["one"])
    gradient, _ = _worst(runs[name], "gradients", _reference(runs, "one", "gradients"))
    assert (loss > LOSS_ABSOLUTE) == loss_differs
    assert gradient > 100 * GRADIENT_OF_LARGEST
