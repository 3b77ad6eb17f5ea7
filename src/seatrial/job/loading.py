"""Load a job file: text, overrides, schema, model, layout, rules; all problems are reported at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from seatrial.base.errors import Diagnostic, InputError, InternalError
from seatrial.job.finding import Facts
from seatrial.job.job import Job, Unchosen
from seatrial.job.layout import Layout
from seatrial.job.partial import Partial, UnreadableError
from seatrial.job.ranks import resolve_layout
from seatrial.job.resolve import resolve_architecture
from seatrial.job.rules import Rule, check
from seatrial.job.schema import JobFile
from seatrial.job.source import Source, read_text
from seatrial.job.validate import list_fields, text_fields, validate

_PATHS = (
    ("model", "hf"),
    ("model", "init_from"),
    ("data", "train"),
    ("data", "validation"),
    ("data", "tokenizer"),
    ("checkpoint", "folder"),
    ("checkpoint", "fallback"),
    ("ssh", "hostfile"),
    ("ssh", "config"),
)


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job of a job file, with `--set` overrides such as "train.steps=200".

    Paths in the file are relative to its folder, paths in overrides to the current folder. With `parallel = "auto"`
    the job is open: its layout is still to be chosen. Raises InputError with every problem.
    """
    path = job_file(path)
    return job_from_text(read_text(path), name=str(path), base_folder=path.parent, overrides=overrides)


def job_file(path: Path) -> Path:
    """The file that `path` names: itself, or if it does not exist, the same name with .toml."""
    named = path.with_name(f"{path.name}.toml") if path.name else path
    return named if not os.path.isfile(path) and os.path.isfile(named) else path


def job_from_text(text: str, *, name: str, base_folder: Path, overrides: Sequence[str] = ()) -> Job:
    """As `load_job`, for a text; `name` is what messages call the file."""
    job, problems = judged(text, name=name, base_folder=base_folder, overrides=overrides)
    if job is None or problems:
        raise InputError(problems)
    return job


def judged(
    text: str,
    *,
    name: str,
    base_folder: Path,
    overrides: Sequence[str] = (),
    more_rules: Sequence[Rule] = (),
) -> tuple[Job | None, list[Diagnostic]]:
    """The job and its problems, by line; job is None if a value is missing or invalid.

    `more_rules` are checked with the job file's own. InputError for invalid TOML.
    """
    source = Source(text, name)
    kinds = {"text_fields": text_fields(), "list_fields": list_fields()}
    problems = [p for o in overrides if (p := source.override(o, **kinds)) is not None]
    _make_absolute(source, base_folder)
    file, found = validate(source)
    problems += found
    try:
        architecture, findings = resolve_architecture(file.model)
    except UnreadableError:
        architecture, findings = Facts(file).architecture, []
    layout, layout_findings = resolve_layout(file)
    findings += layout_findings
    findings += check(Facts(file, architecture, layout), more_rules)
    problems += [f.locate(source) for f in findings]
    ordered = sorted(dict.fromkeys(problems), key=by_line)
    if isinstance(file, JobFile) and file.parallel == "auto":
        layout = cast(Layout, Unchosen())
    if any(isinstance(part, Partial) for part in (file, architecture, layout)):
        if not problems:
            raise InternalError("a value is missing without a reported problem")
        return None, ordered
    return Job(file=file, architecture=architecture, layout=layout, source=name, text=source), ordered


def by_line(problem: Diagnostic) -> tuple[bool, int, int]:
    """Sort key: by line; problems without a line come last, in the order found."""
    return (problem.line is None, problem.line or 0, problem.column or 0)


def _make_absolute(source: Source, base_folder: Path) -> None:
    """Make the paths in the values absolute, before anything uses them."""
    for section, key in _PATHS:
        table: Any = source.values.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        folder = Path.cwd() if source.overridden((section, key)) else base_folder
        if isinstance(value, str):
            table[key] = _absolute(section, key, value, folder)
        elif isinstance(value, list):
            table[key] = [_absolute(section, key, v, folder) if isinstance(v, str) else v for v in value]


def _absolute(section: str, key: str, value: str, folder: Path) -> str:
    if not value or _is_no_path(section, key, value):
        return value
    with contextlib.suppress(RuntimeError):  # ~unknown user
        value = str(Path(value).expanduser())
    return str((folder / value).absolute())


def _is_no_path(section: str, key: str, value: str) -> bool:
    """Names that only look like paths: builtin corpora, object stores, the byte tokenizer."""
    if (section, key) == ("data", "tokenizer") and value == "bytes":
        return True
    return value.startswith("builtin:") or "://" in value
