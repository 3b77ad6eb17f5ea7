"""`seatrial plan JOB`: predict layout, memory, speed and end of a job, with reasons, before a single GPU is rented."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, Diagnostic, InputError

if TYPE_CHECKING:
    from seatrial.hardware.catalogue import Gpu
    from seatrial.hardware.networks import Network
    from seatrial.job import Job
    from seatrial.plan.cost.calibration import Calibration
    from seatrial.plan.measured.rates import Measured
    from seatrial.plan.model.hardware import Hardware
    from seatrial.plan.report.advice import TargetValue
    from seatrial.plan.report.answer import Answer, PlanOptions
    from seatrial.plan.report.dryrun_comparison import DryRunComparison

# Table width: narrower lines show nothing useful, wider ones are hard to read.
_LEAST, _MOST, _PIPE = 60, 140, 100
_NODE = 8  # GPUs per node when searching for clusters
_MOST_NODES, _MOST_RUNS, _MOST_DAYS = 100_000, 20, 3650


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.description = (
        "Predict a job: whether its layout fits, its speed, the best layouts that the rules allow, when the run ends, how "
        "it scales, its network demand, and possible improvements. Nothing is started. "
        "Exit code: 0, 1 if the job's own layout does not fit, 2 for bad input."
    )
    parser.add_argument("job", type=Path, metavar="JOB", help="job file (see `seatrial init`)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace one key of the job"
    )
    where = parser.add_argument_group("hardware")
    where.add_argument(
        "--network", metavar="NAME", help="network between nodes, such as 'InfiniBand NDR 8x400'"
    )
    where.add_argument(
        "--storage-gb-s",
        type=float,
        metavar="RATE",
        help="rate of the checkpoint storage, GB/s (20, assumed)",
    )
    where.add_argument("--price", type=float, metavar="P", help="price of a GPU hour, in any currency")
    where.add_argument(
        "--stack",
        metavar="NAME",
        default="seatrial",
        help="predict the speed of another software stack, such as nemo",
    )
    where.add_argument("--fp8", action="store_true", help="predict that stack with FP8 matrix products")
    where.add_argument(
        "--nodes", type=int, nargs="+", metavar="N", help="sizes of the scaling lines (1, 2, 4, ...)"
    )
    ask = parser.add_argument_group("question")
    ask.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="GOAL",
        help="tokens/s/GPU (2500), MFU (45%%) or time to the end (5d, 36h): report whether the prediction reaches it, or how "
        "likely the run ends by then, and which change would",
    )
    ask.add_argument("--own", action="store_true", help="only the job's own layout: no search")
    ask.add_argument(
        "--fit",
        action="store_true",
        help="memory requirements of the model, and the smallest clusters that meet them",
    )
    ask.add_argument(
        "--dry-run",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="run one step of the job's layout and the N best ones (1) with fake tensors: exact memory and traffic",
    )
    _output_arguments(parser)


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("output")
    out.add_argument("--full", action="store_true", help="every layout, size and source")
    out.add_argument("--svg", metavar="FILE", help="also write the FLOPs waterfall chart")
    out.add_argument("--png", metavar="FILE", help="the same as PNG (requires matplotlib)")
    out.add_argument("--html", metavar="FILE", help="also write the plan as an HTML page")
    out.add_argument("--plain", action="store_true", help="plain text, even on a terminal")
    out.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    out.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="folder of run folders (runs)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 if the job's own layout does not fit (with --fit: if no layout fits). Raises InputError."""
    from seatrial.plan.cost.calibration import shipped
    from seatrial.plan.measured.rates import measured_rates
    from seatrial.plan.report.answer import answer

    wishes, job = _read(args)
    measured = measured_rates(args.runs / job.name, job)
    place = _place(args, job, measured)
    calibration = measured.calibration(shipped())
    if job.is_open:
        with _searching(args):
            job = _settled(args, job, place, calibration)
    if args.fp8:  # after the choice of a layout, which is for our trainer
        job = _in_fp8(job)
    if args.fit:
        return _fit(args, job, place, calibration)
    if wishes.storage_gb_s is None and measured.storage_gb_s is not None:
        wishes = replace(wishes, storage_gb_s=measured.storage_gb_s, storage_source="measured")
    with _searching(args):
        result = answer(job, place, wishes, calibration=calibration)
    unused = tuple(f"not used: {text}" for text in measured.unused)
    result = replace(result, provenance=(*result.provenance, *unused))
    # Show the plan before anything slow begins.
    if not args.json:
        _show(args, plan_lines(result, args))
    ran: list[DryRunComparison] = []
    try:
        _pictures(args, result)
        _dry_runs(args, result, ran)
    finally:
        if args.json:  # with what was run, if a picture or a dry run fails or is interrupted
            _print_json(result, ran)
    if ran and not args.json:
        from seatrial.ui.plan_dryrun import lines

        _show(args, lines(ran, _width()))
    return EXIT_FAILED if result.own.fits is False else EXIT_DONE


def _settled(args: argparse.Namespace, job: Job, place: Hardware, calibration: Calibration) -> Job:
    """Give an open job the layout chosen by `parallel = "auto"`; with --fit also if there is none."""
    from seatrial.job.settled import provisional
    from seatrial.plan.search.auto import choose

    try:
        return choose(job, place, calibration=calibration).settle(job)
    except InputError:
        if args.fit:  # --fit searches for a sufficient cluster
            return provisional(job)
        raise


@contextmanager
def _searching(args: argparse.Namespace) -> Iterator[None]:
    """Show a message on a terminal while it computes: seconds for 128 GPUs, half a minute for a hundred thousand."""
    from seatrial.ui.out import Out

    styled = Out(plain=args.plain).styled
    if styled:
        print("searching layouts ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if styled:
            print("\x1b[2K", end="\r", file=sys.stderr, flush=True)


def _read(args: argparse.Namespace) -> tuple[PlanOptions, Job]:
    """Parse the options and load the job. Raises InputError with the problems of both."""
    from seatrial.job import load_job

    problems: list[Diagnostic] = []
    wishes = job = None
    try:
        wishes = _wishes(args)
    except InputError as error:
        problems += error.diagnostics
    try:
        job = load_job(args.job, args.set)
        if job.architecture.num_experts and args.stack != "seatrial":
            hint = "leave out --stack: of experts, memory and traffic of Seatrial's own stack are known"
            problems.append(Diagnostic(f"experts of the stack {args.stack} are not modelled", hint=hint))
    except InputError as error:
        problems += error.diagnostics
    if job is None or wishes is None or problems:
        raise InputError(problems)
    if job.architecture.lora is not None and args.stack != "seatrial":
        message = f"the memory of LoRA in {args.stack} is unknown"
        raise job.refusal("model.lora", message, "remove --stack, or the adapters")
    return wishes, job


def _in_fp8(job: Job) -> Job:
    """`job` with FP8 matrix products."""
    train = job.train.model_copy(update={"precision": "fp8"})
    return replace(job, file=job.file.model_copy(update={"train": train}))


def _place(args: argparse.Namespace, job: Job, measured: Measured) -> Hardware:
    """The hardware: from the job, measurements, and --network if given."""
    from seatrial.plan.model.hardware import hardware_of

    return measured.at(hardware_of(job, args.network), keep_network=args.network is not None)


def _wishes(args: argparse.Namespace) -> PlanOptions:
    """Parse the options. Raises InputError with all problems."""
    from seatrial.plan.cost.overlap import OURS
    from seatrial.plan.cost.stacks import stacks
    from seatrial.plan.model.hardware import known_network
    from seatrial.plan.report.answer import PlanOptions

    problems: list[Diagnostic] = []
    if args.stack not in stacks():
        close = difflib.get_close_matches(args.stack, stacks(), n=1)
        hint = f'did you mean "{close[0]}"? ' if close else ""
        problems.append(
            Diagnostic(f'unknown stack "{args.stack}"', hint=f"{hint}known: {', '.join(stacks())}")
        )
    if args.fp8 and (args.stack in OURS or args.dry_run is not None or args.fit):
        hint = 'train.precision = "fp8" in the job file; or --stack nemo --fp8, without --fit and --dry-run'
        problems.append(Diagnostic("--fp8 is for other stacks", hint=hint))
    if args.network is not None:
        try:
            known_network(args.network)
        except InputError as error:
            problems += error.diagnostics
    for option, value in (("--storage-gb-s", args.storage_gb_s), ("--price", args.price)):
        if value is not None and not (math.isfinite(value) and 0 < value < 1e9):
            problems.append(Diagnostic(f"{option} {value:g} is not a rate above 0", hint=f"{option} 20"))
    for n in args.nodes or ():
        if not 1 <= n <= _MOST_NODES:
            problems.append(
                Diagnostic(f"--nodes {n} is not between 1 and {_MOST_NODES:,}", hint="--nodes 1 2 4 8 16")
            )
    if args.dry_run is not None and not 0 <= args.dry_run <= _MOST_RUNS:
        text = f"--dry-run {args.dry_run} is not between 0 and {_MOST_RUNS}"
        problems.append(Diagnostic(text, hint="--dry-run 2"))
    wanted: list[TargetValue] = []
    for text in args.target:
        found = _parse_target(text)
        if isinstance(found, Diagnostic):
            problems.append(found)
        else:
            wanted.append(found)
    problems += _unwritable(args)
    if problems:
        raise InputError(problems)
    return PlanOptions(
        stack=args.stack,
        storage_gb_s=args.storage_gb_s,
        price=args.price,
        nodes=tuple(args.nodes or ()),
        targets=tuple(wanted),
        look_further=not args.own,
    )


def _unwritable(args: argparse.Namespace) -> list[Diagnostic]:
    from seatrial.job.loading import job_file

    problems: list[Diagnostic] = []
    taken: set[Path] = set()
    for file in (args.svg, args.png, args.html):
        if file is None:
            continue
        path = Path(file)
        if not path.absolute().parent.is_dir():
            text, hint = "cannot be written: its folder does not exist", "name a file in a folder that exists"
            problems.append(Diagnostic(text, file=file, hint=hint))
        elif path.is_dir():
            problems.append(Diagnostic("is a folder", file=file, hint="name a file in it"))
        elif path.resolve() == job_file(args.job).resolve():
            problems.append(
                Diagnostic("is the job file, which would be overwritten", file=file, hint="name another file")
            )
        elif path.resolve() in taken:
            problems.append(Diagnostic("is given twice", file=file, hint="give a separate file for each"))
        taken.add(path.resolve())
    if args.fit and any((args.svg, args.png, args.dry_run is not None)):
        problems.append(
            Diagnostic("--fit has no layout to plot or run", hint="remove --svg, --png and --dry-run")
        )
    return problems


def _parse_target(text: str) -> TargetValue | Diagnostic:
    from seatrial.plan.report.advice import TargetValue

    match = re.fullmatch(r"\s*([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([%dh]?)\s*", text)
    value = float(match[1].replace(",", "")) if match else 0.0
    kind = match[2] if match else ""
    most = {"%": 100.0, "d": _MOST_DAYS, "h": 24 * _MOST_DAYS}.get(kind, 1e9)
    if not 1e-3 < value <= most:
        return Diagnostic(
            f'--target "{text}" is no rate, percentage (at most 100 %) or time (at most {_MOST_DAYS:,} days)',
            hint="--target 2500, --target 45%, --target 5d or --target 36h",
        )
    if kind in ("d", "h"):
        return TargetValue(value * 3600 * (24 if kind == "d" else 1), "end")
    return TargetValue(value / 100, "MFU") if kind else TargetValue(value, "tokens/s/GPU")


def plan_lines(result: Answer, args: argparse.Namespace) -> list[tuple[str, str]]:
    """The plan as lines with their styles."""
    from seatrial.ui.plan_table import lines

    return lines(result, width=_width(), full=args.full)


def _width() -> int:
    return max(_LEAST, min(_MOST, shutil.get_terminal_size((_PIPE, 24)).columns))


def _show(args: argparse.Namespace, lines: list[tuple[str, str]]) -> None:
    from seatrial.ui.figures import printable
    from seatrial.ui.out import Out
    from seatrial.ui.plan_words import labelled

    out = Out(sys.stdout, plain=args.plain)
    if not out.styled:  # `print` raises if the plan could not be written, and `main` reports it
        print(printable("\n".join(text for text, _ in lines)), flush=True)
        return
    for line in lines:
        if (parts := labelled(line)) is not None:
            out.pair(*parts)
        else:
            out.line(*line)


def _print_json(result: Answer, ran: list[DryRunComparison]) -> None:
    from seatrial.ui.plan_dryrun import document as dry_runs
    from seatrial.ui.plan_json import document

    whole = document(result) | {"dry_run": dry_runs(ran)}
    print(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False))


def _fit(args: argparse.Namespace, job: Job, place: Hardware, calibration: Calibration) -> int:
    from seatrial.hardware.networks import find_network, reference_node
    from seatrial.plan.cost.accumulate import adapted
    from seatrial.plan.cost.predict import capacity
    from seatrial.plan.model.hardware import hardware_of
    from seatrial.plan.model.recipe import Recipe
    from seatrial.plan.search.fit import account, smallest
    from seatrial.ui.plan_fit import document, lines

    def network(gpu: Gpu) -> Network | None:
        if args.network or job.cluster.network or job.file.network:
            return hardware_of(job, args.network).network
        node = reference_node(gpu.name)
        return None if node is None else find_network(node.network)

    available = None if place.cluster is None else capacity(place.cluster)
    own = adapted(job, Recipe.of(job), available, args.stack)
    needs = account(job.architecture, own, stack=args.stack)
    fits = smallest(job, gpus_per_node=_NODE, network_of=network, calibration=calibration, stack=args.stack)
    if args.json:
        print(json.dumps(document(job, needs, fits), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _show(args, lines(job, needs, fits, width=_width()))
    if args.html is not None:
        from seatrial.ui.plan_html import fit_page

        _write(args.html, fit_page(job, needs, available, fits).encode())
    return EXIT_DONE if any(f.recipe is not None for f in fits) else EXIT_FAILED


def _dry_runs(args: argparse.Namespace, result: Answer, ran: list[DryRunComparison]) -> None:
    """Dry-run the job's own layout and the best ones, each once, into `ran`. Progress on stderr: a large one takes a minute."""
    if args.dry_run is None:
        return
    from seatrial.plan.report.advice import short
    from seatrial.plan.report.dryrun_comparison import compare_with_dry_run

    best = [c.recipe for c in result.found.choices[: args.dry_run]] if result.found is not None else []
    wanted = list(dict.fromkeys([result.own.recipe, *best]))
    cpu = result.place.gpu is None and result.job.cluster.launcher == "local"
    for i, recipe in enumerate(wanted, 1):
        print(f"dry run {i} of {len(wanted)}: {short(recipe)}", file=sys.stderr, flush=True)
        ran.append(
            compare_with_dry_run(result.job, recipe, result.place.shape, device="cpu" if cpu else "cuda")
        )


def _pictures(args: argparse.Namespace, result: Answer) -> None:
    if args.html is not None:
        from seatrial.ui.plan_html import page
        from seatrial.ui.plan_table import target_words, verdict

        text, style = verdict(result)
        wishes = [target_words(t) for t in result.targets]
        tone = {"green": "good", "yellow": "warn", "bold red": "bad"}.get(style, "")
        _write(args.html, page(result, verdict=text, tone=tone, wishes=wishes).encode())
    if args.svg is None and args.png is None:
        return
    from seatrial.plan.report.waterfall import waterfall_of
    from seatrial.ui.png import png
    from seatrial.ui.svg import svg_text
    from seatrial.ui.waterfall_svg import waterfall_svg

    if result.waterfall is None:
        text = f"no chart: the speed is unknown: {result.own.why_unknown}"
        raise InputError(text, hint="set GPU and network, or remove --svg and --png")
    shown = waterfall_of(result.waterfall)
    title, below = f"Where the FLOPs of {result.job.name} go", f"predicted, {result.job.layout}"
    picture = waterfall_svg(shown, title=title, subtitle=below)
    if args.svg is not None:
        _write(args.svg, svg_text(picture).encode())
    if args.png is not None:
        _write(args.png, png(picture))


def _write(file: str, content: bytes) -> None:
    from seatrial.base import atomic

    try:
        atomic.write_output(Path(file), content)
    except OSError as error:
        problem = Diagnostic(f"cannot be written: {error.strerror}", file=file, hint="name another file")
        raise InputError(problem) from None
    print(f"written: {file}", file=sys.stderr)
