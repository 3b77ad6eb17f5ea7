"""Snapshots of this rank's state every few steps, in memory that outlives the rank, and bit-exact restore.

Training waits for one copy only. A separate thread writes it, hashed, into the older of two memory files and then
notifies the agent: however the rank ends, the newer file stays intact.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seatrial.checkpoint import memory
from seatrial.checkpoint.manifest import Damaged
from seatrial.checkpoint.stream import DTYPES, FilePlan, raw_bytes
from seatrial.checkpoint.write import Piece
from seatrial.hardware import accelerator
from seatrial.parallel.build import ParallelModel
from seatrial.record.messages import SnapshotFilled
from seatrial.train.checkpointing import state
from seatrial.train.optimizer import ShardedOptimizer
from seatrial.train.records import Records

Report = Callable[[SnapshotFilled], object]


@dataclass
class _PendingWrite:
    """A copy that is to be written."""

    step: int
    generation: int
    slot: int
    copied: torch.Event | None


class Snapshots:
    """Takes this rank's snapshots. `take` never waits for a write; `close` waits for the last one."""

    def __init__(
        self,
        fds: tuple[int, int],
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        *,
        records: Records,
        every: int,
        report: Report,
        held: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`fds`: two memory files; `held`: the spec's "snapshots", their current content; `every`: steps, 0 for never.

        `report` is called on another thread, with `SnapshotFilled` once a file is complete.
        """
        self.taken = 0
        self.skipped = 0  # because the previous one was still being written
        self.failed = 0
        self._fds = fds
        # Only tensors are referenced, so that the model and its process groups can be released.
        self._rank, self._device = model.mesh.rank, model.mesh.device
        self._layout = memory.layout_key(model.mesh.layout.as_dict())
        self._records, self._generation, self._every, self._report = (
            records,
            records.generation,
            every,
            report,
        )
        self._held: list[tuple[int, int] | None] = [None, None]  # (generation, step) of each file
        self._entries: list[Mapping[str, Any] | None] = [
            None,
            None,
        ]  # each file's description, needed to read it
        for entry in held:
            self._held[entry["slot"]] = (entry["generation"], entry["step"])
            self._entries[entry["slot"]] = entry
        self._failure: tuple[int, str] | None = None  # of the writing thread, not yet reported
        # Larger elements first: each tensor is aligned to its element size, and the copy can be viewed as tensors.
        lasting = state.lasting_pieces(model, optimizer)
        pieces = lasting + state.random_pieces(self._rank, self._device)
        pieces.sort(key=lambda piece: -piece.tensor.element_size())
        self._plan = FilePlan([(piece.key, piece.tensor) for piece in pieces])
        self._indexed = [piece.to_index() for piece in pieces]
        self._keys = [piece.key for piece in pieces]
        self._lasting = {piece.key: piece.tensor for piece in lasting}
        # Pinned for a GPU, so that the copy overlaps with the next step.
        self._copy = accelerator.host_memory((self._plan.data_bytes,), torch.uint8, self._device)
        self._views = [
            self._copy[offset : offset + p.tensor.nbytes].view(p.tensor.dtype).view(p.tensor.shape)
            for p, offset in zip(pieces, self._plan.offsets, strict=True)
        ]
        self._free = threading.Event()  # set while the writing thread does not use the copy
        self._orders: queue.SimpleQueue[_PendingWrite | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="snapshots", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Bytes of one snapshot without its header."""
        return self._plan.data_bytes

    @property
    def busy(self) -> bool:
        """Whether `take` would skip. Ranks skip together, so that all have snapshots of the same steps."""
        return not self._free.is_set()

    @property
    def rollback_bound(self) -> int | None:
        """The step of the older snapshot, None if there is none: no rollback, now or later, goes further back."""
        return min((held[1] for held in self._held if held is not None), default=None)

    def forget_after(self, step: int) -> None:
        """Drop later snapshots after a rollback to `step`: they are from an abandoned trajectory, overwritten first.

        Call it after `settle`. A new snapshot of the same step must not be confused with one of that trajectory.
        """
        for slot, held in enumerate(self._held):
            if held is not None and held[1] > step:
                self._held[slot] = self._entries[slot] = None

    def due(self, step: int) -> bool:
        """Whether a snapshot is due after `step`."""
        return self._every > 0 and step % self._every == 0

    @torch.no_grad()
    def take(self, step: int) -> bool:
        """Copy the state as it is after `step`; False, with nothing copied, while the last one is being written."""
        self._report_failure()
        if not self._free.is_set():
            self.skipped += 1
            self._report_skip(step)
            return False
        self._free.clear()
        random = {piece.key: piece.tensor for piece in state.random_pieces(self._rank, self._device)}
        sources = [self._lasting[key] if key in self._lasting else random[key] for key in self._keys]
        for view, source in zip(self._views, sources, strict=True):
            view.copy_(source, non_blocking=True)
        copied = accelerator.record() if accelerator.is_accelerator(self._device) else None
        slot = min((0, 1), key=lambda i: self._held[i] or (-1, -1))
        self._held[slot] = self._entries[slot] = None
        self.taken += 1
        self._orders.put(_PendingWrite(step, self._generation, slot, copied))
        return True

    def settle(self) -> list[Mapping[str, Any]]:
        """Wait until nothing is being written; returns the files' entries, as `restore_from_memory` takes them."""
        self._free.wait()
        return [entry for entry in self._entries if entry is not None]

    def close(self) -> None:
        """Wait until the last snapshot is written and reported."""
        self._orders.put(None)
        self._thread.join()
        self._report_failure()

    # -- the writing thread

    def _write_all(self) -> None:
        # First-touch page faults are slower than the copy: caused here, not in the first `take`.
        if not self._copy.is_pinned():
            self._copy.zero_()
        self._free.set()
        while (taken := self._orders.get()) is not None:
            try:
                message = self._write(taken)
            except (OSError, Damaged, RuntimeError) as error:
                # Most likely out of memory. Training does not need this snapshot; the other file is intact.
                self.failed += 1
                self._failure = (taken.step, str(error))
            else:
                self._held[taken.slot] = (taken.generation, taken.step)
                self._entries[taken.slot] = message
                self._report(SnapshotFilled(**message))
            self._free.set()

    def _write(self, taken: _PendingWrite) -> dict[str, Any]:
        begin = time.perf_counter()
        if taken.copied is not None:
            taken.copied.synchronize()
        of = {"rank": self._rank, "step": taken.step, "generation": taken.generation}
        head = self._plan.head(memory.metadata(**of, layout=self._layout))
        size = len(head) + self._plan.data_bytes
        filling = memory.Filling(self._fds[taken.slot], size)
        filling.add(head)
        filling.add(raw_bytes(self._copy))
        digest = filling.finish()
        values = {
            "slot": taken.slot,
            **of,
            "layout": self._layout,
            "bytes": size,
            "hash": digest,
            "index": {"pieces": self._indexed},
        }
        return {**values, "seconds": time.perf_counter() - begin}

    # -- events

    def _report_skip(self, step: int) -> None:
        # Only the 1st, 2nd, 4th, ...: a slow machine would fill the events file.
        if self.skipped & (self.skipped - 1) == 0:
            self._event(
                "snapshot_skipped",
                f"no snapshot of step {step}: the previous one is still being written ({self.skipped} skipped)",
                {"step": step, "skipped": self.skipped},
            )

    def _report_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            step, why = failure
            data = {"step": step, "failed": self.failed}
            self._event("snapshot_failed", f"the snapshot of step {step} could not be written: {why}", data)

    def _event(self, kind: str, message: str, data: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop training here
            self._records.event(kind, message, severity="warning", data=data)


def restore_from_memory(
    fd: int,
    entry: Mapping[str, Any],
    model: ParallelModel,
    optimizer: ShardedOptimizer,
    *,
    checked: bool = False,
) -> int:
    """Restore this rank from the snapshot in `fd`, its own or a replica's; returns its step.

    `entry` is its description in the generation spec's "snapshots". Weights, optimizer state, update count and random
    state are restored bit for bit, also boxes that others own, but not a replica's random state, see
    `carried.broadcast_state`. `checked`: `memory.verify` was called just before. Raises Damaged, with nothing changed, if
    the content does not match `entry`, this rank or its layout. The file is only read.
    """
    if not checked:
        memory.verify(fd, entry)
    header, tensors, start = memory.read_header(fd)
    mesh = model.mesh
    whose = entry["rank"] if entry["rank"] in mesh.layout.replicas(mesh.rank) else mesh.rank
    wanted = memory.metadata(
        rank=whose,
        step=entry["step"],
        generation=entry["generation"],
        layout=memory.layout_key(mesh.layout.as_dict()),
    )
    if header != wanted:
        raise Damaged(f"the memory file holds {header}, not {wanted}")
    lasting = state.lasting_pieces(model, optimizer)
    random = state.random_pieces(mesh.rank, mesh.device) if whose == mesh.rank else []
    places = [_place(piece, tensors) for piece in lasting + random]
    for piece, place in zip(lasting + random, places, strict=True):
        _read(fd, piece.tensor, start + place, mesh.device)
    optimizer.set_step(int(next(p.tensor for p in lasting if p.key == state.UPDATES)))
    state.set_random_state({piece.key: piece.tensor for piece in random}, mesh.rank, mesh.device)
    return int(entry["step"])


def _place(piece: Piece, tensors: Mapping[str, Any]) -> int:
    """Offset of the data of `piece`. Raises Damaged if the file has no such tensor."""
    found = tensors.get(piece.key) or {}
    if found.get("dtype") != DTYPES[piece.tensor.dtype] or found.get("shape") != list(piece.tensor.shape):
        raise Damaged(f"the memory file has {found} for {piece.key}, a tensor of {tuple(piece.tensor.shape)}")
    begin, end = found["data_offsets"]
    if end - begin != piece.tensor.nbytes:
        raise Damaged(f"the memory file has {end - begin} bytes for {piece.key}")
    return int(begin)


@torch.no_grad()
def _read(fd: int, tensor: Tensor, offset: int, device: torch.device) -> None:
    if not tensor.numel():
        return
    straight = not accelerator.is_accelerator(device) and tensor.is_contiguous()
    target = tensor if straight else torch.empty(tensor.shape, dtype=tensor.dtype)
    view = raw_bytes(target)
    while view:
        n = os.preadv(fd, [view], offset)
        if n == 0:
            raise Damaged("the memory file is truncated")
        view, offset = view[n:], offset + n
    if not straight:
        tensor.copy_(target)
