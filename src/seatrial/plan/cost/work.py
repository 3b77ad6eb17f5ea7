"""GPU time of one microbatch in a decoder layer, the embedding and the head: seconds by kind, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from seatrial.job.architecture import Architecture
from seatrial.job.loss_rows import loss_rows
from seatrial.plan.cost.calibration import UNIT_FACTORS, Factors
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.kernels import Kernels, UnknownSpeedError
from seatrial.plan.cost.overlap import (
    OURS,
    exposed_gather,
    exposed_scatter,
    overlaps,
    part_count,
    reorder_bytes,
)
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.model.cluster import HOST_GB_S, Group, group
from seatrial.plan.model.recipe import Recipe

# Shares of a layer's forward pass that are recomputed: (matrix products, attention, other operators, communication of
# tensor and of context parallel).
REDONE = {
    "none": (0.0, 0.0, 0.0, 0.0, 0.0),
    "attention": (0.0, 1.0, 0.0, 0.0, 1.0),
    "operators": (0.5, 0.0, 1.0, 0.0, 0.0),
    "alternate": (0.5, 0.5, 0.5, 0.5, 0.5),
    "selective": (0.0, 0.0, 1.0, 0.0, 1.0),
    "full": (1.0, 1.0, 1.0, 1.0, 1.0),
}
RING_SOURCE = (
    "ring_attention: never measured on GPUs; assumed: the next keys and values arrive while attention to those at hand is "
    "computed, and attention in steps is as fast as in one"
)
# torch.utils.checkpoint stops early: before the last product and its reduce-scatter.
EARLY_STOP = 0.75
# Bytes per score that GEMMs, softmax and dropout of unfused attention read and write, in 16 bits with a byte for the
# dropout mask.
SCORES_FORWARD, SCORES_BACKWARD = 13, 17


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass: computation, and exposed communication."""

    products: float = 0.0
    attention: float = 0.0
    operators: float = 0.0
    tensor: float = 0.0  # tensor-parallel communication
    context: float = 0.0
    slowed: float = 0.0  # slowdown of computation by overlapped tensor-parallel communication
    exchange: float = 0.0  # in which keys and values leave the NVLink domain, exposed (`context`) or not

    @property
    def kernels(self) -> float:
        return self.products + self.attention + self.operators

    @property
    def total(self) -> float:
        return self.kernels + self.tensor + self.context + self.slowed

    @property
    def window(self) -> float:
        """Seconds in which the network is free for other messages."""
        return self.total - self.exchange

    def __add__(self, other: Pass) -> Pass:
        # Written out for speed: a search adds and scales some hundred thousand of them.
        return Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.operators + other.operators,
            self.tensor + other.tensor,
            self.context + other.context,
            self.slowed + other.slowed,
            self.exchange + other.exchange,
        )

    def times(self, factor: float) -> Pass:
        return Pass(
            self.products * factor,
            self.attention * factor,
            self.operators * factor,
            self.tensor * factor,
            self.context * factor,
            self.slowed * factor,
            self.exchange * factor,
        )


@dataclass(frozen=True)
class Work:
    """One microbatch: a layer's forward, backward and recomputation; the head with its loss; the embedding."""

    forward: Pass
    backward: Pass
    again: Pass
    head_forward: Pass
    head_backward: Pass
    embedding: Pass  # forward and backward together


def tensor_group(recipe: Recipe, fabric: Fabric) -> Group:
    return group(fabric.cluster, stride=1, size=recipe.layout.tensor)


def work(
    model: Architecture,
    recipe: Recipe,
    fabric: Fabric,
    stack: Stack,
    pace: float,
    factors: Factors = UNIT_FACTORS,
) -> Work:
    """Work of a microbatch. `pace` multiplies all kernel times, `factors` those of some kinds.

    Raises UnknownNetworkError, UnknownSpeedError.
    """
    if model.num_experts:
        raise UnknownSpeedError(
            "the speed of a mixture of experts is not modelled: its grouped products were not measured"
        )
    if model.lora is not None:
        raise UnknownSpeedError("no training run with LoRA was measured")
    kernels = Kernels(fabric.cluster.gpu, recipe.precision, stack.attention)
    return _WorkBuilder(model, recipe, fabric, stack, kernels, pace, factors).build()


@dataclass(frozen=True)
class _WorkBuilder:
    model: Architecture
    recipe: Recipe
    fabric: Fabric
    stack: Stack
    kernels: Kernels
    pace: float
    factors: Factors

    def build(self) -> Work:
        r, stack, model = self.recipe, self.stack, self.model
        n, t, h = r.layout.tensor, r.tokens, model.hidden_size
        products = [(a, b // n) if i % 2 == 0 else (a // n, b) for i, (a, b) in enumerate(model.matrices())]
        parts = part_count(r) if overlaps(r, stack) else 1
        ahead = [self.kernels.product(t // parts, b, a) for a, b in products]  # of one part
        back = [self.kernels.product(t // parts, a, b) for a, b in products]
        weights = [self.kernels.product(a, b, t) for a, b in products]
        forward = sum(parts * k for k in ahead)
        backward = sum(parts * k + w for k, w in zip(back, weights, strict=True))
        positions = t / n if r.sequence_parallel else t
        cast = 0.0
        if r.precision == "fp8":  # every GEMM input is read in 16 bits and written in 8, twice
            cast = 4.0 * (2 * h + (model.query_width + model.intermediate_size) / n) * t
        moved_f = (
            stack.hidden_forward * h * positions + stack.ffn_forward * model.intermediate_size / n * t + cast
        )
        moved_b = (
            stack.hidden_backward * h * positions
            + stack.ffn_backward * model.intermediate_size / n * t
            + cast
        )
        moved_b += stack.accumulate * model.layer_parameters() / n
        copies = reorder_bytes(model, r, stack)
        # Plain tensor parallel also reorders what it gathers a second time.
        back_copies = copies if parts > 1 else 1.5 * copies
        attention_f, attention_b = self._attention()
        tensor, (context, exchange) = self._tensor(), self._context(attention_f)
        rings = r.rings and stack.name in OURS
        gap = stack.gap_s
        adds_f, adds_b = self._ring_sums() if rings else (0.0, 0.0)
        moved = self.kernels.move(moved_f + copies + adds_f) + gap
        f = Pass(forward, attention_f, moved, tensor, context, exchange=exchange)
        gathers = tensor * self._backward_gathers()
        twice = 1 if stack.name in OURS and not rings else 2
        moved = self.kernels.move(moved_b + back_copies + adds_b) + 2 * gap
        b = Pass(backward, attention_b, moved, gathers, twice * context, exchange=twice * exchange)
        redone = REDONE[r.recompute]
        if rings and r.recompute == "selective":
            redone = (*redone[:4], 0.0)  # attention is kept
        last, sent = 0.0, redone[3]
        if r.recompute == "full" and stack.layer_states == "ours":
            last, sent = parts * ahead[-1], EARLY_STOP
        again = Pass(
            f.products * redone[0] - last,
            f.attention * redone[1],
            f.operators * redone[2],
            f.tensor * sent,
            f.context * redone[4],
            exchange=f.exchange * redone[4],
        )
        v = model.vocab_size // n
        head = self.kernels.product(t, v, h)
        grow = self.kernels.move(stack.accumulate * v * h)
        head_back = grow + self.kernels.product(t, h, v) + self.kernels.product(h, v, t)
        loss = self.kernels.move(stack.loss * t * v)
        gather = self._collective(1.0) if n > 1 else 0.0
        head_passes = Pass(head, 0.0, loss / 3, gather), Pass(head_back, 0.0, 2 * loss / 3, gather)
        if stack.name in OURS:
            head_passes = self._in_parts(head, head_back, loss, gather)
        paced = self._paced
        passes = paced(f), paced(b), paced(again)
        if n > 1 and r.sequence_parallel and stack.name in OURS:
            passes = self._overlapped(passes, parts, ahead, back, weights)
        return Work(
            forward=passes[0],
            backward=passes[1],
            again=self._of_some_layers(self._with_offload(*passes)),
            head_forward=paced(head_passes[0]),
            head_backward=paced(head_passes[1]),
            embedding=paced(Pass(operators=self.kernels.move(12.0 * t * h), tensor=2 * gather)),
        )

    def _with_offload(self, forward: Pass, backward: Pass, again: Pass) -> Pass:
        """`again` with what a layer waits for its input's copies: to the host and back, each beside one pass of a layer."""
        r = self.recipe
        if not r.offloads:
            return again
        copy = r.width * r.tokens * self.model.hidden_size / r.layout.tensor / (HOST_GB_S * 1e9)
        waits = sum(max(0.0, copy - beside.total) for beside in (forward, backward + again))
        return replace(again, operators=again.operators + waits)

    def _of_some_layers(self, again: Pass) -> Pass:
        """The mean over all layers, of which only some may be recomputed."""
        if self.recipe.recompute_every == 1:
            return again
        layers = self.model.num_hidden_layers
        return again.times(self.recipe.recomputed_of(self.recipe.layout.layer_counts(layers)) / layers)

    def _in_parts(self, product: float, back: float, loss: float, gather: float) -> tuple[Pass, Pass]:
        """Passes of our chunked head: all of it is computed in the backward pass (`parallel/loss.py`).

        The weight gradient is read and written once more for every part after the first. Schedules with a split
        backward pass compute the logits in both of its passes.
        """
        r = self.recipe
        v = self.model.vocab_size // r.layout.tensor
        grown = self.kernels.move(
            2.0 * r.width * v * self.model.hidden_size * (math.ceil(r.tokens / loss_rows(v, r.tokens)) - 1)
        )
        whole = Pass(product + back, 0.0, loss + grown, 2 * gather)
        if r.layout.splits_backward:
            whole += Pass(product, 0.0, loss, gather)
        return Pass(), whole

    def _paced(self, p: Pass) -> Pass:
        q, kinds = self.pace, self.factors
        return Pass(
            p.products * q,
            p.attention * q * kinds.attention,
            p.operators * q * kinds.operators,
            p.tensor,
            p.context,
            exchange=p.exchange,
        )

    def _attention(self) -> tuple[float, float]:
        """Seconds of one layer's attention core: forward, backward."""
        r, model = self.recipe, self.model
        share = r.microbatch / (r.layout.tensor * r.context)
        if self.stack.attention == "unfused":
            # Whole score matrices are computed: a causal mask saves nothing.
            scores = share * model.num_attention_heads * float(r.sequence) ** 2
            flops = share * model.attention_flops(r.sequence, causal=False)
            speed, tiles = self.kernels.heads(model.head_dim)
            # One of the two products forward and three of the four backward have results one head wide.
            return (
                self.kernels.move(SCORES_FORWARD * scores) + flops / speed * (1 + tiles) / 2,
                self.kernels.move(SCORES_BACKWARD * scores) + 2 * flops / speed * (1 + 3 * tiles) / 4,
            )
        flops = share * model.attention_flops(r.sequence)
        return (
            self.kernels.attention(flops, r.sequence, backward=False),
            self.kernels.attention(flops, r.sequence, backward=True),
        )

    def _collective(self, count: float) -> float:
        """Seconds of `count` all-gathers or reduce-scatters of a microbatch's hidden states over the tensor group."""
        r = self.recipe
        n_bytes = 2.0 * r.tokens * self.model.hidden_size
        return count * self.fabric.seconds("all_gather", n_bytes, tensor_group(r, self.fabric))

    def _tensor(self) -> float:
        """Exposed communication of a layer's forward pass: two all-gathers, two reduce-scatters (arXiv:2205.05198)."""
        r = self.recipe
        if r.layout.tensor == 1:
            return 0.0
        if r.sequence_parallel:
            return self._collective(4.0) * (1 - self.stack.hide_tensor)
        n_bytes = 2.0 * r.tokens * self.model.hidden_size
        return 2 * self.fabric.seconds("all_reduce", n_bytes, tensor_group(r, self.fabric))

    def _overlapped(
        self,
        passes: tuple[Pass, Pass, Pass],
        parts: int,
        ahead: Sequence[float],
        back: Sequence[float],
        weights: Sequence[float],
    ) -> tuple[Pass, Pass, Pass]:
        """Forward, backward and recomputation with communication overlapped with products (`overlap.py`).

        `ahead`, `back`: seconds of one part of each of a layer's products; `weights`: of their weight gradients; all
        without the pace.
        """
        r, q = self.recipe, self.pace
        # Weight gradients of a separate pass do not overlap with reduce-scatters.
        separate = r.layout.splits_backward
        n_bytes = 2.0 * r.tokens * self.model.hidden_size / parts
        c = self.fabric.seconds("all_gather", n_bytes, tensor_group(r, self.fabric))
        # Products alternate between an all-gather before and a reduce-scatter after them; in the backward pass vice versa,
        # and the all-gathers of a separate weight pass are exposed.
        forward = [
            exposed_gather(parts, c, q * k) if i % 2 == 0 else exposed_scatter(parts, q * k, c)
            for i, k in enumerate(ahead)
        ]

        def before(k: float, w: float) -> float:
            if separate:
                return exposed_scatter(parts, q * k, c) + parts * c
            return exposed_scatter(parts, q * k, c, q * w, regathered=True)

        backward = [
            before(k, w) if i % 2 == 0 else exposed_gather(parts, c, q * k)
            for i, (k, w) in enumerate(zip(back, weights, strict=True))
        ]
        whole = REDONE[r.recompute][3]
        again = forward[:-1] if r.recompute == "full" else forward

        def with_exposed(p: Pass, exposed: list[float], share: float = 1.0, more: float = 0.0) -> Pass:
            seen = sum(exposed)
            slowed = self.stack.contention * ((len(exposed) + more) * parts * c - seen)
            return replace(p, tensor=seen * share, slowed=slowed * share)

        return (
            with_exposed(passes[0], forward),
            with_exposed(passes[1], backward, more=len(back) / 2),
            with_exposed(passes[2], again, whole),
        )

    def _backward_gathers(self) -> float:
        """Ratio of communication in the backward pass to that in the forward pass.

        Megatron keeps only a rank's part of the gathered activations, and gathers them again for the weight gradients.
        """
        again = self.recipe.sequence_parallel and self.stack.layer_states == "megatron"
        return 1.5 if again else 1.0

    def _ring_sums(self) -> tuple[float, float]:
        """Bytes that a ring's steps read and write to add up what each found, by pass (`ring.py`).

        All but the first are about 3/4 of the queries, and of the keys. Sums of queries are in fp32, of keys in 16 bits.
        """
        r, model = self.recipe, self.model
        t, later = r.tokens / r.layout.tensor, 0.75 * (r.context - 1)
        forward = t * model.query_width * (12 + 18 * later)
        return forward, t * (model.query_width * (12 + 10 * later) + 2 * model.kv_width * 6 * later)

    def _context(self, attention: float) -> tuple[float, float]:
        """Seconds of exchanging keys and values in the context group: (exposed, all that leave the NVLink domain).

        Exposed is what does not overlap with attention. Ours overlaps nothing, unless keys and values go around a ring.
        """
        r = self.recipe
        if r.context == 1:
            return 0.0, 0.0
        at = group(self.fabric.cluster, stride=r.layout.tensor, size=r.context)
        n_bytes = 2.0 * r.tokens * r.context * 2 * self.model.kv_width / r.layout.tensor
        seconds = self.fabric.seconds("all_gather", n_bytes, at)
        ours = self.stack.name in OURS
        if ours and r.rings:
            seconds = (r.context - 1) * self.fabric.send(n_bytes / r.context, across=at.domains > 1)
        leaving = seconds if at.domains > 1 else 0.0
        if ours and not r.rings:
            return seconds, leaving
        # The backward pass exchanges twice as much and has longer attention: the pass with less overlap counts for both.
        hidden = min(attention, self._attention()[1] / 2)
        if ours:
            hidden *= (r.context - 1) / r.context  # nothing is under way during the last step
        return max(0.0, seconds - hidden), leaving
