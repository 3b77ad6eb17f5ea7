"""A private folder in TMPDIR, for files that later runs trust."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from seatrial.base.errors import InputError


def private_folder() -> Path:
    """Return `seatrial-UID` in TMPDIR (or /tmp), created if missing: a folder owned by this user with mode 700.

    Raises InputError if it is anything else, because another user could plant files there. In a shared TMPDIR the
    sticky bit is needed too: otherwise others could rename the folder.
    """
    name = f"seatrial-{os.getuid()}"
    try:
        parent = Path(tempfile.gettempdir())
        folder = parent if parent.name == name else parent / name  # `keep_compiler_private` sets TMPDIR to it
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        where = error.filename or f"TMPDIR/{name}"
        problem = f"cannot make a folder for temporary files, {where}: {error.strerror}"
        raise InputError(problem, hint="set TMPDIR to a local folder that is writable") from error
    wrong = None
    if not stat.S_ISDIR(status.st_mode):
        wrong = "is not a folder"
    elif status.st_uid != os.getuid():
        wrong = "is not a folder of this user"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        wrong = "was writable by other users: its content cannot be trusted"
    if wrong is not None:
        raise InputError(f"{folder} {wrong}", hint="remove it, or set TMPDIR to another local folder")
    return folder


def keep_compiler_private() -> None:
    """Keep the caches of torch.compile in this process, and in its children, where no other user can write.

    By default torch caches compiled code in TMPDIR under a predictable name, and unpickles and loads what it finds
    there. Its compile workers are other Python processes, which would import from the current folder. A
    TORCHINDUCTOR_CACHE_DIR set by the user is kept. Call it before anything is compiled. Raises InputError.
    """
    folder = private_folder()
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if os.path.dirname(cache) == tempfile.gettempdir():  # set by torch itself on import
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["PYTHONSAFEPATH"] = "1"
