"""Callbacks and metrics of other packages, which rank 0 calls with the record of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from seatrial.base.errors import InputError
from seatrial.base.registry import Registry
from seatrial.job import Job
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord
from seatrial.train.records import Records


class Callbacks:
    """The callbacks, or the metrics, of one generation. One that fails is reported and dropped, or ends the run (`on_callback_error`)."""

    def __init__(
        self, registry: Registry[type], names: Iterable[str], job: Job, folder: RunFolder, records: Records
    ) -> None:
        self._kind = registry.kind
        self._stops = job.train.on_callback_error == "stop"
        self._records = records
        self._slow: set[str] = set()
        self._calls: dict[str, Callable[[MetricsRecord], Any]] = {}
        for name in names:
            call = self._guarded(name, "at its start", registry.named(name), folder.path)
            if call is not None:
                self._calls[name] = call

    def step(self, record: MetricsRecord) -> None:
        """Call each with `record`. Raises InputError if one fails and `on_callback_error` is "stop"."""
        for name, call in list(self._calls.items()):
            self._timed(name, call, record)

    def values(self, record: MetricsRecord) -> dict[str, float]:
        """Like `step`; returns each metric's number. A metric that returns anything else has failed."""
        found = {}
        for name, call in list(self._calls.items()):
            value = self._timed(name, partial(_number, call), record)
            if value is not None:
                found[name] = value
        return found

    def _timed(self, name: str, call: Callable[[MetricsRecord], Any], record: MetricsRecord) -> Any:
        start = time.perf_counter()
        value = self._guarded(name, f"at step {record.step}", call, record)
        seconds = time.perf_counter() - start
        if seconds > record.step_time_s and name not in self._slow:
            self._slow.add(name)
            message = f'the {self._kind} "{name}" took {seconds:.2g} s at step {record.step}, more than the step itself'
            data = {"callback": name, "step": record.step, "seconds": seconds}
            self._records.event("callback_slow", message, severity="warning", data=data)
        return value

    def _guarded(self, name: str, when: str, call: Callable[[Any], Any], argument: object) -> Any:
        try:
            return call(argument)
        except Exception as error:
            message = f'the {self._kind} "{name}" failed {when}: {type(error).__name__}: {error}'
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


def _number(call: Callable[[MetricsRecord], Any], record: MetricsRecord) -> float:
    return float(call(record))
