"""What is imported for a job file that names an example: without torch."""

from __future__ import annotations

from seatrial.job.optimizers import Optimizer

MOMENTUM = Optimizer("momentum", ("velocity",), "seatrial_examples.momentum:Momentum")
