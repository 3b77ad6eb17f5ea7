"""`seatrial bundle RUN`: an archive of a run for support, without secrets, data and checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, InputError
from seatrial.record.folder import RunFolder
from seatrial.record.view import read_view
from seatrial.ui.out import Out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.description = (
        "Archive the records and the ends of the logs of a run for support. Secrets are removed if their "
        "names, formats or values are recognised; its MANIFEST.json lists what is included and what was left out. Review "
        "the archive before you send it."
    )
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or the name of one in ./runs")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the archive (NAME-bundle-TIME.tar.gz); must not exist yet"
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON on stdout")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0. Raises InputError if RUN is not a run folder or FILE exists, OSError if it cannot be written."""
    from seatrial.ui.summary import summary_json
    from seatrial.watch.bundle import write_bundle

    folder = RunFolder.find(args.run)
    out: Path = args.out or Path(
        f"{folder.path.resolve().name}-bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
    )
    if os.path.lexists(out) and (out.is_file() or out.is_dir()):
        raise InputError(f"{out} exists already", hint="give another file with --out, or remove it")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}", hint="create it, or name another with --out")
    bundle = write_bundle(folder, out, summary_json(read_view(folder), time.time()), os.environ)
    if args.json:
        print(json.dumps({**bundle.as_dict(), "archive": str(out)}, indent=2))
        return EXIT_DONE
    shown = Out(sys.stdout, plain=args.plain)
    shown.pair("archive", f"{out}, {units.memory(out.stat().st_size)}" if out.is_file() else str(out))
    shown.pair("contains", f"{len(bundle.files)} files; {bundle.redactions} values redacted")
    for why, what in bundle.left_out.items():
        shown.pair("left out", f"{what['files']} files, {units.memory(what['bytes'])}: {why}")
    shown.pair("next", "review the archive before you send it: no pattern finds every secret")
    return EXIT_DONE
