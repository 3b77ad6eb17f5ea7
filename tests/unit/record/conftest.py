from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.job import Job, job_from_text, preset_text
from seatrial.record.folder import RunFolder


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    def make(*overrides: str) -> Job:
        return job_from_text(
            preset_text("first-voyage"),
            name="job.toml",
            base_folder=tmp_path,
            overrides=("train.steps=200", "checkpoint.keep=3", *overrides),
        )

    return make


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "runs" / "a-run"
    path.mkdir(parents=True)
    return RunFolder(path)
