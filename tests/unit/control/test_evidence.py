"""What the kernel says of processes that are really stopped, busy, asleep, dead."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seatrial.base import process
from seatrial.control.hangs.evidence import Evidence, Observation

TIMEOUT_S = 20.0


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., tuple[int, Path]]]:
    """Start a process that does what it is told; it has begun when this returns."""
    pids: list[int] = []

    def start(what: Callable[[], object], *, answers: bool = True) -> tuple[int, Path]:
        reader, writer = os.pipe()
        log = tmp_path / f"{len(pids)}.log"

        def body() -> int:
            if answers:
                faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
            print("an ordinary line", flush=True)
            os.write(writer, b"1")
            what()
            return 0

        pids.append(process.fork(body, log=log))
        os.close(writer)
        assert os.read(reader, 1) == b"1"
        os.close(reader)
        return pids[-1], log

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def until(look: Observation, wanted: Callable[[Evidence], object]) -> Evidence:
    """The end of `look`, made again until it shows what is `wanted`."""
    end = time.monotonic() + TIMEOUT_S
    while not wanted(evidence := look.end()):
        assert time.monotonic() < end, evidence
        select.select([], [], [], 0.01)
    return evidence


def rest() -> None:
    while True:  # it returns after each signal
        signal.pause()


def spin() -> None:
    while True:
        pass


def test_a_sleeping_process_answers_with_its_stack(child: Callable[..., tuple[int, Path]]) -> None:
    pid, log = child(rest)
    evidence = until(Observation(pid, log), lambda e: "test_evidence.py" in e.stack)
    assert evidence.alive
    assert not evidence.stopped
    assert evidence.threads == 1
    assert "ordinary" not in evidence.stack
    assert "answered SIGUSR2" in str(evidence)


def test_a_process_that_computes_is_busy(child: Callable[..., tuple[int, Path]]) -> None:
    pid, log = child(spin)
    until(Observation(pid, log), lambda e: e.busy)
    until(Observation(pid, log), lambda e: "in spin" in e.stack)  # by now it spins for certain


def test_a_stopped_process_is_recognised_and_does_not_answer(child: Callable[..., tuple[int, Path]]) -> None:
    pid, log = child(spin)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    evidence = Observation(pid, log).end()
    assert evidence.stopped
    assert evidence.alive
    assert evidence.stack == ""
    assert "stopped by a signal" in str(evidence)
    assert "did not answer SIGUSR2" in str(evidence)


def test_a_process_without_a_handler_is_not_asked(child: Callable[..., tuple[int, Path]]) -> None:
    pid, log = child(rest, answers=False)
    evidence = Observation(pid, log).end()
    assert not evidence.asked
    assert evidence.alive


def test_a_process_is_not_asked_unless_wanted(child: Callable[..., tuple[int, Path]]) -> None:
    pid, log = child(rest)
    assert not Observation(pid, log, ask=False).end().asked


def test_a_dead_process_and_a_zombie() -> None:
    pid = process.fork(lambda: 0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    zombie = Observation(pid, Path("/nowhere")).end()
    assert (zombie.state, zombie.alive) == ("Z", False)
    os.waitpid(pid, 0)
    dead = Observation(pid, Path("/nowhere")).end()
    assert (dead.state, dead.alive) == ("X", False)
    assert str(dead) == f"process {pid} is dead"


def test_evidence_travels_as_json(child: Callable[..., tuple[int, Path]]) -> None:
    pid, log = child(rest)
    evidence = Observation(pid, log).end()
    assert Evidence.from_dict(json.loads(json.dumps(evidence.as_dict()))) == evidence


def test_a_traced_or_frozen_process_counts_as_stopped() -> None:
    plain = Evidence(1, "S", 1.0, 0.0, 1, "", "", "", False, "")
    values = plain.as_dict()
    assert not plain.stopped
    assert Evidence.from_dict({**values, "state": "t", "tracer": "7 (gdb)"}).stopped
    assert "traced by 7 (gdb)" in str(Evidence.from_dict({**values, "state": "t", "tracer": "7 (gdb)"}))
    assert Evidence.from_dict({**values, "waits_in": "do_freezer_trap"}).stopped
