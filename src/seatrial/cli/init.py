"""`seatrial init`: write a preset's job file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from seatrial.base import atomic
from seatrial.base.errors import EXIT_DONE, InputError
from seatrial.job.preset_files import is_complete, preset_summary, preset_text, presets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", metavar="NAME", help="name of the preset; see --list")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="where to write it (default: NAME.toml here); - prints it"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    parser.add_argument("--list", action="store_true", help="list the presets")


def run(args: argparse.Namespace) -> int:
    if args.list:
        _list(args.json)
        return EXIT_DONE
    if args.preset is None:
        raise InputError(
            "no preset named", hint=f"seatrial init --preset {presets()[0]}; all: seatrial init --list"
        )
    text = preset_text(args.preset)
    out: Path = args.out or Path(f"{args.preset}.toml")
    if str(out) == "-":
        document = json.dumps({"schema_version": 1, "preset": args.preset, "text": text}) + "\n"
        sys.stdout.write(document if args.json else text)
        return EXIT_DONE
    _write(out, text, args.force)
    following = f"seatrial {'train' if is_complete(text) else 'validate'} {out}"
    if args.json:
        print(json.dumps({"schema_version": 1, "preset": args.preset, "file": str(out), "next": following}))
    else:
        print(f"wrote {out}")
        print(f"next: {following}", file=sys.stderr)
    return EXIT_DONE


def _list(as_json: bool) -> None:
    found = [{"name": name, "summary": preset_summary(name)} for name in presets()]
    if as_json:
        print(json.dumps({"schema_version": 1, "presets": found}))
        return
    width = max(len(p["name"]) for p in found)
    for p in found:
        print(f"{p['name']:<{width}}  {p['summary']}")


def _write(out: Path, text: str, force: bool) -> None:
    if out.is_dir():
        raise InputError(f"{out} is a folder", hint=f"name a file in it: --out {out / 'seatrial.toml'}")
    if out.exists() and not force:
        raise InputError(f"{out} exists", hint="--force replaces it; --out FILE writes elsewhere")
    try:
        atomic.write_output(out, text)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: {error.strerror}",
            hint="name a folder that exists and is writable with --out",
        ) from None
