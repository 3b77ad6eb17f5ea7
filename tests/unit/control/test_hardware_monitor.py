"""What a node's hardware says, and what is done to it: only what the job allows, and always told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from wired import Pump

from seatrial.control.hardware import hardware_monitor as hardware_monitor_module
from seatrial.control.hardware.hardware_monitor import KERNEL_LOG, HardwareMonitor
from seatrial.control.node.external import ExternalResult
from seatrial.control.node.spec import AgentSpec
from seatrial.job.schema import ResilienceSection
from seatrial.record import messages as msg

SPEC = AgentSpec(Path("run"), 1, node=3, nodes=4, ranks_per_node=2, device="cpu")
DONE = ExternalResult(True, 0, "well")
OURS = frozenset({"0000:3b:00", "0000:5e:00"})


class Command:
    """In place of a command outside the run: ends when the test says so."""

    started: list[Command] = []  # noqa: RUF012

    def __init__(self, argv: list[str], timeout_s: float) -> None:
        self.argv = argv
        self.deadline = time.monotonic() + timeout_s
        self.reader, self.writer = os.pipe()
        self.found: ExternalResult | None = None
        self.started.append(self)

    def fileno(self) -> int:
        return self.reader

    def end(self, result: ExternalResult = DONE) -> None:
        self.found = result
        os.write(self.writer, b"x")

    def result(self) -> ExternalResult | None:
        return self.found

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


class Gpus:
    """In place of the driver's sources: who holds the GPUs open."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.reader, self.writer = os.pipe()
        self.open = True

    def fileno(self) -> int:
        return self.reader

    def deadline(self, now: float) -> None:
        return None

    def poll(self, now: float) -> list[Any]:
        return []

    def release_gpus(self) -> None:
        self.open = False

    def resume_gpus(self) -> None:
        self.open = True

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


class Node:
    """A hardware monitor, and what it told."""

    def __init__(self, pump: Pump, spec: AgentSpec, **resilience: Any) -> None:
        self.pump = pump
        self.told: list[msg.Journalled] = []
        self.hardware_monitor = HardwareMonitor(
            spec, ResilienceSection(**resilience), self.told.append, pump.watch, pump.unwatch, print
        )
        pump.ticks.append(self.hardware_monitor.tick)

    def reset(self, gpu: str | None) -> None:
        self.hardware_monitor.order(msg.ResetGpu(gpu, "Xid 79"))

    def requalify(self) -> None:
        self.hardware_monitor.order(msg.Requalify())

    def drain(self) -> None:
        self.hardware_monitor.order(msg.Drain("Xid 79"))

    def running(self) -> Command:
        """The command under way."""
        return Command.started[-1]

    def end(self, result: ExternalResult = DONE) -> None:
        self.running().end(result)
        count = len(self.told)
        self.pump.until(lambda: len(self.told) > count)

    def events(self) -> list[tuple[str, bool]]:
        return [(m.kind, m.data["done"]) for m in self.externals()]

    def externals(self) -> list[msg.ExternalEvent]:
        return [m for m in self.told if isinstance(m, msg.ExternalEvent)]

    def tests(self) -> list[bool]:
        return [m.ok for m in self.told if isinstance(m, msg.Requalified)]


@pytest.fixture
def pump(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pump]:
    Command.started.clear()
    monkeypatch.setattr(hardware_monitor_module, "External", Command)
    monkeypatch.delenv(KERNEL_LOG, raising=False)
    pump = Pump()
    yield pump
    for command in Command.started:
        command.close()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_monitor_module, "Sources", Gpus)
    monkeypatch.setattr(hardware_monitor_module, "gpu_addresses", lambda devices: OURS)


CUDA = replace(SPEC, device="cuda")


def test_a_driver_message_in_the_node_s_log_is_reported(
    pump: Pump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log-3").write_text("")
    monkeypatch.setenv(KERNEL_LOG, str(tmp_path / "log-{node}"))
    node = Node(pump, SPEC)
    with open(tmp_path / "log-3", "a") as log:
        log.write("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python3, GPU has fallen off the bus.\n")
    pump.until(lambda: node.told)
    (signal,) = node.told
    assert isinstance(signal, msg.HardwareSignal)
    assert (signal.signal, signal.gpu) == ("xid:79", "0000:3b:00")
    node.hardware_monitor.close()


def test_a_node_without_hardware_reports_nothing(pump: Pump) -> None:
    node = Node(pump, SPEC)
    pump.settle()
    assert node.told == []
    assert node.hardware_monitor.deadline is None
    node.hardware_monitor.close()


def test_a_test_is_run_and_reported(pump: Pump) -> None:
    node = Node(pump, SPEC)
    node.requalify()
    assert "seatrial.train.health.qualify" in node.running().argv
    assert node.running().argv[-4:-2] == ["--count", "2"], "as many as we use"
    node.end(ExternalResult(False, 1, "GPU 1 is missing"))
    assert node.told == [msg.Requalified(ok=False, checks={}, message="GPU 1 is missing")]
    node.hardware_monitor.close()


def test_one_after_the_other(pump: Pump) -> None:
    node = Node(pump, SPEC)
    node.requalify()
    node.requalify()
    assert len(Command.started) == 1
    node.end()
    assert len(Command.started) == 2
    node.end()
    assert node.tests() == [True, True]
    node.hardware_monitor.close()


def test_a_command_that_never_ends_is_given_up(pump: Pump) -> None:
    node = Node(pump, SPEC)
    node.requalify()
    command = node.running()
    assert node.hardware_monitor.deadline == command.deadline
    command.deadline = time.monotonic()
    command.found = ExternalResult(False, None, "did not end")
    pump.until(lambda: node.told)
    assert node.tests() == [False]
    node.hardware_monitor.close()


def test_gpu_reset_without_a_gpu_fails_and_node_is_tested(pump: Pump) -> None:
    node = Node(pump, SPEC, allow_gpu_reset=True)
    node.reset(None)
    node.end()
    assert node.events() == [("gpu_reset", False)]
    assert node.tests() == [True]
    node.hardware_monitor.close()


@pytest.mark.usefixtures("gpus")
def test_forbidden_gpu_reset_is_skipped_and_excludes_the_node(pump: Pump) -> None:
    node = Node(pump, CUDA)
    node.reset("0000:3b:00")
    assert not Command.started
    assert node.events() == [("gpu_reset", False)]
    assert "allow_gpu_reset is false" in node.externals()[0].message
    assert node.tests() == [False]
    node.hardware_monitor.close()


@pytest.mark.usefixtures("gpus")
def test_the_gpu_that_was_named_is_reset_and_tested(pump: Pump) -> None:
    node = Node(pump, CUDA, allow_gpu_reset=True)
    node.reset("0000:3b:00")
    assert node.running().argv == ["nvidia-smi", "--gpu-reset", "-i", "0000:3b:00.0"]
    assert not node.hardware_monitor._sources.open, "an open handle keeps the driver from it"  # type: ignore[attr-defined]
    node.end()
    assert node.hardware_monitor._sources.open  # type: ignore[attr-defined]
    assert node.events() == [("gpu_reset", True)]
    node.end(ExternalResult(False, 1, "row 3 is wrong"))
    assert node.tests() == [False]
    node.hardware_monitor.close()


@pytest.mark.usefixtures("gpus")
def test_if_no_gpu_is_named_all_gpus_of_the_node_are_reset(pump: Pump) -> None:
    node = Node(pump, CUDA, allow_gpu_reset=True)
    node.reset(None)
    node.end()
    node.end(ExternalResult(False, 1, "in use"))
    node.end()
    assert [c.argv[-1] for c in Command.started[:2]] == ["0000:3b:00.0", "0000:5e:00.0"]
    assert len(Command.started) == 3, "one test, after both"
    assert node.events() == [("gpu_reset", True), ("gpu_reset", False)]
    assert node.tests() == [True]
    node.hardware_monitor.close()


@pytest.mark.usefixtures("gpus")
def test_which_gpus_are_ours_is_not_guessed(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_monitor_module, "gpu_addresses", lambda devices: None)
    node = Node(pump, CUDA, allow_gpu_reset=True)
    node.reset(None)
    assert not Command.started
    assert node.tests() == [False]
    node.hardware_monitor.close()


def test_a_drain_that_is_not_allowed_is_shown(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    node = Node(pump, SPEC)
    node.drain()
    assert not Command.started
    (event,) = node.externals()
    assert event.message.endswith("scontrol update nodename=gpu-7 state=drain reason=Xid 79")
    node.hardware_monitor.close()


def test_an_allowed_drain_is_run_and_its_output_reported(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    node = Node(pump, SPEC, allow_node_drain=True)
    node.drain()
    assert node.running().argv[-1] == "reason=Xid 79"
    node.end(ExternalResult(False, 1, "slurm_update error: Invalid user id"))
    assert node.events() == [("node_drained", False)]
    assert node.externals()[0].data["output"] == "slurm_update error: Invalid user id"
    node.hardware_monitor.close()


def test_a_name_that_no_scheduler_could_mean_is_not_drained(
    pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu[1-9]")
    node = Node(pump, SPEC, allow_node_drain=True)
    node.drain()
    node.requalify()
    assert node.events() == [("node_drained", False)]
    assert len(Command.started) == 1, "and the next order is carried out"
    node.hardware_monitor.close()


def test_a_failed_fork_is_reported_and_the_run_continues(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Command:
        raise OSError(11, "Resource temporarily unavailable")

    node = Node(pump, SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(hardware_monitor_module, "External", refuse)
        node.requalify()
    assert node.tests() == [False]
    node.requalify()
    node.end()
    assert node.tests() == [False, True]
    node.hardware_monitor.close()
