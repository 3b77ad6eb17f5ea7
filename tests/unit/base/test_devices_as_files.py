"""What is no file must not become one because a report was to go there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from seatrial.base import atomic


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    atomic.write_text(pipe, "a report\n")
    reader.join(10)
    assert read == ["a report\n"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_folder_is_refused_and_stays_one(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        atomic.write_text(tmp_path, "a report\n")
    assert tmp_path.is_dir()
