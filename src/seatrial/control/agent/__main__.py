"""Entry of `python -m seatrial.control.agent`: what launchers and schedulers start on a node."""

from seatrial.base.process import exit_now
from seatrial.control.agent.agent import main

if __name__ == "__main__":
    exit_now(main())
