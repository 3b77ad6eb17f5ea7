"""Callbacks of other packages in a small run: the example's, a failing one, a slow one."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_cases import Run

from installed import install, install_examples
from seatrial.base.errors import InputError
from seatrial.record.events import read_events
from seatrial.record.metrics import read_metrics

LOSSES = 'train.callbacks=["losses"]'
SLOW = """
import time

class Slow:
    def __init__(self, folder):
        pass

    def __call__(self, record):
        begin = time.perf_counter()
        while time.perf_counter() - begin <= record.step_time_s:
            pass
"""


@pytest.fixture(autouse=True)
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_examples(tmp_path / "site", monkeypatch)


def test_a_callback_gets_the_record_of_every_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", LOSSES)
    (tmp_path / "run" / "reports").mkdir()
    run.loop.run(1)
    rows = [line.split(",") for line in (tmp_path / "run/reports/losses.csv").read_text().splitlines()]
    records, _ = read_metrics(run.folder)
    assert len(rows) == 8
    assert [(int(g), int(s), float(loss)) for g, s, loss in rows] == [
        (r.generation, r.step, r.loss) for r in records
    ]


def test_a_failing_callback_is_reported_and_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", LOSSES)  # without the folder that it writes to
    run.loop.run(1)
    (event,) = (e for e in read_events(run.folder)[0] if e.kind == "callback_failed")
    assert event.severity == "warning"
    assert event.message.startswith('the callback "losses" failed at step 1: FileNotFoundError: ')
    assert len(read_metrics(run.folder)[0]) == 8


def test_on_callback_error_stop_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", LOSSES, "train.on_callback_error=stop")
    with pytest.raises(InputError, match='the callback "losses" failed at step 1'):
        run.loop.run(1)


def test_a_slow_callback_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install({"seatrial.callbacks": {"slow": "seatrial_slow:Slow"}}, tmp_path / "slow", monkeypatch)
    (tmp_path / "slow" / "seatrial_slow.py").write_text(SLOW)
    run = Run(tmp_path / "run", 'train.callbacks=["slow"]', "train.steps=3")
    run.loop.run(1)
    (event,) = (e for e in read_events(run.folder)[0] if e.kind == "callback_slow")
    assert event.message.startswith('the callback "slow" took ')
