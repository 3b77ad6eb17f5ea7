"""`seatrial checkpoints RUN`: a run's checkpoints, where they are, and their states."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, SeatrialError
from seatrial.cli.progress import Progress
from seatrial.record.folder import RunFolder
from seatrial.record.running import running
from seatrial.ui.out import Out
from seatrial.ui.table import print_table

if TYPE_CHECKING:
    from seatrial.checkpoint.survey import CheckpointReport

SCHEMA_VERSION = 1
COLUMNS = ("step", "size", "ranks", "state", "age", "where")
STYLES = {"verified": "green", "damaged": "bold red", "other version": "yellow", "quarantined": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or the name of one in ./runs")
    parser.add_argument(
        "--verify", action="store_true", help="read all of them and compare every byte with its hash"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 if a place does not answer or a checkpoint is damaged. InputError if RUN is not a run folder."""
    from seatrial.checkpoint.survey import places_of

    folder = RunFolder.find(args.run)
    found: list[tuple[str, CheckpointReport]] = []
    aside: list[dict[str, str]] = []
    problems: list[str] = []
    for role, place in places_of(folder):
        try:
            found += [(role, item) for item in _in_place(place, verify=args.verify, folder=folder)]
            aside += [
                {"name": name, "place": role, "where": f"{place.url}/{name}"}
                for name in place.set_aside_names()
            ]
        except SeatrialError as error:  # the other place may still answer
            problems.append(error.render())
    # For equal steps, the main place first.
    found.sort(key=lambda item: (-(item[1].step or 0), item[0] != "main"))
    now = time.time()
    if args.json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "run": str(folder.path),
            "checkpoints": [{"place": role, **as_json(item, now)} for role, item in found],
            "set_aside": aside,
            "problems": problems,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        _print(Out(sys.stdout, plain=args.plain), folder, found, aside, now)
    for _, item in found:
        for problem in item.problems:
            print(f"{item.state}: {problem}", file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    failed = bool(problems) or any(item.state == "damaged" for _, item in found)
    return EXIT_FAILED if failed else EXIT_DONE


def _in_place(place: Any, *, verify: bool, folder: RunFolder) -> list[CheckpointReport]:
    from seatrial.checkpoint.survey import InPlace, describe

    checkpoints = [InPlace(place, step) for step in place.steps()]
    if verify:
        return examine_all(checkpoints, live=running(folder) is not None)
    return [describe(checkpoint) for checkpoint in checkpoints]


def examine_all(checkpoints: list[Any], *, live: bool) -> list[CheckpointReport]:
    """Read all of every checkpoint, with progress on stderr.

    While the run is `live`, checkpoints removed by retention are left out, and no marker file is written.
    """
    from seatrial.checkpoint.survey import InPlace, describe, examine, mark

    known = [describe(checkpoint) for checkpoint in checkpoints]
    examined: list[CheckpointReport] = []
    total, before_it = sum(item.bytes for item in known), 0
    with Progress("verifying") as progress:
        for checkpoint, before in zip(checkpoints, known, strict=True):
            found = examine(checkpoint, _counter(progress, before_it, total, checkpoint.where))
            before_it += before.bytes
            placed = isinstance(checkpoint, InPlace)
            if live and placed and not found.usable and checkpoint.step not in checkpoint.place.steps():
                continue
            if found.state == "verified" and before.state != "verified" and not live:
                problem = mark(checkpoint)
                if problem is not None:
                    print(f"note: the verification could not be recorded: {problem}", file=sys.stderr)
            examined.append(found)
    return examined


def _counter(progress: Progress, done: int, total: int, where: str) -> Callable[[int], None]:
    """Count bytes that several threads have read, and report them to `progress`."""
    one_by_one = threading.Lock()

    def count(n: int) -> None:
        nonlocal done
        with one_by_one:
            done += n
            progress(done, total, where)

    return count


def as_json(found: CheckpointReport, now: float) -> dict[str, Any]:
    """One checkpoint as JSON."""
    return {
        "step": found.step,
        "state": found.state,
        "where": found.where,
        "bytes": found.bytes,
        "files": found.files,
        "ranks": found.ranks,
        "time": found.time,
        "age_s": None if found.time is None else now - found.time,
        "progress": None if found.progress is None else asdict(found.progress),
        "problems": found.problems,
    }


def _print(
    out: Out,
    folder: RunFolder,
    found: list[tuple[str, CheckpointReport]],
    aside: list[dict[str, str]],
    now: float,
) -> None:
    if not found and not aside:
        out.line(f"{folder.path} has no complete checkpoint yet")
        return
    rows = [_row(role, item, now) for role, item in found]
    rows += [["-", "-", "-", "quarantined", "-", item["where"]] for item in aside]
    print_table(out, COLUMNS, rows, styles=STYLES)


def _row(role: str, found: CheckpointReport, now: float) -> list[str]:
    return [
        "-" if found.step is None else str(found.step),
        units.memory(found.bytes) if found.files else "-",
        "-" if found.ranks is None else str(found.ranks),
        found.state,
        "-" if found.time is None else age(now - found.time),
        found.where if role == "main" else f"{found.where} ({role})",
    ]


def age(seconds: float) -> str:
    """An age such as 3 min 2 s; never negative, since another machine's clock may be ahead of ours."""
    return units.duration(round(max(0.0, seconds)))
