"""`seatrial attach RUN`: follow a run to its end, whatever process or scheduler runs it; its exit code is the run's."""

from __future__ import annotations

import argparse
import shlex
import time
from typing import TYPE_CHECKING

from seatrial.base.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED
from seatrial.record.folder import RunFolder
from seatrial.record.launches import checked_launch, read_outcome
from seatrial.record.running import running
from seatrial.record.states import State

if TYPE_CHECKING:
    from seatrial.ui.console import TrainConsole

STATES: dict[int, State] = {
    EXIT_DONE: "finished",
    EXIT_BAD_INPUT: "failed",
    EXIT_FAILED: "failed",
    EXIT_PREEMPTED: "preempted",
    EXIT_INTERRUPTED: "stopped",
}
_CODES = {state: code for code, state in STATES.items()}
_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or the name of one in ./runs")
    parser.add_argument("--plain", action="store_true", help="one line per step, also on a terminal")
    parser.add_argument(
        "--json", action="store_true", help="print the summary as one JSON document on stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: the run's; 130 if Ctrl-C ends the following, while the run continues."""
    from seatrial.ui.console import TrainConsole

    folder = RunFolder.find(args.run)
    with TrainConsole(folder, plain=args.plain, json_output=args.json) as console:
        console.catch_up()
        return follow_to_end(console, folder)


def follow_to_end(console: TrainConsole, folder: RunFolder) -> int:
    """Show the run until it is over, then its summary; returns the run's exit code."""
    from seatrial.launch.follow import follow

    try:
        launch = checked_launch(folder)
        if launch is not None and launch.scheduled:
            follow(folder, console.poll, console.out.line)
        while running(folder) is not None:  # a process that has recorded the end may still be printing it
            console.poll()
            time.sleep(_POLL_S)
        launch = checked_launch(folder)  # a later start may have continued the run
    except KeyboardInterrupt:
        console.close()
        path = shlex.quote(str(folder.path))
        console.out.line("no longer followed; the run continues", "bold")
        console.out.pair("follow", f"seatrial attach {path}", "bold")
        console.out.pair("stop", f"seatrial stop {path}", "bold")
        return EXIT_INTERRUPTED
    view = console.ended()
    console.summary(view)
    outcome = None if launch is None else read_outcome(folder, launch.generation)
    return _CODES.get(view.state, EXIT_FAILED) if outcome is None else outcome.exit_code
