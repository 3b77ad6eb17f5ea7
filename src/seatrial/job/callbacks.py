"""Callbacks and metrics that a job file can name; all are of other packages."""

from __future__ import annotations

from seatrial.base.registry import Registry

# A class, called with the run folder's path; what it gives is called with the MetricsRecord of each step.
CALLBACKS: Registry[type] = Registry("callback", "seatrial.callbacks", {}, of=type)
# As a callback, before the record is written; the number that it returns goes into the record.
METRICS: Registry[type] = Registry("metric", "seatrial.metrics", {}, of=type)
