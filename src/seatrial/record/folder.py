"""Where everything of a run lies. The run folder is the truth; all views are made from it."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from pathlib import Path

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import not_a_file, read_text

# Any of these makes a folder a run folder. job.toml alone does not: `seatrial init` writes such files anywhere.
_MARKS = ("control/lock", "control/identity.json", "plan.json", "events.jsonl", "metrics.jsonl")

_COUNT = re.compile(r"[0-9]{1,18}")  # int() would accept digits of any script
_COUNT_BYTES = 64


class RunFolder:
    """The paths of one run. Making one touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job_toml = path / "job.toml"
        self.plan_json = path / "plan.json"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.interval_json = path / "interval.json"
        self.control = path / "control"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.reports = path / "reports"
        self.ranks = path / "ranks"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def lock(self) -> Path:
        """Locked by the process that runs the run, with its pid inside."""
        return self.control / "lock"

    @property
    def identity_json(self) -> Path:
        """The keys of the job that make two starts the same run."""
        return self.control / "identity.json"

    @property
    def inputs_json(self) -> Path:
        """Digests of job.toml and plan.json at the start of the last launch; see `record.inputs`."""
        return self.control / "inputs.json"

    @property
    def generation_file(self) -> Path:
        """The number of the last start."""
        return self.control / "generation"

    @property
    def secret(self) -> Path:
        """What the processes of the last start prove themselves with; see `record.secret`."""
        return self.control / "secret"

    @property
    def leases(self) -> Path:
        """Who coordinates: one file for each term."""
        return self.control / "leases"

    @property
    def control_state(self) -> Path:
        """What a new coordinator goes on from."""
        return self.control / "state.json"

    @property
    def coordinator_log(self) -> Path:
        """What the coordinators decided, and why, in lines."""
        return self.control / "coordinator.log"

    def rank_log(self, generation: int, node: int, rank: int) -> Path:
        """stdout and stderr of one rank in one generation."""
        return self.logs / f"{generation:06d}" / f"node{node}" / f"rank{rank}.log"

    def rank_error(self, generation: int, node: int, rank: int) -> Path:
        """The exception that ended one rank, as JSON; absent where there was none or nobody could write it."""
        return self.rank_log(generation, node, rank).with_suffix(".error.json")

    def last_generation(self) -> int:
        """The highest generation ever started here, 0 for none. A damaged file is outvoted by the log folders."""
        told: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            told.append(read_text(self.generation_file, most=_COUNT_BYTES).strip())
        with contextlib.suppress(OSError):
            told += os.listdir(self.logs)
        return max((int(text) for text in told if _COUNT.fullmatch(text)), default=0)

    def is_run(self) -> bool:
        """Whether a run was ever started in this folder."""
        return any(os.path.lexists(self.path / mark) for mark in _MARKS)

    def check_records(self) -> None:
        """Raise InputError for every existing record that is not a regular file: a link, a pipe, a folder."""
        records = (self.job_toml, self.plan_json, self.events, self.metrics, self.ledger, self.interval_json)
        control = (self.lock, self.generation_file, self.identity_json, self.inputs_json, self.secret)
        more = (self.control_state, self.coordinator_log)
        wrong = [error for path in (*records, *control, *more) if (error := not_a_file(path))]
        hint = "Seatrial writes regular files there: put the file back, or remove what stands in its place"
        if wrong:
            raise InputError([Diagnostic(f"{e.filename} {e.strerror}", hint=hint) for e in wrong])

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run folder at `path`, for readers. Raises InputError if there is none, and as `check_records`."""
        folder = cls(path)
        if folder.is_run():
            folder.check_records()
            return folder
        if path.is_dir():
            what = f"{path} is not a run folder"
        elif path.exists():
            what = f"{path} is a file, not a run folder"
        else:
            what = f"there is no run folder {path}"
        raise InputError(what, hint=_nearby_hint(path))

    @classmethod
    def find(cls, name: str, root: Path = Path("runs")) -> RunFolder:
        """The run folder at the path `name`, or else the run called `name` under `root`. Raises InputError."""
        for path in (Path(name), root / name):
            if cls(path).is_run():
                return cls.open(path)
        # Neither: tell of the one that was most likely meant.
        return cls.open(Path(name) if Path(name).exists() or "/" in name else root / name)


def _nearby_hint(path: Path) -> str:
    """Names of run folders that could have been meant: inside `path`, or beside it."""
    inside = _runs_in(path) or _runs_in(path / "runs")
    if inside:
        return f"run folders in it: {_listed(inside)}"
    names = _runs_in(path.parent)
    close = difflib.get_close_matches(path.name, [n.name for n in names], n=1)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    if names:
        return f"run folders beside it: {_listed(names)}"
    return "give the path of a run folder, such as runs/NAME; `seatrial train` makes one"


def _runs_in(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if RunFolder(p).is_run())
    except OSError:
        return []


def _listed(paths: list[Path], most: int = 8) -> str:
    text = ", ".join(str(p) for p in paths[:most])
    return text if len(paths) <= most else f"{text} and {len(paths) - most} more"
