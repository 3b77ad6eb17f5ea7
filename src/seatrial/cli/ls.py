"""`seatrial ls`: list the runs below a folder, one line each, from their folders alone."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from seatrial.base.errors import EXIT_DONE, InputError
from seatrial.cli.checkpoints import age
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import plain
from seatrial.record.launches import read_launch
from seatrial.record.view import RunView, read_brief
from seatrial.ui import figures
from seatrial.ui.out import Out
from seatrial.ui.summary import STATE_STYLES
from seatrial.ui.table import print_table

SCHEMA_VERSION = 1
COLUMNS = ("name", "state", "step", "loss", "tokens/s", "age", "where")
UNUSABLE = "unusable"  # in place of a state: the folder cannot be read as a run

_SPEED_STEPS = 20  # the speed is their median
_OLD = re.compile(r"\.old-\d+$")  # renamed by --fresh
# If a folder has any of these, it is or was a run.
_TRACES = ("control", "checkpoints", "logs")


@dataclass
class Listed:
    """One run of the list. None: unknown, or none yet."""

    name: str  # path below the listed folder
    state: str
    why: str = ""
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    time: float | None = None  # unix seconds of the last record
    generation: int = 0
    launcher: str | None = None
    handle: str | None = None  # the launcher's, such as a job number
    host: str | None = None  # from which it was started
    problems: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="where run folders are (runs)")
    where.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="the same")
    parser.add_argument(
        "--all",
        action="store_true",
        help="also runs that --fresh renamed (NAME.old-1), and those of drills",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, even if a run's folder is damaged. Raises InputError if FOLDER cannot be listed."""
    root, now = args.folder or args.runs, time.time()
    if RunFolder(root).is_run():
        raise InputError(
            f"{root} is one run", hint=f"see `seatrial watch {root} --once`, or list {root.parent}"
        )
    if not root.is_dir() and root != Path("runs"):
        raise InputError(f"{root} is not a folder", hint="give the folder that holds run folders")
    listed = [_look(path, str(path.relative_to(root))) for path in _run_folders(root, args.all)]
    # A running run without records counts as the newest.
    unknown = {"running": now}
    listed.sort(key=lambda run: (-(run.time or unknown.get(run.state, 0)), run.name))
    if args.json:
        runs = [
            {
                **asdict(run),
                "path": str(root / run.name),
                "age_s": None if run.time is None else now - run.time,
            }
            for run in listed
        ]
        document = plain({"schema_version": SCHEMA_VERSION, "folder": str(root), "runs": runs})
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return EXIT_DONE
    out = Out(sys.stdout, plain=args.plain)
    if listed:
        styles = {**STATE_STYLES, UNUSABLE: "bold red"}
        print_table(out, COLUMNS, [_row(run, now) for run in listed], styles=styles)
    else:
        out.line(f"no runs in {root}")
    warn = Out(sys.stderr, plain=args.plain)
    for run in listed:
        for problem in run.problems:
            warn.line(f"warning: {run.name}: {problem}", "yellow")
    return EXIT_DONE


def _run_folders(root: Path, everything: bool) -> Iterator[Path]:
    """Folders with a run or traces of one, including unreadable ones."""
    places = [root]
    if everything:
        places += sorted((root / ".drill").glob("*/"))
    for place in places:
        for path in place.iterdir() if place.is_dir() else ():
            if path.name.startswith(".") or not path.is_dir() or (_OLD.search(path.name) and not everything):
                continue
            traces = (path / trace for trace in _TRACES)
            if not _readable(path) or RunFolder(path).is_run() or any(p.is_dir() for p in traces):
                yield path


def _readable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.X_OK)


def _look(path: Path, name: str) -> Listed:
    if not _readable(path):
        return Listed(name, UNUSABLE, problems=["it cannot be read: permission denied"])
    try:
        folder = RunFolder.open(path)
    except InputError as error:
        return Listed(name, UNUSABLE, problems=[diagnostic.full_message for diagnostic in error.diagnostics])
    view = read_brief(folder)
    launch, problems = None, []
    try:
        launch = read_launch(folder)
    except (OSError, ValueError) as error:
        problems = [f"control/launch.json cannot be used ({error})"]
    times = [e.time for e in view.events[-1:]] + ([view.last.time] if view.last else [])
    return Listed(
        name,
        view.state,
        why=view.state_reason,
        step=view.step,
        steps=view.job.steps,
        loss=view.last.loss if view.last else None,
        tokens_per_s=_speed(view),
        time=max(times, default=None),
        generation=view.generation,
        launcher=launch.launcher if launch is not None else None,
        handle=launch.handle if launch is not None else None,
        host=launch.host if launch is not None else None,
        problems=[*(str(p) for p in view.problems), *problems],
    )


def _speed(view: RunView) -> float | None:
    since = view.history.generations[-1] if view.history.generations else 0
    recent = view.history.column("tokens_per_s", since)[-_SPEED_STEPS:]
    return median(recent) if recent else None


def _row(run: Listed, now: float) -> list[str]:
    here = run.host in (None, socket.gethostname())
    where = ("this machine" if here else run.host) if run.launcher in (None, "local") else run.launcher
    return [
        run.name,
        run.state,
        figures.step_of(run.step, run.steps) if run.state != UNUSABLE else "-",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if run.tokens_per_s is None else figures.rate(run.tokens_per_s),
        "-" if run.time is None else age(now - run.time),
        f"{where} {run.handle}" if run.handle else str(where),
    ]
