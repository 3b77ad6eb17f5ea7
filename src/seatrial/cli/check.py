"""`seatrial check [JOB]`: whether nodes are fit to train on: measured, from collected tool output, or simulated."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from seatrial.base import atomic
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, Diagnostic, InputError

if TYPE_CHECKING:
    from seatrial.check.judging.report import Report
    from seatrial.check.reports.adapters import Order
    from seatrial.job import Job

T = TypeVar("T")

# Options that apply only to measuring: (attribute, option).
_OF_MEASURING = (
    ("hostfile", "--hostfile"),
    ("nodes", "--nodes"),
    ("stage", "--stage"),
    ("topology", "--topology"),
    ("timeout", "--timeout"),
    ("storage", "--storage"),
)
_LONGEST_S = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.description = (
        "Measure whether nodes are fit to train on, and name the GPU, link, port or node that is the suspected cause: this node, or "
        "those of JOB, of --hostfile or --nodes, or of the Slurm job that it runs in. With --from, judge outputs of tools "
        "(nvidia-smi, dcgmi, ibstat, ib_write_bw, all_reduce_perf, the kernel log, ...) that were collected on nodes. "
        "Exit code: 0 if nothing failed, 1 if something did, 2 for bad input; with --nagios 0, 1, 2 and 3 as plugins have."
    )
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="a job file: its nodes, and the requirements of its [cluster]"
    )
    source = parser.add_argument_group("what to check")
    source.add_argument(
        "--hostfile", metavar="FILE", help="measure the hosts in FILE, one per line, over ssh"
    )
    source.add_argument("--nodes", metavar="LIST", help="measure these hosts: node[01-16],login")
    source.add_argument(
        "--from",
        dest="sources",
        metavar="PATH",
        nargs="+",
        action="extend",
        help="measure nothing; judge files and folders of outputs, one folder per node; - reads stdin",
    )
    source.add_argument(
        "--simulate", metavar="FILE", help="measure nothing; check the simulated cluster of FILE"
    )
    how = parser.add_argument_group("measurement")
    how.add_argument(
        "--stage",
        choices=("node", "pair", "all"),
        nargs="+",
        action="extend",
        help="run only these stages (default: all three): each node alone, pairs of nodes, groups of nodes",
    )
    how.add_argument(
        "--topology", metavar="FILE", help="leaf switches: output of ibnetdiscover, or Slurm's topology.conf"
    )
    how.add_argument(
        "--timeout", metavar="S", type=float, help="timeout of one measurement on a node, in seconds (60)"
    )
    how.add_argument("--storage", metavar="DIR", help="checkpoint folder whose throughput is measured")
    _output_arguments(parser)
    _apply_arguments(parser)


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument(
        "--nagios", action="store_true", help="print one line and exit with the code of a monitoring plugin"
    )
    parser.add_argument("--html", metavar="FILE", help="also write an HTML report")
    parser.add_argument(
        "--exclude-file",
        metavar="FILE",
        help="also write the failed nodes: one per line, or as a Slurm node list if FILE ends in .slurm",
    )
    parser.add_argument("--strict", action="store_true", help="treat suspect and unjudged as failed")
    parser.add_argument(
        "--port-gbit-s",
        metavar="RATE",
        type=float,
        help="required rate of every fabric port, one direction",
    )
    baseline = parser.add_mutually_exclusive_group()
    baseline.add_argument(
        "--baseline", metavar="FILE", help="compare the measurements with those saved in FILE"
    )
    baseline.add_argument("--save-baseline", metavar="FILE", help="save the measurements to FILE")
    parser.add_argument("--plain", action="store_true", help="plain text, even on a terminal")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="folder of run folders (runs)"
    )


def _apply_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("removing failed nodes from the scheduler")
    group.add_argument(
        "--scheduler",
        choices=("slurm", "kubernetes"),
        help="print the commands for this scheduler only (default: that of the job, or Slurm inside a Slurm job)",
    )
    group.add_argument("--apply", action="store_true", help="run the commands")
    group.add_argument(
        "--force",
        action="store_true",
        help="with --apply: also if more than half of the nodes would be removed",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 1 if something failed (`--strict`: did not pass); a plugin's with --nagios. Raises InputError."""
    if not args.nagios:
        return _run(args)
    from seatrial.check.reports import report_nagios

    try:
        return _run(args)
    except InputError as error:  # exit code 2 means CRITICAL to a monitoring system, and this is not
        first = error.diagnostics[0]
        print(
            report_nagios.unknown(first.message if first.file is None else f"{first.file}: {first.message}")
        )
        return report_nagios.UNKNOWN


def _run(args: argparse.Namespace) -> int:
    _verify(args)
    _verify_files(args)
    job = _job(args.job)
    if args.apply:
        from seatrial.cli.check_apply import verify

        verify(args, job)
    report = _report(args, job)
    if args.baseline is not None:
        from seatrial.check.judging.baseline import compare_baseline

        report = report.also(compare_baseline(report, Path(args.baseline)))
    if args.save_baseline is not None:
        from seatrial.check.judging.baseline import save_baseline

        kept = _write_or_refuse(args.save_baseline, lambda path: save_baseline(report, path))
        print(f"{kept} measurements saved to {args.save_baseline}", file=sys.stderr)
    from seatrial.cli.check_apply import drain_failed

    out = drain_failed(report, args, job)
    _files(report, out.orders, args, job)
    code = _print(report, out.orders, args)
    return code or (EXIT_FAILED if out.failed else EXIT_DONE)


def _verify(args: argparse.Namespace) -> None:
    """Raise InputError for options that contradict each other, with all contradictions."""
    problems: list[Diagnostic] = []
    ways = {"--from": args.sources, "--simulate": args.simulate}
    given = [option for option, value in ways.items() if value not in (None, [])]
    if len(given) > 1:
        problems.append(Diagnostic("--from and --simulate are mutually exclusive", hint="choose one"))
    for way in given:
        wrong = [option for name, option in _OF_MEASURING if getattr(args, name) is not None]
        if way == "--simulate" and args.job is not None:
            wrong.append("JOB")
        hint = "pass the file with --from" if wrong == ["--topology"] and way == "--from" else "remove it"
        problems += [Diagnostic(f"{option} and {way} are mutually exclusive", hint=hint) for option in wrong]
    if args.hostfile is not None and args.nodes is not None:
        problems.append(Diagnostic("--hostfile and --nodes are mutually exclusive", hint="choose one"))
    if args.json and args.nagios:
        problems.append(
            Diagnostic("--json and --nagios are mutually exclusive", hint="choose one output format")
        )
    if args.port_gbit_s is not None and not 0 < args.port_gbit_s < 1e5:
        text = f"--port-gbit-s {args.port_gbit_s:g} is not a rate"
        problems.append(Diagnostic(text, hint="in Gb/s, one direction: 400"))
    if args.timeout is not None and not (math.isfinite(args.timeout) and 1 <= args.timeout <= _LONGEST_S):
        text = f"--timeout {args.timeout:g} is not a time"
        problems.append(Diagnostic(text, hint=f"seconds, from 1 to {_LONGEST_S:.0f}"))
    if args.apply and args.simulate:
        problems.append(Diagnostic("--apply with --simulate: the nodes are simulated", hint="remove it"))
    if args.force and not args.apply:
        problems.append(Diagnostic("--force requires --apply", hint="remove it, or add --apply"))
    if problems:
        raise InputError(problems)


def _verify_files(args: argparse.Namespace) -> None:
    """Check that all files can be read or written before anything is measured. Raises InputError."""
    problems = [
        Diagnostic(
            "cannot be written: its folder does not exist", file=file, hint="name a folder that exists"
        )
        for file in (args.html, args.exclude_file, args.save_baseline)
        if file is not None and not Path(file).absolute().parent.is_dir()
    ]
    if problems:
        raise InputError(problems)
    if args.baseline is not None:
        from seatrial.check.judging.baseline import compare_baseline
        from seatrial.check.judging.report import Report

        compare_baseline(Report(()), Path(args.baseline))


def _job(file: str | None) -> Job | None:
    if file is None:
        return None
    from seatrial.job.loading import load_job

    return load_job(Path(file))


def _report(args: argparse.Namespace, job: Job | None) -> Report:
    if args.simulate is not None:
        from seatrial.check.blame.simulated_file import simulate

        return simulate(Path(args.simulate))
    if args.sources:
        from seatrial.check.intake.offline import judge_paths
        from seatrial.check.judging.compare import Plan
        from seatrial.cli.progress import Progress

        plan = None if job is None else Plan(job.cluster.nodes, job.cluster.gpus_per_node, args.job)
        with Progress("reading") as progress:
            return judge_paths(args.sources, plan=plan, port_gbit_s=args.port_gbit_s, progress=progress)
    from seatrial.cli.check_measure import measured

    return measured(args, job)


def _files(report: Report, orders: Sequence[Order], args: argparse.Namespace, job: Job | None) -> None:
    if args.html is not None:
        from seatrial.check.reports import report_html

        page = report_html.page(report, orders)
        _write_or_refuse(args.html, lambda path: atomic.write_output(path, page))
        print(f"report: {args.html}", file=sys.stderr)
    if job is not None and report.check_run is not None:
        from seatrial.cli.check_measure import keep

        if (kept := keep(report, orders, args.runs / job.name)) is not None:
            print(f"report: {kept}", file=sys.stderr)
    if args.exclude_file is not None:
        from seatrial.check.reports import report_exclude

        nodes = report_exclude.failed_nodes(report)
        form = report_exclude.slurm if args.exclude_file.endswith(".slurm") else report_exclude.hostfile
        _write_or_refuse(args.exclude_file, lambda path: atomic.write_output(path, form(nodes)))
        print(f"{len(nodes)} nodes to exclude: {args.exclude_file}", file=sys.stderr)
        nameless = sum(f.verdict == "FAIL" and f.target.node is None for f in report.findings)
        if nameless and report.check_run is None:
            print(
                f"warning: {nameless} failed findings name no node and are not in it: put outputs into one folder per node",
                file=sys.stderr,
            )


def _write_or_refuse(file: str, write: Callable[[Path], T]) -> T:
    try:
        return write(Path(file))
    except OSError as error:
        problem = Diagnostic(
            f"cannot be written: {error.strerror}", file=file, hint="name a file in a folder that exists"
        )
        raise InputError(problem) from None


def _print(report: Report, orders: Sequence[Order], args: argparse.Namespace) -> int:
    if args.nagios:
        from seatrial.check.reports import report_nagios

        line, code = report_nagios.line(report, strict=args.strict)
        print(line)
        return code
    if args.json:
        from seatrial.check.reports import report_json

        sys.stdout.write(report_json.text(report, orders))
    else:
        from seatrial.check.reports.report_table import table
        from seatrial.ui.out import Out

        out = Out(sys.stdout, plain=args.plain)
        width = min(140, shutil.get_terminal_size().columns) if out.styled else 110
        for text, style in table(report, orders, width=width):
            out.line(text, style)
    return EXIT_DONE if report.passes(strict=args.strict) else EXIT_FAILED
