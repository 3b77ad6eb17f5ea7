"""Asynchronous tensor parallel: the training of one process, the bits of plain tensor parallel, and the order of what it does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import async_order
import pytest
import torch
from parity import (
    FULL,
    GRADIENT_OF_LARGEST,
    LAYOUTS,
    LOSS_ABSOLUTE,
    RECOMPUTE,
    SELECTIVE,
    ZERO_BUBBLE,
    Case,
    Ran,
    assert_same_bits,
    assert_trains_alike,
    compare,
    run_layouts,
)
from parity_ranks import ARCH, MICROBATCH, SEQUENCES

from conftest import each_case, run_cases, selected_cases

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

TP2 = {"layout": {"tensor": 2}}
TIED_QWEN3 = {"tied": True, "family": "qwen3"}
# A microbatch of 2 has parts of sequences, one of 1 of positions.
ASYNC: dict[str, Case] = {
    "tp2": {**TP2, "order": True, "evaluate": True},
    "tp2-positions": {**TP2, "microbatch": 1, "order": True},
    "tp2-eights": {**TP2, "microbatch": 8},
    "full-recompute-positions-documents": {
        "layout": FULL,
        **RECOMPUTE,
        "microbatch": 1,
        "documents": True,
        "peer": "one-documents",
    },
    "interleaved-tied-qwen3": {
        "layout": LAYOUTS["tp2-pp2-fsdp2-interleaved"],
        **TIED_QWEN3,
        "peer": "one-tied-qwen3",
    },
    "replicate2-fsdp2": {"layout": {"tensor": 2, "replicate": 2, "shard": 2}},
    "zero-bubble": {"layout": {**ZERO_BUBBLE, "tensor": 2}},
    "selective": {**TP2, **SELECTIVE, "order": True},
    "compiled-selective": {**TP2, **SELECTIVE, "order": True, "compile": True},
    "compiled": {**TP2, "compile": True, "order": True},
    "compiled-recompute-positions": {**TP2, **RECOMPUTE, "compile": True, "microbatch": 1},
}
# Plain tensor parallel in the same layout: with parts of sequences each sum has the same terms in the same order.
BITWISE: dict[str, Case] = {
    "tp2": {**TP2, "evaluate": True},
    "zero-bubble": ASYNC["zero-bubble"],
    "full-bf16": {"layout": FULL, "precision": "bf16", "tied": True},
    "full-recompute": {"layout": FULL, **RECOMPUTE},
}
# Each part of these is in another one too.
_LONG = {
    *("tp2-eights", "replicate2-fsdp2", "compiled-recompute-positions", "interleaved-tied-qwen3"),
    *("full-recompute", "compiled-selective"),
}
_each = partial(each_case, long=_LONG)
SABOTAGE: dict[str, Case] = {
    "sabotage-order": {
        **TP2,
        "sabotage": "positions left in the order of parts",
        "microbatch": 1,
        "steps": 1,
    },
    "sabotage-weights": {**TP2, "sabotage": "weight gradients of the first part only", "steps": 1},
}
ONES: dict[str, Case] = {
    "one": {},
    "one-documents": {"documents": True},
    "one-tied-qwen3": TIED_QWEN3,
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    unwanted = _LONG - selected_cases(request)
    plain = {f"plain-{name}": case for name, case in BITWISE.items() if name not in unwanted}
    asynchronous = {n: {**case, "async_tensor": True} for n, case in (BITWISE | ASYNC | SABOTAGE).items()}
    return run_layouts(request, ONES | plain | asynchronous, optional=_LONG, steps=2)


@_each(ASYNC)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)


@_each(BITWISE)
def test_parts_of_sequences_change_no_bit(name: str, runs: dict[str, Ran]) -> None:
    assert_same_bits(runs[name], runs[f"plain-{name}"], "gradients", "weights")


def test_it_evaluates_to_the_same_bits(runs: dict[str, Ran]) -> None:
    """Without gradients, and in batches that are cut otherwise than those of the training."""
    for ours, theirs in zip(runs["tp2"].ranks, runs["plain-tp2"].ranks, strict=True):
        assert len(ours["logits"]) == 4
        assert all(torch.equal(a, b) for a, b in zip(ours["logits"], theirs["logits"], strict=True))


OF_SEQUENCES = (MICROBATCH, SEQUENCES // MICROBATCH, ARCH.num_hidden_layers)


@pytest.mark.parametrize(
    ("name", "parts", "microbatches", "layers_of_a_rank"),
    [
        ("tp2", *OF_SEQUENCES),
        ("tp2-positions", 4, SEQUENCES, ARCH.num_hidden_layers),
        ("compiled", *OF_SEQUENCES),
        ("selective", *OF_SEQUENCES),  # nothing of this is done twice
        pytest.param("compiled-selective", *OF_SEQUENCES, marks=pytest.mark.long),
    ],
)
def test_collectives_are_launched_before_what_hides_them(
    name: str, parts: int, microbatches: int, layers_of_a_rank: int, runs: dict[str, Ran]
) -> None:
    """Forward and backward, in compiled layers too, where a compiler may put things in another order."""
    forward, backward = async_order.layer(parts)
    expected = (forward * layers_of_a_rank + backward * layers_of_a_rank) * microbatches
    for rank in runs[name].ranks:
        assert rank["order"] == expected


def test_positions_in_a_wrong_order_are_seen(runs: dict[str, Ran]) -> None:
    assert compare(runs, "sabotage-order").loss > 100 * LOSS_ABSOLUTE


def test_lost_parts_of_weight_gradients_are_seen(runs: dict[str, Ran]) -> None:
    """The loss of the first step is right all the same."""
    found = compare(runs, "sabotage-weights")
    assert found.loss < LOSS_ABSOLUTE
    assert found.worst > 100 * GRADIENT_OF_LARGEST


def test_a_part_that_one_rank_does_not_send_holds_up_the_others(tmp_path: Path) -> None:
    """Nobody goes on with rows that did not come: the others' wait ends with the group's own limit, as an error."""
    case = {
        "name": "silent",
        **TP2,
        "tied": False,
        "steps": 1,
        "async_tensor": True,
        "sabotage": "a rank that ends before its second part",
    }
    done = run_cases([case], tmp_path, timeout_s=120)
    assert done.returncode == 1
    assert "wait(work)" in done.stderr
