"""An open job (`parallel = "auto"`) with the layout that was chosen for it, checked like a hand-written one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seatrial.base.errors import InputError
from seatrial.job.finding import Facts
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.ranks import resolve_layout
from seatrial.job.rules_layout import LAYOUT_RULES
from seatrial.job.schema import ParallelSection

# Keys of [train] that belong to a layout: the planner may choose them with it, unless they are `fixed`.
CHOSEN_TOO = ("microbatch", "activation_checkpointing", "accumulate")


def fixed(job: Job, key: str) -> bool:
    """Whether the job says what this key of `CHOSEN_TOO` is."""
    return job.wrote(f"train.{key}") and getattr(job.train, key) != "auto"


def provisional(job: Job) -> Job:
    """`job` with all ranks in one sharded group, whether or not the rules allow it: the starting point of a search."""
    at = job.cluster
    file = job.file.model_copy(update={"parallel": ParallelSection()})
    return replace(job, file=file, layout=Layout(shard=at.nodes * at.gpus_per_node))


def reopened(job: Job) -> Job:
    """`job` with `train.accumulate` open again if the planner chose it: a search compares both values."""
    if job.chosen is None or job.wrote("train.accumulate"):
        return job
    train = job.train.model_copy(update={"accumulate": "auto"})
    return replace(job, file=job.file.model_copy(update={"train": train}))


def settled(
    job: Job,
    parallel: ParallelSection,
    train: Mapping[str, Any],
    chosen: Mapping[str, Any] | None = None,
) -> Job:
    """`job` with this [parallel] and these values of [train]; `chosen` is plan.json's record of the choice.

    Raises InputError, located at `parallel`, with every rule that it breaks: an earlier start's choice may break some.
    """
    written = job.train.model_fields_set - {key for key in CHOSEN_TOO if not fixed(job, key)}
    section = job.train.model_construct(_fields_set=written, **{**dict(job.train), **train})
    file = job.file.model_copy(update={"parallel": parallel, "train": section})
    layout, findings = resolve_layout(file)
    if not findings:
        facts = Facts(file, job.architecture, layout)
        findings = [finding for rule in LAYOUT_RULES for finding in rule(facts)]
    if findings:
        raise InputError([job.located(finding) for finding in findings])
    return replace(job, file=file, layout=layout, chosen=chosen)
