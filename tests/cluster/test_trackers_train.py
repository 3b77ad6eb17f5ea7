"""Trackers of a live run: fed while it trains, and whatever they do it ends as without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from recovery_runs import Begin, beginning, lines

from installed import install, install_examples

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

ONE_RANK = ("cluster.nodes=1", "cluster.gpus_per_node=1", "parallel.tensor=1", "parallel.pipeline=1")
RAISES = """
from seatrial.job.trackers import TrackerEntry

RAISES = TrackerEntry("raising_tracker:Raises", "os", "nothing")

class Raises:
    def __init__(self, run):
        raise ConnectionError("the tracker's server is gone")
"""


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    site = tmp_path / "site"
    install_examples(site, monkeypatch)
    install({"seatrial.trackers": {"raises": "raising_tracker:RAISES"}}, site, monkeypatch)
    (site / "raising_tracker.py").write_text(RAISES)
    with beginning(tmp_path / "job") as start:
        yield start


def test_trackers_follow_a_live_run_without_affecting_it(begin: Begin) -> None:
    trial = begin('watch.trackers=["lines", "raises"]', "train.steps=20000", *ONE_RANK)
    pushed = trial.run / "reports" / "lines.txt"
    trial.until(lambda: pushed.exists() and "step 5:" in pushed.read_text())
    trial.until_event("tracker_failed")
    trial.process.terminate()  # preempted: saved, and ended in order
    code, err = trial.end()
    assert code == 75, err
    (failed,) = trial.events("tracker_failed")
    assert 'the tracker "raises" failed: ConnectionError: the tracker\'s server is gone' in failed["message"]
    assert failed["severity"] == "warning"
    trained = [m["step"] for m in lines(trial.run / "metrics.jsonl")]
    text = pushed.read_text().splitlines()
    assert [int(line.split()[1][:-1]) for line in text if line.startswith("step")] == trained
    assert text[-1] == "small preempted"
