"""A job run as a user runs it, on this machine's GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def train(folder: Path, job: str, *overrides: str) -> list[dict[str, float]]:
    """The metrics of one start of the job file `job` in `folder`, after it has ended well."""
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(job)
    arguments = [a for o in overrides for a in ("--set", o)]
    done = subprocess.run(
        [sys.executable, "-m", "seatrial", "train", "job.toml", "--plain", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]
