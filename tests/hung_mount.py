"""A mount that hangs, as one of a dead file server does: a FUSE file system over a folder that answers nothing."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType

import pytest

_FORCE, _DETACH = 1, 2


class HungMount:
    """Over `folder` while the context lasts; then what waits in it gets an error, and the folder is as before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1

    def __enter__(self) -> HungMount:
        """Skips the test where this process may not mount."""
        try:
            self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            pytest.skip(f"a hung mount needs /dev/fuse: {error.strerror}")
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        if self._libc.mount(b"hung", os.fsencode(self.folder), b"fuse", 0, options.encode()) != 0:
            os.close(self._fd)
            pytest.skip(f"a hung mount needs the right to mount: {os.strerror(ctypes.get_errno())}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._libc.umount2(os.fsencode(self.folder), _FORCE | _DETACH)
        os.close(self._fd)  # ends the connection, and with it what waits for an answer
