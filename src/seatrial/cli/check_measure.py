"""How `seatrial check` measures: hosts, options and progress; and where its report is stored."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import atomic
from seatrial.base.errors import Diagnostic, InputError
from seatrial.check.judging.compare import Plan
from seatrial.check.live.conductor import STAGES, LiveOptions, check_live
from seatrial.check.live.hosts import hosts_of
from seatrial.check.node.node_stage import NodeOptions
from seatrial.check.outputs.topology import Topology, read_topology
from seatrial.check.reports import report_html, report_json
from seatrial.record.folder import RunFolder
from seatrial.ui.out import Out

if TYPE_CHECKING:
    from seatrial.check.judging.report import Report
    from seatrial.check.reports.adapters import Order
    from seatrial.job import Job

_NODE_S = 60.0  # of a node stage; less with a shorter --timeout
_REPORT = "check"


def measured(args: argparse.Namespace, job: Job | None) -> Report:
    """Measure the hosts and judge. Raises InputError for hosts, a topology or a folder that cannot be used."""
    hostfile = None if args.hostfile is None else Path(args.hostfile)
    hosts = hosts_of(job, hostfile=hostfile, nodes=args.nodes)
    out = Out(sys.stderr, plain=args.plain)
    report = (lambda text: None) if args.nagios else out.line
    here = not any(host.prefix for host in hosts)
    names = [host.name for host in hosts]
    options = _options(args, job, here)
    if options.topology is not None:
        _verify_topology(options.topology, names, args.topology, report)
    return check_live(hosts, options, report).recorded(names)


def _verify_topology(
    topology: Topology, names: Sequence[str], file: str, report: Callable[[str], None]
) -> None:
    """Warn of hosts missing in the topology. Raises InputError if it contains none of them."""
    known = {node for node, _ in topology.leaves}
    strange = [name for name in names if name not in known]
    if len(strange) == len(names):
        some = ", ".join(sorted(known)[:3])
        text = f"the topology contains none of the hosts; it has {some}, the hosts are {', '.join(names[:3])}"
        raise InputError(Diagnostic(text, file=file, hint="use the topology's names for the hosts"))
    if strange:
        report(
            f"warning: {file} does not list {len(strange)} of {len(names)} hosts: {', '.join(strange[:8])}"
        )


def _options(args: argparse.Namespace, job: Job | None, here: bool) -> LiveOptions:
    timeout = _NODE_S if args.timeout is None else args.timeout
    device = "auto" if job is None else job.cluster.device
    # The nodes of a virtual cluster exist only once it starts, and its ranks use the CPU if there is no GPU for each.
    real = job is not None and job.cluster.launcher != "local"
    gpus = job.cluster.gpus_per_node if job is not None and real and device != "cpu" else None
    plan = None
    if job is not None and real:
        plan = Plan(job.cluster.nodes, job.cluster.gpus_per_node, args.job)
    node = NodeOptions(
        gpus=gpus,
        storage=_storage(args, job, here),
        seconds=min(timeout, _NODE_S),
        port_gbit_s=args.port_gbit_s,
        device=device,
    )
    return LiveOptions(
        node,
        stages=tuple(stage for stage in STAGES if args.stage is None or stage in args.stage),
        device=device,
        topology=None if args.topology is None else read_topology(Path(args.topology)),
        port_gbit_s=args.port_gbit_s,
        timeout_s=timeout,
        plan=plan,
    )


def _storage(args: argparse.Namespace, job: Job | None, here: bool) -> str | None:
    """Absolute folder of checkpoints, as agents start elsewhere: from the option, the job, or else that of runs.

    If it does not exist, a node measures the nearest folder above. Without a job only this machine's folder is known.
    """
    named: str | None = args.storage
    folder = None if job is None else job.checkpoint.folder
    if named is None and folder is not None:
        if "://" in folder:
            return None
        named = folder
    if named is None and (job is not None or here):
        named = str(args.runs)
    return None if named is None else os.path.abspath(named)


def keep(report: Report, orders: Sequence[Order], run: Path) -> Path | None:
    """Write check.json and check.html into the run's reports; path of the former, None if the run was never started.

    The planner reads the rates from there, so the newest check replaces the previous one under the same name.
    """
    folder = RunFolder(run)
    if not folder.is_run():
        return None
    folder.reports.mkdir(exist_ok=True)
    atomic.write_text(folder.reports / f"{_REPORT}.html", report_html.page(report, orders))
    file = folder.reports / f"{_REPORT}.json"
    # The time is stored: a copied folder has new file times, and the planner ignores old rates.
    atomic.write_text(file, report_json.text(report, orders, time=time.time()))
    return file
