"""How fast this node computes and copies: `python -m seatrial.check.node.probe_rates --device cpu|cuda --seconds S`.

One JSON object a line on stdout, each as soon as it is known: {"doing": ...} before each part, so that the parent knows
in which part a hung process was, and {"cpu": ...} or {"gpu": ...}, {"pair": ...} after it. The last line is {"done": true}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def send(message: dict[str, Any]) -> None:
    """Print one line on stdout and flush it."""
    print(json.dumps(message), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry; the exit code."""
    parser = argparse.ArgumentParser(prog="seatrial.check.node.probe_rates", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument(
        "--threads", type=int, default=0, help="of the CPU's rates; 0: as many as this process may use CPUs"
    )
    arguments = parser.parse_args(argv)
    # Importing torch is most of the time that the CPU's rates take.
    send({"doing": "importing torch"})
    if arguments.device == "cpu":
        from seatrial.check.node.probe_cpu import measure_cpu

        measure_cpu(arguments.seconds, arguments.threads, send)
    else:
        from seatrial.check.node.probe_cuda import measure_cuda

        measure_cuda(arguments.seconds, send)
    send({"done": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
