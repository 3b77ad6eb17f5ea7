"""Activation offload on the test device: the same bits as without, and not without any one of its waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_cases import ARCH, SETTINGS, mesh
from torch import Tensor

import late_device
from late_device import LateDevice
from missing_waits import OFFLOAD_WAITS
from seatrial.model.initialise import RandomWeights
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.offload import ActivationOffload
from seatrial.plan.cost.memory import offloaded_inputs
from seatrial.plan.model.recipe import Recipe

LAYERS = 5
OFFLOAD = {"activation_checkpointing": "full", "offload_activations": True}


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs the test device, where nothing completes that is not waited for."""
    late_device.install(monkeypatch.setattr)
    monkeypatch.setattr(late_device, "LAG_S", float("inf"))
    return monkeypatch.setattr


def model_on(device: Any, **settings: Any) -> ParallelModel:
    arch = replace(ARCH, num_hidden_layers=LAYERS)
    return ParallelModel(arch, mesh(device=device), replace(SETTINGS, **settings), RandomWeights(arch, 0))


def gradients(model: ParallelModel, passes: int = 2) -> list[Tensor]:
    """Summed over as many steps, of two microbatches each, of other data."""
    for number in range(passes):
        generator = torch.Generator().manual_seed(number)
        ids_BT = torch.randint(0, ARCH.vocab_size, (4, 17), generator=generator)
        model.forward_backward(ids_BT[:, :-1], ids_BT[:, 1:])
    return [s.grad for s in model.shards if s.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_gradients_are_those_without_offload(patch: Any, late: bool, every: int) -> None:
    expected = gradients(model_on(torch.device("cpu")))
    before = late_device.seen["copies"]
    model = model_on(LateDevice() if late else torch.device("cpu"), **OFFLOAD, recompute_every_layers=every)
    assert same(gradients(model), expected)
    # Of 5 or 3 recomputed layers all but the last, there and back, in 2 steps of 2 microbatches.
    assert late_device.seen["copies"] - before == (2 * 2 * 2 * (4 if every == 1 else 2) if late else 0)


def test_host_memory_is_used_again(patch: Any) -> None:
    model = model_on(LateDevice(), **OFFLOAD)
    gradients(model, passes=3)
    context = model.stages[0].layer_context
    assert isinstance(context, ActivationOffload)
    recipe = Recipe(sequence=16, global_batch=4, microbatch=2, recompute="full", offload=True)
    assert len(context._transfers._spare) == offloaded_inputs(model.arch, recipe, 0) == LAYERS - 1


def test_an_abandoned_forward_pass_leaves_nothing(patch: Any) -> None:
    model = model_on(LateDevice(), **OFFLOAD)
    stage = model.stages[0]
    fourth = stage.blocks[3]

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = fourth.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        gradients(model)
    handle.remove()
    assert same(gradients(model), gradients(model_on(torch.device("cpu"))))


def test_a_pass_without_gradients_copies_nothing(patch: Any) -> None:
    model = model_on(LateDevice(), **OFFLOAD)
    before = late_device.seen["copies"]
    ids_BT = torch.zeros((4, 16), dtype=torch.int64)
    model.validation_loss(ids_BT, ids_BT)
    assert late_device.seen["copies"] == before


@pytest.mark.parametrize("wait", OFFLOAD_WAITS)
def test_without_a_wait_gradients_differ_or_it_fails(patch: Any, wait: str) -> None:
    expected = gradients(model_on(torch.device("cpu")))
    OFFLOAD_WAITS[wait](patch)
    model = model_on(LateDevice(), **OFFLOAD)
    try:
        found = gradients(model)
    except RuntimeError as error:
        assert "freed while a side stream copied it" in str(error)  # noqa: PT017
    else:
        assert not same(found, expected)
