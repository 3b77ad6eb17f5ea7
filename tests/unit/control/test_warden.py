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

from seatrial.control import warden as warden_module
from seatrial.control.external import ExternalResult
from seatrial.control.spec import AgentSpec
from seatrial.control.warden import KERNEL_LOG, Warden
from seatrial.job.schema import ResilienceSection

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
    """A warden, and what it told."""

    def __init__(self, pump: Pump, spec: AgentSpec, **resilience: Any) -> None:
        self.pump = pump
        self.told: list[dict[str, Any]] = []
        self.warden = Warden(
            spec, ResilienceSection(**resilience), self.told.append, pump.watch, pump.unwatch
        )
        pump.ticks.append(self.warden.tick)

    def order(self, what: str, **more: Any) -> None:
        self.warden.order({"what": what, "cause": "Xid 79", **more})

    def running(self) -> Command:
        """The command under way."""
        return Command.started[-1]

    def end(self, result: ExternalResult = DONE) -> None:
        self.running().end(result)
        count = len(self.told)
        self.pump.until(lambda: len(self.told) > count)

    def events(self) -> list[tuple[str, bool]]:
        return [(m["external"]["kind"], m["external"]["data"]["done"]) for m in self.told if "external" in m]

    def tests(self) -> list[bool]:
        return [m["requalified"]["ok"] for m in self.told if "requalified" in m]


@pytest.fixture
def pump(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pump]:
    Command.started.clear()
    monkeypatch.setattr(warden_module, "External", Command)
    monkeypatch.delenv(KERNEL_LOG, raising=False)
    pump = Pump()
    yield pump
    for command in Command.started:
        command.close()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warden_module, "Sources", Gpus)
    monkeypatch.setattr(warden_module, "gpu_addresses", lambda devices: OURS)


CUDA = replace(SPEC, device="cuda")


def test_a_driver_message_in_the_nodes_own_log_is_told(
    pump: Pump, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log-3").write_text("")
    monkeypatch.setenv(KERNEL_LOG, str(tmp_path / "log-{node}"))
    node = Node(pump, SPEC)
    with open(tmp_path / "log-3", "a") as log:
        log.write("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python3, GPU has fallen off the bus.\n")
    pump.until(lambda: node.told)
    (signal,) = node.told[0]["signals"]
    assert (signal["signal"], signal["gpu"]) == ("xid:79", "0000:3b:00")
    node.warden.close()


def test_a_node_without_hardware_says_nothing(pump: Pump) -> None:
    node = Node(pump, SPEC)
    pump.settle()
    assert node.told == []
    assert node.warden.deadline is None
    node.warden.close()


def test_a_test_is_run_and_told(pump: Pump) -> None:
    node = Node(pump, SPEC)
    node.order("requalify")
    assert "seatrial.train.qualify" in node.running().argv
    assert node.running().argv[-4:-2] == ["--count", "2"], "as many as we use"
    node.end(ExternalResult(False, 1, "GPU 1 is missing"))
    assert node.told == [{"requalified": {"ok": False, "checks": {}, "message": "GPU 1 is missing"}}]
    node.warden.close()


def test_one_after_the_other(pump: Pump) -> None:
    node = Node(pump, SPEC)
    node.order("requalify")
    node.order("requalify")
    assert len(Command.started) == 1
    node.end()
    assert len(Command.started) == 2
    node.end()
    assert node.tests() == [True, True]
    node.warden.close()


def test_a_command_that_never_ends_is_given_up(pump: Pump) -> None:
    node = Node(pump, SPEC)
    node.order("requalify")
    command = node.running()
    assert node.warden.deadline == command.deadline
    command.deadline = time.monotonic()
    command.found = ExternalResult(False, None, "did not end")
    pump.until(lambda: node.told)
    assert node.tests() == [False]
    node.warden.close()


def test_without_a_gpu_there_is_nothing_to_reset_and_the_node_is_tested(pump: Pump) -> None:
    node = Node(pump, SPEC, allow_gpu_reset=True)
    node.order("reset_gpu", gpu=None)
    node.end()
    assert node.events() == [("gpu_reset", False)]
    assert node.tests() == [True]
    node.warden.close()


@pytest.mark.usefixtures("gpus")
def test_a_reset_that_is_not_allowed_is_not_done_and_keeps_the_node_out(pump: Pump) -> None:
    node = Node(pump, CUDA)
    node.order("reset_gpu", gpu="0000:3b:00")
    assert not Command.started
    assert node.events() == [("gpu_reset", False)]
    assert "allow_gpu_reset is false" in node.told[0]["external"]["message"]
    assert node.tests() == [False]
    node.warden.close()


@pytest.mark.usefixtures("gpus")
def test_the_gpu_that_was_named_is_reset_and_tested(pump: Pump) -> None:
    node = Node(pump, CUDA, allow_gpu_reset=True)
    node.order("reset_gpu", gpu="0000:3b:00")
    assert node.running().argv == ["nvidia-smi", "--gpu-reset", "-i", "0000:3b:00.0"]
    assert not node.warden._sources.open, "an open handle keeps the driver from it"  # type: ignore[attr-defined]
    node.end()
    assert node.warden._sources.open  # type: ignore[attr-defined]
    assert node.events() == [("gpu_reset", True)]
    node.end(ExternalResult(False, 1, "row 3 is wrong"))
    assert node.tests() == [False]
    node.warden.close()


@pytest.mark.usefixtures("gpus")
def test_where_nobody_said_which_all_of_the_nodes_own_are_reset(pump: Pump) -> None:
    node = Node(pump, CUDA, allow_gpu_reset=True)
    node.order("reset_gpu", gpu=None)
    node.end()
    node.end(ExternalResult(False, 1, "in use"))
    node.end()
    assert [c.argv[-1] for c in Command.started[:2]] == ["0000:3b:00.0", "0000:5e:00.0"]
    assert len(Command.started) == 3, "one test, after both"
    assert node.events() == [("gpu_reset", True), ("gpu_reset", False)]
    assert node.tests() == [True]
    node.warden.close()


@pytest.mark.usefixtures("gpus")
def test_which_gpus_are_ours_is_not_guessed(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warden_module, "gpu_addresses", lambda devices: None)
    node = Node(pump, CUDA, allow_gpu_reset=True)
    node.order("reset_gpu", gpu=None)
    assert not Command.started
    assert node.tests() == [False]
    node.warden.close()


def test_a_drain_that_is_not_allowed_is_shown(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    node = Node(pump, SPEC)
    node.order("drain")
    assert not Command.started
    (event,) = [m["external"] for m in node.told]
    assert event["message"].endswith("scontrol update nodename=gpu-7 state=drain reason=Xid 79")
    node.warden.close()


def test_a_drain_that_is_allowed_is_run_and_its_output_told(
    pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    node = Node(pump, SPEC, allow_node_drain=True)
    node.order("drain")
    assert node.running().argv[-1] == "reason=Xid 79"
    node.end(ExternalResult(False, 1, "slurm_update error: Invalid user id"))
    assert node.events() == [("node_drained", False)]
    assert node.told[0]["external"]["data"]["output"] == "slurm_update error: Invalid user id"
    node.warden.close()


def test_a_name_that_no_scheduler_could_mean_is_not_drained(
    pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu[1-9]")
    node = Node(pump, SPEC, allow_node_drain=True)
    node.order("drain")
    node.order("requalify")
    assert node.events() == [("node_drained", False)]
    assert len(Command.started) == 1, "and the next order is carried out"
    node.warden.close()


def test_without_a_process_to_be_had_it_is_told_and_goes_on(
    pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Command:
        raise OSError(11, "Resource temporarily unavailable")

    node = Node(pump, SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(warden_module, "External", refuse)
        node.order("requalify")
    assert node.tests() == [False]
    node.order("requalify")
    node.end()
    assert node.tests() == [False, True]
    node.warden.close()
