"""What `seatrial check` does about the nodes that failed: for which scheduler, printed or carried out."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seatrial.base.errors import InputError
from seatrial.check.adapters import SCHEDULERS, Order, Scheduler, carry_out, orders, reasons, refusal

if TYPE_CHECKING:
    from seatrial.check.report import Report
    from seatrial.job import Job

# Set in every job of Slurm. A pod knows of Kubernetes as well, but hosts there are called as pods, not as nodes.
_SLURM_JOB = "SLURM_JOB_ID"


@dataclass(frozen=True)
class TakenOut:
    """The orders, as far as they were carried out. `failed`: one did not work, or all were refused."""

    orders: tuple[Order, ...]
    failed: bool = False


def verify(args: argparse.Namespace, job: Job | None) -> None:
    """Raises InputError where --apply does not say for which scheduler: before anything is measured."""
    if args.apply and len(_schedulers(args, job)) != 1:
        hint = "add --scheduler slurm or --scheduler kubernetes"
        raise InputError("--apply: for which scheduler?", hint=hint)


def take_out(report: Report, args: argparse.Namespace, job: Job | None) -> TakenOut:
    """The orders for the nodes that failed; carried out with --apply, each told on stderr.

    Raises InputError as verify(), and where a node's name is none.
    """
    verify(args, job)
    schedulers = _schedulers(args, job)
    alone = report.course is not None and len(report.course.nodes) == 1
    if alone and len(schedulers) > 1 and not args.apply:
        schedulers = ()  # a machine that checks itself, and nothing says that it is in a cluster
    try:
        because = reasons(report)
    except InputError:
        if args.apply:
            raise
        return TakenOut(())  # nothing can be told to a scheduler of what no host can be called
    wanted = [order for scheduler in schedulers for order in orders(scheduler, because)]
    if not args.apply or not wanted:
        return TakenOut(tuple(wanted))
    if why := refusal(report, wanted, force=args.force):
        print(f"error: not carried out: {why}", file=sys.stderr)
        return TakenOut(tuple(wanted), failed=True)
    done = carry_out(wanted, lambda text: print(text, file=sys.stderr, flush=True))
    return TakenOut(tuple(done), failed=any(order.done is False for order in done))


def _schedulers(args: argparse.Namespace, job: Job | None) -> tuple[Scheduler, ...]:
    """The one that was named, the job's, or Slurm in a job of it; all where nothing says which.

    None has the nodes of a simulated cluster, or the processes of a virtual one.
    """
    if args.scheduler is not None:
        return (args.scheduler,)
    if args.simulate or (job is not None and job.cluster.launcher == "local"):
        return ()
    if job is not None and job.cluster.launcher in SCHEDULERS:
        return ("slurm" if job.cluster.launcher == "slurm" else "kubernetes",)
    return ("slurm",) if os.environ.get(_SLURM_JOB) else SCHEDULERS
