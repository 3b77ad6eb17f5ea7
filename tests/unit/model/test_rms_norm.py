"""The norm of CPU ranks computes what torch's does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from seatrial.model.decoder import rms_norm


@pytest.mark.parametrize("shape", [(2, 5, 24), (2, 5, 3, 8)])
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_it_is_torchs(shape: tuple[int, ...], dtype: torch.dtype, apart: float) -> None:
    x, grad = (torch.randn(shape, dtype=dtype) for _ in range(2))
    x[0, 0] *= 1e-3  # where eps counts
    x, weight = x.requires_grad_(), torch.randn(shape[-1:], dtype=dtype, requires_grad=True)
    ours, theirs = rms_norm(x, weight, 1e-5), F.rms_norm(x, shape[-1:], weight, 1e-5)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=apart, atol=apart)
    for found, expected in zip(
        *(torch.autograd.grad(out, (x, weight), grad) for out in (ours, theirs)), strict=True
    ):
        scale = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=apart, atol=apart * scale)


@pytest.mark.parametrize("frozen", [False, True])
def test_its_gradients_are_those_of_its_values(frozen: bool) -> None:
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=not frozen)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, weight))
