"""MLflow: one run. Server and experiment from MLflow's own environment variables; without them files in RUN/mlruns."""

from __future__ import annotations

import os
import re

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.states import State
from seatrial.watch.trackers.tracker import TrackedRun

_METRICS, _PARAMS, _VALUE = 1000, 100, 6000  # limits of one MLflow request
_STATUS: dict[State, str] = {"finished": "FINISHED", "failed": "FAILED"}
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")


class MLflow:
    """MLflow keeps every value of a step; of a redone step the latest by time counts."""

    def __init__(self, run: TrackedRun) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if where is None:
            where = (run.path / "mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(where)
        self._waiting: list[Metric] = []
        if run.id is not None:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        made = self._client.create_run(self._experiment(), run_name=run.name)
        self.id = made.info.run_id
        params = [Param(key, str(value)[:_VALUE]) for key, value in run.config.items()]
        for i in range(0, len(params), _PARAMS):
            self._client.log_batch(self.id, params=params[i : i + _PARAMS])

    def log_step(self, record: MetricsRecord, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._put(name, value, record.time, record.step)

    def log_event(self, event: Event, step: int, count: int) -> None:
        self._put(f"events/{event.kind}", count, event.time, step)
        self._client.set_tag(self.id, f"event.{event.kind}", f"after step {step}: {event.message}"[:_VALUE])

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._client.log_batch(self.id, metrics=waiting)

    def end(self, state: State) -> None:
        self._client.set_terminated(self.id, _STATUS.get(state, "KILLED"))

    def _put(self, name: str, value: float, time: float, step: int) -> None:
        name = _NOT_IN_NAMES.sub("_", name)
        self._waiting.append(Metric(name, float(value), int(time * 1000), step))
        if len(self._waiting) == _METRICS:
            self.flush()

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "seatrial")
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another run created it concurrently
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)
