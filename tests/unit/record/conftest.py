from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from presets import preset_job
from seatrial.job import Job
from seatrial.record.folder import RunFolder


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    return partial(preset_job, "first-voyage", "train.steps=200", "checkpoint.keep=3", folder=tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "runs" / "a-run"
    path.mkdir(parents=True)
    return RunFolder(path)
