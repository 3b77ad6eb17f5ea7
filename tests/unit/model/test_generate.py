"""Loading a whole model and sampling from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_cases import ARCHITECTURES, DictWeights, random_tensors

from seatrial.model.decoder import Decoder
from seatrial.model.generate import generate, load_whole
from seatrial.model.initialise import RandomWeights

ARCH = ARCHITECTURES["qwen2-gqa2-tied"]


@pytest.fixture
def model() -> Decoder:
    return load_whole(ARCH, DictWeights(random_tensors(ARCH)))


def test_loads_every_weight_in_the_requested_dtype() -> None:
    tensors = random_tensors(ARCH)
    model = load_whole(ARCH, DictWeights(tensors), dtype=torch.bfloat16)
    assert not model.training
    for name, p in model.named_parameters():
        assert torch.equal(p, tensors[name].to(torch.bfloat16))


def test_the_same_seed_gives_the_same_ids(model: Decoder) -> None:
    one = generate(model, [1, 2, 3], tokens=12, seed=1)
    assert len(one) == 12
    assert one == generate(model, [1, 2, 3], tokens=12, seed=1)
    assert one != generate(model, [1, 2, 3], tokens=12, seed=2)


def test_temperature_zero_and_top_k_one_are_greedy(model: Decoder) -> None:
    ids = [1, 2, 3]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert generate(model, [1, 2, 3], tokens=6, temperature=0, seed=1) == ids[3:]
    assert generate(model, [1, 2, 3], tokens=6, top_k=1, seed=9) == ids[3:]


def test_top_k_and_temperature_change_the_distribution(model: Decoder) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([[7]]))[0, -1]
    drawn = [generate(model, [7], tokens=1, top_k=3, temperature=0.7, seed=s)[0] for s in range(300)]
    best = logits.topk(3)
    assert set(drawn) <= set(best.indices.tolist())
    expected = (best.values / 0.7).softmax(0)
    share = torch.tensor([drawn.count(i) / 300 for i in best.indices.tolist()])
    assert (share - expected).abs().max() < 0.12  # four standard errors at most
    assert len(set(generate(model, [7], tokens=40, top_k=None, temperature=50.0, seed=0))) > 30


def test_stops_before_the_stop_id(model: Decoder) -> None:
    free = generate(model, [5], tokens=10, seed=3)
    stop = free[4]
    assert generate(model, [5], tokens=10, seed=3, stop_id=stop) == free[: free.index(stop)]


def test_the_context_is_cropped() -> None:
    short = dataclasses.replace(ARCH, max_position_embeddings=8)
    model = load_whole(short, DictWeights(random_tensors(ARCH)))
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    assert generate(model, [9] * 5 + [1, 2, 3], tokens=6, seed=4) == generate(
        model, [8] * 90 + [9] * 5 + [1, 2, 3], tokens=6, seed=4
    )
    assert max(seen) == 8


def test_training_continues_after_sampling() -> None:
    model = load_whole(ARCH, RandomWeights(ARCH, 0))
    generate(model, [1] * 30, tokens=2, seed=0)
    model.train()(torch.ones(1, 16, dtype=torch.int64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("prompt", "options"),
    [([], {}), ([257], {}), ([-1], {}), ([1], {"temperature": -1.0}), ([1], {"top_k": 0})],
)
def test_invalid_arguments_are_refused(model: Decoder, prompt: list[int], options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"prompt|temperature"):
        generate(model, prompt, tokens=1, seed=0, **options)  # type: ignore[arg-type]
