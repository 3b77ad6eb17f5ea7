"""The virtual cluster's processes: how they start, that the first failure is named, and that none survives."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_cluster import VirtualCluster

from seatrial.record import events

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

AGENT = "seatrial.control.agent"
FORK_SERVER = "seatrial.train.supervision.fork_server"

Start = Callable[..., VirtualCluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[VirtualCluster] = []

    def begin(**options: Any) -> VirtualCluster:
        started.append(VirtualCluster(tmp_path, **options))
        return started[-1]

    yield begin
    for cluster in started:
        cluster.close()


def suspend(pid: int) -> None:
    """SIGSTOP, until it has taken effect: no descriptor tells of that, so the state is read again and again."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # "cuda" is pretended: the stand-ins do not compute
def test_ranks_get_torchruns_environment_and_end_well(start: Start, device: str) -> None:
    cluster = start(device=device)
    cluster.wait_ranks()
    port = cluster.ranks[0].hello["env"]["MASTER_PORT"]
    shared_threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    for rank, line in cluster.ranks.items():
        assert line.hello["argv"] == [str(cluster.folder.path), "--generation", "3"]
        node, local = divmod(rank, 2)
        assert line.hello["env"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "SEATRIAL_DEVICE": device,
            "OMP_NUM_THREADS": "1" if device == "cpu" else shared_threads,
            "GLOO_SOCKET_IFNAME": "lo",
            # Virtual nodes share this machine's GPUs: each sees its own part.
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")
            if device == "cpu"
            else ["0,1", "2,3"][node],
        }
        line.tell("finish")
    result = cluster.result()
    assert cluster.driver.returncode == 0
    assert result["outcome"] == {"exit_code": 0, "failure": None}
    assert cluster.folder.rank_log(3, 1, 3).read_text() == "rank 3 says hello\n"
    told, problems = events.read_events(cluster.folder)
    assert not problems
    kinds = [e.kind for e in told]
    assert sorted(kinds) == sorted(
        ["coordinator_elected", "generation_started"]
        + ["agent_started", "node_joined"] * 2
        + ["rank_started"] * 4
    )
    assert (
        kinds.index("coordinator_elected") < kinds.index("generation_started") < kinds.index("rank_started")
    )
    pids = {e.rank: (e.data or {})["pid"] for e in told if e.kind == "rank_started"}
    assert pids == {rank: line.pid for rank, line in cluster.ranks.items()}
    assert cluster.left() == []


def test_killed_rank_is_named_within_5_s_and_nothing_remains(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    cluster.remember(cluster.ranks[3].ask("spawn"))
    cluster.remember(cluster.ranks[0].ask("spawn"))
    killed_at = time.time()
    os.kill(cluster.ranks[3].pid, signal.SIGKILL)
    result = cluster.result()
    assert result["end"] - killed_at < 5
    failure = result["outcome"]["failure"]
    assert cluster.driver.returncode == result["outcome"]["exit_code"] == 1
    assert (failure["node"], failure["rank"]) == (1, 3)
    assert failure["message"] == "rank 3 on node 1 was killed by SIGKILL"
    assert "out-of-memory" in failure["hint"]
    assert failure["log"] == str(cluster.folder.rank_log(3, 1, 3))
    assert failure["tail"] == "rank 3 says hello"
    assert killed_at <= failure["time"] <= result["end"]
    told, _ = events.read_events(cluster.folder)
    first = next(e for e in told if e.severity == "error")
    assert (first.kind, first.node, first.rank, first.generation) == ("rank_failed", 1, 3, 3)
    assert cluster.left() == []


def test_ranks_that_do_not_answer_are_killed(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    assert cluster.ranks[1].ask("deaf") == "deaf"
    suspend(cluster.ranks[2].pid)
    killed_at = time.time()
    cluster.ranks[0].tell({"exit": 7})
    result = cluster.result()
    assert result["outcome"]["failure"]["message"] == "rank 0 on node 0 ended with exit code 7"
    assert result["end"] - killed_at < 5
    assert cluster.left() == []


def test_failure_contains_traceback_of_an_uncaught_exception(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    cluster.ranks[2].tell("raise")
    failure = cluster.result()["outcome"]["failure"]
    assert failure["message"] == "rank 2 on node 1 ended with exit code 1"
    assert failure["tail"].endswith("ZeroDivisionError: as the test asked")
    assert "Traceback (most recent call last):" in failure["tail"]


def test_the_cause_is_named_although_a_consequence_was_quicker(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    cluster.ranks[1].tell(
        {"fail": {"exit_code": 1, "consequence": True, "message": "connection closed by peer"}}
    )
    cluster.ranks[1].wait_end()
    cluster.ranks[2].tell(
        {"fail": {"exit_code": 1, "consequence": False, "message": "the loss is not finite"}}
    )
    failure = cluster.result()["outcome"]["failure"]
    assert failure["message"] == "rank 2 on node 1: ValueError: the loss is not finite"
    assert failure["tail"].endswith("ValueError: the loss is not finite")
    assert failure["hint"] == "do it otherwise"


def test_bad_input_found_by_a_rank_is_exit_2(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    cluster.ranks[1].tell(
        {"fail": {"exit_code": 2, "consequence": False, "message": "token id 300 is too large"}}
    )
    outcome = cluster.result()["outcome"]
    assert cluster.driver.returncode == outcome["exit_code"] == 2
    assert outcome["failure"]["cause"] == "token id 300 is too large"
    assert outcome["failure"]["hint"] == "do it otherwise"


def test_kill_9_of_an_agent_is_a_failure_of_its_node(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    cluster.remember(cluster.ranks[2].ask("spawn"))
    os.kill(cluster.find(AGENT, node=1), signal.SIGKILL)
    failure = cluster.result()["outcome"]["failure"]
    assert failure["message"] == "agent of node 1 was killed by SIGKILL"
    assert (failure["node"], failure["rank"]) == (1, None)
    assert cluster.left() == []


def test_kill_9_of_a_fork_server_is_a_failure_of_its_node(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    cluster.remember(cluster.ranks[0].ask("spawn"))
    os.kill(cluster.find(FORK_SERVER, node=0), signal.SIGKILL)
    failure = cluster.result()["outcome"]["failure"]
    assert failure["message"] == "fork server of node 0 was killed by SIGKILL"
    assert cluster.left() == []


@pytest.mark.parametrize("stopped_agent", [False, True])
def test_kill_9_of_the_driver_leaves_nothing(start: Start, stopped_agent: bool) -> None:
    cluster = start()
    cluster.wait_ranks()
    cluster.remember(cluster.ranks[1].ask("spawn"))
    if stopped_agent:
        suspend(cluster.find(AGENT, node=0))
    cluster.driver.kill()
    assert cluster.left() == []


@pytest.mark.parametrize("apart_s", [0.0, 0.002, 0.005, 0.01])
def test_kill_9_of_driver_then_agents_leaves_nothing(start: Start, apart_s: float) -> None:
    """Some agents are killed while they already clean up, since their launcher has exited."""
    cluster = start()
    cluster.wait_ranks()
    cluster.remember(cluster.ranks[1].ask("spawn"))
    agents = [cluster.find(AGENT, node=0), cluster.find(AGENT, node=1)]
    cluster.driver.kill()
    time.sleep(apart_s)
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    assert cluster.left() == []


def test_kill_9_of_all_but_the_ranks_at_once_leaves_no_rank(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    fork_servers = [cluster.find(FORK_SERVER, node=n) for n in (0, 1)]
    agents = [cluster.find(AGENT, node=n) for n in (0, 1)]
    above = [
        *fork_servers,
        *agents,
        cluster.driver.pid,
    ]  # upwards, so that none lives to clean up after another
    for pid in above:
        suspend(pid)
    for pid in above:
        os.kill(pid, signal.SIGKILL)
    assert cluster.left() == []


def test_an_interrupted_driver_stops_everything_in_order(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    cluster.remember(cluster.ranks[1].ask("spawn"))
    # As the terminal does it: the signal goes to the whole foreground group, which is the driver's alone.
    os.killpg(cluster.driver.pid, signal.SIGINT)
    result = cluster.result()
    assert cluster.driver.returncode == 130
    assert result["outcome"] == {"exit_code": 130, "failure": None}
    told, _ = events.read_events(cluster.folder)
    assert [e.message for e in told if e.severity == "error"] == []
    assert cluster.left() == []


def test_an_interrupt_while_fork_servers_import(start: Start) -> None:
    cluster = start(worker_module="standin_slow")
    cluster.wait_ranks(2)
    cluster.driver.send_signal(signal.SIGINT)
    assert cluster.result()["outcome"] == {"exit_code": 130, "failure": None}
    assert cluster.left() == []


def test_kill_9_of_the_driver_while_fork_servers_import(start: Start) -> None:
    cluster = start(worker_module="standin_slow")
    cluster.wait_ranks(2)
    cluster.driver.kill()
    assert cluster.left() == []


def test_a_failure_on_one_node_while_the_other_imports(start: Start) -> None:
    cluster = start(worker_module="standin_slow")
    cluster.wait_ranks(2)
    cluster.wait_event(
        "generation_started"
    )  # before that it is no failure: another fork server takes its place
    os.kill(min(cluster.ranks), signal.SIGKILL)
    failure = cluster.result()["outcome"]["failure"]
    assert failure["message"].startswith("fork server of node ")
    assert failure["message"].endswith(" was killed by SIGKILL")
    assert cluster.left() == []


def test_a_second_interrupt_does_not_wait(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    assert cluster.ranks[0].ask("deaf") == "deaf"
    interrupted_at = time.time()
    os.kill(cluster.driver.pid, signal.SIGINT)
    cluster.ranks[1].wait_end()  # the first one has come through
    os.kill(cluster.driver.pid, signal.SIGINT)
    result = cluster.result()
    assert cluster.driver.returncode == 130
    assert result["end"] - interrupted_at < 1.5  # the grace is 2 s
    assert cluster.left() == []


def test_a_stopped_agent_does_not_hold_up_the_end(start: Start) -> None:
    cluster = start()
    cluster.wait_ranks()
    suspend(cluster.find(AGENT, node=1))
    killed_at = time.time()
    os.kill(cluster.ranks[0].pid, signal.SIGKILL)
    result = cluster.result()
    assert result["outcome"]["failure"]["message"] == "rank 0 on node 0 was killed by SIGKILL"
    assert result["end"] - killed_at < 10  # 4 s on a quiet machine; the agent never answers
    assert cluster.left() == []


def test_a_worker_module_that_cannot_be_imported(start: Start) -> None:
    cluster = start(worker_module="no_such_worker")
    failure = cluster.result()["outcome"]["failure"]
    assert failure["rank"] is None
    assert failure["message"].startswith("fork server of node ")
    assert failure["tail"].endswith("ModuleNotFoundError: No module named 'no_such_worker'")


def test_no_rank_is_forked_after_cuda_was_initialised(start: Start) -> None:
    cluster = start(worker_module="standin_cuda")
    failure = cluster.result()["outcome"]["failure"]
    assert failure["tail"].endswith("importing standin_cuda initialised CUDA: no rank could use it")
    assert cluster.left() == []


def test_a_tick_that_raises_leaves_nothing(start: Start) -> None:
    cluster = start(quiet=True)
    cluster.wait_ranks()
    cluster.remember(cluster.ranks[0].ask("spawn"))
    (cluster.folder.path / "break").touch()
    assert cluster.driver.wait(timeout=10) == 1
    assert cluster.left() == []


def test_a_port_in_use_is_bad_input(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        cluster = start(port=port)
        result = cluster.result()
    assert cluster.driver.returncode == 2
    assert result["error"].startswith(f"error: port {port} is in use\n  hint: ")
    assert not cluster.folder.logs.exists()
