"""The file system of the run folder is full: what no record can say any more is said to the user."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from recovery_runs import Trial, make_folder

pytestmark = [pytest.mark.cluster, pytest.mark.ci]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The small job, its runs on a small file system of their own."""
    made = make_folder(tmp_path / "job")
    runs = made / "runs"
    runs.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(runs)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system of its own needs the right to mount: {mounted.stderr.strip()}")
    yield made
    subprocess.run(["umount", "-l", str(runs)], check=True)


def test_the_cause_is_reported_although_the_disk_is_full(folder: Path) -> None:
    """Steps cannot be recorded, so training must end: a checkpoint must not outlive the record of its steps."""
    trial = Trial(folder, "train.steps=500", "train.sample_tokens=0")
    try:
        trial.until_step(6)
        fd = os.open(folder / "runs" / "filler", os.O_CREAT | os.O_WRONLY)
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, bytes(4096))
        os.close(fd)
        code, err = trial.end()
        assert code == 1
        _, _, summary = err.partition("small failed")
        assert "runs/small is full: make room" in summary, err
        assert "ended without reporting a reason" not in summary
    finally:
        trial.kill_all()
        trial.process.wait()
        for stream in (trial.process.stdout, trial.process.stderr):
            assert stream is not None
            stream.close()
