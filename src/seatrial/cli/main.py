"""The `seatrial` command: finds the verb, runs it, and turns every failure into a message and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import io
import json
import os
import sys
import traceback
from typing import Any, NoReturn

from seatrial import __version__
from seatrial.base.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    InputError,
    SeatrialError,
    from_machine,
    printable,
)
from seatrial.base.process import exit_now

SCHEMA_VERSION = 1

# verb -> (module with add_arguments(parser) and run(args) -> exit code, help). Only the chosen verb is imported.
VERBS = {
    "init": ("seatrial.cli.init", "write a job file from a preset"),
    "schema": ("seatrial.cli.schema", "print the JSON schema of the job file, for editors"),
    "validate": ("seatrial.cli.validate", "check whether a job can start here, and list what prevents it"),
    "check": ("seatrial.cli.check", "judge whether nodes are fit to train on"),
    "explain": ("seatrial.cli.explain", "explain a finding of a check"),
    "plan": ("seatrial.cli.plan", "predict layout, memory, speed and cost of a job"),
    "scale": ("seatrial.cli.scale", "measure the job's speed at several numbers of nodes"),
    "data": ("seatrial.cli.data", "prepare text for training"),
    "train": ("seatrial.cli.train", "run a job; the same command again resumes it"),
    "attach": ("seatrial.cli.attach", "follow a run to its end, wherever it runs"),
    "status": ("seatrial.cli.status", "show the state of a run, also as its scheduler sees it"),
    "stop": ("seatrial.cli.stop", "save the state of a run and end it"),
    "agent": ("seatrial.cli.agent", "run the agent of one node, as schedulers start it"),
    "drill": ("seatrial.cli.drill", "inject faults into copies of the job and judge each recovery"),
    "ls": ("seatrial.cli.ls", "list the runs here and their states"),
    "watch": ("seatrial.cli.watch", "show a run from its folder"),
    "report": (
        "seatrial.cli.report",
        "report on a run: plan and measurement, goodput, failures, cost",
    ),
    "bundle": ("seatrial.cli.bundle", "archive a run's records and logs for support, without secrets"),
    "logs": ("seatrial.cli.logs", "show the logs of a run's ranks and agents"),
    "verify": ("seatrial.cli.verify", "verify a checkpoint, or a whole run with its samples"),
    "checkpoints": ("seatrial.cli.checkpoints", "list a run's checkpoints and their states"),
    "export": ("seatrial.cli.export", "write a checkpoint as a Hugging Face folder"),
    "completion": ("seatrial.cli.completion", "print a completion script for bash, zsh or fish"),
}

# Errors of the file or device behind stdout: not our bug.
_OUTPUT_LOST = (errno.ENOSPC, errno.EIO, errno.EDQUOT)

_USAGE = "usage: seatrial VERB [options]"


def entry() -> NoReturn:
    """The console script: run `main` on the command line and exit with its code."""
    exit_now(main(sys.argv[1:]))


def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code. Errors go to stderr, with `--json` as JSON."""
    as_json = "--json" in argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Like stderr: escape file names that are not UTF-8, or that the locale cannot encode.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(argv)
        if sys.stdout is not None:  # None if a supervisor started us with it closed
            sys.stdout.flush()
        return code
    except SeatrialError as error:
        with contextlib.suppress(OSError):  # stderr may be closed: the exit code still reports it
            _print_error(error, as_json)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our stdout has closed it (`seatrial ... | head`): the interpreter's own flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - last resort: reported as a bug
        if isinstance(error, OSError) and error.errno in _OUTPUT_LOST:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        known = from_machine(error)
        if known is None:  # a bug in Seatrial
            _print_internal(error, as_json)
            return EXIT_INTERNAL
        with contextlib.suppress(OSError):
            _print_error(known, as_json)
        return known.exit_code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if argv else sys.stderr)
        return EXIT_DONE if argv else EXIT_BAD_INPUT
    verb = argv[0]
    if verb in ("-V", "--version"):
        print(f"seatrial {__version__}")
        return EXIT_DONE
    if verb not in VERBS:
        if verb.startswith("-"):
            raise InputError(f"unknown option {verb}", hint=f"{_USAGE}; see seatrial --help")
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean `seatrial {close[0]}`?" if close else f"verbs: {', '.join(VERBS)}"
        raise InputError(f"unknown verb `{verb}`", hint=hint)
    about = VERBS[verb][1]
    parser = _Parser(
        prog=f"seatrial {verb}", description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False
    )
    module = declare(verb, parser)
    code: int = module.run(parser.parse_args(argv[1:]))
    return code


def declare(verb: str, parser: argparse.ArgumentParser) -> Any:
    """Add the arguments of `verb` to `parser`; returns the verb's module."""
    module: Any = importlib.import_module(VERBS[verb][0])
    module.add_arguments(parser)
    with contextlib.suppress(argparse.ArgumentError):  # a verb may have declared it itself
        parser.add_argument("--json", action="store_true", help="machine-readable output")
    return module


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises usage errors as InputErrors like all others."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise InputError(message, hint=f"{usage}; see {self.prog} --help")


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {about}" for verb, (_, about) in VERBS.items())
    return f"""{_USAGE}

From bare GPU nodes to a finished foundation-model training run.

verbs:
{verbs}

options:
  -h, --help     this text; `seatrial VERB --help` for one verb
  -V, --version  the version

A first run on this machine:
  seatrial init --preset first-voyage
  seatrial train first-voyage.toml"""


def _print_error(error: SeatrialError, as_json: bool) -> None:
    """Print an error on stderr, as text or as the JSON document common to all errors."""
    if not as_json:
        print(error.render(), file=sys.stderr)
        return
    if isinstance(error, InputError):
        errors = [
            {"message": d.full_message, "file": d.file, "line": d.line, "column": d.column, "hint": d.hint}
            for d in error.diagnostics
        ]
    else:
        errors = [{"message": error.message, "file": None, "line": None, "column": None, "hint": error.hint}]
    print(json.dumps({"schema_version": SCHEMA_VERSION, "errors": errors}), file=sys.stderr)


def _print_internal(error: Exception, as_json: bool) -> None:
    message = f"internal error: {type(error).__name__}: {error}"
    hint = "this is a bug in Seatrial: please report it with the traceback and the command"
    if as_json:
        place = {"file": None, "line": None, "column": None}
        document = {
            "schema_version": SCHEMA_VERSION,
            "errors": [{"message": message, **place, "hint": hint}],
            "traceback": traceback.format_exc(),
        }
        print(json.dumps(document), file=sys.stderr)
        return
    print(printable(f"{traceback.format_exc()}{message}\n  hint: {hint}"), file=sys.stderr)
