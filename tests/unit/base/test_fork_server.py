"""The process that forks others: orders, ends of children, its own end. It runs in a child of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.base import process
from seatrial.base.fork_server import ForkServer
from seatrial.base.lines import Channel

WITHIN_S = 30.0


def serve(channel: Channel, log: Path) -> int:
    """Fork a child for each order, which exits as ordered; send what becomes of it."""

    def obey(order: dict[str, Any]) -> None:
        def body() -> int:
            try:
                os.fstat(channel.fileno())
            except OSError:
                return int(order["exit"])
            return 99  # the channel is still open here: the agent would not see the fork server's death

        channel.send({"forked": server.fork(body, log)})

    def reaped(pid: int, status: int) -> None:
        channel.send({"ended": pid, "status": status})

    server = ForkServer(channel, obey, reaped)
    while server.wait(WITHIN_S):
        pass
    return 5


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Channel, int]]:
    """The channel to a fork server, and its pid."""
    ours, theirs = Channel.pair()

    def body() -> int:
        ours.close()
        return serve(theirs, tmp_path / "log")

    pid = process.fork(body, log=tmp_path / "log")
    theirs.close()
    yield ours, pid
    ours.close()


def answer(channel: Channel) -> dict[str, Any]:
    assert channel.readable(WITHIN_S)
    (message,) = channel.receive()
    return message


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_it_forks_and_reaps_until_its_agent_is_gone(served: tuple[Channel, int]) -> None:
    channel, pid = served
    for status in (3, 0):
        channel.send({"exit": status})
        child = answer(channel)["forked"]
        assert answer(channel) == {"ended": child, "status": status}
    channel.close()
    assert ended(pid) == 5


def test_sigterm_ends_it(served: tuple[Channel, int]) -> None:
    channel, pid = served
    channel.send({"exit": 0})
    answer(channel)  # it listens
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 5


def test_a_second_thread_forbids_forking() -> None:
    """In a process of its own: the tests' process may have threads."""
    code = (
        "import threading; from seatrial.base.fork_server import import_to_share\n"
        "import_to_share('json')\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "import_to_share('json')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: importing json started 1 threads: a rank forked now could hang"
    )
