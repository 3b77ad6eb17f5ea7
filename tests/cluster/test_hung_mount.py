"""Checkpoints on a mount that hangs: a recovery that needs nothing from it does not wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from recovery_runs import REPLICAS, STEPS, Trial, make_folder

from hung_mount import HungMount

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

# Longer than the run is disturbed: nobody may wait for a collective, or for the storage, for so long.
LONG_LIMITS = ("resilience.hang_min_s=60", "resilience.snapshot_every_steps=3", "checkpoint.every_steps=4")


@pytest.mark.parametrize(
    "settings", [(), pytest.param(REPLICAS, marks=pytest.mark.long)], ids=["memory", "replica"]
)
def test_a_recovery_in_place_goes_on_without_it(tmp_path: Path, settings: tuple[str, ...]) -> None:
    folder = make_folder(tmp_path / "job")
    mount = tmp_path / "mount"
    mount.mkdir()
    trial = Trial(folder, *LONG_LIMITS, *settings, f"train.steps={4 * STEPS}", f"checkpoint.folder={mount}")
    try:
        trial.until_event("checkpoint_saved")
        trial.until_step(9)
        with HungMount(mount):
            trial.kill_rank(3)
            recovered = trial.until_event("recovered")
            source = recovered["data"]["source"]
            assert source == "memory" or (settings and source == "replica")  # by when it was hit
            assert recovered["time"] - trial.until_event("recovering")["time"] < 15.0
            trial.until_step(recovered["data"]["step"] + 6)
        unseen = trial.events("checkpoints_unseen")
        assert [e["data"]["step"] for e in unseen] == [recovered["data"]["step"]] * (source == "memory")
        code, err = trial.end()
        assert code == 0, err
        assert trial.samples() == [(8 * i, 8 * i + 8) for i in range(4 * STEPS)]
        assert trial.events("checkpoint_saved")[-1]["data"]["step"] == 4 * STEPS
    finally:
        trial.kill_all()
        trial.process.wait()
        for stream in (trial.process.stdout, trial.process.stderr):
            assert stream is not None
            stream.close()
