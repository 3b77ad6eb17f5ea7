"""Commands outside the run: their end is told, whatever it is, and nobody waits for one that hangs."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator

import pytest

from seatrial.base import process
from seatrial.base.lines import Channel
from seatrial.control.node.external import Child, External, ExternalResult


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = process.descendants(os.getpid())  # services that other tests use
    yield
    assert process.descendants(os.getpid()) == before


def run_external(argv: list[str], timeout_s: float) -> ExternalResult:
    external = External(argv, timeout_s)
    while (result := external.result()) is None:
        select.select([external], [], [], max(0.0, external.deadline - time.monotonic()) + 0.01)
    return result


def test_the_output_of_both_streams_and_the_exit_code() -> None:
    result = run_external(["sh", "-c", "echo out; echo err >&2; exit 3"], 30.0)
    assert (result.done, result.exit_code, result.output) == (False, 3, "out\nerr")
    assert run_external(["true"], 30.0).done


def test_arguments_are_not_passed_to_a_shell() -> None:
    assert run_external(["echo", "$(id) ; `id` | x"], 30.0).output == "$(id) ; `id` | x"


def test_there_is_no_such_command() -> None:
    result = run_external(["/no/such/command", "x"], 30.0)
    assert (result.done, result.exit_code) == (False, None)
    assert "No such file" in result.output


def test_one_that_takes_too_long_is_ended_with_what_it_started() -> None:
    result = run_external(["sh", "-c", "echo begun; sleep 1000 & sleep 1000"], 0.2)
    assert (result.done, result.exit_code) == (False, None)
    assert "did not end within 0.2 s" in result.output
    assert "begun" in result.output


def test_a_command_that_was_killed() -> None:
    external = External(["sleep", "1000"], 30.0)
    assert external.result() is None
    process.signal_group(external._child.pid, 9)
    select.select([external], [], [], 30.0)
    result = external.result()
    assert result is not None
    assert (result.done, result.output) == (False, "sleep: its process was killed")
    assert external.result() is result


def test_a_command_that_cannot_be_killed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    external = External(["sleep", "1000"], 30.0)
    external.deadline = time.monotonic() - 1
    result = external.result()
    assert result is not None
    assert "cannot be killed" in result.output


def test_long_output_keeps_its_end() -> None:
    result = run_external(["sh", "-c", "yes | head -c 100000; printf '\\033[31mlast'"], 30.0)
    assert len(result.output) == 4000
    assert result.output.endswith("?[31mlast")


def test_a_child_holds_no_files_of_its_parent() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 200)

    def body(channel: Channel) -> None:
        channel.send({"open": sorted(int(n) for n in os.listdir("/proc/self/fd"))})

    child = Child(body)
    os.close(writer)
    os.close(200)
    assert os.read(reader, 1) == b""  # nobody else has the other end
    os.close(reader)
    messages = []
    while not child.ended:
        select.select([child], [], [], 30.0)
        messages += child.receive()
    child.close()
    child.close()
    [message] = messages
    assert len([fd for fd in message["open"] if fd > 2]) <= 2  # its channel, and the listing itself
