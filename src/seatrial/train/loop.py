"""The training loop of one rank: batches, steps, records, checkpoints, and the handling of bad steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seatrial.base.errors import RunFailed
from seatrial.data.loader import Batch, BatchLoader
from seatrial.hardware.accelerator import is_accelerator
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import WARM_UP
from seatrial.record.messages import Ending, Leaving
from seatrial.record.stages import DATA, OPTIMIZER, SAVE, STEP_SUM
from seatrial.train.accounting import Accounting
from seatrial.train.checkpointing.saver import Saver
from seatrial.train.health.guard import HINT, Guard, StepDecision
from seatrial.train.health.replicas import CorruptState, Integrity
from seatrial.train.health.straggler import StragglerWatch
from seatrial.train.meter import Meter, OwnWorkTimer, memory_bytes
from seatrial.train.optimizer import ShardedOptimizer
from seatrial.train.recorder import Recorder, SummedStep, make_guard
from seatrial.train.records import Records
from seatrial.train.schedule import learning_rate
from seatrial.train.step import (
    Contribution,
    StepResult,
    StepValues,
    local_vector,
    update,
    vector_length,
)
from seatrial.train.supervision.supervisor import Rollback, Snapshots, Supervisor
from seatrial.train.trace import Trace
from seatrial.train.validation import Validation, ValidationSet


@dataclass(frozen=True)
class _StepInFlight:
    """A step that may still be in flight on the device."""

    step: int
    data_wait: float
    result: StepResult


class Loop:
    """Trains from one step to the last. Rank 0 writes metrics, ledger and events; all ranks write checkpoints.

    With a supervisor it sends a heartbeat after each step, leaves when asked to, and recovers from non-finite steps.
    Without one any error or non-finite step ends it.

    After an exception these attributes describe this rank's state (on a CPU; on a GPU the host does not know it):
    `applied`, the step whose update is complete in weights and optimizer state, or None;
    `ready`, the step after it if its gradients are final and `apply_ready` can apply its update;
    `known`, the last step whose summed vector this rank has.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        records: Records,
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        loader: BatchLoader,
        *,
        supervisor: Supervisor | None = None,
        snapshots: Snapshots | None = None,
        rollback: Rollback | None = None,
        validation: ValidationSet | None = None,
    ) -> None:
        self.job = job
        self.folder = folder
        self.generation = generation = records.generation
        self._records = records
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.applied: int | None = None
        self.ready: int | None = None
        self.known: SummedStep | None = None
        mesh = model.mesh
        self._on_accelerator = is_accelerator(mesh.device)
        self._writes = mesh.rank == 0
        self._supervisor, self._snapshots, self._rollback = supervisor, snapshots, rollback
        self._meter = Meter(job, mesh.device, generation)
        self._recorder = Recorder(job, folder, records, loader, self._meter, writes=self._writes)
        self._saver = Saver(job, folder, generation, model, optimizer, records, self._report_storage_wait)
        self._accounting = Accounting(folder, generation, model)
        self._trace = Trace(job, folder, generation, mesh.rank, mesh.device)
        self._clip_norm = job.optimizer.clip_norm or None
        self._guard: Guard | None = None
        self._integrity: Integrity | None = None
        self._work_timer: OwnWorkTimer | None = None
        self._stragglers: StragglerWatch | None = None
        if supervisor is not None:
            self._work_timer = OwnWorkTimer(mesh.device)
            self._stragglers = StragglerWatch(job.layout, job.resilience.straggler_factor)
            if job.resilience.verify_every_steps:
                self._integrity = Integrity(model, optimizer)
        self._validation: Validation | None = None
        if validation is not None:
            self._validation = Validation(job, validation, model, self._work_timer)
        self._saver.rollback_bounds = [each for each in (snapshots, self._integrity) if each is not None]
        # On a GPU the host runs one step ahead: reading the loss at once would stall the device after every step.
        # A refused update also refuses all later ones, so a step that was launched too early changes nothing.
        self._max_in_flight = 1 if self._on_accelerator else 0
        self._started: list[_StepInFlight] = []
        self._clock = 0.0
        self._first = self._next = 1
        self._leaving: Leaving | None = None
        self._first_sent = self._ended = False  # `_ended`: normally

    # -- the loop

    def run(self, first_step: int) -> Ending:
        """Train from `first_step` to the job's last step, or leave earlier with everything saved."""
        try:
            return self._run(first_step)
        except CorruptState as error:
            self.applied = self.ready = None
            data = {"last_good_step": error.last_good_step}
            try:  # before anyone can terminate this rank because of the finding
                self._saver.distrust(error.last_good_step, error.message)
            finally:
                self._finding("corruption", error.step, error.message, data, error.blamed)
            raise
        finally:
            if self._work_timer is not None:
                self._work_timer.unwatch()
            self._accounting.close()
            self._trace.close()
            self._saver.close(at_once=not self._ended)
            self._recorder.close()

    def _run(self, first_step: int) -> Ending:
        steps = self.job.train.steps
        convention, numbers = self._meter.convention()
        self._records.event_of_first("device", convention, data=numbers)
        self._begin(first_step)
        if first_step > steps and not self._saver.has(steps):
            # Recovered from a failure during the last save: the state exists, its checkpoint does not yet.
            self._saver.finish(steps, must=True)
        while self._next <= steps:
            step = self._next
            self._next += 1
            reason = self._guard.skip_reason(step) if self._guard is not None else None
            if reason is None:
                with self._trace.step(step):
                    self._start(step)
                self._accounting.lap(step)
            saves = self._saver.due(step)
            ends = saves or self._is_boundary(step)
            self._read_results(leave=0 if ends or reason is not None else self._max_in_flight)
            if self._leaving or self._saver.overdue:
                self._read_results(leave=0)  # requested in the previous step: all ranks act after this one
            if self._next != step + 1:
                continue  # a step must be redone
            if reason is not None:
                self._skip_step(step, reason)
            if ends or self._leaving or self._saver.overdue:
                self._end_step(step, saves)
            if self._leaving and step < steps:
                self._ended = True
                return self._leaving
        self._ended = True
        return "done"

    def _begin(self, first_step: int) -> None:
        self._first = self._next = first_step
        self.applied = None if self._on_accelerator else first_step - 1
        self._saver.start(first_step)
        if self._supervisor is not None:
            self._guard = make_guard(self.job, self.folder, self.model.mesh, first_step)
        if self._work_timer is not None:
            self._work_timer.watch(self.model)
        if self._integrity is not None:
            self._integrity.begin(first_step - 1)
        self._accounting.begin(first_step)
        self._validate_late(first_step - 1)
        self._clock = time.perf_counter()

    # -- one step

    def _start(self, step: int) -> None:
        mesh, clock = self.model.mesh, self._work_timer
        contribution = Contribution(
            leave_request=self._supervisor.leave_request() if self._supervisor is not None else None,
            busy=self._snapshots is not None and self._snapshots.busy,
            saving=self._saver.status(self.known.seconds if self.known is not None else 0.0),
            clock=clock,
            memory_bytes=lambda: memory_bytes(mesh.device),
            changed=self._changed,
        )
        begin = time.perf_counter()
        counted = self.model.clock
        with counted.during(DATA), clock.running() if clock is not None else contextlib.nullcontext():
            batch = self._batch(step)
        data_wait = time.perf_counter() - begin
        values = local_vector(self.model, self.optimizer, batch, contribution, self._clip_norm)
        # If a peer is lost during the all-reduce, this rank can still finish the step, as others may have done.
        self.ready = step if self.applied == step - 1 else None
        with counted.during(STEP_SUM):
            mesh.sum_over_ranks(values)
        if self._on_accelerator:
            self._update(step, values[0], values[1])
            self._started.append(_StepInFlight(step, data_wait, StepResult(values, mesh.device)))
            return
        started = _StepInFlight(step, data_wait, StepResult(values, mesh.device))
        summed = started.result.values()
        self.known = self._known(started, summed, time.perf_counter() - self._clock)
        if self._integrity is not None:
            self._integrity.judge(step, summed.changed)
        self._update(step, values[0], values[1], made=summed.finite)
        self._started.append(started)

    def _batch(self, step: int) -> Batch:
        mesh = self.model.mesh
        share = self.loader.batches.size(step) // mesh.layout.data_parallel
        return self.loader.batch(step, mesh.data_rank * share, share).to(mesh.device)

    def _changed(self) -> Tensor | None:
        """Code for whether this rank's state changed since the last update; if so, no rank may resume from it."""
        code = self._integrity.at_rest.changed() if self._integrity is not None else None
        if code is not None and not self._on_accelerator and int(code):
            self.applied = None
        return code

    def _update(self, step: int, loss: Tensor, norm_squared: Tensor, *, made: bool = True) -> None:
        """Update weights and optimizer state (`made` false: the update is refused). No communication."""
        before, self.ready, self.applied = self.applied, None, None
        lr = learning_rate(step, self.job.train.steps, self.job.optimizer)
        clock, counted = self._work_timer, self.model.clock
        with counted.during(OPTIMIZER), clock.running() if clock is not None else contextlib.nullcontext():
            update(self.optimizer, loss, norm_squared, lr=lr, clip_norm=self._clip_norm)
            if self._integrity is not None:
                self._integrity.at_rest.keep()
        if not self._on_accelerator:
            self.applied = step if made else before

    def apply_ready(self, norm_squared: float) -> None:
        """Apply the update of `ready` with the gradient norm that another rank received; bit-identical to that rank's."""
        assert self.ready is not None
        total = torch.tensor(norm_squared, dtype=torch.float64)
        assert torch.isfinite(total)
        self._update(self.ready, torch.zeros((), dtype=torch.float64), total)

    def _read_results(self, *, leave: int) -> None:
        while len(self._started) > leave:
            done = self._started.pop(0)
            values = done.result.values()
            now = time.perf_counter()
            seconds, self._clock = now - self._clock, now
            if self._integrity is not None:
                # Before a checkpoint of this state can be committed.
                self._integrity.judge(done.step, values.changed)
            self._saver.process_reports(values.parts, values.saving)
            self._saver.record_step(seconds)
            if values.leaving is not None:
                self._leaving = values.leaving
            decision = self._judge(done.step, values)
            if decision.action == "accept":
                self._accept(self._known(done, values, seconds))
                continue
            # Steps launched after it used wrong weights; their updates were refused or are rolled back.
            self._started.clear()
            self.optimizer.allow()
            if decision.action == "back":
                continue  # _judge rolled back
            self._next = done.step
            if decision.action == "skip":
                self._skip_step(done.step, decision.reason)
                self._next += 1

    def _known(self, done: _StepInFlight, values: StepValues, seconds: float) -> SummedStep:
        return SummedStep(self.generation, done.step, values, seconds, done.data_wait)

    def _accept(self, known: SummedStep) -> None:
        self.known = known
        self._recorder.step(known, hold=self._validation is not None and self._validation.due(known.step))
        self._beat(known)
        if self._writes and self._stragglers is not None and known.step >= self._first + WARM_UP:
            for slow in self._stragglers.add(known.values.local_seconds, known.seconds):
                self._finding("straggler", known.step, slow.message, slow.data, [slow.rank])

    # -- bad steps

    def _judge(self, step: int, values: StepValues) -> StepDecision:
        """Decide what to do after a step; a rollback is complete when this returns."""
        loss, norm = values.loss, values.grad_norm
        if self._guard is None:
            if math.isfinite(loss) and math.isfinite(norm):
                return StepDecision("accept")
            # Every rank has the same values and stops here; nothing of this step was saved.
            raise RunFailed(f"the loss is {loss} and the gradient norm {norm} at step {step}", hint=HINT)
        decision = self._guard.judge(step, loss, norm)
        data = decision.data
        if decision.action == "back":
            if self._try_rollback():
                # Snapshots of later steps, also on other nodes, are from the abandoned trajectory.
                data = {**data, "went_back_to": self._next - 1}
            else:
                decision = self._guard.without_rollback(step, loss, norm, decision)
                data = decision.data
        if decision.signal is not None:
            own = values.not_finite
            blamed = own if len(own) < self.model.mesh.layout.world_size else []
            self._finding(decision.signal, step, decision.reason, data, blamed)
        if decision.action == "fail":
            raise RunFailed(decision.reason, hint=HINT)
        return decision

    def _try_rollback(self) -> bool:
        """Restore the newest snapshot that every rank has."""
        if self._rollback is None:
            return False
        before, self.applied, self.ready = self.applied, None, None  # while it is being overwritten
        back = self._rollback()
        if back is None:
            self.applied = before
            return False
        self._saver.distrust(back, f"the run rolled back to step {back}")
        self.optimizer.clear_gradients()
        if self._integrity is not None:
            self._integrity.at_rest.keep()
        self.applied = None if self._on_accelerator else back
        self._next = back + 1
        return True

    def _skip_step(self, step: int, reason: str) -> None:
        """Count `step` as done without training on its samples."""
        assert self._guard is not None
        again = step in self._guard.skipped
        self._guard.mark_skipped(step, reason)
        self.optimizer.set_step(step)  # bias correction and learning rate depend on the step
        if not self._on_accelerator:
            self.applied = step
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        nothing = StepValues((0.0,) * vector_length(self.model.mesh.layout.world_size))
        values = self.known.values if self.known is not None else nothing
        self.known = SummedStep(self.generation, step, values, seconds, 0.0, skipped=True)
        self._recorder.step(self.known)
        if not again:
            self._records.event_of_first(
                "step_skipped",
                f"step {step} was skipped, its samples are not trained on: {reason}",
                severity="warning",
                data={"step": step, "reason": reason},
            )
            if self._writes:
                self._records.settle()  # the ledger must not continue before this event is on disk
        self._beat(self.known)

    # -- between steps

    def _is_boundary(self, step: int) -> bool:
        """Whether anything besides training follows `step`: then no step may be in flight."""
        resilience = self.job.resilience
        if step == self.job.train.steps or (self._validation is not None and self._validation.due(step)):
            return True
        if self._integrity is not None and step % resilience.verify_every_steps == 0:
            return True
        return self._snapshots is not None and self._snapshots.due(step)

    def _end_step(self, step: int, saves: bool) -> None:
        """Verify the state; only then validate, snapshot and, with `saves`, begin to save it."""
        if self._integrity is not None:
            # If a peer is lost during verification, no rank may resume from the unverified state.
            held, self.applied = self.applied, None
            self._integrity.verify(step)
            self.applied = held
        trained = self.known is not None and self.known.step == step and not self.known.skipped
        if self._validation is not None and self._validation.due(step) and trained:
            if self._leaving:
                self._recorder.release()  # the next generation measures it
            else:
                self._validate(self._validation, step)
        last = step == self.job.train.steps
        busy = self.known is not None and self.known.values.busy
        if self._snapshots is not None and not (last or busy):
            wanted = self._leaving is not None or self._snapshots.due(step)
            with self.model.clock.during(SAVE):
                if wanted and self._snapshots.take(step):
                    self._state_was_copied()
        overdue = self._saver.overdue
        if not (last or self._leaving or saves or overdue):
            return
        with self.model.clock.during(SAVE):
            self._recorder.sync()  # a checkpoint that survives a power loss must not outlive the record of its steps
            if last or self._leaving:
                self._saver.finish(step, must=last or self._leaving == "preempted")
            elif overdue:
                self._report_storage_wait(step)
                self._saver.save_or_stop(step)
            elif not self._saver.begin(step):
                return
            self._state_was_copied()
        self._clock = time.perf_counter()  # the next step's time excludes the save

    def _validate(self, validation: Validation, step: int) -> None:
        """Measure the validation loss of the state after `step`, and record it with the step's metrics."""
        supervisor = self._supervisor
        measured = validation.measure(
            supervisor.leave_request if supervisor is not None else lambda: None,
            partial(supervisor.validating, step) if supervisor is not None else lambda batch: None,
        )
        self._leaving = self._leaving or measured.leaving
        self._recorder.release(measured.loss, measured.seconds)
        if measured.loss is not None and not math.isfinite(measured.loss):
            self._records.event_of_first(
                "validation_not_finite",
                f"the validation loss after step {step} is {measured.loss}",
                severity="warning",
                data={"step": step},
            )
        self._clock = time.perf_counter()  # the next step's time excludes the validation

    def _validate_late(self, step: int) -> None:
        """Measure the validation loss after `step`, the current one, if an earlier generation did not."""
        if self._validation is None or not self._validation.due(step):
            return
        mesh = self.model.mesh
        lacking = torch.tensor([float(self._recorder.hold_again(step))], device=mesh.device)
        if mesh.sum_over_ranks(lacking).item():
            self._validate(self._validation, step)

    def _report_storage_wait(self, step: int) -> None:
        """Report that training waits after `step` for a checkpoint, so that it is not diagnosed as a hang."""
        self._finding("storage_wait", step, "training waits for a checkpoint to be written", {}, [])

    def _state_was_copied(self) -> None:
        if self._integrity is not None:
            self._integrity.at_rest.copied()

    # -- reporting

    @property
    def known_width(self) -> int:
        """Length of a known step's row."""
        return SummedStep.width(self.model.mesh.layout.world_size)

    def record_known(self, row: Sequence[float], step: int) -> None:
        """Write the records of `step`, which an earlier generation finished, where they are missing.

        `row` is `known.as_row()` of a rank that has it; a row of another step is ignored.
        """
        known = SummedStep.from_row(row)
        if step > 0 and known.step == step and (known.skipped or known.values.finite):
            self._recorder.once(known)

    def _beat(self, known: SummedStep) -> None:
        if self._supervisor is not None:
            self._supervisor.beat(known.step, known.seconds, not self._first_sent)
            self._first_sent = True

    def _finding(
        self, signal: str, step: int, message: str, data: dict[str, Any], blamed: Sequence[int]
    ) -> None:
        # All ranks have the same finding; rank 0 reports it.
        if self._writes and self._supervisor is not None:
            self._supervisor.finding(signal, step, message, data, blamed)
