"""Removal of failed nodes from the scheduler: commands printed or run."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seatrial.base.errors import InputError
from seatrial.check.reports.adapters import SCHEDULERS, Order, Scheduler, orders, reasons, refusal, run_orders

if TYPE_CHECKING:
    from seatrial.check.judging.report import Report
    from seatrial.job import Job

# Set in every Slurm job. A pod recognises Kubernetes too, but its hosts are named like pods, not like nodes.
_SLURM_JOB = "SLURM_JOB_ID"


@dataclass(frozen=True)
class DrainResult:
    """The orders, and which of them were run. `failed`: one did not succeed, or all were refused."""

    orders: tuple[Order, ...]
    failed: bool = False


def verify(args: argparse.Namespace, job: Job | None) -> None:
    """Raise InputError if --apply leaves the scheduler open, before anything is measured."""
    if args.apply and len(_schedulers(args, job)) != 1:
        hint = "add --scheduler slurm or --scheduler kubernetes"
        raise InputError("--apply requires a scheduler", hint=hint)


def drain_failed(report: Report, args: argparse.Namespace, job: Job | None) -> DrainResult:
    """The orders for the failed nodes; with --apply they are run, each reported on stderr.

    Raises InputError as verify() does, and with --apply if a node's name is invalid.
    """
    verify(args, job)
    schedulers = _schedulers(args, job)
    alone = report.check_run is not None and len(report.check_run.nodes) == 1
    if alone and len(schedulers) > 1 and not args.apply:
        schedulers = ()  # a machine that checks itself and does not seem to belong to a cluster
    try:
        because = reasons(report)
    except InputError:
        if args.apply:
            raise
        return DrainResult(())  # no order is possible for a name that no host can have
    wanted = [order for scheduler in schedulers for order in orders(scheduler, because)]
    if not args.apply or not wanted:
        return DrainResult(tuple(wanted))
    if why := refusal(report, wanted, force=args.force):
        print(f"error: not applied: {why}", file=sys.stderr)
        return DrainResult(tuple(wanted), failed=True)
    done = run_orders(wanted, lambda text: print(text, file=sys.stderr, flush=True))
    return DrainResult(tuple(done), failed=any(order.done is False for order in done))


def _schedulers(args: argparse.Namespace, job: Job | None) -> tuple[Scheduler, ...]:
    """The scheduler given by option, else the job's, else Slurm inside a Slurm job; all if none of these is known.

    No scheduler has the nodes of a simulated cluster, or the processes of a virtual one.
    """
    if args.scheduler is not None:
        return (args.scheduler,)
    if args.simulate or (job is not None and job.cluster.launcher == "local"):
        return ()
    if job is not None and job.cluster.launcher in SCHEDULERS:
        return ("slurm" if job.cluster.launcher == "slurm" else "kubernetes",)
    return ("slurm",) if os.environ.get(_SLURM_JOB) else SCHEDULERS
