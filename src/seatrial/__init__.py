"""Seatrial: from bare GPU nodes to a finished foundation-model training run."""

__version__ = "0.1.0"
