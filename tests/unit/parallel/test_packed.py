"""Documents as sequences of different lengths: where they end, and that attention is that with a bias."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flash_on_cpu
from presets import preset_job
from seatrial.hardware import accelerator
from seatrial.model.decoder import attention, document_bias
from seatrial.parallel.context import own_chunks
from seatrial.parallel.packed import document_bounds, packed_attention, packs_documents

T = 12


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Iterator[None]:
    library = flash_on_cpu.register()
    yield
    library._destroy()


@st.composite
def numbers(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Of the documents of some microbatches, and how many sequences each has."""
    microbatch, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    begins = st.lists(st.booleans(), min_size=T, max_size=T)
    rows = [draw(begins) for _ in range(microbatch * microbatches)]
    return torch.tensor(rows).cumsum(1).int(), microbatch


@given(numbers())
def test_bounds_are_where_the_number_or_the_row_changes(drawn: tuple[Tensor, int]) -> None:
    document_BT, microbatch = drawn
    found = document_bounds(document_BT, microbatch, [range(T)])
    assert found.dtype == torch.int32
    assert torch.equal(found[:, 0, 0], found[:, 0, 1])
    longest = 0
    for row, numbers in zip(found[:, 0, 0].tolist(), document_BT.split(microbatch), strict=True):
        flat = [(i, n) for i, row in enumerate(numbers.tolist()) for n in row]
        expected = [at for at, pair in enumerate(flat) if at == 0 or flat[at - 1] != pair]
        longest = max(longest, len(expected))
        assert row == expected + [len(flat)] * (len(row) - len(expected))
    assert found.shape[3] == longest + 1


def _draws(generator: torch.Generator, microbatch: int, heads: tuple[int, int]) -> list[Tensor]:
    n, k = heads
    shapes = [(microbatch, T, count, 8) for count in (n, k, k, n)]
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


@given(numbers(), st.sampled_from([(4, 4), (4, 2), (4, 1)]), st.sampled_from([1, 2, 3]))
def test_attention_and_its_gradients_are_those_with_a_bias(
    drawn: tuple[Tensor, int], heads: tuple[int, int], context: int
) -> None:
    """Of all positions, and of the chunks of each rank of a context group."""
    document_BT, microbatch = drawn
    generator = torch.Generator().manual_seed(0)
    places = (
        [own_chunks(T, size=context, rank=rank) for rank in range(context)] if context > 1 else [[range(T)]]
    )
    for chunks in places:
        bounds = document_bounds(document_BT, microbatch, chunks)
        for of_chunks, own_BT in zip(bounds, document_BT.split(microbatch), strict=True):
            bias = document_bias(own_BT, torch.float64)
            for chunk, bounds_2L in zip(chunks, of_chunks, strict=True):
                queries, seen = slice(chunk.start, chunk.stop), slice(chunk.stop)
                *qkv, grad = _draws(generator, microbatch, heads)
                found = []
                for attend, mask in ((packed_attention, bounds_2L), (attention, bias[:, :, queries, seen])):
                    own = [x.clone().requires_grad_() for x in qkv]
                    q, k, v = own
                    out = attend(q[:, queries], k[:, seen], v[:, seen], mask)
                    found.append([out, *torch.autograd.grad(out, own, grad[:, queries])])
                for ours, expected in zip(*found, strict=True):
                    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "there", "packs"),
    [
        (torch.bfloat16, 128, True, True),
        (torch.bfloat16, 128, False, False),
        (torch.float32, 128, True, False),
        (torch.bfloat16, 320, True, False),
        (torch.bfloat16, 20, True, False),
    ],
)
def test_it_is_for_what_the_kernel_takes(
    dtype: torch.dtype, head_dim: int, there: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "has_flash_attention", lambda _device: there)
    arch = preset_job("qwen2.5-7b-h200", f"model.head_dim={head_dim}").architecture
    assert packs_documents(arch, torch.device("cuda"), dtype) == packs


def test_a_cpu_has_no_such_kernel() -> None:
    assert not accelerator.has_flash_attention(torch.device("cpu"))
