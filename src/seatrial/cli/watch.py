"""`seatrial watch RUN`: a run as its folder shows it; it need not be running."""

from __future__ import annotations

import argparse
import sys
import time

from seatrial.base.errors import EXIT_DONE, EXIT_FAILED
from seatrial.record.folder import RunFolder
from seatrial.record.view import RunView, read_view
from seatrial.ui.out import Out
from seatrial.ui.summary import print_status, summary_json

HELP = "show a run from its folder alone"

POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or the name of one in ./runs")
    parser.add_argument(
        "--once", action="store_true", help="show how it stands and exit; without, follow it to its end"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; following a run that ends as failed, 1. Raises InputError where RUN is no run folder."""
    folder = RunFolder.find(args.run)
    view = read_view(folder)
    if args.once or view.state != "running":
        return _show(view, args)
    return _follow(view, args)


def _show(view: RunView, args: argparse.Namespace) -> int:
    warn = Out(sys.stderr, plain=args.plain)
    for problem in view.problems:
        warn.line(f"warning: {problem}", "yellow")
    now = time.time()
    if args.json:
        sys.stdout.write(summary_json(view, now))
    else:
        print_status(Out(sys.stdout, plain=args.plain), view, now)
    return EXIT_DONE


def _follow(view: RunView, args: argparse.Namespace) -> int:
    from seatrial.record import lock
    from seatrial.ui.console import TrainConsole

    folder = view.folder
    with TrainConsole(
        folder,
        total_steps=view.job.steps,
        generation=view.generation,
        plain=args.plain,
        json_output=args.json,
    ) as console:
        console.skip_existing()
        while lock.is_held(folder.lock):
            console.poll()
            time.sleep(POLL_S)
        state = read_view(folder).state
        console.summary(state)
    return EXIT_FAILED if state == "failed" else EXIT_DONE
