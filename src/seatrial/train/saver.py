"""Checkpoints on their way to the storage while training goes on, and what is told of them.

At a save the ranks copy their state into memory and train on; a process of each writes the copy. What became of it
travels with the vector of every step (`SaveNews`), so all ranks know the same of an attempt at the same step, and
decide alike without waiting for each other:

    parts being written -> all there -> rank 0 has it made complete -> complete
                        -> one failed -> once more into the fallback, if there is one -> given up

Nobody knows of a checkpoint's success before it is complete; `at_risk_s` is the training that would be lost.
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
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.record.folder import RunFolder
from seatrial.storage import is_remote
from seatrial.train import state
from seatrial.train.companion import Doubts
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.places import Places
from seatrial.train.rhythm import Rhythm
from seatrial.train.save_events import Attempt, Event, SaveEvents
from seatrial.train.step import SaveNews

_PREPARED_AFTER = 3  # steps of a leg after which the memory for a copy is taken
_POLL_S = 0.1  # how often ranks that wait for a save look, and tell each other
_TOLD_S = 60.0  # between two words of somebody who waits
_REQUEST_S = 10.0  # for an object store to answer, before a checkpoint is set aside
_REMOVAL_S = 60.0  # the end of a run waits no longer for old checkpoints to be removed


class Saver:
    """Saves the state of one leg; all ranks make the same calls at the same steps."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        model: ParallelModel,
        optimizer: ShardedAdamW,
        loader: BatchLoader,
        event: Event,
        waits: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`waits` is called now and then while training waits, with the step that it waits after."""
        self._job, self._folder, self._generation = job, folder, generation
        self._model, self._optimizer, self._loader = model, optimizer, loader
        mesh = model.mesh
        self._mesh, self._writes = mesh, mesh.rank == 0
        self._places = Places(job, folder)
        self._tell = SaveEvents(event, folder, generation, mesh.rank, self._places.urls)
        self._writer = AsyncWriter(rank=mesh.rank, world_size=mesh.layout.world_size, device=mesh.device)
        self._rhythm = Rhythm(job, folder, writes=self._writes)
        self._waits = waits
        self.doubts: Sequence[Doubts] = ()  # what may yet have checkpoints set aside
        self._told_every_s = min(_TOLD_S, job.resilience.first_step_s / 3)
        self._attempt: Attempt | None = None
        self._again = False  # if it fails, save the same step once more, over the partial files
        self._hangs = False  # the storage neither took nor refused the last attempt
        self._unordered = False  # its copy may still be on its way from the device
        self._number = 0  # of the last attempt
        self._prepare_in: int | None = None  # steps
        self._news = SaveNews()
        self._problem = ""  # why this rank's part, or the commit, failed
        self._every: int | None = None if job.checkpoint.every_steps == "auto" else job.checkpoint.every_steps
        self._wanted = False
        self._late = False  # a save was due while the one before was being written
        self._at_risk_s = 0.0  # as rank 0 told all
        self._begun_step = 0  # the last that a save was begun of
        self._saved_step = 0  # the last that is known to be complete

    # -- when

    def start(self, first_step: int) -> None:
        """Training begins with `first_step`; the state before it may or may not be in a checkpoint."""
        self._begun_step = first_step - 1
        self._prepare_in = _PREPARED_AFTER
        self._rhythm.start(first_step, self._places.newest_step() if self._writes else 0)

    def due(self, step: int) -> bool:
        """Whether a save is to begin after `step`, as far as every rank knows before that step; the same in all."""
        if self._late and self._attempt is not None:
            return False  # it comes as soon as the one before is done: until then a step is a step
        if (self._wanted or self._late) and self._attempt is None:
            return True
        section = self._job.checkpoint
        if section.keep_every_steps and step % section.keep_every_steps == 0:
            return True
        if section.every_steps != "auto":
            return step % section.every_steps == 0
        # The first one soon: it shows what saving costs.
        return step - self._begun_step >= (self._every or self._rhythm.first_steps)

    @property
    def overdue(self) -> bool:
        """Whether no more may be trained before a checkpoint is complete."""
        return self._at_risk_s >= self._job.checkpoint.max_unsaved_s

    def stepped(self, seconds: float) -> None:
        """A step took `seconds`."""
        self._rhythm.stepped(seconds, saving=self._attempt is not None)
        if self._prepare_in is None:
            return
        self._prepare_in -= 1
        if self._prepare_in == 0 and self._number == 0:
            # Beside training, and not before: a recovery must not wait for it. Without memory the save itself will say so.
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.prepare(self._pieces())

    def news(self, step_s: float) -> SaveNews:
        """What this rank tells with the vector of the next step, which takes about `step_s`. Waits for nothing."""
        self._look()
        if not self._writes:
            return self._news
        rhythm = self._rhythm
        wanted = self._attempt is None and rhythm.wants_save
        return replace(
            self._news, wanted=wanted, interval=rhythm.interval, at_risk_s=rhythm.at_risk_s(step_s)
        )

    def heard(self, parts: Sequence[int], news: SaveNews) -> None:
        """What all ranks told, after each step: every rank goes on from it in the same way."""
        self._wanted, self._at_risk_s = news.wanted, news.at_risk_s
        if news.interval:
            self._every = news.interval
        self._order_part()  # what a device was told to copy before these numbers is there by now
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
        """Copy the state after `step` and have it written; False where the checkpoint before is still under way."""
        if self._attempt is not None:
            if not self._late:
                self._tell.late(step, self._attempt.step)
            self._late = True  # it begins as soon as that is done
            return False
        self._late = False
        begin = time.perf_counter()
        try:
            self._writer.stage(self._pieces())
        except (OSError, RuntimeError, SeatrialError) as error:
            # No memory for the copy, most likely: told like a part that could not be written.
            self._order(step, 0, begin, problem=str(error))
        else:
            self._order(step, 0, begin)
        return True

    def _pieces(self) -> list[Piece]:
        """What this rank saves."""
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
        if self._mesh.device.type == "cpu":
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
        """Take what the writing process told."""
        for outcome in self._writer.poll():
            self._take(outcome)
        attempt = self._attempt
        patience = self._job.checkpoint.max_unsaved_s / 2
        if attempt is None or time.perf_counter() - attempt.ordered_at < patience:
            return
        # A storage that neither takes nor refuses: what is written to it will hang as well.
        problem = f"the storage has not answered for {units.duration(patience)}"
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
            self._tell.removed(outcome.names, self._rhythm.kept, None if outcome.ok else outcome.problem)
        elif self._attempt is None or outcome.attempt != self._attempt.number:
            return  # of one that was given up
        elif outcome.what == "part":
            self._settle_part(outcome.attempt, None if outcome.ok else outcome.problem or "unknown")
        else:
            self._rhythm.wrote(outcome.bytes)
            self._settle_commit(outcome.attempt, None if outcome.ok else outcome.problem or "unknown")

    def _settle_part(self, number: int, problem: str | None) -> None:
        self._news = replace(self._news, part=number if problem is None else -number)
        self._problem = problem or ""
        if problem is not None and not self._writes and self._attempt is not None:
            self._tell.own_part(self._attempt.step, problem)

    def _settle_commit(self, number: int, problem: str | None) -> None:
        self._news = replace(self._news, committed=number if problem is None else -number)
        self._problem = problem or ""

    def _end(self, attempt: Attempt, failed: list[int]) -> None:
        """All ranks know what became of `attempt`."""
        self._attempt = None
        if failed:
            self._end_badly(attempt, failed)
            return
        self._saved_step = attempt.step
        if not self._writes:
            return
        seconds = time.perf_counter() - attempt.staged_at
        cost = self._rhythm.saved(attempt.step, age_s=seconds, stalled_s=attempt.stalled_s)
        self._tell.saved(attempt, self._places.name_of(attempt.place, attempt.step), cost.bytes, seconds)
        if cost.interval is not None:
            self._tell.interval(cost.interval)

    def _end_badly(self, attempt: Attempt, failed: list[int]) -> None:
        other = attempt.place + 1
        again = other if other < len(self._places) else None
        self._tell.failed(attempt, failed, self._problem, again)
        if again is not None:
            # The copy is still there. The time counts from when it was made.
            self._order(attempt.step, again, attempt.staged_at)
            assert self._attempt is not None
            self._attempt = replace(self._attempt, stalled_s=attempt.stalled_s)
        else:
            # A full disk needs the partial files removed first.
            if self._writes and not self._hangs and not self._again:
                self._writer.order_abandon(self._places.urls[attempt.place], attempt.step, self._generation)
            self._rhythm.failed()

    # -- waiting

    def finish(self, step: int, *, must: bool) -> None:
        """Have the state after `step` in a checkpoint before this returns; all ranks wait.

        A failure is reported, and with `must` raised as SaveFailed in every rank after a second attempt: perhaps only
        the writing process failed, and there is a new one by then. A hanging storage is not tried again.
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
        """No more work may be at risk: wait for a checkpoint, or raise RunFailed in every rank."""
        limit = units.duration(self._job.checkpoint.max_unsaved_s)
        self._tell.overdue(step, self._at_risk_s)
        before = self._saved_step
        self._wait()
        if self._saved_step == before:
            self.begin(step)
            self._wait()
        if self._saved_step == before:
            why = f" ({self._problem})" if self._problem else ""
            raise RunFailed(
                f"no checkpoint could be saved for {limit}{why}: training on would put more work at risk than "
                "checkpoint.max_unsaved_s allows",
                hint="make the storage writable again, or give checkpoint.fallback, and start again: it goes on from the "
                "newest checkpoint",
            )
        self._at_risk_s = 0.0

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of `step`, or a later one; all ranks ask together."""
        return self._any(self._writes and self._places.newest_step() >= step)

    def _any(self, here: bool) -> bool:
        """Whether `here` is true in any rank; a collective."""
        told = torch.tensor([float(here)], dtype=torch.float64, device=self._mesh.device)
        return float(self._mesh.sum_over_ranks(told).item()) > 0

    def _wait(self) -> None:
        """Until no attempt is under way. Ranks that wait tell each other often: no collective lasts long."""
        world = self._mesh.layout.world_size
        self._order_part()
        told = time.monotonic()
        while self._attempt is not None:
            if time.monotonic() - told > self._told_every_s:
                told = time.monotonic()
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
        """Let no checkpoint of a later step than `step` be used: whatever went wrong may be in it.

        All ranks call it, and none returns before rank 0 is done: what follows may end that one.
        """
        self._set_aside(step, why)
        with contextlib.suppress(RuntimeError):  # ranks that are gone need not be waited for
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
        self._rhythm.went_back(step)
        for name, at, error in self._places.set_aside_after(step, why):
            with contextlib.suppress(OSError):  # a full disk must not keep the others from being set aside
                self._tell.distrusted(name, at, why, error)

    def _finish_commit(self, attempt: Attempt) -> None:
        """Rank 0, before it sets aside: what is being made complete must be so, or not, by then."""
        # A folder's rename has happened by the time its process is gone, or never will; a request may still arrive.
        remote = is_remote(self._places.urls[attempt.place])
        until = time.monotonic() + (_REQUEST_S if remote else 0.0)
        while abs(self._news.committed) != attempt.number and time.monotonic() < until:
            self._writer.wait(_POLL_S)
            self._look()
        if abs(self._news.committed) != attempt.number:
            self._writer.abandon()

    def close(self, *, at_once: bool = False) -> None:
        """End the writing process; `at_once` whatever it does. What is not complete is recognised as such."""
        # After an error of the device every call to it fails: the first one is what people must see.
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close(at_once=at_once)
