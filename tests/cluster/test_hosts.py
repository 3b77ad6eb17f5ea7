"""Training across network namespaces: a host that is cut off, or whose link is slow, is named and survived."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import CONSOLE_BYTES, JOB, records, write_corpus
from seatrial.launch.netns import Hosts, Unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

TIMEOUT_S = 90.0
STEPS = 40


class HostsRun:
    """One run of hosts_driver.py in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("hosts_driver.py")), "job.toml"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pipesize=CONSOLE_BYTES,
        )
        self.lines: list[str] = []
        self._rest = b""

    def do(self, what: str) -> None:
        """Do it, and wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()
        self.wait_line(f"did {what}")

    def wait_line(self, wanted: str) -> str:
        """Read what the run shows until a line begins with `wanted`."""
        assert self.process.stderr is not None
        stderr = self.process.stderr.fileno()
        end = time.monotonic() + TIMEOUT_S
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                self.lines.append(line.decode())
                if self.lines[-1].startswith(wanted):
                    return self.lines[-1]
            ready, _, _ = select.select([stderr], [], [], max(0.0, end - time.monotonic()))
            data = os.read(stderr, 1 << 16) if ready else b""
            assert data, f"no line {wanted!r} in\n" + "\n".join(self.lines)
            self._rest += data

    def wait(self) -> int:
        self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode

    def events(self) -> list[dict[str, Any]]:
        return records(self.folder / "runs/small/events.jsonl")

    def coordinator(self) -> int:
        """The node that coordinates now."""
        elected = [e["node"] for e in self.events() if e["kind"] == "coordinator_elected"]
        return int(elected[-1])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostsRun]]:
    try:
        with Hosts(2):
            pass
    except Unavailable as error:
        pytest.skip(str(error))
    write_corpus(tmp_path)
    runs: list[HostsRun] = []

    def begin(*resilience: str) -> HostsRun:
        job = JOB.replace("steps = 12", f"steps = {STEPS}").replace("nodes = 2", "nodes = 2\nspares = 1")
        text = "\n".join([job, "[resilience]", "snapshot_every_steps = 2", *resilience, ""])
        (tmp_path / "job.toml").write_text(text)
        runs.append(HostsRun(tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def exactly_once(run: HostsRun) -> bool:
    """Whether each step is in the ledger with the samples that it should have, in its last generation."""
    last = {r["step"]: r for r in records(run.folder / "runs/small/ledger.jsonl")}
    ranges = [(last[n]["first_sample"], last[n]["end_sample"]) for n in range(1, STEPS + 1)]
    return ranges == [(8 * n, 8 * n + 8) for n in range(STEPS)]


def test_a_host_that_is_cut_off_is_replaced(start: Callable[..., HostsRun]) -> None:
    run = start("silence_s = 2.0")
    run.wait_line("step   6/")
    node = 0 if run.coordinator() == 1 else 1  # the loss of the coordinator's host is the test below
    run.do(f"down {node}")
    lost = f"node {node} is lost"
    assert run.wait_line(lost).startswith(f"{lost}: has been silent for ")
    run.wait_line(f"node 2 (a spare) replaces node {node}")
    run.wait_line("recovered after ")
    assert run.wait() == 0
    told = [e for e in run.events() if e["kind"] == "node_lost"]
    assert [(e["node"], e["data"]["certain"]) for e in told] == [(node, False)]
    assert exactly_once(run)


@pytest.mark.long
def test_the_coordinators_host_is_cut_off(start: Callable[..., HostsRun]) -> None:
    run = start("silence_s = 2.0")
    run.wait_line("step   6/")
    node = run.coordinator()
    if node == 2:
        pytest.skip("the spare was the quickest and coordinates: no rank would be lost with it")
    run.do(f"down {node}")
    run.wait_line("recovered after ")
    assert run.wait() == 0
    assert run.coordinator() != node
    assert exactly_once(run)


@pytest.mark.long  # the judgement of a slow link: tests/unit/control
def test_a_link_that_becomes_slow_is_named_and_survived(start: Callable[..., HostsRun]) -> None:
    run = start()
    run.wait_line("step   6/")
    run.do("slow 1 2")
    end = time.monotonic() + TIMEOUT_S
    while not (found := [e for e in run.events() if (e["data"] or {}).get("signal") == "congestion"]):
        assert time.monotonic() < end, "the slow link was not named"
        assert run.process.poll() is None
        time.sleep(0.05)  # the file tells nobody that it grew
    run.do("fast 1")
    assert run.wait() == 0
    assert [e["node"] for e in found] == [1]
    assert "its network is slow" in found[0]["message"]
    assert not [e for e in run.events() if e["kind"] in ("node_lost", "recovering")]
    assert exactly_once(run)


def test_nothing_of_the_hosts_is_left() -> None:
    """After all the runs above: no namespace of a driver, and no process in one."""
    left = [p.name for p in Path("/run/netns").glob("st-*")] if Path("/run/netns").is_dir() else []
    drivers = {name.split("-")[1].split("x")[0] for name in left}
    assert not [pid for pid in drivers if not os.path.exists(f"/proc/{pid}")]
