"""`seatrial agent --run FOLDER`: the agent of one node, as schedulers start it; also by hand, for debugging."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="the run folder")
    parser.add_argument(
        "--node",
        type=int,
        metavar="N",
        help="the node's index; default: from the scheduler's environment. An index of nodes + spares or more "
        "adds a spare",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: that of the run; 75 also if only this node left; 3 if the agent itself failed."""
    from seatrial.launch.join import run_agent

    return run_agent(args.run, args.node)
