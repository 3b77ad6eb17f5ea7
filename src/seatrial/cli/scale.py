"""`seatrial scale JOB`: measure the speed of the real job at several numbers of nodes."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, Diagnostic, InputError
from seatrial.base.signals import interrupting
from seatrial.cli.progress import LiveLine
from seatrial.cli.validate import job_arguments
from seatrial.job.finding import Facts, RuleViolation
from seatrial.ui.out import Out
from seatrial.ui.table import VERDICT_STYLES, print_table

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.launch.allocation import Allocation
    from seatrial.scale.conduct import Measurement, MeasurementOptions, Progress
    from seatrial.scale.judge import Gates
    from seatrial.scale.trial import Trial

_MOST_NODES = 100_000
_DOUBLING, _SPEEDUP, _UTILISATION = "80", "8:128:12", "70"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.description = (
        "Measure tokens/s of the real job at several numbers of nodes, with intervals and the predictions of `plan`. The same "
        "command continues a measurement. Exit code: 0, 1 if a gate or a run failed, 2 for bad input, 130 interrupted."
    )
    job_arguments(parser)
    parser.add_argument("--nodes", metavar="N,N,...", help="sizes (default: 1, 2, 4, ... up to the job's)")
    parser.add_argument(
        "--strong", action="store_true", help="keep the global batch (default: it grows with the nodes)"
    )
    parser.add_argument(
        "--groups",
        action="store_true",
        help="run disjoint groups of nodes in parallel, and name groups that are slower than the others",
    )
    parser.add_argument(
        "--model-scale",
        type=float,
        metavar="F",
        help="a smaller model of the same shape: heads, widths and layers times F",
    )
    how = parser.add_argument_group("measurement")
    how.add_argument("--steps", type=int, metavar="N", help="steps of a run (default: 30)")
    how.add_argument(
        "--precision",
        type=float,
        default=2.0,
        metavar="P",
        help="stop when every interval is within P %% (2)",
    )
    how.add_argument("--repeats", type=int, default=10, metavar="N", help="at most N runs of a size (10)")
    how.add_argument(
        "--budget", type=float, metavar="H", help="at most H GPU hours, including earlier starts"
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order of sizes")
    how.add_argument(
        "--fresh", action="store_true", help="repeat all runs; earlier ones are kept but not used"
    )
    how.add_argument(
        "--trace",
        action="store_true",
        help="if ranks are named as a cause, an extra run with a torch.profiler trace of two of their steps",
    )
    gates = parser.add_argument_group("gates")
    gates.add_argument(
        "--min-doubling",
        nargs="?",
        const=_DOUBLING,
        metavar="P",
        help="efficiency at each doubling above P %% (80)",
    )
    gates.add_argument(
        "--min-speedup",
        nargs="?",
        const=_SPEEDUP,
        metavar="FROM:TO:TIMES",
        help="speed-up between two numbers of GPUs (8:128:12)",
    )
    gates.add_argument(
        "--min-utilisation",
        nargs="?",
        const=_UTILISATION,
        metavar="P",
        help="tensor cores active more than P %% of the time (70)",
    )
    parser.add_argument("--price", type=float, metavar="P", help="price of a GPU hour, in any currency")
    parser.add_argument(
        "--topology", metavar="FILE", help="leaf switches: output of ibnetdiscover, or Slurm's topology.conf"
    )
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 no gate failed, 1 a gate or a run failed, 2 bad input, 130 interrupted."""
    from seatrial.scale.conduct import Measurement
    from seatrial.scale.results import results_of
    from seatrial.scale.smaller import smaller_changes, with_changes

    job, options, gates, allocation = _read(args)
    out = Out(plain=args.plain)
    smaller = () if args.model_scale is None else smaller_changes(job, args.model_scale)
    if smaller:
        job = with_changes(job, smaller)
    measurement = Measurement(job, args.runs, options, allocation, model_changes=smaller)
    measurement.prepare(fresh=args.fresh)
    try:
        out.line(
            f"{options.mode} scaling of {job.name} on {', '.join(map(str, options.nodes))} nodes", "bold"
        )
        if allocation is not None:
            nodes = ", ".join(allocation.nodes)
            out.pair("allocation", f"{allocation.job} of Slurm, {len(allocation.nodes)} nodes: {nodes}")
        if smaller:
            out.pair("model", ", ".join(f"{c.key.partition('.')[2]} {c.job} -> {c.copy}" for c in smaller))
        out.pair("folder", str(measurement.state.folder))
        if measurement.resumed:
            out.pair("continues", f"{measurement.resumed} runs exist already; --fresh repeats all")
        out.line()
        interrupted = False
        with interrupting(), _Console(out) as console:
            measurement.watch, measurement.finished = console.progress, console.finished
            try:
                measurement.run_all()
                wanted = results_of(measurement, gates).to_trace() if args.trace else None
                if wanted is not None:
                    measurement.trace(*wanted)
            except KeyboardInterrupt:
                interrupted = True
        return _report(args, out, measurement, gates, interrupted)
    finally:
        measurement.close()


def _read(args: argparse.Namespace) -> tuple[Job, MeasurementOptions, Gates, Allocation | None]:
    """Parse the options and check the job. Raises InputError with the problems of both."""
    from seatrial.launch import launcher_for
    from seatrial.launch.allocation import allocation_for
    from seatrial.launch.preflight import preflight
    from seatrial.launch.slurm import SlurmLauncher

    problems: list[Diagnostic] = []
    job, options, gates, allocation = None, None, None, None

    def check(job: Job) -> None:
        nonlocal allocation
        launcher = launcher_for(job)
        if isinstance(launcher, SlurmLauncher):
            most = max(_nodes(args.nodes, job), default=job.cluster.nodes)
            command = shlex.join(["seatrial", *sys.argv[1:]])
            allocation = allocation_for(job, most, args.runs, command, os.environ)
        else:
            launcher.check(job)

    try:
        job = preflight(
            args.job, args.set, args.runs, ignore_memory=args.ignore_memory, rules=[_measurable], check=check
        ).job
    except InputError as error:
        problems += error.diagnostics
    try:
        options, gates = _options(args, job)
    except InputError as error:
        problems += error.diagnostics
    if job is None or options is None or gates is None:
        raise InputError(problems)
    return job, options, gates, allocation


def _options(args: argparse.Namespace, job: Job | None) -> tuple[MeasurementOptions, Gates]:
    """Parse the options. Raises InputError with all problems."""
    from seatrial.check.outputs.topology import read_topology
    from seatrial.scale.conduct import DEFAULT_STEPS, LEAST_STEPS, MeasurementOptions
    from seatrial.scale.judge import Gates

    problems: list[Diagnostic] = []

    def need(holds: bool, message: str, hint: str) -> None:
        if not holds:
            problems.append(Diagnostic(message, hint=hint))

    nodes = _nodes(args.nodes, job)
    need(
        bool(nodes),
        f"--nodes {args.nodes} is not a list of numbers from 1 to {_MOST_NODES:,}",
        "--nodes 1,2,4",
    )
    steps = DEFAULT_STEPS if args.steps is None else args.steps
    need(
        LEAST_STEPS <= steps <= 1_000_000,
        f"--steps {steps} is not between {LEAST_STEPS} and a million: too few steps do not show the warm-up",
        f"--steps {DEFAULT_STEPS}",
    )
    need(0 < args.precision < 100, f"--precision {args.precision:g} is not a percentage", "--precision 2")
    need(1 <= args.repeats <= 1000, f"--repeats {args.repeats} is not between 1 and 1000", "--repeats 10")
    for name in ("budget", "price"):
        value = getattr(args, name)
        fine = value is None or (math.isfinite(value) and 0 < value < 1e12)
        need(fine, f"--{name} {value} is not a number above 0", f"--{name} 10")
    factor = args.model_scale
    need(
        factor is None or 0 < factor < 1,
        f"--model-scale {factor} is not between 0 and 1",
        "--model-scale 0.25",
    )
    need(
        not (args.trace and args.groups),
        "--trace and --groups are mutually exclusive: a trace needs a single run",
        "run the bad group's nodes alone with --trace",
    )
    doubling = _number(args.min_doubling)
    need(
        args.min_doubling is None or (doubling is not None and 0 < doubling <= 200),
        f"--min-doubling {args.min_doubling} is not a percentage",
        f"--min-doubling {_DOUBLING}",
    )
    utilisation = _number(args.min_utilisation)
    need(
        args.min_utilisation is None or (utilisation is not None and 0 < utilisation < 100),
        f"--min-utilisation {args.min_utilisation} is not a percentage",
        f"--min-utilisation {_UTILISATION}",
    )
    speedup = re.fullmatch(r"(\d{1,9}):(\d{1,9}):(\d{1,9}(?:\.\d+)?)", args.min_speedup or "")
    fine = speedup is not None and 0 < int(speedup[1]) < int(speedup[2]) and float(speedup[3]) > 0
    need(
        args.min_speedup is None or fine,
        f"--min-speedup {args.min_speedup} is not FROM:TO:TIMES, with fewer GPUs first",
        f"--min-speedup {_SPEEDUP}",
    )
    topology = None
    if args.topology is not None:
        try:
            topology = read_topology(Path(args.topology))
        except InputError as error:
            problems += error.diagnostics
    if problems:
        raise InputError(problems)
    options = MeasurementOptions(
        nodes=nodes,
        mode="strong" if args.strong else "weak",
        steps=steps,
        precision=args.precision / 100,
        repeats=args.repeats,
        budget=args.budget,
        seed=args.seed,
        groups=args.groups,
        topology=topology,
    )
    asked = None if speedup is None else (int(speedup[1]), int(speedup[2]), float(speedup[3]))
    share = None if utilisation is None else utilisation / 100
    return options, Gates(None if doubling is None else doubling / 100, asked, share)


def _nodes(text: str | None, job: Job | None) -> tuple[int, ...]:
    """The sizes, ascending; () if `text` does not name any. Without it 1, 2, 4, ... and the job's own."""
    if text is None:
        most = 1 if job is None else job.cluster.nodes
        return tuple(sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most}))
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= 6 for word in words):
        return ()
    numbers = sorted({int(word) for word in words})
    return tuple(numbers) if numbers[0] >= 1 and numbers[-1] <= _MOST_NODES else ()


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.removesuffix("%"))
    except ValueError:
        return None


def _report(
    args: argparse.Namespace, out: Out, measurement: Measurement, gates: Gates, interrupted: bool
) -> int:
    from seatrial.base.atomic import write_json, write_text
    from seatrial.scale import report
    from seatrial.scale.results import results_of
    from seatrial.ui.scale_html import page

    results = results_of(measurement, gates, price=args.price)
    document = report.document(results) | {"interrupted": interrupted}
    folder = measurement.state.folder
    write_json(folder / "report.json", document)
    write_text(folder / "report.html", page(results))
    out.line()
    print_table(out, report.columns(results), [report.row(size, results) for size in results.sizes])
    for headings, rows in (report.split_rows(results), report.waterfall_rows(results)):
        if len(headings) > 1:
            out.line()
            print_table(out, headings, rows)
    out.line()
    for label, text in report.lines(results):
        out.pair(label, text, VERDICT_STYLES.get(label, ""))
    out.pair("report", str(folder / "report.html"))
    if args.json:
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    if interrupted:
        out.pair("interrupted", "the same command continues")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if results.failed else EXIT_DONE


class _Console(LiveLine):
    """Output during a measurement: one line per run, and the progress of the current one."""

    def progress(self, progress: Progress) -> None:
        """Show the current run; called many times a second."""
        from seatrial.scale.sizes import in_words

        name = f"{in_words(progress.nodes)}, run {progress.repeat}"
        spent = f", {progress.spent:.3g} GPU hours before"
        self.show(name, f"{name}: step {progress.step}/{progress.steps}", spent)

    def finished(self, trial: Trial) -> None:
        """Print the figures of a run."""
        from seatrial.scale.sizes import in_words

        name = in_words(trial.nodes)
        found = trial.figures
        if found is None:
            self._out.line(f"{name:<12}  {trial.problem}", "bold red")
            return
        self._out.line(
            f"{name:<12}  {found.tokens_per_s:,.0f} tokens/s, {units.duration(found.step_s)} per step over {found.steady} "
            f"steps after {found.warm_up} of warm-up, {trial.seconds:.0f} s"
        )


def _measurable(facts: Facts) -> Iterator[RuleViolation]:
    from seatrial.launch import named
    from seatrial.launch.base import Scheduled
    from seatrial.launch.slurm import SlurmLauncher

    with contextlib.suppress(InputError):  # an unknown launcher is reported elsewhere
        launcher = named(facts.job.cluster.launcher)
        if isinstance(launcher, Scheduled) and not isinstance(launcher, SlurmLauncher):
            yield RuleViolation(
                ("cluster.launcher",),
                "each run would be scheduled separately, on other nodes than the last",
                "--set cluster.launcher=ssh, with the hosts in [ssh]",
            )
