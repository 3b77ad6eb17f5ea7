"""`seatrial logs RUN`: print the logs of ranks and agents from the run folder, during the run or afterwards."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import BinaryIO

from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, InputError, printable
from seatrial.base.files import open_file
from seatrial.base.process import allow_files
from seatrial.cli.watch import check_there
from seatrial.record.folder import RunFolder
from seatrial.record.logs import Log, generations, last_lines_at, logs_of
from seatrial.record.running import running
from seatrial.record.view import read_brief
from seatrial.ui import figures

POLL_S = 0.2
LINES = 20
LOOK_S = 1.0  # between two scans for new files
_BLOCK_BYTES = 1 << 20
_LONGEST_LINE = 16 << 20  # bytes; a longer line is split
_OTHER_FILES = 64  # that this process has open


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or the name of one in ./runs")
    parser.add_argument("--node", type=int, metavar="N", help="complete logs of this node")
    parser.add_argument("--rank", type=int, metavar="R", help="the complete log of this rank")
    parser.add_argument(
        "--generation", type=int, metavar="G", help="of this generation (default: the newest)"
    )
    parser.add_argument(
        "--lines",
        type=int,
        metavar="K",
        help=f"the last K lines of each (default: {LINES}; with --node or --rank all)",
    )
    parser.add_argument("--follow", action="store_true", help="follow new lines until the run ends")
    parser.add_argument("--json", action="store_true", help="a JSON object for each line")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0; 1 after following a run that failed. InputError: no such run, generation, node or rank."""
    if args.lines is not None and args.lines < 0:
        raise InputError(f"--lines {args.lines} is not a number of lines", hint="use 0 or more")
    if args.follow and args.generation is not None:
        raise InputError("--follow continues into later generations", hint="remove --generation, or --follow")
    if args.lines is None and args.node is None and args.rank is None:
        args.lines = LINES
    folder = RunFolder.find(args.run)
    generation, logs = _choose(folder, args)
    if args.follow:
        return _follow(folder, generation, args)
    writer = _Writer(args)
    for log in logs:
        if reader := _open(log, args.lines):
            writer.heading(log, empty=not reader.size)
            writer.all_of(reader, over=True)
            reader.close()
    return EXIT_DONE


def _choose(folder: RunFolder, args: argparse.Namespace) -> tuple[int, list[Log]]:
    """The requested generation and its logs. Raises InputError if there are none."""
    there = generations(folder)
    if args.generation is not None and args.generation not in there:
        what = f"{folder.path} has no logs of generation {args.generation}"
        raise InputError(what, hint=_available("generation", there))
    generation = args.generation or (there[-1] if there else 0)
    every = logs_of(folder, generation)
    logs = _selected(every, args)
    awaited = args.follow and running(folder) is not None and not any(log.rank is not None for log in every)
    if logs or awaited:
        return generation, logs
    if args.rank is None and args.node is None:
        raise InputError(
            f"nothing has been logged in {folder.path} yet", hint=f"see `seatrial watch {folder.path} --once`"
        )
    if args.rank is None:
        asked, hint = f"node {args.node}", _available("node", [log.node for log in every])
    else:
        asked = f"rank {args.rank}" + (f" on node {args.node}" if args.node is not None else "")
        hint = _available("rank", [log.rank for log in every if log.rank is not None])
        here = [f"node {log.node}" for log in every if log.rank == args.rank]
        others = [g for g in there if any(log.rank == args.rank for log in logs_of(folder, g))]
        if here or others:
            hint = f"rank {args.rank} is " + (
                f"on {here[0]}" if here else f"in {_numbers('generation', others)}"
            )
    raise InputError(f"generation {generation} of {folder.path} has no log of {asked}", hint=hint)


def _selected(logs: list[Log], args: argparse.Namespace) -> list[Log]:
    """Logs of the requested node and rank. Without a node, empty logs of agents are left out."""
    return [
        log
        for log in logs
        if args.node in (None, log.node)
        and args.rank in (None, log.rank)
        and (log.rank is not None or args.node is not None or (log.path.exists() and log.path.stat().st_size))
    ]


def _available(noun: str, numbers: list[int]) -> str:
    return f"there: {_numbers(noun, numbers)}" if numbers else f"no {noun} has logs there yet"


def _numbers(noun: str, numbers: list[int]) -> str:
    """Number ranges as text: "ranks 0-7", "generation 3"."""
    return figures.steps(sorted(set(numbers))).replace("step", noun, 1)


class _Reader:
    """An open log, read from its last `lines` lines, or from the start if None. Holds back a partial line."""

    def __init__(self, log: Log, lines: int | None) -> None:
        self.log = log
        self._file: BinaryIO = open(open_file(log.path), "rb")  # noqa: SIM115 - see close()
        self.size = os.fstat(self._file.fileno()).st_size
        self._file.seek(0 if lines is None else last_lines_at(self._file, lines))
        self._rest = b""

    def read(self, *, over: bool = False) -> list[str]:
        """The next complete lines, about a block of them. `over`: no writer is left, so a partial line counts."""
        while True:
            data = self._file.read(_BLOCK_BYTES)
            text = self._rest + data
            end = text.rfind(b"\n") + 1
            if not end and (len(text) > _LONGEST_LINE or (over and not data)):
                end = len(text)
            self._rest = text[end:]
            if end or not data:
                break
        lines = text[:end].decode("utf-8", errors="backslashreplace")
        return lines.removesuffix("\n").split("\n") if lines else []

    def close(self) -> None:
        self._file.close()


def _open(log: Log, lines: int | None) -> _Reader | None:
    try:
        return _Reader(log, lines)
    except OSError as error:
        print(f"warning: {log.path} cannot be read: {error.strerror}", file=sys.stderr)
        return None


class _Writer:
    """Writes lines to stdout under a heading per log; for a single rank the headings go to stderr."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._json = args.json
        self._headings = sys.stdout if args.rank is None else sys.stderr
        self._shown = printable if sys.stdout.isatty() else str  # a terminal would obey escape codes
        self._last: Log | None = None

    def heading(self, log: Log, *, empty: bool = False) -> None:
        if log != self._last and not self._json:
            text = f"==> {log.title}: {log.path}{' (empty)' if empty else ''}"
            print(printable(text), file=self._headings, flush=True)
        self._last = log

    def all_of(self, reader: _Reader, *, over: bool = False) -> None:
        """Write everything that can be read now."""
        log = reader.log
        while lines := reader.read(over=over):
            self.heading(log)
            if self._json:
                about = {
                    "node": log.node,
                    "rank": log.rank,
                    "generation": log.generation,
                    "log": str(log.path),
                }
                lines = [json.dumps({**about, "line": line}, ensure_ascii=False) for line in lines]
            sys.stdout.write(self._shown("\n".join(lines)) + "\n")
        sys.stdout.flush()


def _follow(folder: RunFolder, generation: int, args: argparse.Namespace) -> int:
    """Print what is written until the run stops running. A recovery begins a generation, with files of its own."""
    writer, runs = _Writer(args), running(folder) is not None
    begins = True
    readers: dict[int | tuple[int, str], _Reader] = {}  # the newest log of each rank and agent
    refused: set[Path] = set()  # cannot be read, which was reported once
    lines, looked = args.lines, -LOOK_S
    while True:
        held = running(folder) is not None  # before reading, so that the last lines are read
        if not held or time.monotonic() - looked >= LOOK_S:
            looked = time.monotonic()
            for number in [g for g in generations(folder) if g >= generation]:
                generation = number
                for log in _selected(logs_of(folder, number), args):
                    key = (log.node, log.path.name) if log.rank is None else log.rank
                    before = readers.get(key)
                    newer = before is None or before.log.generation < log.generation
                    if not newer or log.path in refused:
                        continue
                    allow_files(len(readers) + _OTHER_FILES, "the logs")
                    reader = _open(log, lines)
                    if reader is None:
                        refused.add(log.path)
                        continue
                    readers[key] = reader
                    if before is not None:
                        writer.all_of(before, over=True)
                        before.close()
            if begins and held and not readers:
                print(f"waiting for logs of {folder.path}; Ctrl-C ends it", file=sys.stderr, flush=True)
            begins, lines = False, None  # logs that appear later are shown from the start
        for reader in readers.values():
            writer.all_of(reader, over=not held)
            if not held:
                reader.close()
        if not held:
            break
        time.sleep(POLL_S)
    check_there(folder)
    failed = runs and read_brief(folder).state == "failed"
    return EXIT_FAILED if failed else EXIT_DONE
