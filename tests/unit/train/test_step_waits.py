"""What each step says about itself gets onto the device without the host waiting for what is queued there."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seatrial.hardware import accelerator
from seatrial.train.step import Contribution, local_vector

assigned: list[Any] = []


class OnDevice(Tensor):
    """Notes what is assigned to elements. A number would be copied to a GPU, and torch waits for all work before that."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__:
            assigned.append(args[2])
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("masked", [False, True])
def test_no_number_is_assigned_on_the_device(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    monkeypatch.setattr(accelerator, "upload", lambda values, _: values.as_subclass(OnDevice))
    assigned.clear()
    total = torch.ones((), dtype=torch.float64)
    model: Any = SimpleNamespace(
        mesh=SimpleNamespace(rank=0, device=total.device, layout=SimpleNamespace(world_size=4, replicate=2)),
        clock=SimpleNamespace(during=lambda stage: nullcontext()),
        forward_backward=lambda *batch: total * 5,
        take_expert_counts=lambda: None,
        take_balance_loss=lambda: total * 7 if masked else 7.0,
        counted=total * 128 if masked else 128,
    )
    optimizer: Any = SimpleNamespace(squared_norm=lambda: total * 18, prepares=False)
    batch: Any = (None, None, None)
    values = local_vector(model, optimizer, batch, Contribution(changed=lambda: total * 2), clip_norm=1.0)
    assert {5.0, 9.0, 7.0, 128.0, 2.0} <= set(values.tolist())
    assert assigned, "by loss and norm, which are on the device"
    assert all(isinstance(value, Tensor) for value in assigned)
