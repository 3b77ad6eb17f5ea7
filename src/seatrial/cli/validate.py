"""`seatrial validate JOB`: report whether a job could start here, and every problem; starts nothing."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from seatrial.base.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.description = (
        "Check whether a job could start here: job file, data, tokenizer, hardware names, launcher, layout, memory. Reports all problems at "
        "once, with their locations (exit 2). Starts, prepares and writes nothing; `train` and `drill` do it first."
    )
    job_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def job_arguments(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Declare the arguments of verbs that start a job, or check whether it could start."""
    parser.add_argument("job", type=Path, nargs=nargs, metavar="JOB", help="job file (see `seatrial init`)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one key, such as train.steps=100",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where run folders are (runs)"
    )
    parser.add_argument("--ignore-memory", action="store_true", help="only warn about too little memory")


def train_command(args: argparse.Namespace, *more: str, lr: str | None = None) -> str:
    """The `seatrial train` command for these arguments with `more` appended; a new `lr` replaces the old one."""
    words = ["seatrial", "train", str(args.job)]
    sets = [s for s in args.set if lr is None or s.partition("=")[0].strip() != "optimizer.lr"]
    words += [w for s in sets + ([] if lr is None else [f"optimizer.lr={lr}"]) for w in ("--set", s)]
    if args.runs != Path("runs"):
        words += ["--runs", str(args.runs)]
    return shlex.join([*words, *more])


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 the job could start, 1 the storage of its data is unreachable, 2 it could not start."""
    from seatrial.launch.preflight import preflight
    from seatrial.plan.cost.host import in_words
    from seatrial.ui.out import Out

    ready = preflight(args.job, args.set, args.runs, ignore_memory=args.ignore_memory)
    job, account = ready.job, ready.account
    if args.json:
        document = {
            "schema_version": 1,
            "job": job.source,
            "name": job.name,
            "layout": job.layout.as_dict(),
            "data": ready.data,
            "memory": account.document(),
            "notes": ready.notes,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return EXIT_DONE
    nodes = f"{job.cluster.nodes} x {job.cluster.gpus_per_node}"
    out = Out(sys.stdout, plain=True)
    out.line(f"{job.source}: {job.name} could start here")
    out.pair("layout", f"{job.layout}; {job.layout.world_size} ranks on {nodes}")
    out.pair("device", f"{account.device} ({account.device_reason})")
    data, notes = (("data", source) for source in ready.data), (("note", note) for note in ready.notes)
    for label, text in (*data, *in_words(account), *notes):
        out.pair(label, text)
    out.pair("next", train_command(args, *(["--ignore-memory"] if args.ignore_memory else [])))
    return EXIT_DONE
