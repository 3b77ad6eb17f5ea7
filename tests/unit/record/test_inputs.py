"""What a launch was begun with, and what was changed since."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.base.errors import InputError
from seatrial.job import job_from_text
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import freeze, frozen, job_of, read_unchanged

JOB = """
name = "frozen"
[model]
preset = "qwen2.5-tiny"
[data]
train = "builtin:python-library"
[train]
steps = 5
sequence_length = 32
global_batch = 8
[optimizer]
lr = 1e-3
[checkpoint]
every_steps = 5
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "frozen")
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text(job_from_text(JOB, name="job", base_folder=tmp_path).to_toml())
    folder.plan_json.write_text("{}\n")
    freeze(folder)
    return folder


def test_what_was_not_changed_is_read(folder: RunFolder) -> None:
    digests = frozen(folder)
    assert job_of(folder, digests).optimizer.lr == 1e-3
    assert read_unchanged(folder.plan_json, digests) == "{}\n"


@pytest.mark.parametrize("name", ["job.toml", "plan.json"])
def test_a_file_that_was_changed_is_named(folder: RunFolder, name: str) -> None:
    digests = frozen(folder)
    path = folder.path / name
    path.write_text(path.read_text().replace("0.001", "0.01") + "\n")
    with pytest.raises(InputError, match=f"{name} was changed during the run"):
        read_unchanged(path, digests)


def test_a_file_that_is_gone_is_named(folder: RunFolder) -> None:
    digests = frozen(folder)
    folder.job_toml.unlink()
    with pytest.raises(InputError, match=r"cannot read .*job\.toml: No such file"):
        job_of(folder, digests)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job.toml": "ab"}', "[" * 100_000])
def test_digests_that_cannot_be_read_are_bad_input(folder: RunFolder, text: str) -> None:
    folder.inputs_json.write_text(text)
    with pytest.raises(InputError, match=r"cannot read .*inputs\.json"):
        frozen(folder)


def test_a_next_launch_may_have_another_job(folder: RunFolder) -> None:
    folder.job_toml.write_text(folder.job_toml.read_text().replace("0.001", "0.01"))
    freeze(folder)
    assert job_of(folder, frozen(folder)).optimizer.lr == 1e-2
