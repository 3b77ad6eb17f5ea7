"""`python -m seatrial` is the `seatrial` command."""

from seatrial.cli.main import entry

if __name__ == "__main__":
    entry()
