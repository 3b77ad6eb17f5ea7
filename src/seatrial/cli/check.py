"""`seatrial check [JOB] --from PATH...`: whether nodes are fit to train on, from what tools said on them."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from seatrial.base import atomic
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, Diagnostic, InputError

if TYPE_CHECKING:
    from seatrial.check.compare import Plan
    from seatrial.check.report import Report

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.description = (
        "Judge outputs of tools (nvidia-smi, dcgmi, ibstat, ib_write_bw, all_reduce_perf, the kernel log, ...) that "
        "were collected on nodes. What a file is, is told by its content. In a folder, each folder is a node. "
        "Exit code: 0 if nothing failed, 1 if something did, 2 for bad input; with --nagios 0, 1, 2 and 3 as plugins have."
    )
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="a job file: what its [cluster] needs is compared"
    )
    parser.add_argument(
        "--from",
        dest="sources",
        metavar="PATH",
        nargs="+",
        action="extend",
        help="files and folders of outputs",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--nagios", action="store_true", help="print one line, with a plugin's exit code")
    parser.add_argument("--html", metavar="FILE", help="also write a report that a browser shows")
    parser.add_argument(
        "--exclude-file",
        metavar="FILE",
        help="also write the nodes that failed: one a line, or as Slurm lists them if FILE ends in .slurm",
    )
    parser.add_argument("--strict", action="store_true", help="suspect and unjudged count as failed")
    parser.add_argument(
        "--port-gbit-s",
        metavar="RATE",
        type=float,
        help="the rate that every fabric port must have, one direction",
    )
    baseline = parser.add_mutually_exclusive_group()
    baseline.add_argument(
        "--baseline", metavar="FILE", help="compare the measurements with those kept in FILE"
    )
    baseline.add_argument("--save-baseline", metavar="FILE", help="keep the measurements in FILE")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 1 if something failed (`--strict`: did not pass); a plugin's with --nagios. Raises InputError."""
    if not args.nagios:
        return _run(args)
    from seatrial.check import report_nagios

    try:
        return _run(args)
    except InputError as error:  # for a monitoring system 2 is CRITICAL, and this is not
        first = error.diagnostics[0]
        print(
            report_nagios.unknown(first.message if first.file is None else f"{first.file}: {first.message}")
        )
        return report_nagios.UNKNOWN


def _run(args: argparse.Namespace) -> int:
    if args.json and args.nagios:
        raise InputError("--json and --nagios exclude each other", hint="choose one form of output")
    if args.port_gbit_s is not None and not 0 < args.port_gbit_s < 1e5:
        raise InputError(f"--port-gbit-s {args.port_gbit_s:g} is no rate", hint="in Gb/s, one direction: 400")
    if not args.sources:
        raise InputError(
            "nothing to judge: no --from",
            hint="collect outputs on the nodes, then `seatrial check --from FOLDER`",
        )
    from seatrial.check.baseline import compare_baseline, save_baseline
    from seatrial.check.offline import judge_paths

    report = judge_paths(args.sources, plan=_plan(args.job), port_gbit_s=args.port_gbit_s)
    if args.baseline is not None:
        report = report.also(compare_baseline(report, Path(args.baseline)))
    if args.save_baseline is not None:
        kept = _written(args.save_baseline, lambda path: save_baseline(report, path))
        print(f"{kept} measurements kept in {args.save_baseline}", file=sys.stderr)
    _files(report, args)
    return _print(report, args)


def _plan(job: str | None) -> Plan | None:
    if job is None:
        return None
    from seatrial.check.compare import Plan
    from seatrial.job.loading import load_job

    cluster = load_job(Path(job)).cluster
    return Plan(cluster.nodes, cluster.gpus_per_node, job)


def _files(report: Report, args: argparse.Namespace) -> None:
    if args.html is not None:
        from seatrial.check import report_html

        _written(args.html, lambda path: atomic.write_text(path, report_html.page(report)))
        print(f"report: {args.html}", file=sys.stderr)
    if args.exclude_file is not None:
        from seatrial.check import report_exclude

        nodes = report_exclude.failed_nodes(report)
        form = report_exclude.slurm if args.exclude_file.endswith(".slurm") else report_exclude.hostfile
        _written(args.exclude_file, lambda path: atomic.write_text(path, form(nodes)))
        print(f"{len(nodes)} nodes to exclude: {args.exclude_file}", file=sys.stderr)
        nameless = sum(f.verdict == "FAIL" and f.target.node is None for f in report.findings)
        if nameless:
            print(
                f"warning: {nameless} failed findings name no node and are not in it: put outputs into one folder a node",
                file=sys.stderr,
            )


def _written(file: str, write: Callable[[Path], T]) -> T:
    try:
        return write(Path(file))
    except OSError as error:
        problem = Diagnostic(
            f"cannot be written: {error.strerror}", file=file, hint="name a file in a folder that exists"
        )
        raise InputError(problem) from None


def _print(report: Report, args: argparse.Namespace) -> int:
    if args.nagios:
        from seatrial.check import report_nagios

        line, code = report_nagios.line(report, strict=args.strict)
        print(line)
        return code
    if args.json:
        from seatrial.check import report_json

        sys.stdout.write(report_json.text(report))
    else:
        from seatrial.check.report_table import table
        from seatrial.ui.out import Out

        out = Out(sys.stdout, plain=args.plain)
        width = min(140, shutil.get_terminal_size().columns) if out.styled else 110
        for text, style in table(report, width=width):
            out.line(text, style)
    return EXIT_DONE if report.passes(strict=args.strict) else EXIT_FAILED
