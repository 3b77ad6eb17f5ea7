"""Asynchronous checkpoints: written to the storage while training continues, with their events.

At a save the ranks copy their state into memory and continue; a process of each rank writes the copy. The outcome
travels with the vector of every step (`SaveNews`), so all ranks have the same information about an attempt at the same
step, and decide alike without waiting for each other:

    parts being written -> all written -> rank 0 has it committed -> complete
                        -> one failed -> retry into the fallback, if there is one -> given up

No rank treats a checkpoint as saved before it is complete; `at_risk_s` is the training that would be lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from seatrial.base import units
from seatrial.base.errors import RunFailed, SeatrialError
from seatrial.checkpoint.commit import new_manifest
from seatrial.checkpoint.manifest import Progress
from seatrial.checkpoint.staging import AsyncWriter, Outcome
from seatrial.checkpoint.write import PeerSaveFailed, Piece, SaveFailed
from seatrial.data.loader import BatchLoader
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
from seatrial.train.step import SaveNews
from seatrial.train.supervision.supervisor import Doubts

_PREPARED_AFTER = 3  # steps of a generation after which the memory for a copy is allocated
_POLL_S = 0.1  # how often ranks that wait for a save poll, and exchange what they know
_REPORT_EVERY_S = 60.0  # between two reports that training waits
_REQUEST_S = 10.0  # for an object store to answer, before a checkpoint is quarantined
_REMOVAL_S = 60.0  # the end of a run waits no longer for old checkpoints to be removed


class Saver:
    """Saves the state of one generation; all ranks make the same calls at the same steps."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        loader: BatchLoader,
        records: Records,
        waits: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`waits` is called periodically while training waits, with the step that it waits after."""
        self._job, self._folder, self._generation = job, folder, generation
        self._model, self._optimizer, self._loader = model, optimizer, loader
        mesh = model.mesh
        self._mesh, self._writes = mesh, mesh.rank == 0
        self._places = Places(job, folder)
        self._events = SaveEvents(records, self._places.urls)
        self._writer = AsyncWriter(rank=mesh.rank, world_size=mesh.layout.world_size, device=mesh.device)
        self._cadence = CheckpointCadence(job, folder, writes=self._writes)
        self._waits = waits
        self.doubts: Sequence[Doubts] = ()  # checks that may still have checkpoints quarantined
        self._report_every_s = min(_REPORT_EVERY_S, job.resilience.first_step_s / 3)
        self._attempt: Attempt | None = None
        self._again = False  # a failure is retried with the same step, over the partial files
        self._hangs = False  # the storage neither accepted nor refused the last copy
        self._unordered = False  # not written yet: the copy may still be in flight from the device
        self._number = 0  # of the last attempt
        self._prepare_in: int | None = None  # steps
        self._news = SaveNews()
        self._problem = ""  # why this rank's part, or the commit, failed
        self._every: int | None = None if job.checkpoint.every_steps == "auto" else job.checkpoint.every_steps
        self._wanted = False
        self._late = False  # a save was due while the previous one was being written
        self._at_risk_s = 0.0  # as rank 0 reported to all
        self._begun_step = 0  # the last step whose save was begun
        self._saved_step = 0  # the last step whose checkpoint is known to be complete

    # -- when

    def start(self, first_step: int) -> None:
        """Training begins with `first_step`; the state before it may or may not be in a checkpoint."""
        self._begun_step = first_step - 1
        self._prepare_in = _PREPARED_AFTER
        self._cadence.start(first_step, self._places.newest_step() if self._writes else 0)

    def due(self, step: int) -> bool:
        """Whether a save begins after `step`, from what every rank knows before that step; the same in all ranks."""
        if self._late and self._attempt is not None:
            return False  # it begins as soon as the previous one is done; until then no step is a save step
        if (self._wanted or self._late) and self._attempt is None:
            return True
        section = self._job.checkpoint
        if section.keep_every_steps and step % section.keep_every_steps == 0:
            return True
        if section.every_steps != "auto":
            return step % section.every_steps == 0
        # The first one early: it measures what saving costs.
        return step - self._begun_step >= (self._every or self._cadence.first_steps)

    @property
    def overdue(self) -> bool:
        """Whether training must stop until a checkpoint is complete."""
        return self._at_risk_s >= self._job.checkpoint.max_unsaved_s

    def stepped(self, seconds: float) -> None:
        """Record that a step took `seconds`."""
        self._cadence.stepped(seconds, saving=self._attempt is not None)
        if self._prepare_in is None:
            return
        self._prepare_in -= 1
        if self._prepare_in == 0 and self._number == 0:
            # While training runs, not before: a recovery must not wait for it. If memory is short, the save reports it.
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.prepare(self._pieces())

    def news(self, step_s: float) -> SaveNews:
        """This rank's values for the vector of the next step, which takes about `step_s`. Never blocks."""
        self._look()
        if not self._writes:
            return self._news
        cadence = self._cadence
        wanted = self._attempt is None and cadence.wants_save
        return replace(
            self._news, wanted=wanted, interval=cadence.interval, at_risk_s=cadence.at_risk_s(step_s)
        )

    def heard(self, parts: Sequence[int], news: SaveNews) -> None:
        """Process what all ranks reported, after each step: every rank reacts to it in the same way."""
        self._wanted, self._at_risk_s = news.wanted, news.at_risk_s
        if news.interval:
            self._every = news.interval
        self._order_part()  # copies enqueued on the device before these numbers are complete by now
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.committing:
            if abs(news.committed) == attempt.number:
                self._end(attempt, failed=[0] if news.committed < 0 else [])
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
            self._late = True  # it begins as soon as that is done
            return False
        self._late = self._hangs = False
        begin = time.perf_counter()
        try:
            self._writer.stage(self._pieces())
        except (OSError, RuntimeError, SeatrialError) as error:
            # Most likely no memory for the copy: reported like a part that could not be written.
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
        tokens = step * job.train.global_batch * job.train.sequence_length
        progress = Progress(step, tokens, self._loader.samples(step)[1], self._generation)
        reaches = [reach for each in self.doubts if (reach := each.reach) is not None]
        self._writer.order_commit(
            attempt.number,
            self._places.urls[attempt.place],
            new_manifest(job, self._mesh.layout, progress),
            self._folder.path,
            job.checkpoint.keep,
            job.checkpoint.keep_every_steps,
            None if step == job.train.steps else min(reaches, default=None),
        )

    def _look(self) -> None:
        """Process the outcomes that the writing process reported, and give up on an attempt that hangs."""
        for outcome in self._writer.poll():
            self._take(outcome)
        attempt = self._attempt
        patience = self._job.checkpoint.max_unsaved_s / 2
        if attempt is None or time.perf_counter() - attempt.ordered_at < patience:
            return
        # A storage that neither accepts nor refuses: further writes to it will hang as well.
        problem = f"the storage has not responded for {units.duration(patience)}"
        if not attempt.committing and abs(self._news.part) != attempt.number:
            self._writer.abandon()
            self._hangs = True
            self._settle_part(attempt.number, problem)
        elif attempt.committing and self._writes and abs(self._news.committed) != attempt.number:
            self._writer.abandon()
            self._hangs = True
            self._settle_commit(attempt.number, problem)

    def _take(self, outcome: Outcome) -> None:
        if outcome.what == "removed":
            self._events.removed(outcome.names, self._cadence.kept, None if outcome.ok else outcome.problem)
        elif self._attempt is None or outcome.attempt != self._attempt.number:
            return  # of an attempt that was given up
        elif outcome.what == "part":
            self._settle_part(outcome.attempt, None if outcome.ok else outcome.problem or "unknown")
        else:
            self._cadence.wrote(outcome.bytes)
            self._settle_commit(outcome.attempt, None if outcome.ok else outcome.problem or "unknown")

    def _settle_part(self, number: int, problem: str | None) -> None:
        self._news = replace(self._news, part=number if problem is None else -number)
        self._problem = problem or ""
        if problem is not None and not self._writes and self._attempt is not None:
            self._events.own_part(self._attempt.step, problem)

    def _settle_commit(self, number: int, problem: str | None) -> None:
        self._news = replace(self._news, committed=number if problem is None else -number)
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
            # The copy still exists. Times count from when it was made.
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
        """Have the state after `step` in a checkpoint before this returns; all ranks wait.

        A failure is reported, and with `must` raised as SaveFailed in every rank after a retry: perhaps only the
        writing process failed, and it has been replaced by then. A hanging storage is not retried.
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
                self._take(outcome)

    def save_or_stop(self, step: int) -> None:
        """Wait for a checkpoint, or raise RunFailed in every rank: no more work may be put at risk."""
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

    def _any(self, here: bool) -> bool:
        """Whether `here` is true in any rank; a collective."""
        anywhere = torch.tensor([float(here)], dtype=torch.float64, device=self._mesh.device)
        return float(self._mesh.sum_over_ranks(anywhere).item()) > 0

    def _wait(self) -> None:
        """Wait until no attempt is in flight. Waiting ranks exchange news often, so that no collective lasts long."""
        world = self._mesh.layout.world_size
        self._order_part()
        reported_at = time.monotonic()
        while self._attempt is not None:
            if time.monotonic() - reported_at > self._report_every_s:
                reported_at = time.monotonic()
                self._waits(self._attempt.step)
            self._writer.wait(_POLL_S)
            self._look()
            table = torch.zeros(world + 1, dtype=torch.float64, device=self._mesh.device)
            table[self._mesh.rank] = self._news.part
            if self._writes:
                table[world] = self._news.committed
            *parts, committed = (int(v) for v in self._mesh.sum_over_ranks(table).tolist())
            self.heard(parts, SaveNews(committed=committed, at_risk_s=self._at_risk_s))

    # -- the end of a state

    def distrust(self, step: int, why: str) -> None:
        """Quarantine every checkpoint of a later step than `step`: it may contain the corruption.

        All ranks call it, and none returns before rank 0 is done: what follows may terminate rank 0.
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
        self._cadence.went_back(step)
        for name, at, error in self._places.set_aside_after(step, why):
            with contextlib.suppress(OSError):  # a full disk must not keep the others from being quarantined
                self._events.distrusted(name, at, why, error)

    def _finish_commit(self, attempt: Attempt) -> None:
        """Settle the commit in flight before rank 0 quarantines checkpoints: by then it has happened or never will."""
        # A folder's rename has happened by the time its process has exited, or never will; a request may still arrive.
        remote = is_remote(self._places.urls[attempt.place])
        until = time.monotonic() + (_REQUEST_S if remote else 0.0)
        while abs(self._news.committed) != attempt.number and time.monotonic() < until:
            self._writer.wait(_POLL_S)
            self._look()
        if abs(self._news.committed) != attempt.number:
            self._writer.abandon()

    def close(self, *, at_once: bool = False) -> None:
        """End the writing process; `at_once`: even while it writes. An incomplete checkpoint is recognised as such."""
        # After a device error every call to the device fails: the first error is the one users must see.
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close(at_once=at_once)
