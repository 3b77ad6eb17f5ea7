"""The places in src where the host or a stream waits for a GPU's work, each with a way to remove it: what a run gives then must be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import late_device
from seatrial.checkpoint import staging_memory
from seatrial.checkpoint.staging import AsyncWriter
from seatrial.hardware import accelerator
from seatrial.parallel import offload
from seatrial.parallel.offload import Transfers
from seatrial.parallel.stage_clock import StageClock
from seatrial.train import step as steps
from seatrial.train.checkpointing import snapshot
from seatrial.train.checkpointing.snapshot import Snapshots
from seatrial.train.loop import Loop
from seatrial.train.meter import OwnWorkTimer
from seatrial.train.step import StepResult

Patch = Callable[[Any, str, Any], None]  # as `setattr`


class _NeverRecorded:
    """`hardware.accelerator`, but its events are not in any stream: waiting for them returns at once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(accelerator, name)

    def record(self, *, timing: bool = False) -> late_device.Event:
        return late_device.Event(enable_timing=timing)


class _Complete(late_device.Event):
    """An event that says it is complete."""

    def query(self) -> bool:
        return True


def step_result_is_not_waited_for(patch: Patch) -> None:
    values = StepResult.values

    def unwaited(self: StepResult) -> Any:
        self._copied = None
        return values(self)

    patch(StepResult, "values", unwaited)


def event_of_step_result_is_not_recorded(patch: Patch) -> None:
    patch(steps, "accelerator", _NeverRecorded())


def snapshot_is_written_before_it_is_copied(patch: Patch) -> None:
    write = Snapshots._write
    patch(Snapshots, "_write", lambda self, taken: write(self, replace(taken, copied=None)))


def event_of_snapshot_is_not_recorded(patch: Patch) -> None:
    patch(snapshot, "accelerator", _NeverRecorded())


def snapshot_is_taken_while_one_is_written(patch: Patch) -> None:
    take = Snapshots.take

    def at_once(self: Snapshots, step: int) -> bool:
        self._free.set()
        return take(self, step)

    patch(Snapshots, "take", at_once)
    patch(Snapshots, "busy", False)


def checkpoint_is_written_before_it_is_copied(patch: Patch) -> None:
    order_part = AsyncWriter.order_part

    def unwaited(self: AsyncWriter, *args: Any) -> None:
        self._memory._copied = None
        order_part(self, *args)

    patch(AsyncWriter, "order_part", unwaited)


def event_of_checkpoint_is_not_recorded(patch: Patch) -> None:
    patch(staging_memory, "accelerator", _NeverRecorded())


def time_of_stages_is_read_too_early(patch: Patch) -> None:
    read = StageClock._read_marks

    def early(self: StageClock) -> None:
        for event, _, _ in self._marks:
            event.__class__ = _Complete
        read(self)

    patch(StageClock, "_read_marks", early)


def compute_time_is_read_too_early(patch: Patch) -> None:
    read = OwnWorkTimer.read

    def early(self: OwnWorkTimer) -> float:
        for _, end in self._pending:
            end.__class__ = _Complete
        return read(self)

    patch(OwnWorkTimer, "read", early)


def step_is_in_flight_at_a_save(patch: Patch) -> None:
    read = Loop._read_results

    def one_left(self: Loop, *, leave: int) -> None:
        last = self._next > self.job.train.steps
        read(self, leave=leave if last else self._max_in_flight)

    patch(Loop, "_read_results", one_left)


# -- the places where a stream of the GPU waits for another


def input_is_freed_before_it_has_left(patch: Patch) -> None:
    finish = Transfers.finish_sending

    def unwaited(self: Transfers) -> None:
        if self._leaving is not None:
            self._leaving = self._leaving[0], None
        finish(self)

    patch(Transfers, "finish_sending", unwaited)


def input_is_read_before_it_has_arrived(patch: Patch) -> None:
    fetch = Transfers._fetch

    def unwaited(self: Transfers, kept: Any) -> None:
        fetch(self, kept)
        kept.arrived = None
        if self._arriving is not None:
            self._arriving = self._arriving[0], None

    patch(Transfers, "_fetch", unwaited)


def input_is_copied_before_it_is_computed(patch: Patch) -> None:
    class Unordered(late_device.Event):
        def wait(self) -> None:
            if not late_device._current:
                super().wait()

    patch(torch, "Event", Unordered)


def event_of_offload_is_not_recorded(patch: Patch) -> None:
    patch(offload, "accelerator", _NeverRecorded())


OFFLOAD_WAITS = {
    remove.__name__: remove
    for remove in (
        input_is_freed_before_it_has_left,
        input_is_read_before_it_has_arrived,
        input_is_copied_before_it_is_computed,
        event_of_offload_is_not_recorded,
    )
}

JOB_WAITS = {
    remove.__name__: remove
    for remove in (
        step_result_is_not_waited_for,
        event_of_step_result_is_not_recorded,
        snapshot_is_written_before_it_is_copied,
        event_of_snapshot_is_not_recorded,
        snapshot_is_taken_while_one_is_written,
        checkpoint_is_written_before_it_is_copied,
        event_of_checkpoint_is_not_recorded,
        time_of_stages_is_read_too_early,
        compute_time_is_read_too_early,
        step_is_in_flight_at_a_save,
    )
}
