"""TensorBoard: event files in RUN/tensorboard, events of the run as texts in RUN/tensorboard/events."""

from __future__ import annotations

import json

from tensorboard.compat.proto.event_pb2 import Event as Entry
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from seatrial.record.events import Event
from seatrial.record.metrics import MetricsRecord
from seatrial.record.states import State
from seatrial.watch.trackers.tracker import TrackedRun


class TensorBoard:
    """Redone steps replace earlier ones: TensorBoard discards later steps when a new session starts."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.path / "tensorboard"
        self.id = "tensorboard"
        self._steps = EventFileWriter(str(folder))
        # Separate, because redone steps would otherwise also discard the event that explains them.
        self._events = EventFileWriter(str(folder / "events"))
        self._last = run.step
        if run.id is None:
            text = json.dumps(run.config, indent=1, ensure_ascii=False)
            self._text("job", "\n".join(f"    {line}" for line in text.splitlines()), 0, None)

    def log_step(self, record: MetricsRecord, values: dict[str, float]) -> None:
        if record.step <= self._last:
            start = SessionLog(status=SessionLog.START)
            self._steps.add_event(Entry(wall_time=record.time, step=record.step, session_log=start))
        self._last = record.step
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._steps.add_event(Entry(wall_time=record.time, step=record.step, summary=Summary(value=scalars)))

    def log_event(self, event: Event, step: int, count: int) -> None:
        self._text(f"events/{event.kind}", f"{event.severity}: {event.message}", step, event.time)

    def flush(self) -> None:
        self._steps.flush()
        self._events.flush()

    def end(self, state: State) -> None:
        self._steps.close()
        self._events.close()

    def _text(self, tag: str, text: str, step: int, time: float | None) -> None:
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        value = Summary.Value(tag=tag, metadata=kind, tensor=tensor)
        self._events.add_event(Entry(wall_time=time, step=step, summary=Summary(value=[value])))
