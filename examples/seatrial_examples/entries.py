"""What is imported for a job file that names an example: without torch."""

from __future__ import annotations

from seatrial.job.optimizers import Optimizer
from seatrial.job.trackers import TrackerEntry

MOMENTUM = Optimizer("momentum", ("velocity",), "seatrial_examples.momentum:Momentum")
LINES = TrackerEntry("seatrial_examples.lines:Lines", "seatrial_examples", "pip install ./examples")
