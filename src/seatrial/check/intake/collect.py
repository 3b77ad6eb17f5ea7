"""Turn the inputs into pieces of text: files, folders, folders of nodes, outputs of many hosts in one file."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO

from seatrial.base.errors import Diagnostic, InputError
from seatrial.check.intake import labels, numbered_lines
from seatrial.check.intake.labels import Label
from seatrial.check.names import is_host, same_host
from seatrial.check.outputs import nccl_log, shell, sysfs
from seatrial.check.outputs.gpu_state import GpuStates
from seatrial.check.outputs.registry import recognise
from seatrial.check.outputs.tool import Lines
from seatrial.check.ranges import listed, natural

Progress = Callable[[int, int, str], None]

STDIN = "-"
_DEEPEST = 8  # folders below one that was named
_SAMPLE_LINES = 200  # lines of a host to inspect when deciding whether they are a tool's output
_FENCE = re.compile(r"^\s*(?:```|~~~)\s*\w*\s*$")
_SYSTEM = ("sys", "class", "infiniband", "proc", "var", "log")  # path components that are not node names
# Folders that hold node folders.
_HEAPS = (
    "logs",
    "out",
    "output",
    "outputs",
    "result",
    "results",
    "data",
    "nodes",
    "hosts",
)


@dataclass(frozen=True)
class Piece:
    """Outputs of one node. If it cannot be read, `problem` is the code of the reason, and there are no lines.

    `why` explains the problem. `remarks`: irregularities, each with its code, the reason and the line.
    """

    file: str
    node: str | None
    lines: Lines = field(default_factory=lambda: Lines([]))
    tree: Path | None = None  # of sysfs
    states: GpuStates | None = None  # what needs no reader
    problem: str = ""
    why: str = ""
    remarks: tuple[tuple[str, str, int | None], ...] = ()


def collect(paths: Sequence[str], progress: Progress = lambda done, total, what: None) -> Iterator[Piece]:
    """Every output in `paths`, each file once; "-" is stdin.

    Raises InputError, for all missing paths at once, before anything is read; also if nothing is found. In a folder,
    each subfolder is a node, unless its name cannot be a host's (a date, a number); files next to the subfolders belong
    to no named node. If several folders without subfolders are given, each is a node. `progress` is called with bytes
    read, total bytes (0: unknown), and the file.
    """
    missing = [p for p in paths if p != STDIN and not os.path.lexists(p)]
    if missing:
        hint = "give files, or a folder with one folder per node"
        raise InputError([Diagnostic("no such file or folder", file=p, hint=hint) for p in missing])
    places: dict[str, tuple[Path, str | None]] = {}
    folders = sum(os.path.isdir(p) for p in paths)
    for given in paths:
        path = Path(given)
        if given == STDIN or not path.is_dir():
            places.setdefault(STDIN if given == STDIN else os.path.realpath(path), (path, None))
        else:
            name = path.resolve().name
            for place, node in _walk(path, name if folders > 1 and is_host(name) else None):
                places.setdefault(os.path.realpath(place), (place, node))
    if not places:
        raise InputError(f"no outputs in {', '.join(paths)}", hint="the folder contains no files")
    return _read_all(list(places.values()), progress)


def _read_all(places: Sequence[tuple[Path, str | None]], progress: Progress) -> Iterator[Piece]:
    sizes = [0 if str(path) == STDIN else _size(path) for path, _ in places]
    total = 0 if any(str(path) == STDIN for path, _ in places) else sum(sizes)
    befores = accumulate(sizes, initial=0)
    for (path, node), before in zip(places, befores, strict=False):
        yield from _pieces(path, node, partial(_report_progress, progress, before, total, _named(path)))


def _report_progress(progress: Progress, before: int, total: int, what: str, read: int) -> None:
    progress(before + read, total, what)


def _named(path: Path) -> str:
    return "stdin" if str(path) == STDIN else str(path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _walk(
    folder: Path, node: str | None, depth: int = _DEEPEST + 1, named: bool = False
) -> Iterator[tuple[Path, str | None]]:
    """Yield files and sysfs trees below `folder`, each with its node. Hidden files (editor, git) are skipped.

    The topmost folder whose name can be a host's names the node; `named` is true below it.
    """
    if _is_tree(folder):
        yield folder, node
        return
    for entry in _entries(folder):
        linked = entry.is_symlink() and depth <= _DEEPEST
        if not entry.is_dir() or _is_tree(entry) or not depth or linked:
            yield entry, node
        elif named or entry.name in _SYSTEM:
            yield from _walk(entry, node, depth - 1, True)
        elif entry.name.lower() in _HEAPS or not is_host(entry.name):
            yield from _walk(entry, node, depth - 1)
        else:
            yield from _walk(entry, entry.name, depth - 1, True)


def _entries(folder: Path) -> list[Path]:
    try:
        found = [p for p in folder.iterdir() if not p.name.startswith(".")]
    except OSError:
        return [folder / "."]  # reported as a folder that cannot be read
    return sorted(found, key=lambda p: natural(p.name))


def _is_tree(folder: Path) -> bool:
    try:
        return folder.is_dir() and sysfs.is_tree(folder)
    except OSError:
        return False


def _pieces(path: Path, node: str | None, report: Callable[[int], None]) -> list[Piece]:
    file = _named(path)
    if str(path) == STDIN:
        return pieces_of(sys.stdin.buffer, file, None, report)
    if _is_tree(path):
        return [Piece(file, node, tree=path)]
    if not path.is_file():
        why = (
            "the folder cannot be read, or is nested too deeply"
            if path.is_dir()
            else "neither a file nor a folder"
        )
        return [Piece(file, node, problem="FILE005" if path.is_dir() else "FILE004", why=why)]
    try:
        with path.open("rb") as raw:
            return pieces_of(raw, file, node, lambda _: report(raw.tell()))
    except OSError as error:
        return [Piece(file, node, problem="FILE005", why=f"cannot be read: {error.strerror}")]


def pieces_of(
    data: bytes | IO[bytes], file: str, node: str | None, report: Callable[[int], None] = lambda read: None
) -> list[Piece]:
    """The outputs in a file: one, or one per host or rank if lines are labelled or have titles with host names.

    The folder's name (`node`) takes precedence over names in the file. Raises OSError if the file cannot be read.
    """
    content = numbered_lines.read_stream(io.BytesIO(data) if isinstance(data, bytes) else data, report)
    if content.problem is not None:
        return [Piece(file, node, problem=content.problem[0], why=content.problem[1])]
    remarks: list[tuple[str, str, int | None]] = [("FILE003", why, line) for why, line in content.damage]
    lines = without_decoration(content.lines)
    parts: list[tuple[tuple[str | None, ...], labels.Numbered, int]]
    if content.labelled and (groups := _by_host(lines)):
        remarks += _of_ranks(groups, file)
        parts = [
            ((None if label is None else label.host,), part, content.passed[label])
            for label, part in groups.items()
        ]
    else:
        parts = [
            (hosts or (None,), part, content.passed.total() if not n else 0)
            for n, (hosts, part) in enumerate(labels.by_title(lines))
        ]
    names = list(dict.fromkeys(host for hosts, _, _ in parts for host in hosts if host is not None))
    if node is not None and names and not all(same_host(name, node) for name in names):
        why = f"the folder says {node}, the lines say {listed(names)}: the folder takes precedence"
        remarks.append(("FILE008", why, None))
    found = [
        Piece(file, node or host, Lines(part, passed, content.repeated))
        for hosts, part, passed in parts
        for host in hosts
    ]
    return [replace(found[0], remarks=tuple(remarks)), *found[1:]]


def _by_host(lines: labels.Numbered) -> dict[Label | None, labels.Numbered]:
    """Lines by label; empty if the text behind the labels is not a tool's output, or is one output of all ranks."""
    groups = labels.by_label(lines)
    text = "\n".join(line for _, line in lines)
    if nccl_log.is_table(text) or nccl_log.is_debug(text):
        ranks = any(label is not None and label.rank is not None for label in groups)
        return {} if ranks else groups
    known = (
        tool.name
        for label, part in groups.items()
        if label is not None
        for tool in recognise("\n".join(line for _, line in part[:_SAMPLE_LINES]))
    )
    # Any shell output matches the shell reader.
    return groups if any(name != shell.TOOLS[0].name for name in known) else {}


def _of_ranks(groups: Mapping[Label | None, object], file: str) -> Iterator[tuple[str, str, int | None]]:
    """Report ranks without output although higher ranks have some."""
    ranks = {label.rank for label in groups if label is not None and label.rank is not None}
    silent = sorted(set(range(max(ranks, default=-1) + 1)) - ranks)
    if silent:
        yield "FILE003", f"no lines of rank {listed(silent)}, while rank {max(ranks)} has some", None


def without_decoration(lines: labels.Numbered) -> labels.Numbered:
    """The lines without copy-and-paste residue: an enclosing Markdown fence, a common indentation."""
    filled = [n for n, (_, line) in enumerate(lines) if line.strip()]
    fences = [n for n in (filled[:1] + filled[-1:]) if _FENCE.match(lines[n][1])]
    if len(set(fences)) == 2:
        lines = [each for n, each in enumerate(lines) if n not in fences]
    starts = [line[: len(line) - len(line.lstrip(" \t"))] for _, line in lines if line.strip()]
    least, most = min(starts, default=""), max(starts, default="")
    same = next((n for n, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))
    shared = least[:same]
    if len(shared) > 1 or shared == "\t":
        return [(n, line[len(shared) :] if line.strip() else line) for n, line in lines]
    return lines
