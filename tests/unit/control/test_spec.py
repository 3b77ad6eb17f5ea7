"""An agent's orders, and what it costs to start one."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from presets import preset_job
from seatrial.control.node.environment import assignments
from seatrial.control.node.spec import AgentSpec, clean_environment, parse_agent_arguments

job = partial(preset_job, "first-voyage")


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


def test_the_command_line_contains_the_whole_spec() -> None:
    for original in (
        spec(),
        spec(
            interface="lo",
            worker_module="other.worker",
            device="cuda",
            address="10.77.0.2",
            spares=0,
        ),
    ):
        command = original.agent_command()
        assert command[:4] == [sys.executable, "-P", "-m", "seatrial.control.agent"]
        assert parse_agent_arguments(command[4:]) == (original, False)
        assert parse_agent_arguments([*command[4:], "--attended"]) == (original, True)


def test_rank_gets_torchrun_variables_for_its_current_position() -> None:
    """Node 2 is a spare that took the first place, after the run shrank to one."""
    variables = spec(node=2).worker_environment(
        rank=3, local_rank=3, world_size=4, slot=0, slots=1, master_addr="10.77.0.3", master_port=20123
    )
    assert assignments(variables) == {
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
    assert str(spec().fork_server_log) == "/r/first voyage/logs/000002/node1/nursery.log"


def test_the_environment_follows_the_host_and_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.control.node.spec.usable_cores", lambda: 64)
    cpu = assignments(spec(interface="lo").node_environment(job(), {}).variables)
    assert (cpu["OMP_NUM_THREADS"], cpu["TORCH_FR_BUFFER_SIZE"], cpu["GLOO_SOCKET_IFNAME"]) == (
        "1",
        "2000",
        "lo",
    )
    made = spec(device="cuda").node_environment(job("resilience.first_step_s=4000"), {})
    cuda = assignments(made.variables)
    assert (cuda["OMP_NUM_THREADS"], cuda["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) == ("16", "4300")
    assert cuda["TORCH_FR_DUMP_TEMP_FILE"] == "/r/first voyage/logs/000002/node1/flight-rank"
    assert len(made.facts) == 3
    assert spec().node_environment(job(), {}).facts == []


def test_torch_gives_up_a_collective_later_than_a_hang_is_found() -> None:
    for first_step_s, timeout_s in ((60, 600), (1800, 2100), (4000.5, 4301)):
        made = job(f"resilience.first_step_s={first_step_s}")
        assert made.collective_timeout_s == timeout_s
        assert made.resilience.hang_min_s <= made.resilience.first_step_s, (
            "so the first step's limit is the longest"
        )


def test_an_outer_torchruns_store_is_forgotten() -> None:
    assert clean_environment({"TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/h"}) == {"HOME": "/h"}


def test_the_agent_loads_nothing_heavy() -> None:
    code = (
        "import sys, seatrial.control.agent;"
        "print([m for m in ('torch', 'numpy', 'rich', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
