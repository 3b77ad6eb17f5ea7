"""Failure rates of nodes, as published by operators of large clusters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """Observed failures that interrupt a job, per node and day."""

    name: str
    label: str
    per_node_day: float
    source: str


RATES = (
    Rate("rsc-2", "Meta RSC-2", 2.34e-3, "arXiv:2410.21680"),
    Rate(
        "llama-3",
        "Llama 3",
        3.79e-3,
        "419 unexpected interruptions in 54 days on 2,048 nodes, arXiv:2407.21783",
    ),
    Rate("rsc-1", "Meta RSC-1", 6.5e-3, "arXiv:2410.21680"),
    Rate("ant", "Ant", 2.2e-2, "8-GPU nodes, about 2.2e-2"),
)
