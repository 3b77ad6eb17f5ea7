"""The chunked loss against torch's of whole logits: value, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seatrial.data.loader import NO_TARGET
from seatrial.job import loss_rows
from seatrial.parallel.loss import cross_entropy
from seatrial.train.dryrun.recorder import Recorder
from seatrial.train.dryrun.timeline import Timeline

B, T, D, V = 2, 24, 16, 100
TOKENS = 40


def _input(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(V, D, generator=generator, dtype=torch.float64)
    target_BT = torch.randint(0, V, (B, T), generator=generator)
    target_BT[1, 3:11] = NO_TARGET
    return x_BTD.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), target_BT


def _ours(*args: Tensor) -> Tensor:
    tokens = torch.tensor(TOKENS, dtype=torch.float64)
    return cross_entropy(*args, tokens=tokens, group=None, rank=0)


def _plain(x_BTD: Tensor, weight_VD: Tensor, target_BT: Tensor) -> Tensor:
    logits = F.linear(x_BTD, weight_VD).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, target_BT.flatten(), ignore_index=NO_TARGET, reduction="sum")


@pytest.fixture(params=[1, 5, 16, 64], ids=lambda rows: f"{rows}-rows")
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """At least this many positions a part, of 48."""
    monkeypatch.setattr(loss_rows, "LOGITS", request.param * V)
    return request.param


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str
)
def test_value_and_gradients_match_whole_logits(dtype: torch.dtype, most: float, rows: int) -> None:
    ours, theirs = _input(dtype), _input(dtype)
    loss = _ours(*ours)
    assert loss.isnan(), "known only after the backward pass"
    loss.backward()
    expected = _plain(*theirs) / TOKENS
    expected.backward()
    assert abs(loss - expected) <= most * abs(expected)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert (a.grad - b.grad).abs().max() <= most * b.grad.abs().max()
    assert ours[0].grad[1, 3:11].count_nonzero() == 0
    with torch.no_grad():  # as a validation
        total = _ours(*ours)
        assert total.dtype == torch.float64
        assert abs(total - _plain(*theirs)) <= most * total


def test_each_gradient_can_be_computed_alone(rows: int) -> None:
    """A zero-bubble pipeline asks for the input's first, for the weight's in a later pass."""
    x_BTD, weight_VD, target_BT = _input(torch.float64)
    hidden = x_BTD * 1.0
    loss = _ours(hidden, weight_VD, target_BT)
    asked: list[tuple[bool, bool]] = []
    loss.grad_fn.register_hook(lambda grads, _: asked.append((grads[0] is not None, grads[1] is not None)))
    (of_input,) = torch.autograd.grad(loss, x_BTD, retain_graph=True)
    first = loss.item()
    (of_weight,) = torch.autograd.grad(loss, weight_VD)
    assert asked == [(True, False), (False, True)]
    assert first == loss.item()
    theirs = _input(torch.float64)
    (_plain(*theirs) / TOKENS).backward()
    torch.testing.assert_close(of_input, theirs[0].grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(of_weight, theirs[1].grad, rtol=0, atol=1e-13)


def test_a_nan_input_gives_a_nan_loss_and_gradients() -> None:
    x_BTD, weight_VD, target_BT = _input(torch.float32)
    with torch.no_grad():
        x_BTD[0, 2, 0] = float("nan")
        assert _ours(x_BTD, weight_VD, target_BT).isnan()
    loss = _ours(x_BTD, weight_VD, target_BT)
    loss.backward()
    assert loss.isnan()
    assert x_BTD.grad.isnan().any()
    assert weight_VD.grad.isnan().any()


@pytest.mark.parametrize(
    ("columns", "positions", "rows"),
    [
        (152_064, 4096, 512),
        (19_008, 32_768, 4096),
        (128_256, 4096, 1024),
        (2**27, 8, 1),
        (152_064, 32_768, 4096),
    ],
)
def test_positions_of_a_part(columns: int, positions: int, rows: int) -> None:
    assert loss_rows.loss_rows(columns, positions) == rows


def test_bf16_weight_gradient_is_close_to_that_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part may have few logits, and the fp64 gradient is known."""
    torch.manual_seed(0)
    x_BTD, target_BT = torch.randn(1, 2048, 64).bfloat16(), torch.randint(0, 512, (1, 2048))
    weight_VD = (0.05 * torch.randn(512, 64)).bfloat16()

    def gradient(dtype: torch.dtype, logits: int) -> torch.Tensor:
        monkeypatch.setattr(loss_rows, "LOGITS", logits)
        weight = weight_VD.to(dtype, copy=True).requires_grad_()
        _ours(x_BTD.to(dtype), weight, target_BT).backward()
        assert weight.grad is not None
        return weight.grad.double()

    exact = gradient(torch.float64, 2**30)
    one, parts = ((gradient(torch.bfloat16, n) - exact).norm() / exact.norm() for n in (2**30, 512))
    assert 0.001 < one < parts < 2.2 * one


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1.1), (torch.bfloat16, 1.6)], ids=str)
def test_peak_memory_is_below_two_bytes_per_logit(dtype: torch.dtype, most: float) -> None:
    """Beside the gradients that it returns, on fake tensors."""
    positions, width, vocabulary = 2048, 896, 152_064
    from torch._subclasses.fake_tensor import FakeTensorMode

    timeline = Timeline()
    with FakeTensorMode(), Recorder(timeline, {}) as recorder:
        args: list[Any] = [
            torch.empty(1, positions, width, dtype=dtype, requires_grad=True),
            torch.empty(vocabulary, width, dtype=dtype, requires_grad=True),
            torch.zeros(1, positions, dtype=torch.int64),
        ]
        recorder.add(args)
        recorder.restart()
        timeline.mark("loss")
        _ours(*args).backward()
    kept = sum(2 * t.nbytes for t in args[:2]) + args[2].nbytes
    peak = max(p.total for p in timeline.peaks().values())
    assert 0.9 * most < (peak - kept) / (positions * vocabulary) < most
