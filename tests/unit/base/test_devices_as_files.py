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
    atomic.write_output(pipe, "a report\n")
    reader.join(10)
    assert read == ["a report\n"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_folder_is_refused_and_stays_one(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        atomic.write_output(tmp_path, "a report\n")
    assert tmp_path.is_dir()


@pytest.mark.parametrize("made", ["pipe", "link", "dangling"])
def test_a_record_takes_the_place_of_what_is_no_file(tmp_path: Path, made: str) -> None:
    """Nothing is written through it: not to a victim's file, and nobody waits for the reader of a pipe."""
    record, victim = tmp_path / "state.json", tmp_path / "victim"
    victim.write_text("mine")
    if made == "pipe":
        os.mkfifo(record)
    else:
        record.symlink_to(victim if made == "link" else tmp_path / "nothing")
    atomic.write_text(record, "a state\n")
    assert record.read_text() == "a state\n"
    assert not record.is_symlink()
    assert victim.read_text() == "mine"


def test_the_draft_of_a_record_follows_no_link_either(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".state.json.{os.getpid()}.tmp").symlink_to(victim)  # its name can be guessed
    atomic.write_text(tmp_path / "state.json", "a state\n")
    assert (tmp_path / "state.json").read_text() == "a state\n"
    assert victim.read_text() == "mine"
