"""`seatrial status RUN`: state of a run, from its folder and its scheduler."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from seatrial.base.errors import EXIT_DONE
from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, known_launch
from seatrial.record.view import read_view
from seatrial.ui.out import Out
from seatrial.ui.summary import print_status, summary_json

if TYPE_CHECKING:
    from seatrial.launch.follow import StartState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or the name of one in ./runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0. Raises InputError if RUN is not a run folder, RunFailed if the scheduler cannot be queried."""
    folder = RunFolder.find(args.run)
    view, now = read_view(folder), time.time()
    launch = known_launch(folder)
    found = None
    if launch is not None and launch.scheduled:
        from seatrial.launch.follow import read_state

        found = read_state(folder)
    if args.json:
        document = json.loads(summary_json(view, now))
        document["launch"] = None if launch is None else _document(launch, found)
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return EXIT_DONE
    out = Out(sys.stdout, plain=args.plain)
    print_status(out, view, now)
    if launch is not None:
        out.pair(
            "launcher", launch.launcher if launch.handle is None else f"{launch.launcher} {launch.handle}"
        )
    if found is not None:
        out.pair("scheduler", found.status.words)
        if found.next is not None:
            out.pair("follow-up", found.next.words)
    return EXIT_DONE


def _document(launch: Launch, found: StartState | None) -> dict[str, object]:
    document: dict[str, object] = asdict(launch)
    if found is not None:
        document["status"] = asdict(found.status)
        document["follow_up"] = None if found.next is None else asdict(found.next)
    return document
