"""Digests of the inputs of a launch: a process that starts later must read the same content.

A rank that is forked again reads the job and the plan again. If they were edited meanwhile, it would train with other
values than its peers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from seatrial.base.atomic import write_json
from seatrial.base.errors import InputError
from seatrial.base.files import read_bytes, read_json
from seatrial.job import Job, job_from_text
from seatrial.record.folder import RunFolder

Digests = Mapping[str, str]  # file name -> SHA-256 of its content


def freeze(folder: RunFolder) -> None:
    """Record the digests of job.toml and plan.json. Called by the holder of the run's lock before anything starts."""
    write_json(folder.inputs_json, {path.name: _sha256(read_bytes(path)) for path in _files(folder)})


def frozen(folder: RunFolder) -> Digests:
    """The digests of the current launch. InputError if they cannot be read."""
    try:
        found = read_json(folder.inputs_json)
        return {path.name: str(found[path.name]) for path in _files(folder)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "stop the run; the same command rewrites it"
        raise InputError(f"cannot read {folder.inputs_json}: {error}", hint=hint) from error


def read_unchanged(path: Path, digests: Digests) -> str:
    """The text of `path`. InputError if it has changed since the launch."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if _sha256(content) != digests[path.name]:
        raise InputError(
            f"{path} was changed during the run",
            hint="it is the run's own copy: restore it, or stop the run, change your job file, and run the same command",
        )
    return content.decode("utf-8")


def job_of(folder: RunFolder, digests: Digests) -> Job:
    """The job of the current launch. InputError if its file has changed since."""
    text = read_unchanged(folder.job_toml, digests)
    return job_from_text(text, name=str(folder.job_toml), base_folder=folder.path)


def _files(folder: RunFolder) -> tuple[Path, ...]:
    return (folder.job_toml, folder.plan_json)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
