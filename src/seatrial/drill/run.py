"""One run of a drill in its own process: `seatrial train` without a console.

`python -m seatrial.drill.run JOB --runs FOLDER --parent PID`; the exit codes are those of `seatrial train`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.base import process
from seatrial.base.errors import EXIT_DONE, SeatrialError
from seatrial.control.node.spec import WORKER_MODULE
from seatrial.job import load_job
from seatrial.launch import LocalLauncher
from seatrial.launch.netns import Hosts
from seatrial.launch.session import prepare_session

MODULE = "seatrial.drill.run"


class Borrowed(Hosts):
    """Hosts that the drill has created and will remove."""

    def __init__(self, stem: str, count: int) -> None:
        super().__init__(count)
        self._borrowed = stem

    def name(self, host: int) -> str:
        return f"{self._borrowed}-{host}"


def command(
    job: Path,
    runs: Path,
    *,
    parent: int,
    worker_module: str,
    returns: Mapping[int, float],
    hosts: Hosts | None,
) -> list[str]:
    """The command line of one run. `returns`: node -> seconds until its agent, once dead, is started again."""
    words = process.python(MODULE, str(job), "--runs", str(runs), "--parent", str(parent))
    words += ["--worker-module", worker_module]
    for node, seconds in returns.items():
        words += ["--return", f"{node}={seconds:g}"]
    if hosts is not None:
        words += ["--hosts", hosts.name(0).removesuffix("-0")]
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Train the job to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--worker-module", default=WORKER_MODULE)
    parser.add_argument("--return", dest="returns", action="append", default=[], metavar="NODE=SECONDS")
    parser.add_argument("--hosts", metavar="STEM", help="of the names of the nodes' network namespaces")
    arguments = parser.parse_args(argv)
    # If the drill dies, however that happens, its run must die too.
    process.die_with_parent(arguments.parent, signal.SIGKILL)
    try:
        job = load_job(arguments.job)
        nodes = job.cluster.nodes + job.cluster.spares
        hosts = Borrowed(arguments.hosts, nodes) if arguments.hosts else None
        returns = {int(node): float(seconds) for node, seconds in (r.split("=") for r in arguments.returns)}
        session = prepare_session(job, arguments.runs)
        with session.opened:
            if session.complete:
                return EXIT_DONE
            launcher = LocalLauncher(hosts, returns=returns, worker_module=arguments.worker_module)
            return session.run(launcher=launcher).exit_code
    except SeatrialError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
