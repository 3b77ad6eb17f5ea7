"""`seatrial drill JOB`: prove on a copy of the job that the run survives common faults."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, InputError
from seatrial.base.signals import interrupting
from seatrial.cli.progress import LiveLine
from seatrial.cli.validate import job_arguments
from seatrial.job.finding import Facts, RuleViolation
from seatrial.ui.out import Out
from seatrial.ui.table import VERDICT_STYLES, print_table

if TYPE_CHECKING:
    from seatrial.drill.conduct import Drill, Progress, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    job_arguments(parser, nargs="?")
    parser.add_argument("--only", metavar="A,B", help="these scenarios (default: all; see --list)")
    parser.add_argument("--list", action="store_true", help="print the scenarios and exit")
    parser.add_argument(
        "--steps", type=int, default=None, metavar="N", help="steps of each copy (default: 16)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the fault storm")
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="duration of the fault storm in seconds (default: 30)",
    )
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 nothing failed, 1 a scenario failed, 2 bad input, 130 interrupted."""
    from seatrial.drill.conduct import Drill
    from seatrial.drill.copies import DEFAULT_STEPS, Cadence
    from seatrial.drill.scenarios import chosen
    from seatrial.launch.preflight import preflight

    scenarios = chosen(args.only)
    if args.list:
        _list(scenarios, as_json=args.json)
        return EXIT_DONE
    if args.job is None:
        raise InputError("JOB is missing", hint="seatrial drill JOB, or seatrial drill --list")
    if not 0 <= args.seconds < 86400:
        raise InputError(f"--seconds {args.seconds:g} is not between 0 and a day", hint="--seconds 60")
    drill = Drill(
        preflight(
            args.job, args.set, args.runs, ignore_memory=args.ignore_memory, rules=[_on_this_machine]
        ).job,
        args.runs,
        scenarios,
        Cadence(DEFAULT_STEPS if args.steps is None else args.steps),
        seed=args.seed,
        seconds=args.seconds,
    )
    out = Out(plain=args.plain)
    drill.prepare()
    started_at = time.monotonic()
    out.line(f"drill of {drill.job.name}: {len(scenarios)} scenarios on copies, seed {drill.seed}", "bold")
    out.pair("folder", str(drill.root))
    out.line()
    interrupted = False
    with interrupting(), _Console(out) as console:
        drill.watch = console.progress
        drill.finished = console.finished
        try:
            drill.run_all()
        except KeyboardInterrupt:
            interrupted = True
    return _report(args, out, drill, time.monotonic() - started_at, interrupted)


def _report(args: argparse.Namespace, out: Out, drill: Drill, seconds: float, interrupted: bool) -> int:
    from seatrial.drill import report

    page, document, copy = report.write(drill, seconds)
    document["interrupted"] = interrupted
    out.line()
    _table(out, drill.results)
    out.line()
    for result in drill.results:
        if result.judgement.verdict != "PASS":
            out.pair(result.judgement.verdict, f"{result.scenario.name}: {result.judgement.why()}")
            if result.folder is not None:
                out.pair("", f"seatrial watch {result.folder} --once")
    if interrupted:
        out.pair("interrupted", f"{len(drill.results)} of {len(drill.scenarios)} scenarios were run")
    out.pair("result", f"{report.summary(drill.results)} in {units.duration(seconds)}")
    out.pair("report", str(page))
    if copy is not None:
        out.pair("copy", str(copy))
    if args.json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    if interrupted:
        return EXIT_INTERRUPTED
    failed = any(r.judgement.verdict == "FAIL" for r in drill.results)
    return EXIT_FAILED if failed else EXIT_DONE


def _list(scenarios: list[Any], *, as_json: bool) -> None:
    if as_json:
        listed = [
            {"name": s.name, "about": s.about, "expected": s.expect.in_words(), "spares": s.spares}
            for s in scenarios
        ]
        print(json.dumps({"schema_version": 1, "scenarios": listed}, indent=2))
        return
    width = max(len(s.name) for s in scenarios)
    for scenario in scenarios:
        print(f"{scenario.name:<{width}}  {scenario.about}; {scenario.expect.in_words()}")


def _table(out: Out, results: list[Result]) -> None:
    from seatrial.drill.report import COLUMNS, row

    print_table(out, COLUMNS, [row(result) for result in results], styles=VERDICT_STYLES)


class _Console(LiveLine):
    """Output during a drill: one line per scenario, and the progress of the current run."""

    def progress(self, progress: Progress) -> None:
        """Show the current run; called many times a second."""
        left = "" if progress.eta_s is None else f", about {units.duration(round(progress.eta_s))} left"
        begin = f"[{progress.number}/{progress.of}] {progress.name}: step {progress.step}/{progress.steps}"
        self.show(progress.name, begin, left)

    def finished(self, result: Result) -> None:
        """Print the verdict on a scenario."""
        from seatrial.drill.report import row

        _, detected, recovered, redone, *_ = row(result)
        verdict = result.judgement.verdict
        text = f"{verdict:<8}  {result.scenario.name:<26}  "
        if verdict == "PASS":
            text += f"detected in {detected}, recovered in {recovered}, {redone} steps redone"
        else:
            text += result.judgement.why()
        self._out.line(text, VERDICT_STYLES[verdict])


def _on_this_machine(facts: Facts) -> Iterator[RuleViolation]:
    from seatrial.launch import named

    with contextlib.suppress(InputError):  # an unknown launcher is reported elsewhere
        if named(facts.job.cluster.launcher).name == "local":
            return
        yield RuleViolation(
            ("cluster.launcher",),
            "the drill ends processes and cuts networks of a virtual cluster on this machine",
            "--set cluster.launcher=local, with as many nodes and ranks as this machine can run",
        )
