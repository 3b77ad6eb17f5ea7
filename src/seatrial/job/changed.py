"""A copy of a job with some keys changed, as `drill` and `scale` run it; and what was changed, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from seatrial.job.job import Job
from seatrial.job.loading import job_from_text
from seatrial.job.schema import JobFile


@dataclass(frozen=True)
class Change:
    """One key whose value differs between the copy and the job."""

    key: str
    job: Any  # the job's value
    copy: Any
    why: str


@dataclass(frozen=True)
class Copy:
    """A changed job, and its differences from the given one."""

    job: Job
    changes: tuple[Change, ...]


def changed_job(job: Job, wanted: Mapping[str, tuple[Any, str]]) -> Copy:
    """`job` with the keys of `wanted`, "section.key" -> (value, why). Raises InputError for values that a job file may not have."""
    sections: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    changes = []
    for key, (value, why) in wanted.items():
        section, _, name = key.rpartition(".")
        old = getattr(getattr(job.file, section) if section else job.file, name)
        if section == "parallel" and name == "shard":
            old = job.layout.sample_shards  # the job file may leave it open
        if old == value:
            continue
        was = (
            [each.model_dump() if isinstance(each, BaseModel) else each for each in old]
            if isinstance(old, list)
            else old
        )
        changes.append(Change(key, was, value, why))
        if section:
            sections.setdefault(section, {})[name] = value
        else:
            top[name] = value
    update = {s: getattr(job.file, s).model_copy(update=values) for s, values in sections.items()}
    file: JobFile = job.file.model_copy(update={**top, **update})
    parallel = {
        "shard": job.layout.sample_shards,
        "context": job.layout.context,
        **sections.get("parallel", {}),
    }
    parallel["shard"] *= parallel["context"]
    layout = replace(job.layout, **parallel)
    text = Job(file, job.architecture, layout, job.source).to_toml()
    # Read again like any job file, so that whatever would be refused there is refused here.
    return Copy(job_from_text(text, name=f"the copy of {job.source}", base_folder=Path.cwd()), tuple(changes))
