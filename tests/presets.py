"""The presets of `seatrial init`, as files and as jobs."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from seatrial.job import Job, job_from_text, preset_text


def preset_file(name: str) -> Path:
    return Path(str(files("seatrial.job") / "presets" / f"{name}.toml"))


def preset_job(name: str, *overrides: str, folder: Path = Path("/jobs")) -> Job:
    """As a job file job.toml in `folder`, whether there is such a folder or not."""
    return job_from_text(preset_text(name), name="job.toml", base_folder=folder, overrides=overrides)
