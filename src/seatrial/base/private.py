"""A folder of this user alone, for what is kept in TMPDIR and trusted when it is found again."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from seatrial.base.errors import InputError


def private_folder() -> Path:
    """`seatrial-UID` in TMPDIR (or /tmp), made where it is missing: a folder, ours, with mode 700.

    Raises InputError where it is anything else: a file that somebody else could put there would be believed. Who may
    rename what lies in TMPDIR can still exchange it: /tmp has the sticky bit against that.
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
        wrong = "was open to other users: what lies there may be theirs"
    if wrong is not None:
        raise InputError(f"{folder} {wrong}", hint="remove it, or set TMPDIR to another local folder")
    return folder


def keep_compiler_private() -> None:
    """Have torch.compile in this process, and the programs that it starts, believe nothing that others can write.

    torch keeps compiled code in TMPDIR under a name that anybody can guess, and unpickles and loads what it finds there;
    it asks other Pythons, which would import from the current folder. A TORCHINDUCTOR_CACHE_DIR of the user's own stays.
    To be called before anything is compiled. Raises InputError.
    """
    folder = private_folder()
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if os.path.dirname(cache) == tempfile.gettempdir():  # set by torch itself, as it was imported
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["PYTHONSAFEPATH"] = "1"
