"""Asynchronous tensor parallel: the training of one process, the bits of plain tensor parallel, and the order of what it does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import async_order
import pytest
import torch
from parity_ranks import ARCH, MICROBATCH, SEQUENCES
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

FULL = LAYOUTS["tp2-pp2-fsdp2"]
ZERO_BUBBLE = {**LAYOUTS["pp2-zero-bubble"], "tensor": 2}
# Name -> (the case, who must train alike). A microbatch of 2 has parts of sequences, one of 1 of positions.
ASYNC: dict[str, tuple[dict[str, Any], str]] = {
    "tp2": ({"layout": {"tensor": 2}, "order": True, "evaluate": True}, "one"),
    "tp2-positions": ({"layout": {"tensor": 2}, "microbatch": 1, "order": True}, "one"),
    "tp2-eights": ({"layout": {"tensor": 2}, "microbatch": 8}, "one"),
    "full-recompute-positions-documents": (
        {"layout": FULL, "activation_checkpointing": "full", "microbatch": 1, "documents": True},
        "one-documents",
    ),
    "interleaved-tied-qwen3": (
        {"layout": LAYOUTS["tp2-pp2-fsdp2-interleaved"], "tied": True, "family": "qwen3"},
        "one-tied-qwen3",
    ),
    "replicate2-fsdp2": ({"layout": {"tensor": 2, "replicate": 2, "shard": 2}}, "one"),
    "zero-bubble": ({"layout": ZERO_BUBBLE}, "one"),
    "selective": ({"layout": {"tensor": 2}, "activation_checkpointing": "selective", "order": True}, "one"),
    "compiled-selective": (
        {
            "layout": {"tensor": 2},
            "compile": True,
            "activation_checkpointing": "selective",
            "order": True,
        },
        "one",
    ),
    "compiled": ({"layout": {"tensor": 2}, "compile": True, "order": True}, "one"),
    "compiled-recompute-positions": (
        {
            "layout": {"tensor": 2},
            "compile": True,
            "activation_checkpointing": "full",
            "microbatch": 1,
        },
        "one",
    ),
}
# Plain tensor parallel in the same layout: with parts of sequences each sum has the same terms in the same order.
BITWISE: dict[str, dict[str, Any]] = {
    "tp2": {"layout": {"tensor": 2}, "evaluate": True},
    "zero-bubble": {"layout": ZERO_BUBBLE},
    "full-bf16": {"layout": FULL, "precision": "bf16", "tied": True},
    "full-recompute": {"layout": FULL, "activation_checkpointing": "full"},
}
# Each part of these is in another one too.
_LONG = {
    *("tp2-eights", "replicate2-fsdp2", "compiled-recompute-positions", "interleaved-tied-qwen3"),
    *("full-recompute", "compiled-selective"),
}


_each = partial(each_case, long=_LONG)

SABOTAGE = {
    "order": ("positions left in the order of parts", 1),
    "weights": ("weight gradients of the first part only", MICROBATCH),
}


def _cases() -> list[dict[str, Any]]:
    cases = [
        {"name": "one", "layout": {}},
        {"name": "one-documents", "layout": {}, "documents": True},
        {"name": "one-tied-qwen3", "layout": {}, "tied": True, "family": "qwen3"},
        *({"name": f"plain-{name}", **case} for name, case in BITWISE.items()),
    ]
    asynchronous = {name: case for name, (case, _) in ASYNC.items()}
    for name, case in (BITWISE | asynchronous).items():
        cases.append({"name": f"async-{name}", **case, "async_tensor": True})
    for name, (what, microbatch) in SABOTAGE.items():
        cases.append(
            {
                "name": f"sabotage-{name}",
                "layout": {"tensor": 2},
                "microbatch": microbatch,
                "async_tensor": True,
                "sabotage": what,
                "steps": 1,
            }
        )
    return [{"tied": False, "steps": 2, **case} for case in cases]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Every case, run once; of the long ones those that a selected test reads."""
    out = tmp_path_factory.mktemp("async")
    unwanted = {f"{kind}-{name}" for name in _LONG - selected_cases(request) for kind in ("async", "plain")}
    cases = [case for case in _cases() if case["name"] not in unwanted]
    done = run_cases(cases, out, timeout_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return read_runs(out, cases)


@_each(ASYNC)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    ran, peer = runs[f"async-{name}"], ASYNC[name][1]
    loss, norm = _differences(ran, runs[peer])
    gradient, whose = _worst(ran, "gradients", _reference(runs, peer, "gradients"))
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}, gradient {gradient:.1e} ({whose})")
    assert loss <= LOSS_ABSOLUTE
    assert norm <= NORM_RELATIVE
    assert gradient <= GRADIENT_OF_LARGEST, whose


@_each(BITWISE)
def test_parts_of_sequences_change_no_bit(name: str, runs: dict[str, Ran]) -> None:
    for ours, theirs in zip(runs[f"async-{name}"].ranks, runs[f"plain-{name}"].ranks, strict=True):
        assert ours["history"] == theirs["history"]
        for what in ("gradients", "weights"):
            for (name_of, _, a), (_, _, b) in zip(ours[what], theirs[what], strict=True):
                assert torch.equal(a, b), name_of


def test_it_evaluates_to_the_same_bits(runs: dict[str, Ran]) -> None:
    """Without gradients, and in batches that are cut otherwise than those of the training."""
    for ours, theirs in zip(runs["async-tp2"].ranks, runs["plain-tp2"].ranks, strict=True):
        assert len(ours["logits"]) == 4
        assert all(torch.equal(a, b) for a, b in zip(ours["logits"], theirs["logits"], strict=True))


@pytest.mark.parametrize(
    ("name", "parts", "microbatches", "layers_of_a_rank"),
    [
        ("tp2", MICROBATCH, SEQUENCES // MICROBATCH, ARCH.num_hidden_layers),
        ("tp2-positions", 4, SEQUENCES, ARCH.num_hidden_layers),
        ("compiled", MICROBATCH, SEQUENCES // MICROBATCH, ARCH.num_hidden_layers),
        # Nothing of this is done twice.
        ("selective", MICROBATCH, SEQUENCES // MICROBATCH, ARCH.num_hidden_layers),
        pytest.param(
            *("compiled-selective", MICROBATCH, SEQUENCES // MICROBATCH, ARCH.num_hidden_layers),
            marks=pytest.mark.long,
        ),
    ],
)
def test_collectives_are_launched_before_what_hides_them(
    name: str, parts: int, microbatches: int, layers_of_a_rank: int, runs: dict[str, Ran]
) -> None:
    """Forward and backward, in compiled layers too, where a compiler may put things in another order."""
    forward, backward = async_order.layer(parts)
    expected = (forward * layers_of_a_rank + backward * layers_of_a_rank) * microbatches
    for rank in runs[f"async-{name}"].ranks:
        assert rank["order"] == expected


def test_positions_in_a_wrong_order_are_seen(runs: dict[str, Ran]) -> None:
    loss, _ = _differences(runs["sabotage-order"], runs["one"])
    assert loss > 100 * LOSS_ABSOLUTE


def test_lost_parts_of_weight_gradients_are_seen(runs: dict[str, Ran]) -> None:
    """The loss of the first step is right all the same."""
    ran = runs["sabotage-weights"]
    assert abs(ran.ranks[0]["history"][0][0] - runs["one"].ranks[0]["history"][0][0]) < LOSS_ABSOLUTE
    gradient, _ = _worst(ran, "gradients", _reference(runs, "one", "gradients"))
    assert gradient > 100 * GRADIENT_OF_LARGEST


def test_a_part_that_one_rank_does_not_send_holds_up_the_others(tmp_path: Path) -> None:
    """Nobody goes on with rows that did not come: the others' wait ends with the group's own limit, as an error."""
    case = {
        "name": "silent",
        "layout": {"tensor": 2},
        "tied": False,
        "steps": 1,
        "async_tensor": True,
        "sabotage": "a rank that ends before its second part",
    }
    done = run_cases([case], tmp_path, timeout_s=120)
    assert done.returncode == 1
    assert "wait(work)" in done.stderr
