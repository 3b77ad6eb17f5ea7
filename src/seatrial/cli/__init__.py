"""The `seatrial` command; before anything else is imported, empty entries of PYTHONPATH are made to mean nothing."""

import os
import sys


def _leave_out_current_folder() -> None:
    """Here and in what is started from here.

    To Python an empty entry is the current folder, and `export PYTHONPATH=$PYTHONPATH:/x` makes one by accident. An
    entry that names a folder stays, also ".". What Python has imported before it came to us cannot be helped.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [entry for entry in entries if entry]
    if len(named) == len(entries):
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(named)
    here = os.getcwd()
    if here in sys.path and here not in map(os.path.abspath, named):
        sys.path.remove(here)


_leave_out_current_folder()
