"""A run folder with a recovery in it, and the peers' own readers of what was pushed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import encode
from seatrial.record.metrics import MetricsRecord

JOB = 'name = "run"\n[train]\nsteps = 8\nglobal_batch = 4\n[optimizer]\nlr = 0.001\n'


def record(step: int, generation: int = 1, **more: Any) -> MetricsRecord:
    loss = 5.0 / step + generation / 100
    made = MetricsRecord(
        step, step * 64, loss, 1.5, 1e-3, 0.5, 0.1, 128.0, 64.0, None, 1000, 1000.0 + 10 * generation + step, generation
    )  # fmt: skip
    return replace(made, **more)


RECORDS = [
    *(record(step) for step in range(1, 5)),
    record(5, validation_loss=3.25, validation_time_s=0.25),
    record(6, extra={"per plexity!": 7.5}),
    *(record(step, 2) for step in range(5, 8)),
    record(8, 2, validation_loss=2.5, validation_time_s=0.25, expert_load_max=1.5, idle_experts=3),
]
EVENTS = [
    Event(1001.0, 1, "run_started", "info", "begins"),
    Event(1002.0, 1, "agent_started", "info", "of no weight"),
    Event(1017.5, 1, "rank_failed", "error", "rank 3 was killed", 1, 3),
    Event(1018.0, 2, "recovered", "info", "resuming after step 4"),
    Event(1030.0, 2, "run_finished", "info", "all steps are done"),
]


def write(path: Path, records: list[MetricsRecord], events: list[Event]) -> None:
    """Append them."""
    folder = RunFolder(path)
    folder.control.mkdir(parents=True, exist_ok=True)
    folder.job_toml.write_text(JOB)
    folder.plan_json.write_text("{}")
    with folder.metrics.open("ab") as file:
        for each in records:
            file.write(encode({k: v for k, v in vars(each).items() if v is not None or k == "mfu"}))
    with folder.events.open("ab") as file:
        file.writelines(encode(vars(event)) for event in events)


def wandb_records(folder: Path) -> Iterator[Any]:
    """What lies in the .wandb files of all offline runs: records of LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a whole one, or the last part of one
                found = Record()
                found.ParseFromString(whole)
                whole = b""
                yield found
