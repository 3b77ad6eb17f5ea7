"""Which files a source means: a file, a folder, or `builtin:python-library`."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from seatrial.base.errors import Diagnostic, InputError

BUILTIN_LIBRARY = "builtin:python-library"

Kind = Literal["text", "jsonl", "parquet"]

_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
# What a folder is searched for. A file that is named itself is read as text whatever its suffix.
# fmt: off
_TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".py", ".pyi", ".ipynb",
    ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".js", ".jsx",
    ".ts", ".tsx", ".rb", ".php", ".swift", ".scala", ".jl", ".r", ".lua", ".sh", ".sql", ".toml",
    ".yaml", ".yml", ".cfg", ".ini", ".proto",
})
# fmt: on
_LIBRARY_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """A file to read: `name` is its path within the source, the same on every machine."""

    path: Path
    name: str
    kind: Kind
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Span:
    """Part of a file: from `begin` to before `end` (None: the file's end).

    Counted in the units in which its kind can be read from the middle: pieces of text, bytes of JSONL (a line belongs
    to the span that it begins in), row groups of Parquet.
    """

    file: SourceFile
    begin: int = 0
    end: int | None = None


@dataclass
class Found:
    """Files in a fixed order, and what was left out: reason -> how many."""

    files: list[SourceFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def refuse_remote(path: str, hint: str = "") -> None:
    """InputError for an object store's address: it would otherwise read as a strange local path."""
    scheme, separator, _ = path.partition("://")
    if separator:
        raise InputError(
            f"{path}: {scheme}:// addresses are not supported in this version, only local files and folders",
            hint=f"copy the data to a local or shared folder and name that folder{hint}",
        )


def find(sources: Sequence[str]) -> Found:
    """The files of all `sources`, in the order given, sorted within each; InputError lists every unusable one."""
    found = Found()
    problems: list[Diagnostic] = []
    for source in sources:
        try:
            before, skipped_before = len(found.files), found.skipped.copy()
            _find_one(source, found)
            if len(found.files) == before:
                problems.append(_nothing_in(source, found.skipped - skipped_before))
        except InputError as e:
            problems.extend(e.diagnostics)
        except OSError as e:
            problems.append(Diagnostic(f"cannot read {e.filename or source}: {e.strerror}"))
    if problems:
        raise InputError(problems)
    return found


def _find_one(source: str, found: Found) -> None:
    refuse_remote(source, f" (aws s3 sync {source} FOLDER); the token store made of it may be at s3://")
    if source.startswith("builtin:"):
        if source != BUILTIN_LIBRARY:
            raise InputError(f"no built-in corpus {source!r}", hint=f"there is {BUILTIN_LIBRARY}")
        _find_library(found)
        return
    if not source:
        raise InputError("an empty path names no file or folder")  # to Path it is the current folder
    path = Path(source)
    if path.is_dir():
        _find_in_folder(path, found)
    elif path.is_file():
        found.files.append(_describe(path, path.name, _KINDS.get(path.suffix.lower(), "text")))
    elif path.exists():
        raise InputError(f"{source} is neither a file nor a folder")
    else:
        raise InputError(f"no such file or folder: {source}", hint=f"a path, or {BUILTIN_LIBRARY}")


def _describe(path: Path, name: str, kind: Kind) -> SourceFile:
    status = path.stat()
    return SourceFile(path, name, kind, status.st_size, status.st_mtime_ns)


def _find_library(found: Found) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in _walk(root, left_out=_LIBRARY_LEFT_OUT):
        if name.endswith(".py"):
            found.files.append(_describe(root / name, name, "text"))


def _find_in_folder(root: Path, found: Found) -> None:
    for name in _walk(root):
        path = root / name
        suffix = path.suffix.lower()
        if path.name.startswith("."):
            found.skipped["hidden"] += 1
        elif not path.is_file():
            # A dangling link, a socket, a pipe (which would block for ever).
            found.skipped["not a file"] += 1
        elif suffix in _KINDS or suffix in _TEXT_SUFFIXES:
            found.files.append(_describe(path, name, _KINDS.get(suffix, "text")))
        else:
            found.skipped[suffix or "without suffix"] += 1


def _walk(root: Path, left_out: frozenset[str] = frozenset()) -> list[str]:
    """Relative POSIX paths below `root`, sorted; hidden folders (.git, caches) are not entered."""

    def refuse(error: OSError) -> None:
        # os.walk would pass over an unreadable folder in silence: data would be missing, unnoticed.
        raise error

    names: list[str] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in left_out]
        relative = Path(folder).relative_to(root)
        names.extend((relative / f).as_posix() for f in files)
    return sorted(names)


def _nothing_in(source: str, skipped: Counter[str]) -> Diagnostic:
    if source == BUILTIN_LIBRARY:
        return Diagnostic(
            "this Python has no standard library sources on disk",
            hint="name a folder of text files instead",
        )
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items()))
    return Diagnostic(
        f"nothing to read in the folder {source}"
        + (f" (skipped: {reasons})" if reasons else ": it is empty"),
        hint="text files (.txt, .md, .py, ...), .jsonl and .parquet are read; a file named itself is read as text",
    )
