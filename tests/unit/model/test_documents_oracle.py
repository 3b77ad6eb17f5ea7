"""Attention within documents: against transformers with a 4D mask, and against each document alone.

Reached with torch 2.13 and transformers 5.23 on a CPU, the largest over all cases: logits 0, gradients 2.1e-6.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_cases import ARCHITECTURES, DictWeights, Oracle, random_tensors

from seatrial.hardware import accelerator
from seatrial.job.architecture import Architecture
from seatrial.model.decoder import attention, document_bias, stored_name
from seatrial.model.generate import load_whole

T = 65
LOGITS = 1e-6  # of the largest logit
GRADIENTS = 1e-5  # of the largest entry of the same gradient
ALONE = 2e-5  # of the largest logit: the angles are others, their differences are not

# Documents of one token, of many, one that ends the sequence, and a sequence of one document.
DOCUMENTS = torch.stack(
    [
        torch.tensor([i in (1, 7, 8, 40, 64) for i in range(T)]).cumsum(0),
        torch.tensor([i in (31, 32) for i in range(T)]).cumsum(0),
        torch.zeros(T, dtype=torch.int64),
    ]
).to(torch.int32)


@pytest.fixture(params=ARCHITECTURES, name="arch")
def _arch(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


def _ids(arch: Architecture) -> torch.Tensor:
    return torch.randint(arch.vocab_size, DOCUMENTS.shape, generator=torch.Generator().manual_seed(1))


def _visible() -> torch.Tensor:
    """[B, 1, T, T], written element by element: not by the code under test."""
    rows = [
        [[j <= i and bool(row[i] == row[j]) for j in range(T)] for i in range(T)]
        for row in DOCUMENTS.tolist()
    ]
    return torch.tensor(rows)[:, None]


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("documents", [False, True])
def test_repeated_keys_give_the_same_attention(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are for kernels that want as many heads of keys as of queries."""
    generator = torch.Generator().manual_seed(2)
    qkv = [torch.randn(3, T, n, 8, dtype=torch.float64, generator=generator) for n in (6, 2, 2)]
    bias = document_bias(DOCUMENTS, torch.float64) if documents else None
    found = []
    for repeated in (False, True):
        monkeypatch.setattr(accelerator, "needs_equal_heads", lambda _q, *, biased: repeated)  # noqa: B023
        own = [x.clone().requires_grad_() for x in qkv]
        out = attention(*own, bias)
        found.append([out, *torch.autograd.grad(out.square().sum(), own)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_bias_masks_later_positions_and_other_documents() -> None:
    bias = document_bias(DOCUMENTS, torch.float32)
    assert bias.dtype == torch.float32
    assert torch.equal(bias == 0, _visible())
    assert torch.equal(bias == float("-inf"), ~_visible())


@pytest.mark.cluster  # slow
def test_logits_and_every_gradient_with_a_4d_mask(arch: Architecture, oracle: Oracle) -> None:
    tensors, ids = random_tensors(arch), _ids(arch)
    theirs = oracle.model(arch, tensors)
    ours = load_whole(arch, DictWeights(tensors)).train()
    expected = theirs(ids, attention_mask=_visible()).logits
    logits = ours(ids, documents=DOCUMENTS)
    assert _difference(logits, expected) <= LOGITS
    # It must have been another computation than the one without documents.
    assert _difference(ours(ids).detach()[:2], expected.detach()[:2]) > 0.05

    for output in (logits, expected):
        F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    mine = {stored_name(n, arch): p.grad for n, p in ours.named_parameters() if p.grad is not None}
    apart = {name: _difference(grad, gradients[name]) for name, grad in oracle.joined(mine).items()}
    assert apart.keys() == gradients.keys()
    assert {name: d for name, d in apart.items() if not d <= GRADIENTS} == {}


def test_a_packed_document_has_the_logits_it_has_alone(arch: Architecture) -> None:
    """Positions continue across document boundaries; RoPE depends on their differences only."""
    ids = _ids(arch)
    model = load_whole(arch, DictWeights(random_tensors(arch)))
    with torch.no_grad():
        packed = model(ids, documents=DOCUMENTS)
        for row, numbers in enumerate(DOCUMENTS):
            for number in numbers.unique().tolist():
                here = (numbers == number).nonzero()[:, 0]
                alone = model(ids[row, here][None])
                error = (packed[row, here] - alone[0]).abs().max() / packed.abs().max()
                assert error <= ALONE, (row, number)


def test_recomputed_activations_give_the_same_gradients(arch: Architecture) -> None:
    tensors, ids = random_tensors(arch), _ids(arch)
    gradients = []
    for recompute in (False, True):
        model = load_whole(arch, DictWeights(tensors)).train()
        for block in model.blocks:
            block.recompute = recompute
        model(ids, documents=DOCUMENTS).logsumexp(-1).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_bf16_stays_close(arch: Architecture) -> None:
    tensors, ids = random_tensors(arch), _ids(arch)
    with torch.no_grad():
        exact = load_whole(arch, DictWeights(tensors))(ids, documents=DOCUMENTS)
        rounded = load_whole(arch, DictWeights(tensors), dtype=torch.bfloat16)(
            ids, documents=DOCUMENTS
        ).float()
    # Rounding sends some positions to other experts.
    most = 0.15 if arch.num_experts else 0.04
    assert ((rounded - exact).norm() / exact.norm()).item() <= most
