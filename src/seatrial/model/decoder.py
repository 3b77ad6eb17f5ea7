"""A decoder-only transformer: Qwen2.5, Llama 3, Qwen3 and similar models by configuration. No parallelism in here.

Letters in tensor names, here and in parallel/:

    B  sequences in a microbatch      V  vocabulary
    T  positions in a sequence        F  width of the MLP
    D  width of the model             H  width of one attention head
    N  query heads                    K  key and value heads (N is a multiple of K)
    E  width of all heads, N H or K H

In a mixture of experts:

    R  rows: positions of all sequences, B T      X  experts
    S  slots: a row for each expert of a position, k R, sorted by expert
    L  layers of the model, or of a stage

Parameters are named as in Hugging Face's files (`model.layers.3.self_attn.q_proj.weight`); a pipeline stage keeps the
layer numbers of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.utils.checkpoint import checkpoint

from seatrial.hardware import accelerator
from seatrial.job.architecture import Architecture, RopeScaling
from seatrial.model.lora import add_adapters

Projections = Callable[..., Sequence[Tensor]]
"""(x [B, T, D], modules) -> the output of each of these linear modules, [B, T, its own width]."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [B, T, D], head's weight [V, D], targets [B, T]) -> a scalar."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q [B, T, N, H], k and v [B, T, K, H], bias or what else `Decoder.document_mask` returns, or None) -> [B, T, N, H]."""
Balance = Callable[[Tensor, Tensor], Tensor]
"""(x [B, T, D], routed [2, X]) -> x, through which the gradient of the load-balancing loss enters."""
Spread = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""(`Experts`, and what it takes for all of a layer's experts) -> what it would return, with experts on other ranks."""
OwnPositions = Callable[[Tensor, int], Tensor]
"""(tensor with all positions of the sequence, their dimension) -> those that this rank computes."""
DocumentMask = Callable[[Tensor, torch.dtype, OwnPositions | None], Tensor]
"""(documents of a microbatch, dtype of the queries, `own_positions`) -> what layers attend with: `document_bias`."""


def each(x_BTD: Tensor, *linears: nn.Module) -> Sequence[Tensor]:
    """Apply several projections to one tensor."""
    return [linear(x_BTD) for linear in linears]


class _CpuRMSNorm(torch.autograd.Function):
    """The norm on a CPU, where torch has no kernel for it and its backward pass takes several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        grad, wide_weight = grads[0].to(rstd.dtype), weight.to(rstd.dtype)
        normed, scaled = x * rstd, grad * wide_weight
        share = (scaled * normed).mean(-1, keepdim=True)
        of_x = scaled.addcmul_(normed, share, value=-1).mul_(rstd).to(x.dtype)
        if not ctx.needs_input_grad[1]:  # a frozen model's
            return of_x, None, None
        return of_x, normed.mul_(grad).flatten(0, -2).sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch.nn.functional.rms_norm` over the last dimension."""
    if x.device.type == "cpu":
        normed: Tensor = _CpuRMSNorm.apply(x, weight, eps)
        return normed
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight (arXiv:1910.07467); computed in fp32 inside the kernel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def inverse_frequencies(
    width: int, theta: float, scaling: RopeScaling | None, device: torch.device | str | None = None
) -> Tensor:
    """RoPE's angular frequencies, fp32 [width/2] (arXiv:2104.09864), with Llama 3.1's scaling where it is given.

    The scaling divides low frequencies by `factor`, keeps high ones, and interpolates linearly in between, according to
    the ratio of the original context length to the wavelength.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    freq = 1.0 / (theta**exponents)
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    original = scaling.original_max_position_embeddings
    low = original / scaling.low_freq_factor
    high = original / scaling.high_freq_factor
    blend = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * freq / scaling.factor + blend * freq
    scaled = torch.where(wavelength > low, freq / scaling.factor, freq)
    return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)


class RotaryTable:
    """cos and sin of every position, computed once per device and dtype.

    Not a buffer: the model is built on the meta device, where a buffer would lose its values.
    """

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, H], or as much of H as is rotated."""
        key = (device, dtype)
        if key not in self._tables or self._tables[key][0].shape[0] < length:
            a = self._arch
            freq = inverse_frequencies(a.rotary_width, a.rope_theta, a.rope_scaling, device)
            angles = torch.outer(torch.arange(length, device=device).float(), freq)
            angles_TH = torch.cat((angles, angles), dim=-1)
            self._tables[key] = (angles_TH.cos().to(dtype), angles_TH.sin().to(dtype))
        cos, sin = self._tables[key]
        return cos[:length], sin[:length]


def rotate(x_BTNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotate each head's pairs (i, i + W/2) by their position's angle; W, the tables' width, is H or less."""
    turned, rest = x_BTNH.tensor_split([cos_TH.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    out = turned * cos_TH[:, None] + rotated * sin_TH[:, None]
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def document_bias(document_BT: Tensor, dtype: torch.dtype, own: OwnPositions | None = None) -> Tensor:
    """Additive attention bias [B, 1, T, T]: 0 where a position may attend, -inf elsewhere; with `own` of those rows only.

    A position attends to itself and to earlier positions of its own document; `document_BT` numbers the documents of
    each sequence. The bias has the queries' dtype and is built once for all layers: from a boolean mask every fused
    kernel would build it again.
    """
    rows_BT = document_BT if own is None else own(document_BT, 1)
    same_BTT = rows_BT[:, :, None] == document_BT[:, None, :]
    if own is None:
        same_BTT.tril_()
    else:
        position_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        same_BTT &= own(position_T, 0)[:, None] >= position_T
    bias_BTT = torch.zeros(same_BTT.shape, dtype=dtype, device=document_BT.device)
    return bias_BTT.masked_fill_(~same_BTT, float("-inf"))[:, None]


def attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal attention or, with a bias, masked by it. [B, T, N, H]."""
    group = q_BTNH.shape[2] // k_BTKH.shape[2]
    biased = bias is not None and not isinstance(bias, CausalBias)  # which flash attention knows
    if group > 1 and accelerator.needs_equal_heads(q_BTNH, biased=biased):
        k_BTKH, v_BTKH = (x.repeat_interleave(group, 2) for x in (k_BTKH, v_BTKH))
    out_BNTH = F.scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BTKH.transpose(1, 2),
        v_BTKH.transpose(1, 2),
        attn_mask=bias,
        is_causal=bias is None,
        enable_gqa=q_BTNH.shape[2] != k_BTKH.shape[2],
    )
    return out_BNTH.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245), causal or, with a bias, masked by it.

    The number of heads follows from the projections' outputs, so a subset of the heads (tensor parallel) also works.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        D, H = arch.hidden_size, arch.head_dim
        N, K = arch.num_attention_heads, arch.num_key_value_heads
        self.head_dim = H
        self.q_proj = nn.Linear(D, N * H, bias=arch.qkv_bias)
        self.k_proj = nn.Linear(D, K * H, bias=arch.qkv_bias)
        self.v_proj = nn.Linear(D, K * H, bias=arch.qkv_bias)
        self.o_proj: nn.Module = nn.Linear(N * H, D, bias=False)
        self.q_norm = RMSNorm(H, arch.rms_norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(H, arch.rms_norm_eps) if arch.qk_norm else None
        self.project: Projections = each  # or a parallel layout's replacement
        self.attend: Attend = attention  # as above

    def forward(
        self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor, bias_B1TT: Tensor | None = None
    ) -> Tensor:
        q_BTE, k_BTE, v_BTE = self.project(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        heads = (*q_BTE.shape[:2], -1, self.head_dim)
        q_BTNH, k_BTKH, v_BTKH = q_BTE.view(heads), k_BTE.view(heads), v_BTE.view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = rotate(q_BTNH, cos_TH, sin_TH), rotate(k_BTKH, cos_TH, sin_TH)
        return self.o_proj(self.attend(q_BTNH, k_BTKH, v_BTKH, bias_B1TT).flatten(2))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, D: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(D, width, bias=False)
        self.up_proj = nn.Linear(D, width, bias=False)
        self.down_proj: nn.Module = nn.Linear(width, D, bias=False)
        self.project: Projections = each  # as in attention; the order of the positions does not matter here

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.project(x_BTD, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate_BTF) * up_BTF)


def weighted_swiglu(gate_SF: Tensor, up_SF: Tensor, weight_S: Tensor) -> Tensor:
    """SwiGLU of each slot, times its weight."""
    return F.silu(gate_SF) * up_SF * weight_S[:, None].to(gate_SF.dtype)


class Experts(nn.Module):
    """The experts' weights, each kind in one parameter, and their SwiGLU."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        X, D, width = arch.num_experts, arch.hidden_size, arch.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(X, width, D))
        self.up_proj = nn.Parameter(torch.empty(X, width, D))
        self.down_proj = nn.Parameter(torch.empty(X, D, width))
        self.activate: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_swiglu

    def forward(self, x_SD: Tensor, weight_S: Tensor, end_X: Tensor) -> Tensor:
        """Each slot's expert applied to it, times its weight, [S, D]; `end_X`: the slot after the last of each expert.

        The weight is applied to what is narrower, the input of the last product: then its output need not be kept.
        """
        gate_SF = F.grouped_mm(x_SD, self.gate_proj.transpose(1, 2), offs=end_X)
        up_SF = F.grouped_mm(x_SD, self.up_proj.transpose(1, 2), offs=end_X)
        h_SF = self.activate(gate_SF, up_SF, weight_S)
        return F.grouped_mm(h_SF, self.down_proj.transpose(1, 2), offs=end_X)


class ToSlots(torch.autograd.Function):
    """[R, D] -> [S, D]: each row to the slots of its experts. Its gradient is `FromSlots`.

    Indexing would add the gradients of a row in an order that differs from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_S: Tensor, slot_Rk: Tensor) -> Tensor:
        ctx.save_for_backward(slot_Rk)
        return x_RD[order_S // slot_Rk.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slot_Rk,) = ctx.saved_tensors
        return grads[0][slot_Rk].sum(1), None, None


class FromSlots(torch.autograd.Function):
    """[S, D] -> [R, D]: the sum of each row's slots. Its gradient is `ToSlots`."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, order_S: Tensor, slot_Rk: Tensor) -> Tensor:
        ctx.save_for_backward(order_S, slot_Rk)
        return y_SD[slot_Rk].sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order_S, slot_Rk = ctx.saved_tensors
        return grads[0][order_S // slot_Rk.shape[1]], None, None


class _InFp32(torch.autograd.Function):
    """x W^T in fp32, whatever their dtype, without keeping fp32 copies of them."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_XD: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, weight_XD)
        return F.linear(x_RD.float(), weight_XD.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x_RD, weight_XD = ctx.saved_tensors
        of_x, of_weight = grads[0] @ weight_XD.float(), None
        if ctx.needs_input_grad[1]:
            of_weight = (grads[0].T @ x_RD.float()).to(weight_XD.dtype)
        return of_x.to(x_RD.dtype), of_weight


class Router(nn.Linear):
    """Which experts a position is sent to, and with which weights."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch.hidden_size, arch.num_experts, bias=False)
        self.per_position = arch.num_experts_per_tok
        self.normalise = arch.norm_topk_prob
        self.groups, self.best_groups = arch.n_group, arch.topk_group
        self.scale = arch.routed_scaling_factor
        # Moved by how many positions each expert got (`train/router_bias.py`); whole and in fp32 on every rank.
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(arch.num_experts, dtype=torch.float32), requires_grad=False)
            if arch.sigmoid_router
            else None
        )

    def forward(self, x_RD: Tensor) -> Tensor:
        """Logits [R, X]."""
        if self.e_score_correction_bias is None:
            return super().forward(x_RD)
        logits_RX: Tensor = _InFp32.apply(x_RD, self.weight)
        return logits_RX

    def choose(self, logits_RX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and numbers of each position's experts [R, k], and its probabilities of all of them [R, X]; fp32."""
        if self.e_score_correction_bias is None:
            probability_RX = F.softmax(logits_RX, dim=-1, dtype=torch.float32)
            weight_Rk, expert_Rk = probability_RX.topk(self.per_position, dim=-1)
        else:
            score_RX = logits_RX.sigmoid()
            probability_RX = score_RX / score_RX.sum(-1, keepdim=True)
            expert_Rk = self._best(score_RX.detach() + self.e_score_correction_bias)
            weight_Rk = score_RX.gather(1, expert_Rk)
        if self.normalise:
            weight_Rk = weight_Rk / weight_Rk.sum(-1, keepdim=True)
        return (weight_Rk if self.scale == 1 else weight_Rk * self.scale), expert_Rk, probability_RX

    def _best(self, score_RX: Tensor) -> Tensor:
        """The experts of the best groups with the highest scores [R, k]; a group's score is the sum of its two best experts'."""
        if self.groups > 1:
            score_RGx = score_RX.unflatten(1, (self.groups, -1))
            group_RG = score_RGx.topk(2, dim=-1).values.sum(-1)
            best_Rg = group_RG.topk(self.best_groups, dim=-1).indices
            out_RG = torch.ones_like(group_RG, dtype=torch.bool).scatter(1, best_Rg, False)
            score_RX = score_RGx.masked_fill(out_RG[:, :, None], float("-inf")).flatten(1)
        return score_RX.topk(self.per_position, dim=-1).indices


class SparseMLP(nn.Module):
    """A mixture of experts: each position is sent to the k experts that the router chooses; none is dropped."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate = Router(arch)
        self.experts = Experts(arch)
        # To which every position is sent.
        self.shared_experts = MLP(arch.hidden_size, arch.shared_width) if arch.n_shared_experts else None
        # A parallel layout's communication: from this rank's positions to all of them, and back, summed over ranks.
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.scatter: Callable[[Tensor], Tensor] | None = None
        # A parallel layout's exchange of slots with the ranks that hold the other experts.
        self.spread: Spread | None = None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and what the load-balancing loss needs: see `Decoder.balance`."""
        if self.gather is not None:
            x_BTD = self.gather(x_BTD)
        x_RD = x_BTD.flatten(0, 1)
        weight_Rk, expert_Rk, probability_RX = self.gate.choose(self.gate(x_RD))
        expert_S, order_S = expert_Rk.flatten().sort(stable=True)
        slot_Rk = order_S.argsort().view_as(expert_Rk)
        experts = torch.arange(probability_RX.shape[1], device=x_RD.device)
        # No number is read back from the device: a product's groups are bounds in its memory.
        end_X = torch.searchsorted(expert_S, experts, right=True, out_int32=True)
        x_SD, weight_S = ToSlots.apply(x_RD, order_S, slot_Rk), weight_Rk.flatten().gather(0, order_S)
        if self.spread is None:
            y_SD = self.experts(x_SD, weight_S, end_X)
        else:
            y_SD = self.spread(self.experts, x_SD, weight_S, end_X)
        out_BTD = FromSlots.apply(y_SD, order_S, slot_Rk).view_as(x_BTD)
        if self.shared_experts is not None:
            # Contiguous: torch would multiply gathered positions with frozen weights as a batch (bmm).
            out_BTD = out_BTD + self.shared_experts(x_RD.view_as(x_BTD))
        count_X = end_X.diff(prepend=end_X.new_zeros(1)).float()
        routed_2X = torch.stack((count_X, probability_RX.sum(0)))
        return out_BTD if self.scatter is None else self.scatter(out_BTD), routed_2X


class Block(nn.Module):
    """One decoder layer. With `recompute`, its activations are computed again in the backward pass.

    `contexts`, if given, is checkpoint's `context_fn`: it keeps some of them. Returns hidden states; with experts also
    what `SparseMLP` returns.
    """

    def __init__(self, arch: Architecture, *, sparse: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(arch)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp: MLP | SparseMLP = (
            SparseMLP(arch) if sparse else MLP(arch.hidden_size, arch.intermediate_size)
        )
        self.recompute = False
        self.contexts: Callable[[], Any] | None = None

    def forward(
        self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor, bias_B1TT: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        # Inside the block, not around it: sharded data parallel hooks the block's own call, and must not see the
        # second forward pass as another use of its weights.
        if self.recompute and torch.is_grad_enabled():
            how: dict[str, Any] = {} if self.contexts is None else {"context_fn": self.contexts}
            inputs = (x_BTD, cos_TH, sin_TH, bias_B1TT)
            return checkpoint(self._layer, *inputs, use_reentrant=False, preserve_rng_state=False, **how)
        return self._layer(x_BTD, cos_TH, sin_TH, bias_B1TT)

    def attend(
        self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor, bias_B1TT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The hidden states after attention, and the MLP's input."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TH, sin_TH, bias_B1TT)
        return x_BTD, self.post_attention_layernorm(x_BTD)

    def _layer(
        self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor, bias_B1TT: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_BTD, input_BTD = self.attend(x_BTD, cos_TH, sin_TH, bias_B1TT)
        out = self.mlp(input_BTD)
        return (x_BTD + out[0], out[1]) if isinstance(out, tuple) else x_BTD + out


class Head(nn.Module):
    """The output projection, or with targets the loss; a tied one has no weight and is passed the embedding's."""

    def __init__(self, arch: Architecture, *, tied_here: bool) -> None:
        super().__init__()
        self.weight = None if tied_here else nn.Parameter(torch.empty(arch.vocab_size, arch.hidden_size))
        self.loss: Loss | None = None  # set by the trainer

    def forward(
        self, x_BTD: Tensor, tied_weight_VD: Tensor | None, target_BT: Tensor | None = None
    ) -> Tensor:
        weight = self.weight if self.weight is not None else tied_weight_VD
        assert weight is not None
        if target_BT is None:
            return F.linear(x_BTD, weight)
        assert self.loss is not None
        return self.loss(x_BTD, weight, target_BT)


LayerContext = Callable[[Block, Tensor], AbstractContextManager[None]]
"""(layer, its input) -> the context in which the layer is called."""


class Trunk(nn.Module):
    """What Hugging Face calls `model`: embedding, layers, final norm, or the part of them that a stage holds."""

    def __init__(self, arch: Architecture, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        # nn.Embedding, or a parallel layout's replacement: ids [B, T] -> [B, T, D], with a `weight`.
        self.embed_tokens: nn.Module | None = (
            nn.Embedding(arch.vocab_size, arch.hidden_size) if first else None
        )
        sparse_from = arch.first_k_dense_replace if arch.num_experts else arch.num_hidden_layers
        self.layers = nn.ModuleDict({str(i): Block(arch, sparse=i >= sparse_from) for i in layers})
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps) if last else None


class Decoder(nn.Module):
    """The whole model, or the consecutive `layers` of one pipeline stage.

    A first stage takes token ids [B, T], others hidden states [B, T, D]; a last stage returns logits [B, T, V] or, with
    targets, the loss; other stages return hidden states. With experts, stages also pass on, summed over all layers so
    far, how many positions were sent to each expert, and the router's probabilities, [2, X] in fp32.

    Weights are uninitialised: `model.initialise` or a weight source fills them. Build it under `torch.device("meta")` to
    use no memory.
    """

    def __init__(
        self,
        arch: Architecture,
        layers: range | None = None,
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        self.arch = arch
        self.layer_range = range(arch.num_hidden_layers) if layers is None else layers
        self.model = Trunk(arch, self.layer_range, first=first, last=last)
        tied_here = arch.tie_word_embeddings and first
        self.lm_head = Head(arch, tied_here=tied_here) if last else None
        if arch.lora is not None:
            for block in self.blocks:
                add_adapters(block, arch.lora)
        self.rotary = RotaryTable(arch)
        # Length of the whole sequence. Set where hidden states are a part of it (sequence and context parallel).
        self.sequence_length: int | None = None
        self.document_mask: DocumentMask = document_bias  # or what the replaced `attend` of the layers takes
        # Set where a rank computes some of the positions (context parallel).
        self.own_positions: OwnPositions | None = None
        # Set by the trainer where there are experts: adds the load-balancing loss to that of the last stage.
        self.balance: Balance | None = None
        # Positions sent to each expert of each of these layers that has any, by all forward passes with gradients so far, fp64.
        self.sent_LX: Tensor | None = None
        # Set by the trainer (activation offload).
        self.layer_context: LayerContext | None = None

    @property
    def blocks(self) -> list[Block]:
        return list(self.model.layers.values())  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        routed_2X: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        target_BT: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Token ids [B, T] or hidden states [B, T, D] -> hidden states, or logits [B, T, V], or the loss of `target_BT`.

        With experts a later stage takes, and an earlier one returns, `routed_2X` beside hidden states.

        With `documents`, the document number [B, T] of each position of the whole sequence or what else `document_mask`
        takes, attention stays inside documents. Positions do not restart in each: RoPE's scores depend on relative positions only (arXiv:2104.09864,
        section 3.2).
        """
        embedding = self.model.embed_tokens
        length = self.sequence_length if self.sequence_length is not None else x.shape[1]
        h_BTD = x if embedding is None else embedding(x)
        cos_TH, sin_TH = self.rotary(length, h_BTD.device, h_BTD.dtype)
        own = self.own_positions
        if own is not None:
            cos_TH, sin_TH = own(cos_TH, 0), own(sin_TH, 0)
        # No bias argument without documents: a compiled block's call stays the same.
        mask = () if documents is None else (self.document_mask(documents, h_BTD.dtype, own),)
        counts: list[Tensor] = []
        for block in self.blocks:
            with nullcontext() if self.layer_context is None else self.layer_context(block, h_BTD):
                h_BTD = block(h_BTD, cos_TH, sin_TH, *mask)
            if isinstance(h_BTD, tuple):
                h_BTD, own_2X = h_BTD
                counts.append(own_2X[0].detach())
                routed_2X = own_2X if routed_2X is None else routed_2X + own_2X
        if counts and torch.is_grad_enabled():
            # Not in the layer, which recomputation runs again.
            sent_LX = torch.stack(counts).double()
            self.sent_LX = sent_LX if self.sent_LX is None else self.sent_LX + sent_LX
        if self.lm_head is None:
            return h_BTD if routed_2X is None else (h_BTD, routed_2X)
        assert self.model.norm is not None
        h_BTD = self.model.norm(h_BTD)
        if routed_2X is not None and self.balance is not None and torch.is_grad_enabled():
            h_BTD = self.balance(h_BTD, routed_2X)
        return self.lm_head(h_BTD, None if embedding is None else embedding.weight, target_BT)


def stored_name(name: str, arch: Architecture) -> str:
    """The name under which a parameter is stored in a file.

    Where embedding and head are tied but belong to different pipeline stages, the last stage has a copy called
    `lm_head.weight`; files contain it once, as the embedding.
    """
    if arch.tie_word_embeddings and name == "lm_head.weight":
        return "model.embed_tokens.weight"
    return name


@cache
def whole_shapes(arch: Architecture) -> Mapping[str, tuple[int, ...]]:
    """Stored name -> shape of every parameter of the whole model, in the order of the layers."""
    with torch.device("meta"):
        model = Decoder(arch)
    return MappingProxyType({stored_name(n, arch): tuple(p.shape) for n, p in model.named_parameters()})
