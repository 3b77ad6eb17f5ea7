"""An agent's orders, the reports it sends, and what it costs to start one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.control.reports import Report
from seatrial.control.spec import AgentSpec, clean_environment, parse_agent_arguments


def spec(**changes: object) -> AgentSpec:
    values = {
        "run": Path("/r/first voyage"),
        "generation": 2,
        "node": 1,
        "nodes": 2,
        "ranks_per_node": 4,
        "master_addr": "127.0.0.1",
        "master_port": 20123,
        "device": "cpu",
    }
    return AgentSpec(**(values | changes))  # type: ignore[arg-type]


def test_the_command_line_says_it_all() -> None:
    for original in (spec(), spec(interface="lo", worker_module="other.worker", device="cuda")):
        command = original.agent_command()
        assert command[:4] == [sys.executable, "-P", "-m", "seatrial.control.agent"]
        parsed, options = parse_agent_arguments([*command[4:], "--channel", "5", "--parent", "77"])
        assert parsed == original
        assert (options.channel, options.parent) == (5, 77)


def test_ranks_are_numbered_through_the_nodes() -> None:
    assert list(spec().ranks) == [4, 5, 6, 7]
    environment = spec().rank_environment(6)
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("6", "2", "8")
    assert str(spec().rank_log(6)) == "/r/first voyage/logs/000002/node1/rank6.log"


def test_a_cpu_rank_has_one_thread_and_gpu_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert spec().node_environment()["OMP_NUM_THREADS"] == "1"
    assert spec(device="cuda").node_environment()["OMP_NUM_THREADS"] == "16"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert spec().node_environment()["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in spec(device="cuda").node_environment(), "what the user says is kept"


def test_an_outer_torchruns_store_is_forgotten() -> None:
    assert clean_environment({"TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/h"}) == {"HOME": "/h"}


def test_a_report_survives_its_journey() -> None:
    report = Report("rank_exited", 1, 12.5, rank=0, pid=4, status=0, oom_killed=False)
    assert Report.from_message(report.to_message()) == report
    assert not report.failed


def test_the_agent_loads_nothing_heavy() -> None:
    code = (
        "import sys, seatrial.control.agent;"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'rich', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
