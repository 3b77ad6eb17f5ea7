"""`python -m seatrial` is the `seatrial` command."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `-m` put the current folder there: what lies in it is not ours to execute
    from seatrial.cli.main import entry

    entry()
