"""One measured run, as a process of its own: what `seatrial train` does, without a console.

`python -m seatrial.scale.run JOB --runs FOLDER --parent PID`; the exit codes are those of `seatrial train`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from seatrial.base import process
from seatrial.base.errors import SeatrialError
from seatrial.job import load_job
from seatrial.launch.session import prepare_session

_MODULE = "seatrial.scale.run"


def command(job: Path, runs: Path, *, parent: int) -> list[str]:
    """The command line of one run."""
    return process.python(_MODULE, str(job), "--runs", str(runs), "--parent", str(parent))


def main(argv: Sequence[str] | None = None) -> int:
    """Train the job to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args(argv)
    # If the measurement dies, however that happens, its run must die too. SIGINT also ends agents on other hosts.
    process.die_with_parent(arguments.parent, signal.SIGINT)
    try:
        session = prepare_session(load_job(arguments.job), arguments.runs)
        with session.opened:
            return session.run().exit_code
    except SeatrialError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
