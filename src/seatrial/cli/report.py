"""`seatrial report RUN`: the report of a run as one HTML file or as JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from seatrial.base import atomic, units
from seatrial.base.errors import EXIT_DONE, InputError
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import plain
from seatrial.record.view import read_view
from seatrial.ui.out import Out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.description = (
        "Report on a run, finished or not, from its folder: plan and measurement, goodput, failures, checkpoints, "
        "loss, scaling, checks, drills, cost. One self-contained HTML file; what is missing is listed in it."
    )
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or the name of one in ./runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (RUN/reports/report.html)")
    parser.add_argument("--price", type=float, metavar="P", help="price of a GPU hour, in any currency")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the report as JSON on stdout; without --out no page is written",
    )
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0. Raises InputError if RUN is not a run folder, OSError if the page cannot be written."""
    from seatrial.ui.goodput_words import percent
    from seatrial.watch.report import report
    from seatrial.watch.report_html import page

    if args.price is not None and not (math.isfinite(args.price) and args.price >= 0):
        raise InputError(
            f"--price {args.price} is not the price of an hour", hint="give a number, such as --price 2.50"
        )
    folder = RunFolder.find(args.run)
    document = report(read_view(folder), time.time(), args.price)
    out: Path | None = args.out
    if out is None and not args.json:
        folder.reports.mkdir(exist_ok=True)
        out = folder.reports / "report.html"
    if out is not None:
        if not out.parent.is_dir():
            raise InputError(f"there is no folder {out.parent}", hint="create it, or name another with --out")
        atomic.write_output(out, page(document))
    if args.json:
        sys.stdout.write(json.dumps(plain(document), indent=2, allow_nan=False) + "\n")
        return EXIT_DONE
    shown, found = Out(sys.stdout, plain=args.plain), document["goodput"]
    shown.pair("state", f"{document['state']}: {document['state_reason']}")
    if found is not None:
        shown.pair("goodput", f"ETTR {percent(found['ettr'])} of {units.duration(found['wall_s'])}")
    for part, why in document["missing"].items():
        shown.pair("missing", f"{part}: {why}")
    shown.pair("report", str(out))
    return EXIT_DONE
