"""Entry of `python -m seatrial.control.agent`: what launchers and schedulers start on a node."""

import sys

from seatrial.control.agent.agent import main

if __name__ == "__main__":
    sys.exit(main())
