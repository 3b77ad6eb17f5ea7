"""Our decoder against transformers: logits, loss and every gradient of random models of each family.

Reached with torch 2.13 and transformers 5.23 on a CPU, the largest over all cases: logits 0, loss 2e-7 (the sum of the
tokens' losses is taken in another order), gradients 2.2e-7, and 0 where there is no QK norm.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from model_cases import ARCHITECTURES, GROUPED, DictWeights, Oracle, random_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seatrial.data.loader import NO_TARGET
from seatrial.job.architecture import Architecture
from seatrial.job.huggingface import architecture_from_config, config_from_architecture
from seatrial.job.parameters import is_router_bias
from seatrial.model.decoder import Decoder, stored_name, whole_shapes
from seatrial.model.generate import load_whole
from seatrial.parallel.loss import LoadBalancing, cross_entropy

pytestmark = pytest.mark.cluster  # slow together

LOGITS = 1e-6  # of the largest logit
LOSS = 1e-6  # relative
GRADIENTS = 1e-5  # of the largest entry of the same gradient


@pytest.fixture(params=ARCHITECTURES, name="arch")
def _arch(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


def _ids(arch: Architecture, batch: int = 2, length: int = 65) -> torch.Tensor:
    return torch.randint(arch.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference as a part of the largest entry."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def test_logits_loss_and_every_gradient(arch: Architecture, oracle: Oracle) -> None:
    tensors, ids = random_tensors(arch), _ids(arch)
    theirs = oracle.model(arch, tensors)
    ours = load_whole(arch, DictWeights(tensors)).train()

    balances = arch.router_aux_loss_coef > 0
    asked = {"output_router_logits": True} if balances else {}
    expected = theirs(ids, labels=ids, **asked)
    balance = LoadBalancing(arch.router_aux_loss_coef, rows=ids.numel() * arch.sparse_layers, ranks=1)
    balance.share, ours.balance = 1.0, balance
    logits = ours(ids)
    loss = _loss(logits, ids)
    expected.loss.backward()
    loss.backward()
    assert _difference(logits, expected.logits) <= LOGITS
    if balances:
        assert float(balance.total) == pytest.approx(expected.aux_loss.item(), rel=LOSS)
    whole = loss.item() + arch.router_aux_loss_coef * float(balance.total)
    assert whole == pytest.approx(expected.loss.item(), rel=LOSS)

    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    mine = oracle.joined(
        {stored_name(n, arch): p.grad for n, p in ours.named_parameters() if p.grad is not None}
    )
    assert mine.keys() == gradients.keys()
    assert all(g.abs().max() > 0 for g in gradients.values())  # else a missing path would go unseen
    apart = {name: _difference(mine[name], gradients[name]) for name in gradients}
    assert {name: d for name, d in apart.items() if not d <= GRADIENTS} == {}


def test_recomputed_activations_give_the_same_gradients(arch: Architecture) -> None:
    tensors, ids = random_tensors(arch), _ids(arch)
    gradients = []
    for recompute in (False, True):
        model = load_whole(arch, DictWeights(tensors)).train()
        for block in model.blocks:
            block.recompute = recompute
        _loss(model(ids), ids).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_bf16_logits(arch: Architecture, oracle: Oracle) -> None:
    tensors, ids = random_tensors(arch), _ids(arch, batch=8 if arch.sigmoid_router else 2)
    with torch.no_grad():
        exact = oracle.model(arch, tensors)(ids).logits
        theirs = oracle.model(arch, tensors, torch.bfloat16)(ids).logits.float()
        ours = load_whole(arch, DictWeights(tensors), dtype=torch.bfloat16)(ids).float()
    # transformers rounds to bf16 inside its norm as well, so the two differ. Ours must be no farther from fp32.
    error = _median_error if arch.sigmoid_router else _error
    assert error(ours, exact) <= 1.1 * error(theirs, exact)
    # Where two experts get nearly the same, rounding sends a position to another one.
    most = 0.2 if arch.num_experts and not arch.sigmoid_router else 0.04
    assert error(ours, theirs) <= 1.5 * error(theirs, exact) <= most


def test_pipeline_stages_compute_what_the_whole_model_does(arch: Architecture) -> None:
    tensors, ids = random_tensors(arch), _ids(arch)
    whole = load_whole(arch, DictWeights(tensors))
    n = arch.num_hidden_layers
    first = 1 + arch.first_k_dense_replace
    stages = [Decoder(arch, range(first), last=False), Decoder(arch, range(first, n), first=False)]
    h = ids
    with torch.no_grad():
        for stage in stages:
            for name, p in stage.named_parameters():
                p.copy_(tensors[stored_name(name, arch)])
            h = (
                stage(*h) if isinstance(h, tuple) else stage(h)
            )  # with experts it also passes on what they got
        assert torch.equal(h, whole(ids))


def test_parameter_counts(arch: Architecture, oracle: Oracle) -> None:
    shapes = whole_shapes(arch)
    theirs = oracle.model(arch, random_tensors(arch))
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    expected = {name: tuple(t.shape) for name, t in oracle.joined(empty).items()}
    biases = {name: shape for name, shape in expected.items() if is_router_bias(name)}
    assert {name: tuple(b.shape) for name, b in theirs.named_buffers() if is_router_bias(name)} == biases
    assert {name: tuple(p.shape) for name, p in theirs.named_parameters()} | biases == expected
    assert sum(map(math.prod, biases.values())) == arch.sparse_layers * arch.num_experts * arch.sigmoid_router
    shapes = {name: shape for name, shape in shapes.items() if name not in biases}
    assert sum(math.prod(shape) for shape in shapes.values()) == arch.parameters() == theirs.num_parameters()
    used = {
        n: (arch.num_experts_per_tok, *shape[1:]) if len(shape) == 3 else shape for n, shape in shapes.items()
    }
    assert sum(map(math.prod, used.values())) == arch.active_parameters()
    matrices = [shape for name, shape in used.items() if len(shape) > 1 and "embed" not in name]
    head = arch.vocab_size * arch.hidden_size if arch.tie_word_embeddings else 0
    assert sum(map(math.prod, matrices)) + head == arch.matmul_parameters()


def test_flops_against_torchs_counter(arch: Architecture) -> None:
    # torch counts the whole score matrix of the attention, so this is the convention with 12.
    model = load_whole(arch, DictWeights(random_tensors(arch))).train()
    ids = _ids(arch)
    # The math kernel: matrix products of forward and backward, without the recomputation of the fused ones.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
        model(ids).sum().backward()
    expected = arch.flops_per_token(ids.shape[1], full_attention=True) * ids.numel()
    assert counter.get_total_flops() == expected


def test_config_json_of_transformers(arch: Architecture, oracle: Oracle) -> None:
    assert architecture_from_config(oracle.config(arch).to_dict()) == arch
    again = type(oracle.config(arch))(**config_from_architecture(arch, "float32"))
    theirs, ours = oracle.config(arch).to_dict(), again.to_dict()
    about_the_file = {"dtype", "architectures", "_attn_implementation"}
    assert {k: v for k, v in theirs.items() if k not in about_the_file and ours.get(k) != v} == {}


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The root mean square of the difference as a part of that of `b`."""
    return ((a - b).norm() / b.norm()).item()


def _median_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The same of each position: the median. Routed weights of 2.5 in all let single positions decide the sum."""
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).median().item()


@pytest.mark.parametrize("name", ["qwen2-gqa2-tied", "llama-gqa4"])
def test_targets_that_do_not_count(name: str, oracle: Oracle) -> None:
    """transformers' loss with labels of -100, and its gradients."""
    arch = ARCHITECTURES[name]
    tensors, ids = random_tensors(arch), _ids(arch)
    ignored = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < torch.tensor(
        [[0.95], [0.3]]
    )
    theirs, ours = oracle.model(arch, tensors), load_whole(arch, DictWeights(tensors)).train()
    expected = theirs(ids, labels=ids.masked_fill(ignored, -100)).loss
    expected.backward()
    target = ids[:, 1:].masked_fill(ignored[:, 1:], NO_TARGET)
    tokens = (target != NO_TARGET).sum(dtype=torch.float64)
    assert ours.lm_head is not None
    ours.lm_head.loss = partial(cross_entropy, tokens=tokens, group=None, rank=0)
    loss = ours(ids[:, :-1].contiguous(), target_BT=target)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=LOSS)
    grads = {stored_name(n, arch): p.grad for n, p in ours.named_parameters()}
    for their_name, parameter in theirs.named_parameters():
        assert _difference(grads[their_name], parameter.grad) <= GRADIENTS, their_name
