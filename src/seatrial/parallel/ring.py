"""Ring attention (arXiv:2310.01889): keys and values go around a context-parallel group while attention to them is computed.

A rank's chunks are r and 2n-1-r, as `context` cuts a sequence. In step i rank r has the keys and values of rank s = r - i
(mod n), sends them on, and computes:

    s = r  causal attention of own queries to own keys: both chunks are in the order of the sequence
    s < r  both chunks of queries see all of the keys' first chunk, and none of the second
    s > r  the second chunk of queries sees all of both chunks of keys, and the first chunk none

So every rank computes 2 C^2 pairs of a query and a key in each step, and no mask is needed. What the steps found is added up
by the logarithm of each softmax's denominator. In the backward pass gradients of keys and values go around one step behind
them, and each rank adds its own.

    C  positions of a chunk      t  positions of a rank (2 C)      n  ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend

from seatrial.hardware.accelerator import is_accelerator, name
from seatrial.parallel.collectives import resolve_group, wait

_aten = torch.ops.aten


def _send_on(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Send `x` to the next rank of the ring. Returns what waits for the tensor of the previous rank."""
    received, n, rank = torch.empty_like(x), group.size(), group.rank()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n),
        ]
    )

    def arrived() -> Tensor:
        for work in works:
            wait(work)
        return received

    return arrived


def _pairs(step: int, positions: int, group: ProcessGroup) -> tuple[slice, slice]:
    """Which own queries and which keys of those at hand `step` is about."""
    every, C = slice(None), positions // 2
    if step == 0:
        return every, every
    return (every, slice(C)) if step <= group.rank() else (slice(C, None), every)


def _kernel(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> SDPBackend:
    """The fused kernel that `scaled_dot_product_attention` would use."""
    if not is_accelerator(q.device):
        return SDPBackend.FLASH_ATTENTION
    grouped = q.shape[1] != k.shape[1]
    kernel = SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=grouped))
    if kernel not in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        raise RuntimeError(
            f"ring attention needs torch's flash or cuDNN attention, and {name(q.device)} has neither for heads of "
            f"{q.shape[-1]} in {q.dtype}: set parallel.ring_attention = false"
        )
    return kernel


def _attend(q_BCNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention [B, C, N, H], and the logarithm of each softmax's denominator [B, N, C] in fp32."""
    q, k, v = (x.transpose(1, 2) for x in (q_BCNH, k_BSKH, v_BSKH))
    if _kernel(q, k, v, causal=causal) == SDPBackend.CUDNN_ATTENTION:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        lse = lse.squeeze(-1)
    elif is_accelerator(q.device):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out.transpose(1, 2), lse


def _gradients(
    grad_BCNH: Tensor,
    q_BCNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BCNH: Tensor,
    lse_BNC: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values through these pairs. `out` and `lse` are those of all keys."""
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BCNH, q_BCNH, k_BSKH, v_BSKH, out_BCNH))
    lse = lse_BNC.contiguous()
    lengths = None, None, q.shape[2], k.shape[2]  # no documents
    if _kernel(q, k, v, causal=causal) == SDPBackend.CUDNN_ATTENTION:
        no_seed = torch.empty(0, dtype=torch.uint64, device=q.device)  # no dropout
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, q, k, v, out, lse[..., None], no_seed, no_seed, None), *lengths, 0.0, causal
        )
    elif is_accelerator(q.device):
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse), *lengths, 0.0, causal, None, None
        )
    else:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad, q, k, v, out, lse), 0.0, causal
        )
    of_q, of_k, of_v = (x.transpose(1, 2) for x in grads)
    return of_q, of_k, of_v


@torch.library.custom_op(
    "seatrial::ring_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, str group) -> (Tensor, Tensor)",
)
def ring_attention_op(q: Tensor, k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Causal attention [B, t, N, H] of this rank's positions in fp32 sums, and its `lse` [B, N, t], for the backward pass."""
    members = resolve_group(group)
    n, t = members.size(), q.shape[1]
    kv_2BtKH = torch.stack((k, v))
    out_BtNH, lse_BNt = torch.empty(0), torch.empty(0)
    for step in range(n):
        arrived = _send_on(kv_2BtKH, members) if step < n - 1 else None
        rows, keys = _pairs(step, t, members)
        found, lse = _attend(q[:, rows], *kv_2BtKH[:, :, keys], causal=step == 0)
        if step == 0:
            out_BtNH, lse_BNt = found.float(), lse.contiguous()
        else:
            sum_BNC = lse_BNt[..., rows]
            # The share of these keys in the softmax over all so far.
            share_BC = (lse - sum_BNC).sigmoid().transpose(1, 2)[..., None]
            out_BtNH[:, rows].lerp_(found.float(), share_BC)
            sum_BNC.copy_(torch.logaddexp(sum_BNC, lse))
        if arrived is not None:
            kv_2BtKH = arrived()
    return out_BtNH.to(q.dtype), lse_BNt


@ring_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor]:
    B, t, N, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(B, N, t, dtype=torch.float32)


@torch.library.custom_op(
    "seatrial::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str group) -> (Tensor, Tensor)",
)
def _ring_attention_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """Gradients of `q` [B, t, N, H], and of `k` and `v` [2, B, t, K, H]."""
    members = resolve_group(group)
    n, t = members.size(), q.shape[1]
    kv_2BtKH = torch.stack((k, v))
    of_q_BtNH = torch.empty(0)
    summed: Callable[[], Tensor] | None = None
    for step in range(n):
        arrived = _send_on(kv_2BtKH, members) if step < n - 1 else None
        rows, keys = _pairs(step, t, members)
        of_q, of_k, of_v = _gradients(
            *(grad[:, rows], q[:, rows], *kv_2BtKH[:, :, keys], out[:, rows], lse[..., rows]),
            causal=step == 0,
        )
        if summed is None:
            of_q_BtNH, of_kv_2BtKH = of_q.float(), torch.stack((of_k, of_v))
        else:
            of_q_BtNH[:, rows] += of_q
            of_kv_2BtKH = summed()  # of the same keys, from the ranks that had them before
            of_kv_2BtKH[0, :, keys] += of_k
            of_kv_2BtKH[1, :, keys] += of_v
        summed = _send_on(of_kv_2BtKH, members)
        if arrived is not None:
            kv_2BtKH = arrived()
    assert summed is not None
    return of_q_BtNH.to(q.dtype), summed()  # after n steps at the rank whose keys they are


@_ring_attention_backward_op.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), k.new_empty(2, *k.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    *qkv, ctx.group = inputs
    ctx.save_for_backward(*qkv, *output)


def _backward(ctx: Any, grad: Tensor, _of_lse: Tensor) -> tuple[Tensor | None, ...]:
    of_q, of_kv = _ring_attention_backward_op(grad, *ctx.saved_tensors, ctx.group)
    return of_q, *of_kv.unbind(), None


ring_attention_op.register_autograd(_backward, setup_context=_save)

IMPLEMENTATIONS = {op._opoverload: op._init_fn for op in (ring_attention_op, _ring_attention_backward_op)}


class RingAttention:
    """Attention of this rank's positions over all earlier ones of the sequence, without documents."""

    def __init__(self, group: ProcessGroup) -> None:
        self._name = group.group_name  # how a compiled layer names the group

    def __call__(self, q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, _none: Tensor | None = None) -> Tensor:
        """As `model.decoder.attention`."""
        out_BtNH: Tensor = ring_attention_op(q_BtNH, k_BtKH, v_BtKH, self._name)[0]
        return out_BtNH
