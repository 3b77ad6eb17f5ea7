"""Write files so that neither a reader nor the next start after a crash sees a partial one."""

from __future__ import annotations

import json
import math
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
    """Replace `path` by `text` atomically: the old content or the new one, never a mixture, even after a power loss.

    Without `durable` it does not wait for the disk, which can take seconds: a power loss then leaves any content.
    Replaces whatever is at `path`, including a link or a pipe; nothing is written through it.
    """
    write_bytes(path, text.encode("utf-8"), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """As `write_text`, for binary or already encoded content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # left by a dead process with the same pid
    try:
        with open(temporary, "xb") as f:
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


def write_output(path: Path, content: str | bytes) -> None:
    """Write to a path given by the user, as `write_bytes`; devices and pipes (/dev/stdout) are written to.

    Replacing a device by a regular file would destroy it.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with open(path, "wb") as f:
            f.write(data)
    else:
        write_bytes(path, data)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `value` as indented JSON with a final newline."""
    # Non-UTF-8 bytes of a file name are surrogate escapes, which UTF-8 cannot encode: write them as JSON escapes.
    write_bytes(path, json_text(value).encode("utf-8", "backslashreplace"))


def json_text(value: Any) -> str:
    """`value` as indented JSON with a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
