"""Writing files so that a reader, or the next start after a crash, never sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (renames and new files)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text`: the old content or the new one, never a mixture, also after a power loss.

    Not `durable`: after a power loss anything may be there. It does not wait for the disk, which can take seconds.
    A device or a pipe (/dev/stdout, /dev/null) is written to: a file in its place would be the end of it.
    """
    write_bytes(path, text.encode("utf-8"), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """`write_text` of what is no text, or is encoded already."""
    if path.exists() and not path.is_file():
        with open(path, "wb") as f:
            f.write(content)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            if durable:
                os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `value` as indented JSON with a final newline."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # A file's name that is no UTF-8 has characters that UTF-8 cannot write: JSON has escapes of the same form.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))
