"""What agents ask of a storage that hangs: a child each, which ends by itself, so that the next place is tried."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_files import put

from hung_mount import HungMount
from seatrial.control.snapshots import transfer
from seatrial.control.snapshots.snapshot_buffers import Held
from seatrial.control.snapshots.transfer import Moving

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_LOOK_S", 1)
    monkeypatch.setattr(transfer, "_WRITE_S", 1)


@pytest.fixture
def held() -> Iterator[Held]:
    fd = os.memfd_create("part")
    yield Held(put(fd, rank=0), fd, own=True)
    os.close(fd)


def end(moving: Moving) -> tuple[int, dict[str, Any]]:
    """(status, answer) of a child, which must not take for ever."""
    began = time.monotonic()
    status = os.waitstatus_to_exitcode(os.waitpid(moving.pid, 0)[1])
    assert time.monotonic() - began < WAIT_S
    return status, moving.result()


@pytest.mark.cluster  # slow
def test_neither_looking_nor_writing_waits_for_ever(tmp_path: Path, held: Held) -> None:
    with HungMount(tmp_path):
        began = [
            transfer.look([str(tmp_path / "trial")]),
            transfer.flush(held, str(tmp_path / "trial"), 1, read_back=True),
        ]
        for moving in began:
            status, answer = end(moving)
            assert status == -signal.SIGALRM
            assert (answer["ok"], answer["message"]) == (False, "the storage did not answer for 1 s")


def test_what_shows_signs_of_life_may_take_longer(tmp_path: Path, held: Held) -> None:
    """And leaves an answer of its own, and no more than that."""
    status, answer = end(transfer.flush(held, str(tmp_path), 1, read_back=True))
    assert (status, answer["ok"], answer["message"]) == (0, True, "")
    status, answer = end(transfer.look([str(tmp_path)]))
    assert (status, answer["step"]) == (0, 0)
