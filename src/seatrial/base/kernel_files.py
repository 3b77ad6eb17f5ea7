"""Read small files of /proc and /sys. What does not exist or may not be read is None."""

from __future__ import annotations

from pathlib import Path

KMSG = Path("/dev/kmsg")
KMSG_RECORD_BYTES = 8192  # more than the kernel returns at once; it refuses a smaller buffer
_LARGEST_BYTES = 1 << 20  # /proc/cpuinfo of 512 processors


def text_of(path: Path, *, errors: str = "replace") -> str | None:
    """The file's text, stripped; None if it cannot be read. `errors`: "surrogateescape" for what contains paths."""
    try:
        with path.open("rb") as f:
            return f.read(_LARGEST_BYTES).decode(errors=errors).strip()
    except OSError:
        return None


def number_of(path: Path) -> int | None:
    """The whole number in the file; None if there is none ("max") or it cannot be read."""
    text = text_of(path)
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def bytes_of(field: str | None) -> int | None:
    """Bytes of a field such as "MemTotal: 1000 kB"; None if there is none."""
    number = (field or "").removesuffix("kB").strip()
    return int(number) * 1024 if number.isdecimal() else None


def fields_of(path: Path) -> dict[str, str]:
    """Lines "name: value" or "name=value" (unquoted), the first of each name; empty if the file cannot be read."""
    found: dict[str, str] = {}
    for line in (text_of(path) or "").splitlines():
        at = min((i for c in ":=" if (i := line.find(c)) >= 0), default=-1)
        if at > 0:
            found.setdefault(line[:at].strip(), line[at + 1 :].strip().strip('"'))
    return found
