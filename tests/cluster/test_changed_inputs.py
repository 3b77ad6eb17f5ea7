"""Job or data edited under a live run: a rank that starts later must not train on with other numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recovery_runs import Trial, make_folder, one_node

from seatrial.data.prepare import prepare

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

LONG = "train.steps=4000"


def edit_job(trial: Trial) -> str:
    path = trial.run / "job.toml"
    text = path.read_text()
    assert "lr = 0.01" in text
    path.write_text(text.replace("lr = 0.01", "lr = 0.1"))
    return "job.toml was changed during the run"


def edit_plan(trial: Trial) -> str:
    path = trial.run / "plan.json"
    path.write_text(path.read_text().replace("tokens", "token"))
    return "plan.json was changed during the run"


def replace_data(trial: Trial) -> str:
    (trial.folder / "corpus" / "part0.py").write_text("other text\n" * 2000)
    store = trial.folder / "store"
    # As a program that knows nothing of the run would do it: Seatrial's own verbs refuse.
    prepare([str(trial.folder / "corpus")], "bytes", trial.folder / "other")
    store.rename(trial.folder / "old")
    (trial.folder / "other").rename(store)
    return "store was recreated during the run"


@pytest.mark.parametrize(
    "edit",
    [edit_job, *(pytest.param(edit, marks=pytest.mark.long) for edit in (edit_plan, replace_data))],
    ids=lambda f: f.__name__,
)
def test_a_rank_that_would_read_something_else_refuses(tmp_path: Path, edit: Callable[[Trial], str]) -> None:
    folder = make_folder(tmp_path / "work")
    prepare([str(folder / "corpus")], "bytes", folder / "store")
    trial = Trial(folder, LONG, 'data.train="store"', *one_node(4))
    try:
        trial.until_step(6)
        problem = edit(trial)
        before = trial.steps()
        trial.kill_rank(1)
        code, err = trial.end()
        assert code == 2
        assert problem in err
        assert "rank 1" in err
        after = trial.steps()
        assert {step: after[step] for step in before} == before
        assert not trial.events("corruption", "node_evicted")
    finally:
        trial.kill_all()
        trial.process.wait()
        for stream in (trial.process.stdout, trial.process.stderr):
            if stream is not None:
                stream.close()
