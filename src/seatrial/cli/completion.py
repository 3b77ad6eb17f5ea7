"""`seatrial completion SHELL`: a completion script, generated from the parsers of all verbs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from seatrial.base.errors import EXIT_DONE

SHELLS = ("bash", "zsh", "fish")

# Where each shell searches for its script.
_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/seatrial",
    "zsh": "a folder of $fpath, as _seatrial",
    "fish": "~/.config/fish/completions/seatrial.fish",
}

# Arguments that name runs, files and folders, by metavar; no other value is completed.
_RUNS = ("RUN", "RUN_OR_CHECKPOINT", "CHECKPOINT|RUN")
_FILES = ("FILE", "PATH", "SOURCE", "bytes|PATH")
_FOLDERS = ("FOLDER", "DIR")

# A run is named by its folder below ./runs, or else by a path. shtab has bash take the output of a function whose
# name contains `_dir` as paths.
_RUN_FOLDERS = {"bash": "_seatrial_run_dirs", "zsh": "_seatrial_run_dirs", "fish": "(_seatrial_run_dirs)"}
_PREAMBLES = {
    "bash": """
_seatrial_run_dirs() {
  (cd runs 2>/dev/null && compgen -d -- "$1") || compgen -d -- "$1"
}
""",
    "zsh": """
_seatrial_run_dirs() {
  compadd -- runs/*(/N:t) || _files -/
}
""",
    "fish": """
function _seatrial_run_dirs
  set -l word (commandline -ct)
  set -l runs runs/*/
  string replace --regex '^runs/(.*)/$' '$1' -- $runs | string match -- "$word*"
  or __fish_complete_directories $word
end
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.epilog = "Save its output as: " + "; ".join(
        f"{shell}: {place}" for shell, place in _PLACES.items()
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 0."""
    import shtab

    from seatrial.cli.main import VERBS, declare

    root = argparse.ArgumentParser(prog="seatrial")
    root.add_argument("-V", "--version", action="store_true", help="the version")
    verbs = root.add_subparsers()
    for verb, (_, about) in VERBS.items():
        parser = verbs.add_parser(verb, help=about)
        declare(verb, parser)
        parser.description = about
    completed = {
        # zsh would take shtab's own pattern, (*.toml), for glob qualifiers.
        "JOB": {**shtab.glob("*.toml"), "zsh": "_files -g '*.toml'"},
        **dict.fromkeys(_RUNS, _RUN_FOLDERS),
        **dict.fromkeys(_FILES, shtab.FILE),
        **dict.fromkeys(_FOLDERS, shtab.DIRECTORY),
    }
    for action in _actions(root):
        if isinstance(action.metavar, str) and action.metavar in completed:
            action.complete = completed[action.metavar]  # type: ignore[attr-defined]
    script: str = shtab.complete(root, args.shell, preamble=_PREAMBLES[args.shell])
    if args.json:
        print(json.dumps({"schema_version": 1, "shell": args.shell, "script": script}))
    else:
        sys.stdout.write(script)
    return EXIT_DONE


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
