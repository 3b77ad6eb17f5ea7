"""Detection of silent data corruption: state that changes between two updates, and replicas whose weights differ.

Weights are compared by two 64-bit sums of their bits. Integer sums do not depend on the order of addition, so they are
equal on every device; one changed bit always changes the first, and the second weights each word by its position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seatrial.base.errors import RunFailed
from seatrial.job.layout import Coordinates, Layout
from seatrial.parallel.build import ParallelModel
from seatrial.train.optimizer import ShardedOptimizer
from seatrial.train.step import CHANGED, CHANGED_COPIED

KINDS = ("replicas", "tensor ranks", "ends of the pipeline")

_SMALL = 1 << 15  # bytes: norms and biases, whose own kernels would take longer to start than to run
_ROW = 4096  # words: positions are weighted by row and by column, without a temporary as large as the weights


class CorruptState(RunFailed):
    """The state of some rank is corrupt; raised in all ranks.

    Checkpoints and snapshots of `last_good_step` and before are not affected.
    """

    def __init__(self, message: str, *, step: int, last_good_step: int, blamed: Sequence[int]) -> None:
        super().__init__(
            message,
            hint="a device's memory or arithmetic is faulty, not the job: test the devices of these ranks",
        )
        self.step = step
        self.last_good_step = last_good_step
        self.blamed = tuple(blamed)


def _words(values: Tensor) -> list[Tensor]:
    """The memory of `values` as integers: 64-bit words, and narrower ones for the remainder."""
    flat = values.detach().view(-1)
    narrow = {4: torch.int32, 2: torch.int16, 8: torch.int64}[flat.element_size()]
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        return [flat.view(narrow)]
    whole = flat.numel() // per_word * per_word
    parts = (flat[:whole].view(torch.int64), flat[whole:].view(narrow))
    return [p for p in parts if p.numel()]


def _sum(words: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of all words modulo 2^64, an int64 scalar."""
    if not words:
        return torch.zeros((), dtype=torch.int64, device=device)
    large = [w for w in words if w.nbytes > _SMALL]
    small: dict[torch.dtype, list[Tensor]] = {}
    for word in words:
        if word.nbytes <= _SMALL:
            small.setdefault(word.dtype, []).append(word)
    joined = [torch.cat(each) for each in small.values()]
    return torch.stack([w.sum(dtype=torch.int64) for w in large + joined]).sum()


def _weighted_sum(words: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of (2 i + 1) x word i of each tensor, times an odd number that differs between tensors; modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, word in enumerate(words):
        full = word.numel() // _ROW * _ROW
        table = word[:full].view(-1, _ROW)
        rest = word[full:]
        # Word i of the table is in row r, column c, and 2 i + 1 = (2 r ROW + 1) + 2 c.
        rows = torch.arange(table.shape[0], device=device) * (2 * _ROW) + 1
        columns = torch.arange(_ROW, device=device) * 2
        behind = (torch.arange(rest.numel(), device=device) + full) * 2 + 1
        own = (table.sum(1, dtype=torch.int64) * rows).sum()
        own += (table.sum(0, dtype=torch.int64) * columns).sum()
        own += (rest * behind).sum()
        total += own * (2 * number + 1)
    return total


class AtRest:
    """Checksum of weights and optimizer state between two updates, when nothing may change them."""

    def __init__(self, model: ParallelModel, optimizer: ShardedOptimizer) -> None:
        self._device = model.mesh.device
        self._words = [w for t in [*(s.local for s in model.shards), optimizer.buffer] for w in _words(t)]
        self._kept: Tensor | None = None
        self._copied: Tensor | None = None

    @torch.no_grad()
    def keep(self) -> None:
        """Record the checksum of the state, which was just updated or loaded."""
        self._kept = _sum(self._words, self._device)
        self._copied = None

    @torch.no_grad()
    def copied(self) -> None:
        """Record that the state was just copied: if it has already changed, the copy may be corrupt too."""
        if self._kept is not None:
            self._copied = (_sum(self._words, self._device) != self._kept) * CHANGED_COPIED

    @torch.no_grad()
    def changed(self) -> Tensor | None:
        """A code (step.INTACT, CHANGED_COPIED, CHANGED) on the device, without a host sync."""
        if self._kept is None:
            return None
        code = (_sum(self._words, self._device) != self._kept) * CHANGED
        return code if self._copied is None else torch.where(self._copied > 0, self._copied, code)


@dataclass(frozen=True)
class Mismatch:
    """Ranks whose weights should be equal and are not."""

    blamed: list[int]
    message: str
    groups: list[list[int]] = field(default_factory=list)


class Replicas:
    """Compares the weights of the ranks that hold the same shard."""

    def __init__(self, model: ParallelModel) -> None:
        self._mesh = model.mesh
        tied = model.arch.tie_word_embeddings and model.mesh.layout.pipeline > 1
        held = [
            model.shards,
            [s for s in model.shards if s.holders > 1],
            [s for s in model.shards if tied and s.name == "model.embed_tokens.weight"],
        ]
        self._words = [[w for s in shards for w in _words(s.local)] for shards in held]
        self.groups = groups(model.mesh.layout, tied=tied)

    @torch.no_grad()
    def find(self) -> Mismatch | None:
        """Find weights that differ. All ranks call it, after the same update, and get the same result."""
        if not any(self.groups.values()):
            return None  # no weights are replicated
        mesh = self._mesh
        device = mesh.device
        table = torch.zeros(mesh.layout.world_size, len(KINDS), 2, dtype=torch.int64, device=device)
        for kind, words in enumerate(self._words):
            table[mesh.rank, kind, 0] = _sum(words, device)
            table[mesh.rank, kind, 1] = _weighted_sum(words, device)
        mesh.sum_over_ranks(table)
        sums = [[(int(a), int(b)) for a, b in of_rank] for of_rank in table.tolist()]
        return compare(self.groups, sums)


def groups(layout: Layout, *, tied: bool) -> dict[int, list[list[int]]]:
    """For each of KINDS, the groups of two or more ranks that hold the same weights of that kind."""
    found: dict[int, dict[tuple[int, ...], list[int]]] = {0: {}, 1: {}, 2: {}}
    for rank in range(layout.world_size):
        at: Coordinates = layout.coordinates(rank)
        found[0].setdefault((at.pipeline, at.shard, at.tensor), []).append(rank)
        found[1].setdefault((at.pipeline, at.replicate, at.shard), []).append(rank)
        if tied and at.pipeline in (0, layout.pipeline - 1):
            found[2].setdefault((at.replicate, at.shard, at.tensor), []).append(rank)
    return {kind: [g for g in by_key.values() if len(g) > 1] for kind, by_key in found.items()}


def compare(
    groups_of_kind: dict[int, list[list[int]]], sums: Sequence[Sequence[tuple[int, int]]]
) -> Mismatch | None:
    """Blame ranks by `sums`[rank][kind]: the minority of a group; without a majority the whole group is suspect.

    A corrupt rank differs in at least one of its groups; if several groups differ, the ranks common to them are blamed.
    """
    suspects: list[set[int]] = []
    wrong: list[list[int]] = []
    kinds: list[str] = []
    for kind, members in groups_of_kind.items():
        for group in members:
            of_group = Counter(sums[r][kind] for r in group)
            if len(of_group) == 1:
                continue
            most, count = of_group.most_common(1)[0]
            agree = 2 * count > len(group)
            suspects.append({r for r in group if not agree or sums[r][kind] != most})
            wrong.append(group)
            if KINDS[kind] not in kinds:
                kinds.append(KINDS[kind])
    if not suspects:
        return None
    common = set.intersection(*suspects)
    blamed = sorted(common or set.union(*suspects))
    who = _ranks(blamed)
    if len(blamed) > 1 and common:
        who = f"one of {who}"
    return Mismatch(
        blamed, f"weights that must be equal differ between {' and '.join(kinds)}: {who} is damaged", wrong
    )


class Integrity:
    """Both checks, and the last steps that passed them. Raises CorruptState in all ranks."""

    def __init__(self, model: ParallelModel, optimizer: ShardedOptimizer) -> None:
        self.at_rest = AtRest(model, optimizer)
        self._replicas = Replicas(model)
        self._good = (0, 0)

    def begin(self, step: int) -> None:
        """Start with the state after `step`, just loaded."""
        self._good = (step, step)
        self.at_rest.keep()

    @property
    def rollback_bound(self) -> int:
        """The last verified step but one: a copy made at the last one may still be distrusted."""
        return self._good[0]

    def verify(self, step: int) -> None:
        """Compare replicas after the update of `step`. All ranks call it."""
        wrong = self._replicas.find()
        if wrong is not None:
            raise self._corrupt(step, wrong.message, wrong.blamed, self._good[1])
        self._good = (self._good[1], step)

    def judge(self, step: int, changed: Mapping[int, int]) -> None:
        """Raise CorruptState if any state changed; `changed`: rank -> code, from the vector of `step`."""
        if not changed:
            return
        # A copy made after the change is corrupt too.
        good = self._good[CHANGED_COPIED not in changed.values()]
        message = f"weights or optimizer state of {_ranks(sorted(changed))} changed between two updates"
        raise self._corrupt(step, message, sorted(changed), good)

    @staticmethod
    def _corrupt(step: int, message: str, blamed: list[int], good: int) -> CorruptState:
        text = f"{message} (found at step {step}, no damage at step {good})"
        return CorruptState(text, step=step, last_good_step=good, blamed=blamed)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
