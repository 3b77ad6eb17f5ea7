"""The `seatrial` command. Removes empty entries of PYTHONPATH before anything else is imported."""

import os
import sys


def _leave_out_current_folder() -> None:
    """Remove empty PYTHONPATH entries, in this process and its children.

    Python takes an empty entry as the current folder; `export PYTHONPATH=$PYTHONPATH:/x` adds one by accident. Entries
    that name a folder are kept, also ".". Modules that Python imported before this one are not affected.
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
