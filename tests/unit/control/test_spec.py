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
        "spares": 1,
        "ranks_per_node": 4,
        "address": "127.0.0.1",
        "device": "cpu",
    }
    return AgentSpec(**(values | changes))  # type: ignore[arg-type]


def test_the_command_line_says_it_all() -> None:
    for original in (
        spec(),
        spec(interface="lo", worker_module="other.worker", device="cuda", address="10.77.0.2", spares=0),
    ):
        command = original.agent_command()
        assert command[:4] == [sys.executable, "-P", "-m", "seatrial.control.agent"]
        parsed, options = parse_agent_arguments([*command[4:], "--channel", "5", "--parent", "77"])
        assert parsed == original
        assert (options.channel, options.parent) == (5, 77)


def test_a_rank_gets_torchruns_variables_for_the_place_it_has_now() -> None:
    """Node 2 is a spare that took the first place, after the run shrank to one."""
    environment = spec(node=2).worker_environment(
        rank=3, local_rank=3, world_size=4, slot=0, slots=1, master_addr="10.77.0.3", master_port=20123
    )
    assert environment == {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.77.0.3",
        "MASTER_PORT": "20123",
    }


def test_logs_lie_by_generation_and_node() -> None:
    assert str(spec().rank_log(7, 6)) == "/r/first voyage/logs/000007/node1/rank6.log"
    assert str(spec().log) == "/r/first voyage/logs/000002/node1/agent.log"
    assert str(spec().nursery_log) == "/r/first voyage/logs/000002/node1/nursery.log"


def test_collectives_are_remembered() -> None:
    """Both names: which of them torch reads depends on its version."""
    environment = spec().node_environment()
    assert environment["TORCH_FR_BUFFER_SIZE"] == "2000"


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
        "print([m for m in ('torch', 'numpy', 'rich', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
