"""One measured run in its own process: `seatrial train` without a console.

`python -m seatrial.scale.run JOB --runs FOLDER --parent PID`; the exit codes are those of `seatrial train`. With
`--allocation ID --on NODE,NODE` it is a job step on these nodes of Slurm's job ID.
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
from seatrial.launch.allocation import Allocation
from seatrial.launch.session import prepare_session
from seatrial.launch.slurm_step import SlurmStepLauncher

_MODULE = "seatrial.scale.run"


def command(job: Path, runs: Path, allocation: Allocation | None, *, parent: int) -> list[str]:
    """The command line of one run; in an allocation, on all nodes of `allocation`."""
    where = () if allocation is None else ("--allocation", allocation.job, "--on", ",".join(allocation.nodes))
    return process.python(_MODULE, str(job), "--runs", str(runs), "--parent", str(parent), *where)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the job to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--allocation")
    parser.add_argument("--on", default="")
    arguments = parser.parse_args(argv)
    # If the measurement process dies, its run must die too. SIGINT also ends agents on other hosts.
    process.die_with_parent(arguments.parent, signal.SIGINT)
    try:
        launcher = None
        if arguments.allocation is not None:
            nodes = tuple(arguments.on.split(","))
            launcher = SlurmStepLauncher(Allocation(arguments.allocation, nodes))
        session = prepare_session(load_job(arguments.job), arguments.runs, launcher=launcher)
        with session.opened:
            return session.run(launcher=launcher).exit_code
    except SeatrialError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
