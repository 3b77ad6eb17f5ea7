"""CUDA's flash attention over sequences of different lengths, computed on the CPU one sequence at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _scores(q_CNH: Tensor, k_SNH: Tensor) -> Tensor:
    """Of which the last query sees all keys, and each before it one less."""
    C, _, H = q_CNH.shape
    S = len(k_SNH)
    score_NCS = torch.einsum("cnh,snh->ncs", q_CNH, k_SNH) * H**-0.5
    return score_NCS.masked_fill(torch.ones(C, S, dtype=torch.bool).triu(S - C + 1), float("-inf"))


def _one(q_CNH: Tensor, k_SKH: Tensor, v_SKH: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention by its formula, and the log of each softmax's denominator [N, C]."""
    k_SNH, v_SNH = (x.repeat_interleave(q_CNH.shape[1] // x.shape[1], 1) for x in (k_SKH, v_SKH))
    score_NCS = _scores(q_CNH, k_SNH)
    return torch.einsum("ncs,snh->cnh", score_NCS.softmax(-1), v_SNH), score_NCS.logsumexp(-1)


def _gradients(
    grad_CNH: Tensor, q_CNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, out_CNH: Tensor, lse_NC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """By its formulas, from what the forward pass returned (arXiv:2205.14135, appendix B.2)."""
    N, H = q_CNH.shape[1:]
    S, K, _ = k_SKH.shape
    k_SNH, v_SNH = (x.repeat_interleave(N // K, 1) for x in (k_SKH, v_SKH))
    p_NCS = (_scores(q_CNH, k_SNH) - lse_NC[..., None]).exp()
    of_p_NCS = torch.einsum("cnh,snh->ncs", grad_CNH, v_SNH)
    of_score_NCS = p_NCS * (of_p_NCS - (grad_CNH * out_CNH).sum(-1).t()[..., None]) * H**-0.5
    of_q_CNH = torch.einsum("ncs,snh->cnh", of_score_NCS, k_SNH)
    of_k_SNH = torch.einsum("ncs,cnh->snh", of_score_NCS, q_CNH)
    of_v_SNH = torch.einsum("ncs,cnh->snh", p_NCS, grad_CNH)
    of_k_SKH, of_v_SKH = (x.view(S, K, N // K, H).sum(2) for x in (of_k_SNH, of_v_SNH))
    return of_q_CNH, of_k_SKH, of_v_SKH


def _sequences(bounds: Tensor, longest: int, length: int) -> list[slice]:
    at = bounds.tolist()
    assert (at[0], at[-1]) == (0, length)
    pairs = list(pairwise(at))
    assert all(0 <= end - begin <= longest for begin, end in pairs)
    return [slice(*pair) for pair in pairs]


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> tuple[Tensor, ...]:
    of_q, of_k, longest_q, longest_k, dropout, causal, _debug = rest
    assert (dropout, causal) == (0.0, True)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = _sequences(of_q, longest_q, len(q)), _sequences(of_k, longest_k, len(k))
    parts = [_one(q[a].to(dtype), k[b].to(dtype), v[b].to(dtype)) for a, b in zip(queries, keys, strict=True)]
    out, lse = (torch.cat(x, dim) for x, dim in zip(zip(*parts, strict=True), (0, 1), strict=True))
    unused = torch.zeros((), dtype=torch.uint64)
    return out.to(q.dtype), lse, torch.zeros(2, dtype=torch.uint64), unused, torch.empty(0)


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> tuple[Tensor, ...]:
    out, lse, of_q, of_k, longest_q, longest_k, *_ = rest
    assert out.shape == q.shape
    assert lse.shape == (q.shape[1], len(q))
    queries, keys = _sequences(of_q, longest_q, len(q)), _sequences(of_k, longest_k, len(k))
    of_each = [
        _gradients(
            *(x.to(lse.dtype) for x in (grad[a], q[a], k[b], v[b], out[a])),
            lse[:, a],
        )
        for a, b in zip(queries, keys, strict=True)
    ]
    of_q, of_k, of_v = (torch.cat(x).to(q.dtype) for x in zip(*of_each, strict=True))
    return of_q, of_k, of_v


def register() -> torch.library.Library:
    """For CPU tensors, as long as what is returned lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library
