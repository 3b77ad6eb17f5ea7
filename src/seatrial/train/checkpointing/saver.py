"""Asynchronous checkpoints: written to storage while training continues, with their events.

At a save the ranks copy their state into memory and continue; a process of each rank writes the copy. Its status is part
of every step's vector (`SaveStatus`), so all ranks have the same information about an attempt at the same step, and
decide alike without further communication:

    parts being written -> all written -> rank 0 has it committed -> complete
                        -> one failed -> retry into the fallback, if there is one -> given up

A checkpoint counts as saved only once it is complete; `at_risk_s` is the training that would be lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from seatrial.base import units
from seatrial.base.errors import RunFailed, SeatrialError
from seatrial.checkpoint.commit import new_manifest, progress_after
from seatrial.checkpoint.staging import AsyncWriter, Outcome
from seatrial.checkpoint.write import PeerSaveFailed, Piece, SaveFailed
from seatrial.hardware.accelerator import is_accelerator
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.record.folder import RunFolder
from seatrial.storage import is_remote
from seatrial.train.checkpointing import state
from seatrial.train.checkpointing.checkpoint_cadence import CheckpointCadence
from seatrial.train.checkpointing.places import Places
from seatrial.train.checkpointing.save_events import Attempt, SaveEvents
from seatrial.train.optimizer import ShardedOptimizer
from seatrial.train.records import Records
from seatrial.train.step import SaveStatus
from seatrial.train.supervision.supervisor import RollbackBound

_PREPARED_AFTER = 3  # steps of a generation after which the memory for a copy is allocated
_POLL_S = 0.1  # polling interval of ranks that wait for a save, and of their status all-reduce
_REPORT_EVERY_S = 60.0  # between two reports that training waits
_REQUEST_S = 10.0  # for an object store to answer, before a checkpoint is quarantined
_REMOVAL_S = 60.0  # how long the end of a run waits for old checkpoints to be removed


class Saver:
    """Saves the state of one generation; all ranks make the same calls at the same steps."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        records: Records,
        report_wait: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`report_wait` is called periodically while training waits, with the step that it waits after."""
        self._job, self._folder, self._generation = job, folder, generation
        self._model, self._optimizer = model, optimizer
        mesh = model.mesh
        self._mesh, self._writes = mesh, mesh.rank == 0
        self._places = Places(job, folder)
        self._events = SaveEvents(records, self._places.urls)
        self._writer = AsyncWriter(rank=mesh.rank, world_size=mesh.layout.world_size, device=mesh.device)
        self._cadence = CheckpointCadence(job, folder, writes=self._writes)
        self._report_wait = report_wait
        self.rollback_bounds: Sequence[RollbackBound] = ()  # retention keeps one not after the lowest
        self._report_every_s = min(_REPORT_EVERY_S, job.resilience.first_step_s / 3)
        self._attempt: Attempt | None = None
        self._again = False  # a failure is retried with the same step, over the partial files
        self._hangs = False  # the storage did not respond to the last write
        self._unordered = False  # the write is not ordered yet: the device may still be copying
        self._number = 0  # of the last attempt
        self._prepare_in: int | None = None  # steps
        self._status = SaveStatus()
        self._problem = ""  # why this rank's part, or the commit, failed
        self._every: int | None = None if job.checkpoint.every_steps == "auto" else job.checkpoint.every_steps
        self._requested = False
        self._late = False  # a save was due while the previous one was being written
        self._at_risk_s = 0.0  # as rank 0 reported to all
        self._begun_step = 0  # the step of the last save begun
        self._saved_step = 0  # the step of the last complete checkpoint

    # -- when

    def start(self, first_step: int) -> None:
        """Start before `first_step`; the state before it may or may not be in a checkpoint."""
        self._begun_step = first_step - 1
        self._prepare_in = _PREPARED_AFTER
        self._cadence.start(first_step, self._places.newest_step() if self._writes else 0)

    def due(self, step: int) -> bool:
        """Whether a save begins after `step`; decided before the step, alike in all ranks."""
        if self._late and self._attempt is not None:
            return False  # it begins once the previous save is done
        if (self._requested or self._late) and self._attempt is None:
            return True
        section = self._job.checkpoint
        if section.keep_every_steps and step % section.keep_every_steps == 0:
            return True
        if section.every_steps != "auto":
            return step % section.every_steps == 0
        # The first one early, to measure the cost of a save.
        return step - self._begun_step >= (self._every or self._cadence.first_steps)

    @property
    def overdue(self) -> bool:
        """Whether training must stop until a checkpoint is complete."""
        return self._at_risk_s >= self._job.checkpoint.max_unsaved_s

    def record_step(self, seconds: float) -> None:
        """Record that a step took `seconds`."""
        self._cadence.record_step(seconds, saving=self._attempt is not None)
        if self._prepare_in is None:
            return
        self._prepare_in -= 1
        if self._prepare_in == 0 and self._number == 0:
            # Not before training, so that no recovery waits for it. If memory is short, the save reports it.
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.prepare(self._pieces())

    def status(self, step_s: float) -> SaveStatus:
        """This rank's entries in the vector of the next step, which takes about `step_s`. Never blocks."""
        self._poll_writer()
        if not self._writes:
            return self._status
        cadence = self._cadence
        requested = self._attempt is None and cadence.wants_save
        return replace(
            self._status, requested=requested, interval=cadence.interval, at_risk_s=cadence.at_risk_s(step_s)
        )

    def process_reports(self, parts: Sequence[int], status: SaveStatus) -> None:
        """Process the status of all ranks after each step; every rank reacts alike."""
        self._requested, self._at_risk_s = status.requested, status.at_risk_s
        if status.interval:
            self._every = status.interval
        self._order_part()  # these values have been read from the device, so copies enqueued before them are complete
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.committing:
            if abs(status.committed) == attempt.number:
                self._end(attempt, failed=[0] if status.committed < 0 else [])
        elif all(abs(part) == attempt.number for part in parts):
            failed = [rank for rank, part in enumerate(parts) if part < 0]
            if failed:
                self._end(attempt, failed)
            else:
                self._commit(attempt)

    # -- saving

    def begin(self, step: int) -> bool:
        """Copy the state after `step` and have it written; False while the previous checkpoint is still in flight."""
        if self._attempt is not None:
            if not self._late:
                self._events.late(step, self._attempt.step)
            self._late = True  # it begins once that is done
            return False
        self._late = self._hangs = False
        begin = time.perf_counter()
        try:
            self._writer.stage(self._pieces())
        except (OSError, RuntimeError, SeatrialError) as error:
            # Most likely out of host memory: handled like a part that could not be written.
            self._order(step, 0, begin, problem=str(error))
        else:
            self._order(step, 0, begin)
        return True

    def _pieces(self) -> list[Piece]:
        """The pieces that this rank saves."""
        mesh = self._mesh
        pieces = state.lasting_pieces(self._model, self._optimizer)
        pieces += state.random_pieces(mesh.rank, mesh.device)
        return [piece for piece in pieces if piece.owner]

    def _order(self, step: int, place: int, begin: float, problem: str | None = None) -> None:
        now = time.perf_counter()
        self._number += 1
        self._begun_step = step
        self._attempt = Attempt(self._number, step, place, now, begin, now - begin)
        if problem is not None:
            self._settle_part(self._number, problem)
            return
        self._unordered = True
        if not is_accelerator(self._mesh.device):
            self._order_part()

    def _order_part(self) -> None:
        attempt, waits = self._attempt, self._unordered
        self._unordered = False
        if attempt is None or not waits:
            return
        self._writer.order_part(
            attempt.number,
            self._places.urls[attempt.place],
            attempt.step,
            self._generation,
            self._job.checkpoint.read_back,
        )

    def _commit(self, attempt: Attempt) -> None:
        self._attempt = replace(attempt, committing=True)
        if not self._writes:
            return
        step, job = attempt.step, self._job
        progress = progress_after(job, step, self._generation)
        bounds = [bound for each in self.rollback_bounds if (bound := each.rollback_bound) is not None]
        self._writer.order_commit(
            attempt.number,
            self._places.urls[attempt.place],
            new_manifest(job, self._mesh.layout, progress),
            self._folder.path,
            job.checkpoint.keep,
            job.checkpoint.keep_every_steps,
            None if step == job.train.steps else min(bounds, default=None),
        )

    def _poll_writer(self) -> None:
        """Process the outcomes from the writing process, and give up on an attempt that hangs."""
        for outcome in self._writer.poll():
            self._on_outcome(outcome)
        attempt = self._attempt
        patience = self._job.checkpoint.max_unsaved_s / 2
        if attempt is None or time.perf_counter() - attempt.ordered_at < patience:
            return
        # The storage hangs: further writes to it would hang as well.
        problem = f"the storage has not responded for {units.duration(patience)}"
        if not attempt.committing and abs(self._status.part) != attempt.number:
            self._writer.abandon()
            self._hangs = True
            self._settle_part(attempt.number, problem)
        elif attempt.committing and self._writes and abs(self._status.committed) != attempt.number:
            self._writer.abandon()
            self._hangs = True
            self._settle_commit(attempt.number, problem)

    def _on_outcome(self, outcome: Outcome) -> None:
        if outcome.what == "removed":
            why = self._cadence.removal_reason
            self._events.removed(outcome.names, why, None if outcome.ok else outcome.problem)
        elif self._attempt is None or outcome.attempt != self._attempt.number:
            return  # from an attempt that was given up
        elif outcome.what == "part":
            self._settle_part(outcome.attempt, None if outcome.ok else outcome.problem or "unknown")
        else:
            self._cadence.record_size(outcome.bytes)
            self._settle_commit(outcome.attempt, None if outcome.ok else outcome.problem or "unknown")

    def _settle_part(self, number: int, problem: str | None) -> None:
        self._status = replace(self._status, part=number if problem is None else -number)
        self._problem = problem or ""
        if problem is not None and not self._writes and self._attempt is not None:
            self._events.own_part(self._attempt.step, problem)

    def _settle_commit(self, number: int, problem: str | None) -> None:
        self._status = replace(self._status, committed=number if problem is None else -number)
        self._problem = problem or ""

    def _end(self, attempt: Attempt, failed: list[int]) -> None:
        """Finish `attempt`, whose outcome all ranks know."""
        self._attempt = None
        if failed:
            self._end_badly(attempt, failed)
            return
        self._saved_step = attempt.step
        if not self._writes:
            return
        seconds = time.perf_counter() - attempt.staged_at
        cost = self._cadence.saved(attempt.step, age_s=seconds, stalled_s=attempt.stalled_s)
        self._events.saved(attempt, self._places.name_of(attempt.place, attempt.step), cost.bytes, seconds)
        if cost.interval is not None:
            self._events.interval(cost.interval)

    def _end_badly(self, attempt: Attempt, failed: list[int]) -> None:
        other = attempt.place + 1
        again = other if other < len(self._places) else None
        self._events.failed(attempt, failed, self._problem, again)
        if again is not None:
            # The copy still exists; times count from its creation.
            self._order(attempt.step, again, attempt.staged_at)
            assert self._attempt is not None
            self._attempt = replace(self._attempt, stalled_s=attempt.stalled_s)
        else:
            # On a full disk the partial files must be removed first.
            if self._writes and not self._hangs and not self._again:
                self._writer.order_abandon(self._places.urls[attempt.place], attempt.step, self._generation)
            self._cadence.failed()

    # -- waiting

    def finish(self, step: int, *, must: bool) -> None:
        """Save the state after `step`, if it is not saved yet, and wait; all ranks wait.

        A failure is reported, and with `must` raised as SaveFailed in every rank after a retry: perhaps only the
        writing process failed, which is replaced by then. Hanging storage is not retried.
        """
        self._wait()
        if self._saved_step != step:
            self._again = must
            self.begin(step)
            self._wait()
            self._again = False
        if self._saved_step != step and must and not self._any(self._hangs):
            self.begin(step)
            self._wait()
        if self._saved_step != step and must:
            if self._problem:
                raise SaveFailed(f"the checkpoint of step {step} could not be written: {self._problem}")
            raise PeerSaveFailed("another rank could not write its part")
        if self._writes:
            for outcome in self._writer.wait_removed(_REMOVAL_S):
                self._on_outcome(outcome)

    def save_or_stop(self, step: int) -> None:
        """Wait for a checkpoint, or raise RunFailed in every rank: `max_unsaved_s` is reached."""
        limit = units.duration(self._job.checkpoint.max_unsaved_s)
        self._events.overdue(step, self._at_risk_s)
        before = self._saved_step
        self._wait()
        if self._saved_step == before:
            self.begin(step)
            self._wait()
        if self._saved_step == before:
            why = f" ({self._problem})" if self._problem else ""
            raise RunFailed(
                f"no checkpoint could be saved for {limit}{why}: further training would put more work at risk than "
                "checkpoint.max_unsaved_s allows",
                hint="make the storage writable again, or give checkpoint.fallback, and start again: it resumes from the "
                "newest checkpoint",
            )
        self._at_risk_s = 0.0

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of `step`, or a later one; all ranks call it."""
        return self._any(self._writes and self._places.newest_step() >= step)

    def _any(self, value: bool) -> bool:
        """Whether `value` is true in any rank; a collective."""
        total = torch.tensor([float(value)], dtype=torch.float64, device=self._mesh.device)
        return float(self._mesh.sum_over_ranks(total).item()) > 0

    def _wait(self) -> None:
        """Wait until no attempt is in flight. Ranks exchange their status often, so that no collective lasts long."""
        world = self._mesh.layout.world_size
        self._order_part()
        reported_at = time.monotonic()
        while self._attempt is not None:
            if time.monotonic() - reported_at > self._report_every_s:
                reported_at = time.monotonic()
                self._report_wait(self._attempt.step)
            self._writer.wait(_POLL_S)
            self._poll_writer()
            table = torch.zeros(world + 1, dtype=torch.float64, device=self._mesh.device)
            table[self._mesh.rank] = self._status.part
            if self._writes:
                table[world] = self._status.committed
            *parts, committed = (int(v) for v in self._mesh.sum_over_ranks(table).tolist())
            self.process_reports(parts, SaveStatus(committed=committed, at_risk_s=self._at_risk_s))

    # -- rollbacks and corruption

    def distrust(self, step: int, why: str) -> None:
        """Quarantine every checkpoint of a later step than `step`: it may be corrupt.

        All ranks call it, and none returns before rank 0 is done, which may be terminated right afterwards.
        """
        self._set_aside(step, why)
        with contextlib.suppress(RuntimeError):  # do not wait for ranks that have exited
            self._mesh.sum_over_ranks(torch.zeros(1, dtype=torch.float64, device=self._mesh.device))

    def _set_aside(self, step: int, why: str) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.step > step:
            if attempt.committing and self._writes:
                self._finish_commit(attempt)
            self._attempt = None
        self._begun_step = min(self._begun_step, step)
        self._saved_step = min(self._saved_step, step)
        if not self._writes:
            return
        self._cadence.rolled_back(step)
        for name, at, error in self._places.set_aside_after(step, why):
            with contextlib.suppress(OSError):  # a full disk must not keep the others from being quarantined
                self._events.distrusted(name, at, why, error)

    def _finish_commit(self, attempt: Attempt) -> None:
        """Wait for the commit in flight, so that it cannot complete after rank 0 has quarantined checkpoints."""
        # A rename happens before its process has exited, or never; a request to an object store may still arrive.
        remote = is_remote(self._places.urls[attempt.place])
        until = time.monotonic() + (_REQUEST_S if remote else 0.0)
        while abs(self._status.committed) != attempt.number and time.monotonic() < until:
            self._writer.wait(_POLL_S)
            self._poll_writer()
        if abs(self._status.committed) != attempt.number:
            self._writer.abandon()

    def close(self, *, at_once: bool = False) -> None:
        """End the writing process; `at_once`: even while it writes. An incomplete checkpoint is recognised as such."""
        # After a device error every call to the device fails: it must not hide the first error.
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close(at_once=at_once)
