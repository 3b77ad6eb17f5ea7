"""Random weights: the same model in every layout, and the requested distribution."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_cases import ARCHITECTURES, same_bytes

from seatrial.base.box import Box, chunk
from seatrial.model import initialise
from seatrial.model.decoder import whole_shapes
from seatrial.model.initialise import RandomWeights

# More rows than two blocks of one seed, and no multiple of a block.
ARCH = dataclasses.replace(
    ARCHITECTURES["qwen2-mha"], vocab_size=2 * initialise._ROWS + 61, intermediate_size=initialise._ROWS + 8
)
EMBEDDING = "model.embed_tokens.weight"


def _whole(arch=ARCH, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    source = RandomWeights(arch, seed)
    return {name: source.read(name, Box.whole(s), dtype) for name, s in whole_shapes(arch).items()}


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_split_gives_the_same_bits(parts: int, dtype: torch.dtype) -> None:
    source = RandomWeights(ARCH, 1)
    for name, tensor in _whole(dtype=dtype).items():
        for dim in range(tensor.ndim):
            whole = Box.whole(tensor.shape)
            boxes = [whole.narrow(dim, *chunk(tensor.shape[dim], parts, i)) for i in range(parts)]
            pieces = [source.read(name, box, dtype) for box in boxes]
            assert same_bytes(torch.cat(pieces, dim), tensor)


def test_any_split_of_experts_gives_the_same_bits() -> None:
    arch = ARCHITECTURES["qwen3-moe-gqa2"]
    source = RandomWeights(arch, 1)
    for name, tensor in _whole(arch).items():
        for dim in range(tensor.ndim):
            whole = Box.whole(tensor.shape)
            boxes = [whole.narrow(dim, *chunk(tensor.shape[dim], 3, i)) for i in range(3)]
            pieces = [source.read(name, box, torch.float32) for box in boxes]
            assert same_bytes(torch.cat(pieces, dim), tensor), name
    experts = _whole(arch)["model.layers.0.mlp.experts.down_proj"]
    assert len({e.numpy().tobytes() for e in experts}) == arch.num_experts
    assert abs(experts.std().item() / (0.02 / (2 * arch.num_hidden_layers) ** 0.5) - 1) < 0.05


def test_a_box_across_two_blocks_and_an_empty_one() -> None:
    tensor, source, rows = _whole()[EMBEDDING], RandomWeights(ARCH, 1), initialise._ROWS
    box = Box((rows - 3, 5), (rows + 7, 11))
    assert same_bytes(source.read(EMBEDDING, box, torch.float32), tensor[box.slices()])
    for offset in (0, 5, rows, tensor.shape[0]):
        assert source.read(EMBEDDING, Box((offset, 0), (0, 48)), torch.float32).shape == (0, 48)


def test_the_distribution() -> None:
    for name, tensor in _whole().items():
        if name.endswith("norm.weight"):
            assert tensor.eq(1).all(), name
        elif name.endswith(".bias"):
            assert tensor.eq(0).all(), name
        else:
            into_the_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / (2 * ARCH.num_hidden_layers) ** 0.5 if into_the_residual else 0.02
            n = tensor.numel()
            # Five standard errors of the mean and of the deviation.
            assert abs(tensor.mean().item()) < 5 * std / n**0.5, name
            assert abs(tensor.std().item() / std - 1) < 5 / (2 * n) ** 0.5, name


def test_names_seeds_and_blocks_differ() -> None:
    tensors = {n: t for n, t in _whole().items() if t.ndim == 2}
    first_values = {tuple(t[0, :4].tolist()) for t in tensors.values()}
    assert len(first_values) == len(tensors)
    embedding, rows = tensors[EMBEDDING], initialise._ROWS
    assert not torch.equal(embedding[:61], embedding[rows : rows + 61])
    assert not torch.equal(embedding, _whole(seed=2)[EMBEDDING])
    assert same_bytes(embedding, _whole()[EMBEDDING])


def test_values_of_a_seed_do_not_change() -> None:
    # A change here changes every run that is started again from the same job file.
    read = RandomWeights(ARCH, 1234).read(EMBEDDING, Box((0, 0), (1, 4)), torch.float32)
    torch.testing.assert_close(
        read, torch.tensor([[0.01669173, -0.00908133, 0.00741927, 0.00034797]]), rtol=1e-4, atol=1e-8
    )
