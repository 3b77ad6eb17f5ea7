"""Asynchronous saves: the state is copied into memory that another process writes to the storage.

Training waits only for the copy. The memory is an anonymous file (memfd), laid out as the final safetensors file;
the process reads it there.
"""

from __future__ import annotations

import contextlib
import json
import select
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from seatrial.base.stalled import SAMPLE_S, StalledProcesses
from seatrial.checkpoint.manifest import Manifest
from seatrial.checkpoint.staging_memory import StagingMemory
from seatrial.checkpoint.stream import FilePlan
from seatrial.checkpoint.write import Piece, boxes_of
from seatrial.checkpoint.writer_process import Outcome, What, WriterProcess

__all__ = ["AsyncWriter", "Outcome"]


class AsyncWriter:
    """One rank's copy of its state, and the process that writes it. Used by the main thread.

    Every order gets exactly one Outcome, whatever happens to the process; if it has ended, the next order starts a
    new one.
    """

    def __init__(self, *, rank: int, world_size: int, device: torch.device) -> None:
        """Starts nothing and takes no memory until `prepare` or `stage`."""
        self._rank, self._world_size = rank, world_size
        self._memory = StagingMemory(device)
        self._process: WriterProcess | None = None
        self._stalled = StalledProcesses()
        self._orders: dict[tuple[int, What], float] = {}  # not answered yet -> time it was given
        self._received: list[Outcome] = []  # received, not polled yet
        self._size = self._index_bytes = 0  # of what is staged
        self._staged = False  # the memory holds one complete state
        self._leave = False  # a hung process holds it: the next copy uses new memory
        self._rubbish: list[
            tuple[str, int, int]
        ] = []  # parts to be removed once there is a checkpoint elsewhere
        # The last part that was ordered, until it is committed.
        self._part: tuple[str, int, int] | None = None

    # -- the copy

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Allocate the memory for a copy of `pieces` now, in parallel with training: otherwise the first `stage` waits.

        Raises OSError if there is not enough.
        """
        plan, head, index = _plan(pieces)
        self._memory.prepare(len(head) + plan.data_bytes + len(index))
        with contextlib.suppress(OSError):
            self._started()

    def stage(self, pieces: Sequence[Piece]) -> None:
        """Copy the state; if the previous copy is still being written, that save is abandoned.

        On a GPU the copy is only enqueued: later work on the stream runs after it. Raises OSError if memory is short.
        """
        if self.busy:
            self.abandon()
        self._staged = False
        if self._leave:
            self._memory.leave()
            self._leave = False
        plan, head, index = _plan(pieces)
        self._size, self._index_bytes = len(head) + plan.data_bytes, len(index)
        with contextlib.suppress(OSError):  # the order will report it
            self._started()  # in parallel with the copy: starting takes as long as a small checkpoint
        self._memory.fill(head, _ordered(pieces), plan, index)
        self._staged = True

    @property
    def busy(self) -> bool:
        """Whether the copy is still being written, or committed as a checkpoint."""
        return any(what != "removed" for _, what in self._orders)

    @property
    def pid(self) -> int | None:
        """The writing process; None before the first copy, and if it has ended."""
        return None if self._process is None else self._process.pid

    # -- orders

    def order_part(self, attempt: int, place_url: str, step: int, generation: int, read_back: bool) -> None:
        """Order the staged state written to `place_url` as this rank's part. Waits for the device copy to finish."""
        if not self._staged:
            # The memory holds an earlier save, or nothing.
            self._received.append(Outcome(attempt, "part", False, "the state could not be copied", "other"))
            return
        self._memory.copied()
        if self._rank == 0 and self._part is not None and self._part != (place_url, step, generation):
            self._rubbish.append(self._part)
        self._part = (place_url, step, generation)
        self._order(
            "part",
            attempt,
            url=place_url,
            step=step,
            generation=generation,
            rank=self._rank,
            size=self._size,
            index_at=self._size,
            index_bytes=self._index_bytes,
            read_back=read_back,
        )

    def order_commit(
        self,
        attempt: int,
        place_url: str,
        manifest: Manifest,
        fence_folder: Path,
        keep: int,
        keep_every: int,
        sure: int | None = None,
    ) -> None:
        """Order that all ranks' parts be committed as the checkpoint of `manifest` (without files and tensors yet).

        In one rank, once all have written their parts. Nothing is published after a later generation has begun in the
        run folder `fence_folder`. Then old checkpoints are removed, see `retention.retire`, with a separate Outcome.
        """
        self._part = None
        self._order(
            "commit",
            attempt,
            url=place_url,
            manifest=manifest.to_text(),
            world_size=self._world_size,
            fence=str(fence_folder),
            keep=keep,
            keep_every=keep_every,
            sure=sure,
        )
        # Not earlier: a place that failed to take its parts may not answer at all.
        for url, at, of in self._rubbish:
            self.order_abandon(url, at, of)
        self._rubbish.clear()

    def order_abandon(self, place_url: str, step: int, generation: int) -> None:
        """Order the removal of the parts of a checkpoint that will not be completed. In one rank; not answered."""
        self._part = None
        with contextlib.suppress(OSError):  # the process cannot be started: the next start removes them
            self._started().post({"abandon": {"url": place_url, "step": step, "generation": generation}})

    def _order(self, what: What, attempt: int, **values: object) -> None:
        problem = ""
        try:
            process = self._started()
        except OSError as error:
            problem = f"the writing process could not be started: {error}"
        now = time.monotonic()
        self._orders[attempt, what] = now
        if what == "commit":
            # What the previous commit's retention has left to remove is removed after this one.
            for other in [key for key in self._orders if key[1] == "removed"]:
                del self._orders[other]
            self._orders[attempt, "removed"] = now
        if problem:
            self._fail(problem)
        else:
            process.post({what: {"attempt": attempt, **values}})

    def _started(self) -> WriterProcess:
        """The process, restarted if it has ended. Raises OSError."""
        self._collect()
        if self._process is None:
            self._process = WriterProcess(self._memory.fd)
        return self._process

    # -- outcomes

    def poll(self) -> list[Outcome]:
        """Outcomes since the last call, without blocking."""
        self._collect()
        received, self._received = self._received, []
        return received

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to `poll`, or `timeout_s` have passed."""
        self._collect()
        if self._received:
            return
        if self._process is None:
            select.select([], [], [], timeout_s)
        else:
            self._process.wait(timeout_s)

    def wait_removed(self, timeout_s: float) -> list[Outcome]:
        """Outcomes received until old checkpoints have been removed, or `timeout_s` have passed."""
        until = time.monotonic() + timeout_s
        received = self.poll()
        while any(what == "removed" for _, what in self._orders) and (left := until - time.monotonic()) > 0:
            self.wait(min(left, SAMPLE_S))
            received += self.poll()
        return received

    def _collect(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            outcomes = process.outcomes()
        except ValueError as error:
            self._lose(process, str(error))
            return
        for outcome in outcomes:
            self._orders.pop((outcome.attempt, outcome.what), None)
            if outcome.what == "commit" and not outcome.ok:
                self._orders.pop((outcome.attempt, "removed"), None)
            self._received.append(outcome)
        stalled = self._stalled.find({process.pid: False})
        if process.ended is not None:
            self._lose(process, f"the writing process {process.ended}")
        elif stalled:
            self._lose(process, f"the writing process {stalled[process.pid]}, and was killed")

    def _lose(self, process: WriterProcess, problem: str) -> None:
        self._process = None
        process.kill()
        self._fail(problem)

    def _fail(self, problem: str) -> None:
        now = time.monotonic()
        for (attempt, what), began in self._orders.items():
            self._received.append(Outcome(attempt, what, False, problem, "writer", now - began))
        self._orders.clear()

    # -- the end

    def abandon(self) -> None:
        """Abandon every order, and kill the process whatever it is doing; the orders are no longer answered.

        If it hangs in the storage, it keeps the memory it maps: the next copy uses new memory.
        """
        process, self._process = self._process, None
        self._orders.clear()
        self._part = None
        self._rubbish.clear()
        if process is not None:
            process.kill()
            # The copy is still valid, and may be wanted for another place.
            self._leave = self._leave or process.hangs

    def close(self, *, at_once: bool = False) -> None:
        """End the process and release the memory. Unfinished saves are dropped.

        Without `at_once`, a process with no unanswered orders may exit by itself.
        """
        process, self._process = self._process, None
        if process is not None:
            if self._orders or at_once:
                process.kill()
            else:
                process.end()
        self._orders.clear()
        self._memory.close()


def _ordered(pieces: Sequence[Piece]) -> list[Piece]:
    """Larger elements first: this aligns each tensor to its element size, so that memory can be viewed as tensors."""
    return sorted(pieces, key=lambda piece: -piece.tensor.element_size())


def _plan(pieces: Sequence[Piece]) -> tuple[FilePlan, bytes, bytes]:
    """The layout of the file, its head (the bytes before its data), and its index as text."""
    ordered = _ordered(pieces)
    plan = FilePlan([(piece.key, piece.tensor) for piece in ordered])
    index = {"pieces": [piece.to_index() for piece in ordered]}
    return plan, plan.head(boxes_of(ordered)), json.dumps(index, separators=(",", ":")).encode()
