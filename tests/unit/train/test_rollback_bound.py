"""How far back a run may still roll back: retention keeps a checkpoint before that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_cases import Run

from seatrial.checkpoint.manifest import named, step_of
from seatrial.train.checkpointing.snapshot import Snapshots
from seatrial.train.health import replicas as replicas_module
from seatrial.train.health.replicas import CHANGED_COPIED, CorruptState, Integrity


@pytest.fixture
def integrity(monkeypatch: pytest.MonkeyPatch) -> Integrity:
    monkeypatch.setattr(replicas_module, "AtRest", lambda *_: SimpleNamespace(keep=lambda: None))
    monkeypatch.setattr(replicas_module, "Replicas", lambda *_: SimpleNamespace(find=lambda: None))
    return Integrity(None, None)  # type: ignore[arg-type]


def test_last_good_step_is_not_before_the_rollback_bound(integrity: Integrity) -> None:
    integrity.begin(4)
    assert integrity.rollback_bound == 4
    for step in (10, 20):
        integrity.verify(step)
    assert integrity.rollback_bound == 10, "what was copied at 20 may have been copied after the change"
    with pytest.raises(CorruptState) as found:
        integrity.judge(21, {0: CHANGED_COPIED})
    assert found.value.last_good_step == 10


@pytest.mark.parametrize(
    ("held", "reach"), [([None, None], None), ([(1, 10), None], 10), ([(2, 20), (1, 15)], 15)]
)
def test_rollback_bound_is_the_older_snapshot(held: list[Any], reach: int | None) -> None:
    snapshots = Snapshots.__new__(Snapshots)
    snapshots._held = held
    assert snapshots.rollback_bound == reach


def test_rollback_leaves_a_checkpoint_on_disk_with_keep_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved at 2 and 4, a snapshot of 3: the rollback from 5 quarantines 4, and 2 must still exist then."""
    run = Run(tmp_path, "checkpoint.every_steps=2", "checkpoint.keep=1", copies=True)
    run.wait_for_saves()
    run.spoil(5, times=2)
    left: list[int] = []
    distrust = run.loop._saver.distrust

    def after(step: int, why: str) -> None:
        for outcome in run.loop._saver._writer.wait_removed(20.0):
            run.loop._saver._on_outcome(outcome)
        distrust(step, why)
        left.extend(s for p in named(run.folder.checkpoints) if (s := step_of(p)) is not None)

    monkeypatch.setattr(run.loop._saver, "distrust", after)
    assert run.loop.run(1) == "done"
    assert left == [2]
    assert len(list(run.folder.checkpoints.glob("step-0000000?"))) <= 2, "and no more than that"
