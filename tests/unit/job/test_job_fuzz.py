"""Whatever a job file says, loading gives a Job or an InputError, never another exception."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import GOOD, load

from seatrial.base.errors import Diagnostic, InputError
from seatrial.job import Job
from seatrial.job.schema import JobFile
from seatrial.job.validate import SECTIONS

LITERALS = [
    "zero-bubble",
    "interleaved-1f1b",
    "zbv",
    "gpipe",
    "wsd",
    "llama",
    "qwen3",
    "llama3.1-8b",
    "auto",
    "x",
]
SMALL = st.sampled_from([*map(str, range(-1, 9)), "64", "256", "300", "4096", "1000003"])
VALUES = st.one_of(
    SMALL,
    SMALL,
    st.sampled_from([f'"{word}"' for word in LITERALS]),
    st.sampled_from(
        ["true", "false", "0.5", "nan", "-inf", "[1]", "{}", "{ factor = 8.0 }", "1979-05-27", '""']
    ),
)
SECTION_KEYS = [(s, key) for s, section in SECTIONS.items() for key in section.model_fields]
KEYS = st.sampled_from(
    [*(f"{s}.{key}" for s, key in SECTION_KEYS), *JobFile.model_fields, "data.x", "x.y", "x"]
)


@pytest.mark.cluster  # for its time only
@settings(deadline=None, max_examples=300)
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.lists(st.tuples(KEYS, VALUES), max_size=3))
def test_any_values(changes: dict[str, str], overrides: list[tuple[str, str]]) -> None:
    text = written({**flat(tomllib.loads(GOOD)), **changes})
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        text = GOOD
    job, problems = attempt(text, *(f"{key}={value}" for key, value in overrides))
    if job is None:
        assert problems
        assert all(problem.file is not None and problem.render() for problem in problems)
        return
    assert job.layout.world_size == job.cluster.nodes * job.cluster.gpus_per_node
    assert job.microbatches * job.layout.data_parallel * job.train.microbatch == job.train.global_batch
    assert load(job.to_toml()).identity() == job.identity()


@settings(deadline=None)
@given(st.text())
def test_any_text(text: str) -> None:
    job, problems = attempt(text)
    assert job is None
    assert problems


def attempt(text: str, *overrides: str) -> tuple[Job | None, list[Diagnostic]]:
    try:
        return load(text, *overrides), []
    except InputError as error:
        return None, error.diagnostics


def flat(values: dict[str, Any]) -> dict[str, str]:
    """Dotted keys and TOML values of a job file of plain values."""
    found = {}
    for name, value in values.items():
        for key, inner in value.items() if isinstance(value, dict) else [("", value)]:
            found[f"{name}.{key}".rstrip(".")] = f'"{inner}"' if isinstance(inner, str) else str(inner)
    return found


def written(values: dict[str, str]) -> str:
    """Dotted keys as lines, each below the header of its section."""
    lines = [f"{key} = {value}" for key, value in values.items() if "." not in key]
    for section in dict.fromkeys(key.split(".")[0] for key in values if "." in key):
        lines.append(f"[{section}]")
        lines += [f"{k.split('.')[1]} = {v}" for k, v in values.items() if k.startswith(f"{section}.")]
    return "\n".join(lines) + "\n"
