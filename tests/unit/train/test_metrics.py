"""Metrics of other packages in a small run: the example's, and ones that fail."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from loop_cases import Run

from installed import install, install_examples
from seatrial.base.errors import InputError
from seatrial.record.events import read_events
from seatrial.record.metrics import read_metrics

PERPLEXITY = 'train.metrics=["perplexity"]'
ODD = """
class Odd:
    def __init__(self, folder):
        self.folder = folder

class Words(Odd):
    def __call__(self, record):
        return "many"

class Twice(Odd):
    def __call__(self, record):
        assert record.step < 3
        return float("nan")
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_examples(tmp_path / "site", monkeypatch)
    odd = {name: f"seatrial_odd:{name.capitalize()}" for name in ("words", "twice")}
    install({"seatrial.metrics": odd}, tmp_path / "odd", monkeypatch)
    (tmp_path / "odd" / "seatrial_odd.py").write_text(ODD)


def test_every_record_has_the_metrics_value(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", PERPLEXITY)
    run.loop.run(1)
    records, problems = read_metrics(run.folder)
    assert (len(records), problems) == (8, [])
    assert [r.extra for r in records] == [{"perplexity": math.exp(r.loss)} for r in records]


def test_without_metrics_records_have_no_extra_values(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "train.steps=3")
    run.loop.run(1)
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert all("extra" not in line for line in lines)
    assert [r.extra for r in read_metrics(run.folder)[0]] == [None] * 3


def test_failing_metrics_are_reported_and_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 'train.metrics=["words", "twice", "perplexity"]', "train.steps=4")
    run.loop.run(1)
    records, _ = read_metrics(run.folder)
    assert [set(r.extra or ()) for r in records] == [{"twice", "perplexity"}] * 2 + [{"perplexity"}] * 2
    assert math.isnan((records[0].extra or {})["twice"])
    failed = [e for e in read_events(run.folder)[0] if e.kind == "callback_failed"]
    assert [e.data for e in failed] == [{"callback": "words"}, {"callback": "twice"}]
    assert failed[0].message.startswith('the metric "words" failed at step 1: ValueError: ')
    assert failed[1].message.startswith('the metric "twice" failed at step 3: AssertionError: ')


def test_on_callback_error_stop_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 'train.metrics=["words"]', "train.on_callback_error=stop")
    with pytest.raises(InputError, match='the metric "words" failed at step 1'):
        run.loop.run(1)
