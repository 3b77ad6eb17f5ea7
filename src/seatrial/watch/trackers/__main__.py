"""`python -m seatrial.watch.trackers RUN --to NAME`: the process that pushes a run to one tracker.

In its own process a tracker may use memory, hang or crash without affecting the run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from seatrial.base import process
from seatrial.base.complain import complain
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, SeatrialError
from seatrial.record.folder import RunFolder
from seatrial.watch.trackers.feed import POLL_S, feed

_SLICE_S = 0.1


class _StopSignal:
    """A sleep that SIGTERM, sent when the run is over, cuts short."""

    def __init__(self) -> None:
        self._over = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._over = True

    def __call__(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._over and time.monotonic() < end:
            time.sleep(_SLICE_S)  # Python resumes a sleep after a signal (PEP 475)
        return self._over


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 at the run's end; 1 if the tracker failed, with the reason in the last line of stderr."""
    parser = argparse.ArgumentParser(prog="seatrial.watch.trackers", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--to", required=True, metavar="NAME")
    parser.add_argument("--poll-s", type=float, default=POLL_S)
    parser.add_argument("--parent", type=int, help="pid of the process to end with")
    arguments = parser.parse_args(argv)
    if arguments.parent is not None:
        process.die_with_parent(arguments.parent)
    try:
        feed(RunFolder.open(arguments.run), arguments.to, poll_s=arguments.poll_s, wait=_StopSignal())
    except SeatrialError as error:
        complain(" ".join(error.render().split()))  # the monitor reports the last line
        return error.exit_code
    except Exception as error:  # noqa: BLE001  last frame; a tracker's package can raise anything
        traceback.print_exc()
        complain(f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
