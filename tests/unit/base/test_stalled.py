"""Processes that stand still, and those that only look like it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from seatrial.base.stalled import SAMPLE_S, StalledProcesses, state_of


class Kernel:
    """Processes and a clock in the test's hands."""

    def __init__(self) -> None:
        self.now = 100.0
        self.states: dict[int, tuple[str, int]] = {}
        self.stalled = StalledProcesses(lambda: self.now, self.states.get)

    def sample(self, seconds: float, works: bool = False) -> dict[int, str]:
        """Look for so long; what the last look found."""
        found: dict[int, str] = {}
        for _ in range(round(seconds / SAMPLE_S)):
            self.now += SAMPLE_S
            found = self.stalled.find(dict.fromkeys(self.states, works))
        return found


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_a_stopped_process_is_found_within_seconds(kernel: Kernel) -> None:
    kernel.states[7] = ("T", 3)
    kernel.states[8] = ("S", 3)
    assert kernel.sample(5) == {}
    assert kernel.sample(1) == {7: "has been stopped by a signal for 5 s"}


def test_repeatedly_stopped_and_continued_is_not_stopped(kernel: Kernel) -> None:
    for tick in range(30):
        kernel.states[7] = ("T", tick)
        assert kernel.sample(1) == {}


def test_a_pause_of_the_whole_machine_counts_for_no_process(kernel: Kernel) -> None:
    kernel.states[7] = ("T", 3)
    kernel.sample(2)
    kernel.now += 3600
    assert kernel.sample(1) == {}
    kernel.states[7] = ("S", 3)
    kernel.sample(1)
    kernel.states[7] = ("T", 3)
    assert kernel.sample(4) == {}, "counted anew"


def test_a_traced_process_is_the_debuggers(kernel: Kernel) -> None:
    kernel.states[7] = ("t", 3)
    assert kernel.sample(60) == {}


def test_one_that_must_work_and_does_not_is_found(kernel: Kernel) -> None:
    kernel.states[7] = ("D", 3)
    assert kernel.sample(29, works=True) == {}
    assert kernel.sample(2, works=True) == {7: "has used no CPU time for 30 s"}
    assert kernel.sample(2, works=False) == {}, "one that waits for others uses none either"


def test_one_that_has_ended_is_forgotten(kernel: Kernel) -> None:
    kernel.states[7] = ("T", 3)
    kernel.sample(5)
    del kernel.states[7]
    kernel.sample(1)
    kernel.states[7] = ("T", 3)  # another one with its number
    assert kernel.sample(5) == {}


def test_the_kernels_state_of_a_real_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        state = state_of(child.pid)
        assert state is not None
        assert state[0] == "T"
    finally:
        child.kill()
        child.communicate()
    assert state_of(child.pid) is None
