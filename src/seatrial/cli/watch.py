"""`seatrial watch RUN`: show a run from its folder; it need not be running."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from pathlib import Path

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, InputError, RunFailed, SeatrialError
from seatrial.record.folder import RunFolder
from seatrial.record.running import running
from seatrial.record.view import RunView, read_view
from seatrial.ui.out import Out
from seatrial.ui.summary import print_status, summary_json

POLL_S = 0.2
TOKEN_FILE = Path("~/.seatrial/web-token")
_LARGE_BYTES = 32 << 20  # records of this size take a second or longer to read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="*",
        help="path of a run folder, or the name of one in ./runs; exactly one unless with --web or --grafana",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="show the current state and exit; default: follow the run to its end",
    )
    parser.add_argument(
        "--to",
        metavar="TRACKER",
        help="push the run to a tracker (tensorboard, wandb, mlflow) resuming an earlier push, and follow it while it runs",
    )
    parser.add_argument("--wait", action="store_true", help="wait for the run to begin, then follow it")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")
    parser.add_argument(
        "--grafana",
        type=Path,
        metavar="DIR",
        help="write Grafana dashboards, Prometheus alert rules and an example configuration, for the given runs",
    )
    web = parser.add_argument_group("in a browser")
    web.add_argument("--web", action="store_true", help="serve web pages of RUN, or of all runs in ./runs")
    web.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where run folders are (runs)"
    )
    web.add_argument(
        "--host", default="127.0.0.1", help="address to serve on; any but 127.0.0.1 needs a token"
    )
    web.add_argument("--port", type=int, default=8470, help="port to serve on; 0: any (8470)")
    web.add_argument(
        "--token",
        action="store_true",
        help="require the token on 127.0.0.1 too, on a machine with other users",
    )
    web.add_argument(
        "--token-file",
        type=Path,
        default=TOKEN_FILE,
        metavar="FILE",
        help=f"where the token is kept ({TOKEN_FILE})",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 after following a run that failed. Raises InputError if RUN is not a run folder."""
    if args.grafana is not None:
        return _grafana(args)
    if args.web:
        return _serve(args)
    if len(args.run) != 1:
        raise InputError("name one run", hint="`seatrial ls` lists them; --web shows several")
    (name,) = args.run
    if args.wait and args.once:
        raise InputError("--once shows the current state: it cannot --wait")
    if args.to is not None and (args.once or args.json):
        raise InputError("--to shows nothing: it cannot be combined with --once or --json")
    folder = _wait_for_run(name) if args.wait else RunFolder.find(name)
    if args.to is not None:
        return _push(folder, args.to)
    records = (folder.metrics, folder.events, folder.ledger)
    size = sum(path.stat().st_size for path in records if path.is_file())
    if size > _LARGE_BYTES:
        print(f"reading {units.memory(size)} of records", file=sys.stderr, flush=True)
    follows = args.wait or (not args.once and running(folder) is not None)
    return _follow(folder, args) if follows else _show(read_view(folder), args)


def _grafana(args: argparse.Namespace) -> int:
    """Write the files of --grafana, and print how to load them."""
    for name in ("once", "wait", "plain", "web", "to"):
        if getattr(args, name):
            raise InputError(f"--{name} cannot be combined with --grafana")
    from seatrial.watch.grafana.files import how_to_load, write_files

    try:
        written = write_files(args.grafana, [RunFolder.find(name, args.runs) for name in args.run])
    except OSError as error:
        reason = f"cannot write to {args.grafana}: {error.strerror}"
        raise InputError(reason, hint="give a writable folder, or one that can be created") from None
    if args.json:
        print(json.dumps({"schema_version": 1, "files": [str(path) for path in written]}))
    else:
        print("\n".join(f"wrote {path}" for path in written), how_to_load(args.grafana), sep="\n\n", end="")
    return EXIT_DONE


def _serve(args: argparse.Namespace) -> int:
    """Serve pages until interrupted."""
    for name in ("once", "wait", "json", "plain"):
        if getattr(args, name):
            raise InputError(f"--{name} cannot be combined with --web")
    if not 0 <= args.port < 1 << 16:
        raise InputError(f"--port {args.port} is not a port", hint="use 0 to 65535; 0: any free port")
    from seatrial.watch.web.access import is_loopback, make_token
    from seatrial.watch.web.server import listen, serve

    chosen = [RunFolder.find(name, args.runs) for name in args.run]
    if not chosen and not args.runs.is_dir():
        raise InputError(f"there is no folder {args.runs}", hint="name runs, or their folder with --runs")
    kept, token, new = args.token_file.expanduser(), None, False
    if args.token or not is_loopback(args.host):
        token, new = make_token(kept)
    with listen(args.host, args.port) as listening:
        serve(chosen, args.runs, listening, token, new=new, kept=kept)
    return EXIT_DONE


def _wait_for_run(name: str) -> RunFolder:
    """Wait until the run `name` is running; returns its folder."""
    waits = False
    while True:
        with contextlib.suppress(InputError):
            folder = RunFolder.find(name)
            if running(folder) is not None and folder.job_toml.exists():
                return folder
        if not waits:
            print(f"waiting for {name} to begin; Ctrl-C ends it", file=sys.stderr, flush=True)
        waits = True
        time.sleep(POLL_S)


def _push(folder: RunFolder, name: str) -> int:
    """Push a run to a tracker. Raises RunFailed for whatever the tracker's package raises."""
    from seatrial.watch.trackers.feed import feed

    try:
        pushed = feed(folder, name, report=lambda text: print(text, file=sys.stderr, flush=True))
    except SeatrialError:
        raise
    except Exception as error:  # a tracker's package can raise anything
        raise RunFailed(
            f"{name} failed: {type(error).__name__}: {error}",
            hint="the run is not affected; the same command continues where this one stopped",
        ) from error
    print(f"pushed {pushed.steps:,} steps and {pushed.events:,} events to {name} as {pushed.id}")
    return EXIT_DONE


def _show(view: RunView, args: argparse.Namespace) -> int:
    warn = Out(sys.stderr, plain=args.plain)
    for problem in view.problems:
        warn.line(f"warning: {problem}", "yellow")
    now = time.time()
    if args.json:
        sys.stdout.write(summary_json(view, now))
    else:
        print_status(Out(sys.stdout, plain=args.plain), view, now)
    return EXIT_DONE


def _follow(folder: RunFolder, args: argparse.Namespace) -> int:
    from seatrial.ui.console import TrainConsole

    # Exit normally rather than by the signal, so that the terminal is restored.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with TrainConsole(folder, plain=args.plain, json_output=args.json) as console:
        if console.out.styled:
            from seatrial.ui.terminal import Terminal

            with Terminal(folder, console.out.console) as terminal:
                while running(folder) is not None:
                    if not terminal.show(POLL_S):
                        return EXIT_DONE
        else:
            console.catch_up()
            while running(folder) is not None:
                console.poll()
                time.sleep(POLL_S)
        check_there(folder)
        view = console.ended()
        console.summary(view)
    return EXIT_FAILED if view.state == "failed" else EXIT_DONE


def check_there(folder: RunFolder) -> None:
    """Raise RunFailed if the folder of the followed run no longer exists."""
    if not folder.is_run():
        raise RunFailed(
            f"{folder.path} no longer exists: it was moved or removed",
            hint="if it was moved, `seatrial watch` with its new path shows it",
        )
