"""A timeline of a step's memory: a log of storages that are allocated, resized and freed, and its peaks.

Pure, no torch. Storages are numbers. The kind of a storage is often known only later, when it is passed to a collective
or becomes a gradient, so kinds may be assigned at any time and count from the storage's allocation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

# Parts of a segment that are distinguished individually, from its beginning and from its end. Where a segment iterates over
# layers (gradient reduction at the end of a pipeline's step, the weight pass of a split backward pass), traces with
# different numbers of layers agree part by part near both ends, and no part between them is higher.
_EDGE = 16

TEMPORARY, ACTIVATIONS = "temporary", "activations"


@dataclass(frozen=True)
class Peak:
    """The peak of one part of a step: bytes by kind."""

    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass
class Timeline:
    """A log. `resize` appends to it, `mark` begins a segment, `split` a part of one."""

    round_to: int = 1  # bytes: the allocator rounds up to multiples of this
    _changes: list[tuple[int, int]] = field(default_factory=list)  # (storage, change in bytes)
    _marks: list[tuple[int, str]] = field(default_factory=list)  # (changes so far, label)
    _splits: list[int] = field(default_factory=list)
    _kinds: dict[int, str] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)  # of storages that are alive

    def resize(self, storage: int, n_bytes: int) -> None:
        """Record that `storage` has `n_bytes` from now on; 0: it is freed."""
        n_bytes = -(-n_bytes // self.round_to) * self.round_to
        more = n_bytes - self._sizes.get(storage, 0)
        if more:
            self._changes.append((storage, more))
        if n_bytes:
            self._sizes[storage] = n_bytes
        else:
            self._sizes.pop(storage, None)

    def restart(self) -> None:
        """Restart the log with the storages that are alive now."""
        self._changes = list(self._sizes.items())
        self._marks.clear()
        self._splits.clear()

    def mark(self, label: str) -> None:
        """Begin a segment called `label`, which ends the previous one."""
        self._marks.append((len(self._changes), label))

    def split(self) -> None:
        """End a part of the segment here, and begin another."""
        self._splits.append(len(self._changes))

    def set_kind(self, storage: int, kind: str) -> None:
        """Assign a kind to `storage`; the first one assigned counts."""
        self._kinds.setdefault(storage, kind)

    def peaks(self) -> dict[str, Peak]:
        """The peak under each label, over all segments with that label, part by part.

        A key is the label, `#`, and the part: `+0`, `+1`, ... from the segment's beginning, `-1`, `-2`, ... from its
        end, or `mid`. A storage without a kind is `temporary` if it was allocated and freed within one segment, else
        `activations`.
        """
        fleeting = self._short_lived()
        live: dict[str, int] = {}
        total = 0
        found: dict[str, Peak] = {}
        for keys, changes in self._parts():
            # What is alive at its beginning counts too.
            best, best_total = dict(live), total
            for storage, more in changes:
                kind = self._kinds.get(storage) or (TEMPORARY if storage in fleeting else ACTIVATIONS)
                live[kind] = live.get(kind, 0) + more
                total += more
                if total > best_total:
                    best, best_total = dict(live), total
            for key in keys:
                known = found.get(key)
                if known is None or best_total > known.total:
                    found[key] = Peak({k: v for k, v in best.items() if v})
        return found

    def _bounds(self) -> list[tuple[int, int, str]]:
        ends = [begin for begin, _ in self._marks[1:]] + [len(self._changes)] * bool(self._marks)
        return [(begin, end, label) for (begin, label), end in zip(self._marks, ends, strict=True)]

    def _parts(self) -> Iterator[tuple[list[str], Iterable[tuple[int, int]]]]:
        splits = iter(self._splits)
        at = next(splits, None)
        first = self._marks[0][0] if self._marks else len(self._changes)
        yield ["before#+0"], self._changes[:first]
        for begin, end, label in self._bounds():
            cuts = [begin]
            while at is not None and at <= end:
                if at >= begin:
                    cuts.append(at)
                at = next(splits, None)
            cuts.append(end)
            n = len(cuts) - 1
            for i in range(n):
                yield [f"{label}#{_part(i, n)}"], self._changes[cuts[i] : cuts[i + 1]]

    def _short_lived(self) -> set[int]:
        """Storages that were allocated and freed within one segment."""
        out: set[int] = set()
        for begin, end, _ in self._bounds():
            allocated: dict[int, int] = {}
            seen: set[int] = set()
            for storage, more in self._changes[begin:end]:
                if storage not in seen:
                    seen.add(storage)
                    if more > 0:
                        allocated[storage] = 0
                if storage in allocated:
                    allocated[storage] += more
            out.update(storage for storage, left in allocated.items() if left == 0)
        return out


def _part(i: int, n: int) -> str:
    if i < _EDGE:
        return f"+{i}"
    return f"-{n - i}" if n - i <= _EDGE else "mid"


def position(index: int, count: int, edge: int = 2) -> str:
    """Name of a layer in a label: `+0`, `+1` from the first, `-1`, `-2` from the last, `mid` between them.

    Sharded data parallel prefetches one layer ahead of the current one, so two layers at either end may differ from
    those between. `edge`: how many have names of their own there; more where only every n-th layer is recomputed.
    """
    if index < edge and index < count - edge:
        return f"+{index}"
    return f"-{count - index}" if count - index <= edge else "mid"


def microbatch_label(microbatch: int, microbatches: int, edges: tuple[int, int]) -> str:
    """Name of a microbatch in a label: the first and the last `edges` by number, `mid` between them."""
    first, last = edges
    if microbatch < first:
        return f"+{microbatch}"
    left = microbatches - microbatch
    return f"-{left}" if left <= last else "mid"
