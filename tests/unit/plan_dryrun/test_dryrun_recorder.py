"""The recorder's FLOPs, memory and collectives, and the fake CUDA kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from seatrial.base.errors import InternalError
from seatrial.model import decoder
from seatrial.train.dryrun.kernels import cuda_kernels
from seatrial.train.dryrun.recorder import WEIGHTS, Recorder
from seatrial.train.dryrun.timeline import Timeline


def recorder(**dimensions: str) -> Recorder:
    return Recorder(Timeline(), dimensions)


def highest(seen: Recorder) -> int:
    return max(peak.total for peak in seen.timeline.peaks().values())


def test_matmul_flops_and_memory_are_recorded() -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    seen = recorder()
    with seen:
        c = a @ b
        view = c[1:]
        del c, view
    assert seen.counts.flops == {("forward", "matmul"): 2 * 3 * 5 * 7}
    assert highest(seen) == 3 * 7 * 4
    assert sum(seen.timeline._sizes.values()) == 0


def test_flops_of_products_that_torch_does_not_count() -> None:
    x_SD, weight_XFD = torch.ones(12, 8), torch.ones(3, 16, 8)
    end_X = torch.tensor([4, 4, 12], dtype=torch.int32)
    with recorder() as seen:
        y_SF = torch.nn.functional.grouped_mm(x_SD, weight_XFD.transpose(1, 2), offs=end_X)
        torch.nn.functional.grouped_mm(x_SD.t(), y_SF, offs=end_X)
    assert seen.counts.flops == {("forward", "matmul"): 2 * 2 * 12 * 8 * 16}
    with recorder() as seen:
        torch.ones(3, 7).addmm_(torch.ones(3, 5), torch.ones(5, 7))
    assert seen.counts.flops == {("forward", "matmul"): 2 * 3 * 5 * 7}


def test_attention_flops_use_full_scores_and_5_backward_matmuls() -> None:
    q, k = (torch.ones(2, 4, 8, 16, requires_grad=True) for _ in range(2))
    seen = recorder()
    with seen:
        out = F.scaled_dot_product_attention(q, k, k, is_causal=True)
        seen.phase = "backward"
        out.sum().backward()
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert seen.counts.flops == {
        ("forward", "attention"): 2 * product,
        ("backward", "attention"): 5 * product,
    }


def test_storage_resized_to_zero_is_a_gathered_weight() -> None:
    original = torch.UntypedStorage.resize_
    seen = recorder()
    with seen:
        weight = torch.ones(100)
        weight.untyped_storage().resize_(0)
        seen.timeline.mark("freed")
    peaks = seen.timeline.peaks()
    assert peaks["before#+0"].kinds == {WEIGHTS: 400}
    assert peaks["freed#+0"].total == 0
    assert torch.UntypedStorage.resize_ is original


def test_collectives_of_unknown_groups_are_refused() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        world = torch.distributed.group.WORLD
        assert world is not None
        values = torch.ones(10)
        seen = recorder(**{world.group_name: "world"})
        with seen:
            torch.distributed.all_reduce(values)
        assert seen.counts.collectives == {("all-reduce", "world", "float32", 40): 1}
        with recorder(), pytest.raises(InternalError, match="not a dimension"):
            torch.distributed.all_reduce(values)
        with recorder(**{world.group_name: "world"}), pytest.raises(InternalError, match="does not know"):
            torch.distributed.reduce(values, dst=0)
    finally:
        torch.distributed.destroy_process_group()


def test_cuda_rms_norm_saves_one_value_a_row() -> None:
    original = decoder.rms_norm
    with FakeTensorMode(), cuda_kernels("auto"):
        x, weight = torch.empty(6, 32, requires_grad=True), torch.empty(32, requires_grad=True)
        seen = recorder()
        with seen:
            out = decoder.rms_norm(x, weight, 1e-6)
            # x and weight are there before; what is new is the output and the reciprocal root of each row.
            assert sum(seen.timeline._sizes.values()) == 6 * 32 * 4 + 6 * 4
            out.backward(torch.empty_like(out))
        assert x.grad is not None
        assert weight.grad is not None
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    assert decoder.rms_norm is original


@pytest.mark.parametrize("width", [16, 12])
def test_cuda_attention_does_not_repeat_grouped_keys(width: int) -> None:
    with FakeTensorMode(), cuda_kernels("auto"):
        q = torch.empty(2, 4, 8, width, requires_grad=True)
        k = torch.empty(2, 2, 8, width, requires_grad=True)
        seen = recorder()
        with seen:
            out = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        assert out.shape == q.shape
        padded = 16
        assert seen.counts.flops["forward", "attention"] == 2 * 2 * 2 * 4 * 8 * 8 * padded
        out.backward(torch.empty_like(out))
        assert k.grad is not None
        assert k.grad.shape == k.shape
