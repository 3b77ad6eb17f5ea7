"""Callbacks of other packages: what rank 0 calls with the record of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from seatrial.base.errors import InputError
from seatrial.job import Job
from seatrial.job.callbacks import CALLBACKS
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord
from seatrial.train.records import Records


class Callbacks:
    """The callbacks of one generation. One that fails is reported and not called again, or ends the run, as configured by the job."""

    def __init__(self, job: Job, folder: RunFolder, records: Records) -> None:
        self._stops = job.train.on_callback_error == "stop"
        self._records = records
        self._slow: set[str] = set()
        self._calls: dict[str, Callable[[MetricsRecord], object]] = {}
        for name in job.train.callbacks or ():
            call = self._guarded(name, "at its start", CALLBACKS.named(name), folder.path)
            if call is not None:
                self._calls[name] = call

    def step(self, record: MetricsRecord) -> None:
        """Call each with `record`. Raises InputError if one fails and the job is to stop then."""
        for name, call in list(self._calls.items()):
            began = time.perf_counter()
            self._guarded(name, f"at step {record.step}", call, record)
            seconds = time.perf_counter() - began
            if seconds > record.step_time_s and name not in self._slow:
                self._slow.add(name)
                message = f'the callback "{name}" took {seconds:.2g} s at step {record.step}, more than the step itself'
                data = {"callback": name, "step": record.step, "seconds": seconds}
                self._records.event("callback_slow", message, severity="warning", data=data)

    def _guarded(self, name: str, when: str, call: Callable[[Any], Any], argument: object) -> Any:
        try:
            return call(argument)
        except Exception as error:
            message = f'the callback "{name}" failed {when}: {type(error).__name__}: {error}'
            if self._stops:
                raise InputError(
                    message, hint='repair it, or set train.on_callback_error = "warn"'
                ) from error
            self._calls.pop(name, None)
            self._records.event(
                "callback_failed",
                f"{message}; training continues without it",
                severity="warning",
                data={"callback": name},
            )
            return None
