"""What was handed in, as pieces of text: files, folders, folders of nodes, outputs of many hosts in one file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.base.errors import Diagnostic, InputError
from seatrial.check.outputs import sysfs
from seatrial.check.registry import recognise
from seatrial.check.report import natural
from seatrial.check.tool import Lines

LARGEST_BYTES = 256 << 20  # of one file: a kernel log of months is smaller
_DEEPEST = 8  # folders below one that was named
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\n]*(?:\x07|\x1b\\)")
# Control characters that terminals and pagers leave are no damage: tab, newline, return, backspace, form feed.
_FOREIGN = re.compile("[\x00-\x07\x0b\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_PDSH = re.compile(rf"^(?P<host>{_HOST}): ?(?P<rest>.*)$")
_DSHBAK = re.compile(rf"^-{{4,}}\n(?P<host>{_HOST})\n-{{4,}}$", re.MULTILINE)
# What a person has copied along: the prompt and the command before an output, the next prompt after it, the fences of Markdown.
_PROMPT = re.compile(
    r"^\s*(?:\([\w.-]+\) )?\[?[\w.-]{1,60}@[\w.-]{1,120}(?:[: ][^\n#$%>]{0,200})?\]?[#$%>](?: .*)?$"
    r"|^\s*[$>] ?(?:sudo )?(?:nvidia-smi|ib\w+|mlxlink|dcgmi|dmesg|journalctl|cat|tail|grep|kubectl|srun|mpirun|\./)\b.*$"
)
_FENCE = re.compile(r"^\s*(?:```|~~~)\s*\w*\s*$")
_EDGE = 3  # lines at either end that can be such
_SYSTEM = ("sys", "class", "infiniband", "proc", "var", "log")  # parts of a path, no names of nodes


@dataclass(frozen=True)
class Piece:
    """One output. `problem` is the code of what keeps it from being text (then `lines` are none), with `why`.

    `foreign_line` is the first line that holds what no text of a tool holds, None where there is none.
    """

    file: str
    node: str | None
    lines: Lines = field(default_factory=lambda: Lines([]))
    tree: Path | None = None
    problem: str = ""
    why: str = ""
    foreign_line: int | None = None


def collect(paths: Sequence[str]) -> list[Piece]:
    """Every output in `paths`, each file once. Raises InputError for all paths that do not exist, and if nothing is there.

    In a folder, each folder is a node; what lies beside them is of no named node. Of several folders without folders
    in them, each is a node.
    """
    missing = [p for p in paths if not os.path.lexists(p)]
    if missing:
        hint = "name files, or a folder with one folder a node"
        raise InputError([Diagnostic("no such file or folder", file=p, hint=hint) for p in missing])
    seen: set[str] = set()
    found: list[Piece] = []
    folders = sum(os.path.isdir(p) for p in paths)
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            places: Iterator[tuple[Path, str | None]] = iter([(path, None)])
        else:
            places = _walk(path, path.resolve().name if folders > 1 else None)
        for place, node in places:
            real = os.path.realpath(place)
            if real not in seen:
                seen.add(real)
                found += _pieces(place, node)
    if not found:
        raise InputError(f"nothing to judge in {', '.join(paths)}", hint="the folder holds no files")
    return found


def _walk(folder: Path, node: str | None) -> Iterator[tuple[Path, str | None]]:
    """Files, and folders that are a tree of sysfs. Hidden files are the editor's and git's, not a tool's."""
    if _is_tree(folder):
        yield folder, node
        return
    for entry in _entries(folder):
        if entry.is_dir() and not _is_tree(entry) and entry.name not in _SYSTEM:
            yield from _inside(entry, entry.name, _DEEPEST)
        elif entry.is_dir() and not _is_tree(entry):
            yield from _inside(entry, node, _DEEPEST)
        else:
            yield entry, node


def _inside(folder: Path, node: str | None, depth: int) -> Iterator[tuple[Path, str | None]]:
    for entry in _entries(folder):
        if entry.is_dir() and not _is_tree(entry) and depth > 0 and not entry.is_symlink():
            yield from _inside(entry, node, depth - 1)
        else:
            yield entry, node


def _entries(folder: Path) -> list[Path]:
    try:
        found = [p for p in folder.iterdir() if not p.name.startswith(".")]
    except OSError:
        return [folder / "."]  # told as a folder that cannot be read
    return sorted(found, key=lambda p: natural(p.name))


def _is_tree(folder: Path) -> bool:
    try:
        return folder.is_dir() and sysfs.is_tree(folder)
    except OSError:
        return False


def _pieces(path: Path, node: str | None) -> list[Piece]:
    file = str(path)
    if _is_tree(path):
        return [Piece(file, node, tree=path)]
    if not path.is_file():
        why = (
            "the folder cannot be read, or lies too deep" if path.is_dir() else "neither a file nor a folder"
        )
        return [Piece(file, node, problem="FILE005" if path.is_dir() else "FILE004", why=why)]
    try:
        with path.open("rb") as f:
            data = f.read(LARGEST_BYTES + 1)
    except OSError as error:
        return [Piece(file, node, problem="FILE005", why=f"cannot be read: {error.strerror}")]
    if len(data) > LARGEST_BYTES:
        return [Piece(file, node, problem="FILE004", why=f"larger than {LARGEST_BYTES >> 20} MiB")]
    return pieces_of(data, file, node)


def pieces_of(data: bytes, file: str, node: str | None) -> list[Piece]:
    """The outputs in a file's bytes: one, or one for each host where `pdsh` or `dshbak` has marked them."""
    if not data.strip(b"\0 \t\r\n"):
        return [Piece(file, node, problem="FILE002", why="the file is empty")]
    packed = next((name for magic, name in _PACKED.items() if data.startswith(magic)), None)
    if packed is not None:
        return [Piece(file, node, problem="FILE004", why=f"compressed ({packed})")]
    text = _decode(data)
    if text is None:
        return [Piece(file, node, problem="FILE004", why="binary data")]
    text = undressed(_ANSI.sub("", text).replace("\r\n", "\n"))
    foreign = _FOREIGN.search(text)
    line = None if foreign is None else text.count("\n", 0, foreign.start()) + 1
    parts = split_hosts(text)
    if not any(recognise(part) for _, part in parts):
        return [Piece(file, node, Lines.of(text), foreign_line=line)]
    return [Piece(file, host, Lines.of(part), foreign_line=line) for host, part in parts]


def undressed(text: str) -> str:
    """The text without what a person has copied along with it; the lines keep their numbers.

    An indentation that all lines share is taken away, and prompts and fences at either end become empty lines.
    """
    lines = text.split("\n")
    filled = [n for n, line in enumerate(lines) if line.strip()]
    fences = [n for n in (filled[:1] + filled[-1:]) if _FENCE.match(lines[n])]
    if len(fences) == 2:
        lines[fences[0]] = lines[fences[1]] = ""
        filled = filled[1:-1]
    for n in {*filled[:_EDGE], *filled[-_EDGE:]}:
        if _PROMPT.match(lines[n]):
            lines[n] = ""
    starts = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line.strip()]
    least, most = min(starts, default=""), max(starts, default="")
    same = next((n for n, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))
    shared = least[:same]
    if len(shared) > 1 or shared == "\t":
        lines = [line[len(shared) :] if line.strip() else line for line in lines]
    return "\n".join(lines)


def _decode(data: bytes) -> str | None:
    """The text; bytes that are none become U+FFFD. None for data that is mostly not text."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # PowerShell's `>`
        return data.decode("utf-16", "replace")
    text = data.decode("utf-8-sig", "replace")
    if len(_FOREIGN.findall(text[:65536])) > len(text[:65536]) // 10:
        return None
    return text


def split_hosts(text: str) -> list[tuple[str, str]]:
    """(host, output) where each line begins with its host's name (pdsh, clush), or dshbak has put titles; else nothing.

    Some tools begin each line with a word of their own ("NVRM: "), so what comes out must be looked at.
    """
    if text.startswith("----") and (titles := list(_DSHBAK.finditer(text))) and titles[0].start() == 0:
        ends = [t.start() for t in titles[1:]] + [len(text)]
        return [(t["host"], text[t.end() + 1 : end]) for t, end in zip(titles, ends, strict=True)]
    lines: dict[str, list[str]] = {}
    count = 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        found = _PDSH.match(line)
        if found is None:
            return []
        count += 1
        lines.setdefault(found["host"], []).append(found["rest"])
    # A name before every line, and the same few names again and again.
    if not lines or len(lines) * 5 > count:
        return []
    return [(host, "\n".join(rest) + "\n") for host, rest in lines.items()]
