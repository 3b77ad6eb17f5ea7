"""`seatrial ls`: list the runs below a folder, one line each, from their folders alone."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

from seatrial.base.errors import EXIT_DONE, InputError
from seatrial.cli.checkpoints import age
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import plain
from seatrial.record.listing import UNUSABLE, Listed, read_listed, run_folders
from seatrial.ui import figures
from seatrial.ui.out import Out
from seatrial.ui.summary import STATE_STYLES
from seatrial.ui.table import print_table

SCHEMA_VERSION = 1
COLUMNS = ("name", "state", "step", "loss", "tokens/s", "age", "where")


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
    listed = [read_listed(path, str(path.relative_to(root))) for path in run_folders(root, args.all)]
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
