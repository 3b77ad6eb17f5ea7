"""A run folder of the version before runs could be started on many hosts: preempted after step 7 of 12, 2 nodes x 2 ranks."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from conftest import Run, records, seatrial

pytestmark = pytest.mark.cluster

PACKED = Path(__file__).parents[1] / "fixtures/runs/before-launch.tar.gz"


def test_it_can_be_watched_verified_and_resumed(tmp_path: Path) -> None:
    with tarfile.open(PACKED) as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / "runs/old"
    shown = seatrial(tmp_path, "watch", "old", "--once", "--json")
    assert shown.returncode == 0, shown.stderr
    view = json.loads(shown.stdout)
    assert (view["state"], view["step"]) == ("preempted", 7)
    assert view["problems"] == []
    verified = seatrial(tmp_path, "verify", "old")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    before = records(folder / "metrics.jsonl")
    code, _, err = Run(tmp_path).wait()
    assert code == 0, err
    assert "resuming after step 7\n" in err
    after = records(folder / "metrics.jsonl")
    assert after[:7] == before
    assert [m["step"] for m in after] == list(range(1, 13))
    assert after[-1]["loss"] < before[-1]["loss"]
    assert (folder / "checkpoints/step-00000012/manifest.json").is_file()
    verified = seatrial(tmp_path, "verify", "old")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "12 steps, 96 samples, each seen exactly once" in verified.stdout
