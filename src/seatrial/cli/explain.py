"""`seatrial explain CODE`: what a finding of a check means, and what to do about it."""

from __future__ import annotations

import argparse
import difflib
import json
import sys

from seatrial.base.errors import EXIT_DONE, InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "code", metavar="CODE", nargs="?", help="code of a finding, such as NET004; default: list all codes"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0. Raises InputError for a code that does not exist, with similar ones."""
    from dataclasses import asdict

    from seatrial.check.judging.findings import codes, explain
    from seatrial.ui.out import Out

    if args.code is None:
        chosen = list(codes().values())
    elif (found := explain(args.code)) is not None:
        chosen = [found]
    else:
        close = difflib.get_close_matches(args.code.strip().upper(), codes(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "`seatrial explain` lists all codes"
        raise InputError(f"unknown code {args.code!r}", hint=hint)
    if args.json:
        json.dump(
            {"schema_version": 1, "codes": [asdict(c) for c in chosen]},
            sys.stdout,
            indent=2,
            ensure_ascii=False,
        )
        print()
        return EXIT_DONE
    out = Out(sys.stdout)
    if args.code is None:
        for code in sorted(chosen, key=lambda c: c.code):
            out.line(f"{code.code}  {code.title}")
        return EXIT_DONE
    code = chosen[0]
    out.line(f"{code.code}: {code.title}", "bold")
    entries = (
        ("means", code.meaning),
        ("action", code.action),
        ("unjudged", code.unjudged),
        ("source", code.source),
    )
    for label, text in entries:
        if text:
            out.pair(label, text)
    return EXIT_DONE
