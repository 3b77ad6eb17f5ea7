"""`python -m seatrial` is the `seatrial` command."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `-m` puts the current folder there; nothing in it must shadow a module
    from seatrial.cli.main import entry

    entry()
