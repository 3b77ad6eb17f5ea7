"""A small valid job file and how to load variations of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.base.errors import Diagnostic, InputError
from seatrial.job import Job, job_from_text

GOOD = """\
name = "trial"

[model]
preset = "qwen2.5-tiny"

[data]
train = "builtin:python-library"

[cluster]
nodes = 2
gpus_per_node = 4

[parallel]
tensor = 2
pipeline = 2

[train]
steps = 200
sequence_length = 256
global_batch = 32
microbatch = 4

[optimizer]
lr = 3e-3

[checkpoint]
every_steps = 50
"""


def load(text: str = GOOD, *overrides: str, folder: Path = Path("/nowhere")) -> Job:
    return job_from_text(text, name="job.toml", base_folder=folder, overrides=overrides)


def problems(text: str = GOOD, *overrides: str, folder: Path = Path("/nowhere")) -> list[Diagnostic]:
    """What is wrong with a job file that must be refused."""
    with pytest.raises(InputError) as caught:
        load(text, *overrides, folder=folder)
    return caught.value.diagnostics


def only_problem(*overrides: str, text: str = GOOD, folder: Path = Path("/nowhere")) -> Diagnostic:
    found = problems(text, *overrides, folder=folder)
    assert len(found) == 1, [d.message for d in found]
    return found[0]
