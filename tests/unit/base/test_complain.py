"""Troubles are told where that is possible, and never make more of them."""

from __future__ import annotations

import subprocess
import sys

TELL = (
    "from seatrial.base.complain import complain; complain('no room: \\ud800'); print('goes on', flush=True)"
)


def test_it_is_a_line_on_stderr() -> None:
    done = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
    assert done.stderr == "no room: ?\n"


def test_a_full_disk_causes_no_second_error() -> None:
    """An agent's stderr is a file in the run folder."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", TELL], stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert (done.returncode, done.stdout) == (0, "goes on\n")
