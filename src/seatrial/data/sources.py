"""List the files of a source (a file, a folder, or `builtin:python-library`), and their kinds."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.base.errors import Diagnostic, InputError
from seatrial.data.content import Kind, NotTextError, look
from seatrial.data.packed import PACKINGS, Packing

BUILTIN_LIBRARY = "builtin:python-library"

_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
# The suffixes that a folder is searched for. A file that is named itself is read as text whatever its suffix.
# fmt: off
_TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".py", ".pyi", ".ipynb",
    ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".js", ".jsx",
    ".ts", ".tsx", ".rb", ".php", ".swift", ".scala", ".jl", ".r", ".lua", ".sh", ".sql", ".toml",
    ".yaml", ".yml", ".cfg", ".ini", ".proto",
})
# fmt: on
_REASONS_SHOWN = 20
_LIBRARY_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """A file to read: `name` is its path within the source, the same on every machine."""

    path: Path
    name: str
    kind: Kind
    size: int
    mtime_ns: int
    packing: Packing | None = None  # compression: such a file can only be read from its beginning


@dataclass(frozen=True)
class Span:
    """Part of a file: from `begin` up to `end`, exclusive (None: the file's end).

    Counted in the units at which its kind can be read from the middle: pieces of text, bytes of JSONL (a line belongs
    to the span that it begins in), row groups of Parquet.
    """

    file: SourceFile
    begin: int = 0
    end: int | None = None


@dataclass
class SourceFiles:
    """Files in a fixed order, and skipped entries: reason -> count, and the first of them."""

    files: list[SourceFile] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, name: str, n: int = 1) -> None:
        """Count `n` skipped entries, with `name` as the example."""
        self.skipped[reason] = self.skipped.get(reason, 0) + n
        self.examples.setdefault(reason, name)

    def add(self, other: SourceFiles) -> None:
        """Append all of `other`."""
        self.files += other.files
        for reason, n in other.skipped.items():
            self.skip(reason, other.examples[reason], n)


def describe_skipped(skipped: Mapping[str, int], examples: Mapping[str, str]) -> list[str]:
    """Skipped entries as messages: the most frequent reasons first, each with an example."""
    lines = [
        f"{n} {reason}" + (f" ({examples[reason]}{', ...' if n > 1 else ''})" if reason in examples else "")
        for reason, n in sorted(skipped.items(), key=lambda item: -item[1])
    ]
    if len(lines) > _REASONS_SHOWN:
        lines[_REASONS_SHOWN:] = [f"and for {len(lines) - _REASONS_SHOWN} other reasons (--json has all)"]
    return lines


def refuse_remote(path: str, hint: str = "") -> None:
    """Raise InputError for an object store's address, which would otherwise be taken for a local path."""
    scheme, separator, _ = path.partition("://")
    if separator:
        raise InputError(
            f"{path}: {scheme}:// addresses are not supported in this version, only local files and folders",
            hint=f"copy the data to a local or shared folder and name that folder{hint}",
        )


def find(sources: Sequence[str], *, look_inside: bool = True) -> SourceFiles:
    """The files of all `sources`, in the order given, sorted within each; InputError lists every unusable one.

    Without `look_inside` no file is opened; kind and compression are taken from the names.
    """
    found = SourceFiles()
    problems: list[Diagnostic] = []
    for source in sources:
        here = SourceFiles()
        try:
            _find_one(source, here, look_inside)
            if not here.files:
                problems.append(_nothing_in(source, here))
        except InputError as e:
            problems.extend(e.diagnostics)
        except OSError as e:
            problems.append(Diagnostic(f"cannot read {e.filename or source}: {e.strerror}"))
        found.add(here)
    if problems:
        raise InputError(problems)
    return found


def _find_one(source: str, found: SourceFiles, look_inside: bool) -> None:
    refuse_remote(source, f" (aws s3 sync {source} FOLDER); the token store made of it may be at s3://")
    if source.startswith("builtin:"):
        if source != BUILTIN_LIBRARY:
            raise InputError(f"no built-in corpus {source!r}", hint=f"there is {BUILTIN_LIBRARY}")
        _find_library(found)
        return
    if not source:
        raise InputError("the path is empty")  # Path("") is the current folder
    path = Path(source)
    if path.is_dir():
        _find_in_folder(path, found, look_inside)
    elif path.is_file():
        try:
            found.files.append(_describe(path, path.name, look_inside))
        except NotTextError as e:
            raise InputError(Diagnostic(f"is {e}", file=source, hint=e.hint)) from e
    elif path.exists():
        raise InputError(f"{source} is neither a file nor a folder")
    else:
        raise InputError(f"no such file or folder: {source}", hint=f"a path, or {BUILTIN_LIBRARY}")


def _suffixes(name: str) -> tuple[str, str]:
    """(suffix of the kind, suffix of the compression after it), "" if absent."""
    stem, last = os.path.splitext(name.lower())
    return (os.path.splitext(stem)[1], last) if last in PACKINGS else (last, "")


def _describe(path: Path, name: str, look_inside: bool) -> SourceFile:
    suffix, packed = _suffixes(name)
    kind, packing, status = _KINDS.get(suffix, "text"), None, path.stat()
    if look_inside:
        kind, packing = look(path, None if suffix == ".json" else kind, PACKINGS.get(packed))
    return SourceFile(path, name, kind, status.st_size, status.st_mtime_ns, packing)


def _find_library(found: SourceFiles) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    for name, skipped in _walk(root, left_out=_LIBRARY_LEFT_OUT):
        if not skipped and name.endswith(".py"):
            found.files.append(_describe(root / name, name, False))


def _find_in_folder(root: Path, found: SourceFiles, look_inside: bool) -> None:
    for name, skipped in _walk(root):
        path = root / name
        suffix, packed = _suffixes(path.name)
        if skipped:
            found.skip(skipped, name)
        elif path.name.startswith("."):
            found.skip("hidden", name)
        elif not path.is_file():
            # A dangling link, a socket, or a pipe (which would block forever).
            found.skip("neither a file nor a folder", name)
        elif suffix in _KINDS or suffix in _TEXT_SUFFIXES:
            try:
                found.files.append(_describe(path, name, look_inside))
            except NotTextError as e:
                found.skip(str(e), name)
        else:
            found.skip(f"suffix {suffix}{packed}" if suffix or packed else "no suffix", name)


def _walk(root: Path, left_out: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """(relative POSIX path, "") of the files below `root`, sorted; (path, reason) of skipped folders.

    Hidden folders (.git, caches) and links, which may form a loop, are skipped.
    """

    def refuse(error: OSError) -> None:
        # os.walk would silently skip an unreadable folder: data would be missing unnoticed.
        raise error

    found: list[tuple[str, str]] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        relative = Path(folder).relative_to(root)
        found += [((relative / f).as_posix(), "") for f in files]
        for f in folders:
            if f.startswith("."):
                found.append(((relative / f).as_posix(), "hidden folder"))
            elif os.path.islink(os.path.join(folder, f)):
                found.append(((relative / f).as_posix(), "link to a folder"))
        folders[:] = [f for f in folders if not f.startswith(".") and f not in left_out]
    return sorted(found)


def _nothing_in(source: str, found: SourceFiles) -> Diagnostic:
    if source == BUILTIN_LIBRARY:
        return Diagnostic(
            "this Python has no standard library sources on disk",
            hint="use a folder of text files instead",
        )
    reasons = ", ".join(describe_skipped(found.skipped, found.examples))
    return Diagnostic(
        f"no readable files in the folder {source}"
        + (f" (skipped: {reasons})" if reasons else ": it is empty"),
        hint="text files (.txt, .md, .py, ...), .jsonl and .parquet are read, also compressed as .gz, .bz2, .xz or "
        ".zst; a file given by name is read as text whatever its suffix",
    )
