"""Muon: orthogonalised momentum for the matrices of layers (arXiv:2502.16982); AdamW for embedding, head, norms, biases.

Orthogonalising needs whole matrices, and each rank of a stage holds a part. So the matrices are divided among these ranks,
replicas included. In a round each rank gets the parts of one matrix (of stacked experts: of several), orthogonalises it,
and sends every rank its part of the result. Nothing is computed twice, and replicas get the same bits. Both messages are
in bf16, as the computation is in torch.optim.Muon: 4 bytes sent for each of the rank's own values, and no rounding added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from seatrial.base.box import Box, chunk
from seatrial.job.layout import Coordinates, Layout
from seatrial.job.optimizers import is_hidden_matrix
from seatrial.job.schema import OptimizerSection
from seatrial.parallel.build import Shard, held_box
from seatrial.parallel.mesh import Mesh
from seatrial.parallel.tensor import split_dimension
from seatrial.train.optimizer import ShardedAdamW

# torch.optim.Muon's; the coefficients are those of kellerjordan.github.io/posts/muon.
STEPS, A, B, C, EPS = 5, 3.4445, -4.7750, 2.0315, 1e-7


def orthogonalise(x: Tensor) -> Tensor:
    """Newton-Schulz iteration in bf16 of one matrix, or of each in a stack; the operations of torch.optim.Muon."""
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    x = x.bfloat16()
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


@dataclass(frozen=True)
class Part:
    """What a rank orthogonalises in a round: matrix `number`, whole, or some of the matrices stacked in it."""

    number: int
    box: Box


def divide(shapes: Sequence[tuple[int, ...]], layout: Layout) -> list[list[Part | None]]:
    """Rounds: for each rank of a stage the part of one of these matrices, or of a stack, that it orthogonalises.

    A stack's part is among those matrices of which the rank holds something: only tensor-parallel ranks exchange it.
    """
    ranks = _ranks(layout)
    rounds: list[list[Part | None]] = []
    # Those of a round take equally long, as far as possible: its ranks wait for each other.
    single = [n for n, shape in enumerate(shapes) if len(shape) == 2]
    single.sort(key=lambda n: (-min(shapes[n]) * shapes[n][0] * shapes[n][1], shapes[n], n))
    for begin in range(0, len(single), len(ranks)):
        own = single[begin : begin + len(ranks)]
        rounds.append([Part(n, Box.whole(shapes[n])) for n in own] + [None] * (len(ranks) - len(own)))
    for n, shape in enumerate(shapes):
        if len(shape) == 3:
            stacked: list[Part | None] = []
            for at in ranks:
                box = Box.whole(shape).narrow(
                    0, *chunk(shape[0], layout.shard, layout.expert_shard(at.shard))
                )
                among = (layout.replicate * layout.tensor, at.replicate * layout.tensor + at.tensor)
                box = box.narrow(0, *chunk(box.sizes[0], *among))
                stacked.append(Part(n, box) if box.numel else None)
            rounds.append(stacked)
    return rounds


def _ranks(layout: Layout) -> list[Coordinates]:
    """The ranks of a pipeline stage."""
    return [layout.coordinates(n) for n in range(layout.world_size // layout.pipeline)]


@dataclass(frozen=True)
class _Round:
    """A round as one rank sees it. Lists are by rank of the stage; None: nothing is sent."""

    part: Part | None  # what this rank orthogonalises
    sent: list[Box | None]  # of that rank's part, what this one sends it
    received: list[Box | None]  # of this rank's part, what that one sends
    returned: list[Box | None]  # of this rank's part, what that one holds
    own: list[tuple[int, Box] | None]  # of that rank's part, what this one holds: (number, box)


class ShardedMuon(ShardedAdamW):
    """Muon over this rank's shards."""

    prepares = True

    def __init__(self, shards: list[Shard], settings: OptimizerSection, mesh: Mesh) -> None:
        super().__init__(shards, settings)
        self._settings = settings
        self._layout, self._group = mesh.layout, mesh.stage
        # By number: the same on every rank of the stage, also where this one holds nothing of a matrix.
        self._matrices = [s for s in shards if s.trained and is_hidden_matrix(s.name, s.whole)]
        slots = {id(slot.shard): slot for slot in self._slots}
        self._own = {n: slots[id(s)] for n, s in enumerate(self._matrices) if id(s) in slots}
        ranks = _ranks(mesh.layout)
        rounds = divide([s.whole for s in self._matrices], mesh.layout)
        self._rounds = [self._seen(parts, ranks, mesh.rank % len(ranks)) for parts in rounds]
        self._directions: dict[int, Tensor] = {}  # number -> this rank's part of the orthogonalised momentum
        self._count = torch.zeros_like(self._refused)

    def _seen(self, parts: list[Part | None], ranks: list[Coordinates], rank: int) -> _Round:
        def held(at: Coordinates, part: Part | None) -> Box | None:
            if part is None:
                return None
            matrix = self._matrices[part.number]
            return held_box(matrix.name, matrix.whole, self._layout, at).intersect(part.box)

        def given(at: Coordinates, to: Coordinates, part: Part | None) -> Box | None:
            # By the replica of `to`; of what tensor parallel does not split, by its first rank.
            if part is None or at.replicate != to.replicate:
                return None
            split = split_dimension(self._matrices[part.number].name) is not None
            return held(at, part) if split or at.tensor == 0 else None

        me, part = ranks[rank], parts[rank]
        own = [(p, held(me, p)) for p in parts]
        return _Round(
            part=part,
            sent=[given(me, to, p) for to, p in zip(ranks, parts, strict=True)],
            received=[given(at, me, part) for at in ranks],
            returned=[held(at, part) for at in ranks],
            own=[None if p is None or box is None else (p.number, box) for p, box in own],
        )

    def counts(self) -> list[Tensor]:
        return [self._count, *super().counts()]

    def clear_gradients(self) -> None:
        super().clear_gradients()
        self._directions.clear()

    @torch.no_grad()
    def prepare(self, scale: Tensor | None) -> None:
        """Orthogonalise the momentum that this update will have. All ranks of the stage call it."""
        self._directions = {
            n: torch.empty_like(slot.shard.local, dtype=torch.bfloat16) for n, slot in self._own.items()
        }
        for each in self._rounds:
            self._round(each, scale)

    def _round(self, each: _Round, scale: Tensor | None) -> None:
        ahead = {n: self._ahead(n, scale) for n in dict(e for e in each.own if e is not None)}
        sent = [
            None if box is None or own is None else _cut(ahead[own[0]], self._matrices[own[0]].box, box)
            for box, own in zip(each.sent, each.own, strict=True)
        ]
        received = self._exchange(sent, each.received)
        returned: list[Tensor | None] = [None] * len(sent)
        if each.part is not None:
            whole = self._refused.new_empty(each.part.box.sizes, dtype=torch.bfloat16)
            for box, values in zip(each.received, received, strict=True):
                if box is not None:
                    _cut(whole, each.part.box, box).copy_(values.view(box.sizes))
            whole = orthogonalise(whole)
            returned = [None if box is None else _cut(whole, each.part.box, box) for box in each.returned]
        back = self._exchange(returned, [None if own is None else own[1] for own in each.own])
        for own, values in zip(each.own, back, strict=True):
            if own is not None:
                number, box = own
                direction = _cut(self._directions[number], self._matrices[number].box, box)
                direction.copy_(values.view(box.sizes))

    def _ahead(self, number: int, scale: Tensor | None) -> Tensor:
        """This rank's part of the momentum after the update, in bf16."""
        slot, settings = self._own[number], self._settings
        gradient = slot.shard.grad
        assert gradient is not None
        if scale is not None:
            gradient = gradient * scale
        momentum = slot.state["momentum"].lerp(gradient, 1 - settings.momentum)
        return (gradient.lerp(momentum, settings.momentum) if settings.nesterov else momentum).bfloat16()

    def _exchange(self, sent: list[Tensor | None], sizes: list[Box | None]) -> Sequence[Tensor]:
        """Send each rank of the stage its tensor; returns what each sent, flat, of these sizes."""
        flat = torch.cat([self._refused.new_empty(0).bfloat16() if t is None else t.flatten() for t in sent])
        if self._group is None:
            return [flat]
        counts = [0 if box is None else box.numel for box in sizes]
        out = flat.new_empty(sum(counts))
        dist.all_to_all_single(
            out, flat, counts, [0 if t is None else t.numel() for t in sent], group=self._group
        )
        return out.split(counts)

    def _apply(self, lr: float) -> None:
        settings, refused = self._settings, self._refused > 0
        super()._apply(lr * settings.adamw_lr_factor)
        for number, slot in self._own.items():
            values, momentum, gradient = slot.parameter, slot.state["momentum"], slot.parameter.grad
            if gradient is None:
                continue
            own_lr = lr * slot.lr_factor
            new = momentum.lerp(gradient, 1 - settings.momentum)
            momentum.copy_(torch.where(refused, momentum, new))
            step = -own_lr * self._adjusted(slot.shard.whole)
            new = torch.add(values * (1 - own_lr * slot.weight_decay), self._directions[number], alpha=step)
            values.copy_(torch.where(refused, values, new))
        self._count.copy_(torch.where(refused, self._count, self._count + 1))

    def _adjusted(self, shape: tuple[int, ...]) -> float:
        """Factor on the learning rate: "match_rms_adamw" of arXiv:2502.16982, "original" of Keller Jordan."""
        rows, columns = shape[-2:]
        if self._settings.adjust_lr == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def _cut(values: Tensor, at: Box, box: Box) -> Tensor:
    """The part `box` of `values`, which are those of `at`."""
    return values[box.relative_to(at).slices()]
