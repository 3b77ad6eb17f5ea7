"""The process that records a node: what it writes and serves, and that its failures end nothing but itself."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from wired import Pump

from presets import preset_job
from seatrial.control.node.external import Child
from seatrial.control.node.spec import AgentSpec
from seatrial.control.telemetry import node_sampler
from seatrial.control.telemetry import telemetry as telemetry_module
from seatrial.control.telemetry.targets import metrics_port, write_targets
from seatrial.control.telemetry.telemetry import Telemetry
from seatrial.job import Job
from seatrial.record import messages as msg
from seatrial.record.exposition import exposition
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import append_line
from seatrial.record.series import NODE_SERIES, RUN_SERIES, series
from seatrial.record.telemetry import read_latest

POWER = series("gpu_power_watts", gpu=0)


def job_of(folder: Path, *overrides: str) -> Job:
    return preset_job("first-voyage", "watch.telemetry_every_s=1", *overrides, folder=folder)


@dataclass
class Node:
    """An agent's telemetry of node 3."""

    folder: RunFolder
    pump: Pump = field(default_factory=Pump)
    told: list[Any] = field(default_factory=list)
    telemetry: Telemetry | None = None

    def start(self, *overrides: str) -> Telemetry:
        spec = AgentSpec(self.folder.path, 1, node=3, nodes=4, ranks_per_node=2, device="cpu")
        job = job_of(self.folder.path, *overrides)
        self.telemetry = Telemetry(spec, job, self.told.append, self.pump.watch, self.pump.unwatch)
        return self.telemetry

    @property
    def child(self) -> Child:
        assert self.telemetry is not None
        assert self.telemetry._child is not None
        return self.telemetry._child

    def failures(self) -> list[str]:
        assert all(isinstance(each, msg.ExternalEvent) for each in self.told)
        return [each.data["what"] for each in self.told]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(node_sampler, "_FIRST_S", 0.05)
    (tmp_path / "runs/a-run").mkdir(parents=True)
    made = Node(RunFolder(tmp_path / "runs/a-run"))
    yield made
    if made.telemetry is not None:
        made.telemetry.close()
    made.pump.close()


@pytest.fixture
def port() -> int:
    """A free port, less the number of the node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1]) - 3


def scrape(port: int) -> str:
    """What it serves; nothing before it does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 3}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


def wait(node: Node, condition: Callable[[], object]) -> None:
    node.pump.until(condition)


def recorded(node: Node) -> dict[str, float]:
    found = read_latest(node.folder)
    return found[3].values if 3 in found else {}


def test_the_host_and_what_probes_read_are_recorded(node: Node) -> None:
    node.start().update("gpus", {POWER: 700.0})
    wait(node, lambda: POWER in recorded(node))
    values = recorded(node)
    assert values[POWER] == 700
    assert values["node_cpus"] == os.cpu_count()
    assert values[series("storage_total_bytes", storage="run")] > 0
    assert not node.told


def test_what_is_old_is_absent() -> None:
    ours, theirs = node_sampler.Channel.pair()
    settings = node_sampler.SamplerSettings(Path("run"), 3, 1.0, {}, "127.0.0.1", None)
    sampler = node_sampler.NodeSampler(settings, theirs)
    sampler.update("gpus", {POWER: 1.0})
    assert sampler.newest() == {POWER: 1.0}
    at, values = sampler._read["gpus"]
    sampler._read["gpus"] = at - node_sampler.FRESH * 10 - 1, values
    assert sampler.newest() == {}
    ours.close()
    theirs.close()


def test_metrics_are_served_and_clean(node: Node, port: int) -> None:
    append_line(node.folder.metrics, {
        "step": 7, "tokens": 700, "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "step_time_s": 0.1, "data_wait_s": 0.0,
        "tokens_per_s": 1000.0, "tokens_per_s_per_gpu": 500.0, "mfu": None, "memory_bytes": None, "time": 1.76e9,
        "generation": 1,
    })  # fmt: skip
    telemetry = node.start(f"watch.metrics_port={port}")
    telemetry.update("gpus", {POWER: 700.0, "not_in_the_table": 1.0})
    wait(node, lambda: 'seatrial_gpu_power_watts{gpu="0",node="3"} 700.0' in scrape(port))
    text = scrape(port)
    assert re.search(r'seatrial_run_info\{host="[^"]+",node="3",run="a-run",version="[^"]+"\} 1\.0', text)
    assert "seatrial_run_step" not in text, "this node does not coordinate"
    assert "not_in_the_table" not in text
    assert [line for line in text.splitlines() if "run=" in line and "_info" not in line] == []
    telemetry.coordinates(True)
    wait(node, lambda: 'seatrial_run_step{run="a-run"} 7.0' in scrape(port))
    text = scrape(port)
    assert "seatrial_run_mfu_ratio" not in text, "not known, so absent"
    assert text.count("# HELP") == text.count("# TYPE") > 20
    clean(text)
    telemetry.coordinates(False)
    wait(node, lambda: "seatrial_run_step" not in scrape(port))


def clean(text: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_every_series_of_the_table_is_clean() -> None:
    values = {
        series(each.name, **dict.fromkeys(each.labels, "x")): 1.0
        for each in (*NODE_SERIES.values(), *RUN_SERIES.values())
    }
    text = exposition([({}, values), ({}, {'run_step{run="y"}': 2.0})]).decode()
    assert len(re.findall("^seatrial_", text, re.M)) == len(values) + 1
    assert text.count("# TYPE seatrial_run_step gauge") == 1
    clean(text)


def test_a_taken_port_is_a_warning(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        node.start(f"watch.metrics_port={taken.getsockname()[1] - 3}")
        wait(node, lambda: node.told)
        assert node.failures() == ["serve"]
        assert "is not served at 127.0.0.1:" in node.told[0].message
        assert "the run is not affected" in node.told[0].message
        wait(node, lambda: recorded(node))  # what else it does goes on


@pytest.mark.cluster  # it waits for the second sample
def test_a_folder_that_cannot_be_written_is_a_warning(node: Node) -> None:
    node.folder.telemetry.write_text("in the way")
    node.start()
    wait(node, lambda: node.told)
    assert node.failures() == ["record"]
    node.folder.telemetry.unlink()
    wait(node, lambda: recorded(node))  # it tries again
    assert node.failures() == ["record"], "said once"


def test_a_storage_that_hangs_is_absent(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sampler.os, "statvfs", lambda path: signal.pause())
    node.start()
    wait(node, lambda: "node_cpus" in recorded(node))
    assert not [name for name in recorded(node) if name.startswith("storage")]


def test_a_process_that_ends_is_a_warning(node: Node) -> None:
    telemetry = node.start()
    os.kill(node.child.pid, signal.SIGKILL)
    wait(node, lambda: node.told)
    assert node.failures() == ["process"]
    telemetry.update("gpus", {POWER: 1.0})
    telemetry.coordinates(True)


def test_a_stopped_process_blocks_no_other(node: Node) -> None:
    telemetry = node.start()
    os.kill(node.child.pid, signal.SIGSTOP)
    for _ in range(2000):  # more than a socket takes
        telemetry.update("gpus", {f"x{i}": 1.0 for i in range(50)})
    assert len(node.child._channel._waiting) < 10_000


def test_no_process_could_be_started(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(body: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(telemetry_module, "Child", refuse)
    node.start()
    assert node.failures() == ["process"]


def test_ports_and_targets(tmp_path: Path) -> None:
    assert metrics_port(job_of(tmp_path), 2) is None
    here = job_of(tmp_path, "watch.metrics_port=9400")
    assert metrics_port(here, 2) == 9402
    apart = job_of(tmp_path, "watch.metrics_port=9400", "cluster.launcher=slurm")
    assert metrics_port(apart, 2) == 9400
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    write_targets(folder, apart, {1: "10.0.0.2", 0: "fd00::1"})
    assert folder.prometheus_targets.read_text() == '[{"targets": ["[fd00::1]:9400", "10.0.0.2:9400"]}]\n'
