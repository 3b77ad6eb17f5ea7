"""Agents of a check by themselves: what they start, what they reply, and that nothing of them outlives anybody."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seatrial.base.errors import InputError
from seatrial.check.blame.rounds import Round
from seatrial.check.live import ib_pair
from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import AgentPool, Reply
from seatrial.check.live.hosts import LOOPBACK, SSH, Host

pytestmark = pytest.mark.cluster

_MARK = "SEATRIAL_TEST_CHECK"
WITHIN_S = 30.0
FIRST = msg.RunRanks(
    ranks=[0],
    gpus=[0],
    world_size=2,
    device="cpu",
    backend="gloo",
    store=None,
    listen=LOOPBACK,
    interface=None,
    toward=LOOPBACK,
    flows=[[0, 1, 0], [1, 0, 1]],
    sizes=[65536],
    durations=msg.Durations(flow_s=0.3, sum_s=0.1, stall_s=20.0),
    hca=None,
)


@dataclass(frozen=True)
class Dance(msg.Order[msg.Clock]):
    """Of another version."""

    op = "dance"


@pytest.fixture
def mark() -> Iterator[str]:
    """What marks the processes of a test; none may be left at its end."""
    made = uuid.uuid4().hex
    yield made
    left = living(made)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def living(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            marked = entry.name.isdigit() and f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes()
            if marked and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(int(entry.name))
    return found


def wait_gone(mark: str) -> None:
    """Until nothing with this mark is alive; each wait is for the end of one of them."""
    until = time.monotonic() + WITHIN_S
    while left := living(mark):
        assert time.monotonic() < until, left
        try:
            handle = os.pidfd_open(left[0])
        except ProcessLookupError:
            continue
        try:
            select.select([handle], [], [], max(0.0, until - time.monotonic()))
        finally:
            os.close(handle)


def host(mark: str, *prefix: str) -> Host:
    return Host("node", LOOPBACK, prefix, environment={_MARK: mark})


def ask(agent_pool: AgentPool, order: msg.Order[msg.Answer], limit_s: float = WITHIN_S) -> Reply[msg.Answer]:
    return agent_pool.ask({(0, 0): order}, limit_s=limit_s)[0, 0]


def test_tools_end_hang_and_are_absent(mark: str) -> None:
    with AgentPool([host(mark)]) as agent_pool:
        assert agent_pool.greet(WITHIN_S)[0].alive
        ended = ask(agent_pool, msg.RunTool(["sh", "-c", "echo out; echo err >&2; exit 3"]))
        assert ended.value is not None
        assert (ended.value.rc, ended.value.out, ended.value.err) == (3, "out\n", "err\n")
        assert ask(agent_pool, msg.RunTool(["no-such-tool"])).value == msg.ToolResult(None)
        begin = time.monotonic()
        # What it has started hangs as well, and holds its output open.
        hung = ask(agent_pool, msg.RunTool(["sh", "-c", "echo at work >&2; sleep 600 & wait"]), 1.0)
        assert (hung.value, hung.alive) == (None, True)
        assert hung.problem == "did not end within 1 s; stderr: at work"
        assert time.monotonic() - begin < WITHIN_S
        strange = ask(agent_pool, Dance())
        assert (strange.alive, "unknown order" in strange.problem) == (True, True)
        assert ask(agent_pool, msg.Ping()).alive


def test_a_server_is_reported_once_it_listens(mark: str) -> None:
    serve = "import socket, sys; s = socket.create_server(('', int(sys.argv[1]))); s.accept()"
    heard: list[int] = []
    with AgentPool([host(mark)]) as agent_pool:
        agent_pool.greet(WITHIN_S)
        offered = ask(agent_pool, msg.FindPorts(1)).value
        assert offered is not None
        (port,) = offered.ports
        argv = [sys.executable, "-c", serve, str(port)]

        def connect(key: tuple[int, int], port: int) -> dict[tuple[int, int], msg.Order[Any]]:
            heard.append(port)
            return {(0, 1): msg.Reach([msg.Endpoint(LOOPBACK, port)])}

        orders: dict[tuple[int, int], msg.Order[Any]] = {(0, 0): msg.RunTool(argv, port)}
        replies = agent_pool.ask(orders, limit_s=WITHIN_S, listening=connect)
    assert heard == [port]
    assert {key: reply.value is not None for key, reply in replies.items()} == {(0, 0): True, (0, 1): True}


def test_a_rank_whose_partner_never_comes_fails_in_time(mark: str) -> None:
    order = replace(FIRST, durations=replace(FIRST.durations, stall_s=3.0))
    with AgentPool([host(mark)]) as agent_pool:
        agent_pool.greet(WITHIN_S)
        ask(agent_pool, msg.Prepare(), 120.0)
        reply = agent_pool.ask({(0, 0): order}, limit_s=60.0, listening=lambda key, port: {})[0, 0]
        assert reply.value is not None
        (rank,) = reply.value.ranks
        assert rank.failed == "no data received for 3 s"
        assert ask(agent_pool, msg.Ping()).alive


def test_when_one_rank_is_killed_the_other_is_called_back(mark: str) -> None:
    def killed(key: tuple[int, int], port: int) -> dict[tuple[int, int], msg.RunRanks]:
        store = msg.Endpoint(LOOPBACK, port)
        return {(1, 0): replace(FIRST, ranks=[1], store=store, backend="no-such-backend")}

    with AgentPool([host(mark), host(mark)]) as agent_pool:
        agent_pool.greet(WITHIN_S)
        agent_pool.ask({(n, 0): msg.Prepare() for n in (0, 1)}, limit_s=120.0)
        begin = time.monotonic()
        replies = agent_pool.ask(
            {(0, 0): FIRST},
            limit_s=120.0,
            listening=killed,
            failed=lambda reply: reply.value is None or bool(reply.value.ranks[0].failed),
        )
        assert time.monotonic() - begin < FIRST.durations.stall_s
    first, second = replies[0, 0].value, replies[1, 0].value
    assert first is not None
    assert second is not None
    assert first.ranks[0].failed == "cancelled: its partner failed"
    assert "no-such-backend" in second.ranks[0].failed.lower()


# What perftest does as far as its callers see: the server waits for its client, both print the result.
STANDIN = """\
#!{python}
import socket, sys
words = sys.argv[1:]
device, port = words[words.index("-d") + 1], int(words[words.index("-p") + 1])
if words[-2] == "-p":
    with socket.create_server(("", port)) as server:
        server.accept()[0].close()
else:
    socket.create_connection((words[-1], port)).close()
    if device == "mlx5_1":
        sys.exit(" Port number 1 state is Down")
rule = "-" * 80
print("                    RDMA_Write BW Test\\n Device         :", device, "\\n Number of qps   : 4\\n" + rule)
print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
print(" 8388608    52345            0.00               391.83             0.005839\\n" + rule)
"""


def test_ib_write_bw_runs_over_all_rails_at_once_and_both_ways(mark: str, tmp_path: Path) -> None:
    script = tmp_path / "ib_write_bw"
    script.write_text(STANDIN.format(python=sys.executable))
    script.chmod(0o755)
    environment = {_MARK: mark, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    hosts = [Host(f"node{n}", LOOPBACK, environment=environment) for n in range(4)]
    rails = np.array([[True, True], [True, False]])
    round_ = Round(1, "test", np.array([[0, 1], [2, 3]]), rails, np.array([False, False]), loaded=False)
    with AgentPool(hosts) as agent_pool:
        agent_pool.greet(WITHIN_S)
        found = {
            (k, r): (v, told)
            for k, r, v, told in ib_pair.rates(agent_pool, hosts, ["mlx5_0/1", "mlx5_1/1"], round_, [0, 1])
        }
    assert sorted(found) == [(0, 0), (0, 1), (1, 0)]
    assert found[0, 0] == found[1, 0] == (391.83, ())
    # The port that is down is its host's affair; the rail was not measured.
    value, told = found[0, 1]
    assert np.isnan(value)
    assert {(f.code, f.target.node) for f in told} == {("NET001", "node0"), ("NET001", "node1")}


@pytest.mark.parametrize("how", ["end of its orders", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_an_agent(mark: str, how: str) -> None:
    """Neither a tool, nor what it has put into a session of its own, nor ranks."""
    agent_pool = AgentPool([host(mark)])
    with agent_pool:
        agent_pool.greet(WITHIN_S)
        ask(agent_pool, msg.Prepare(), 120.0)
        line = agent_pool.lines[0]
        assert line.process is not None
        tool = msg.RunTool(["sh", "-c", "setsid sleep 600 & sleep 600"])
        for order in (tool, FIRST):
            agent_pool.send(0, order, 600.0)
        until = time.monotonic() + WITHIN_S
        while len(living(mark)) < 6:  # agent, what forks ranks, a rank, sh, two of sleep
            assert time.monotonic() < until, living(mark)
            agent_pool._pump(time.monotonic() + 0.05)
        if how == "end of its orders":
            line.leave()
        else:
            os.kill(line.process.pid, getattr(signal, how))
        line.process.wait(timeout=WITHIN_S)
        if (
            how != "SIGKILL"
        ):  # which leaves it no time for what has left its group; its agent pool does it then
            wait_gone(mark)
    wait_gone(mark)


def test_more_hosts_than_there_can_be_pipes_are_bad_input(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 256))
    with pytest.raises(InputError, match="may have 256 files open"), AgentPool([host(mark)] * 1000):
        raise AssertionError("started")


def test_what_a_login_prints_does_not_matter(mark: str) -> None:
    noisy = ("sh", "-c", 'echo "Welcome {to} node7"; echo "{}"; exec "$@"', "sh")
    with AgentPool([host(mark, *noisy)]) as agent_pool:
        assert agent_pool.greet(WITHIN_S)[0].alive
        assert ask(agent_pool, msg.Ping()).alive


# An agent of another version: it says more, and answers otherwise.
NEWER = """\
import json, sys
hello = {"version": "9", "python": "3", "pid": 1, "host": "a", "machine": "b", "port": 2, "gpus": 0, "rdma": [], "new": 1}
print(json.dumps({"hello": hello}), flush=True)
for line in sys.stdin:
    number = json.loads(line)["ask"]["id"]
    print(json.dumps({"done": {"id": number, "answer": {"clock": {"clock": 1.0, "zone": "UTC"}}}}), flush=True)
"""


def test_an_agent_of_another_version_can_say_which(mark: str) -> None:
    with AgentPool([host(mark, sys.executable, "-c", NEWER)]) as agent_pool:
        greeting = agent_pool.greet(WITHIN_S)[0]
        assert greeting.value is not None
        assert greeting.value.version == "9"
        reply = ask(agent_pool, msg.Ping())
    assert (reply.value, reply.alive) == (None, True)
    assert reply.problem == "an unknown reply: clock: `zone` is unknown"


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        (
            ("sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"),
            "exit code 255: Permission denied",
        ),
        (("no-such-launcher",), "cannot start no-such-launcher"),
        ((*SSH, "no-such-host.invalid"), "no-such-host.invalid"),
        (("sh", "-c", "kill -9 $$"), "was killed by SIGKILL"),
    ],
)
def test_the_reason_is_reported_if_an_agent_does_not_start(
    mark: str, prefix: tuple[str, ...], words: str
) -> None:
    with AgentPool([host(mark, *prefix), host(mark)]) as agent_pool:
        first, second = agent_pool.greet(WITHIN_S).values()
        assert (first.alive, second.alive) == (False, True)
        assert words in first.problem
        replies = agent_pool.ask({(n, 0): msg.Ping() for n in (0, 1)}, limit_s=WITHIN_S)
        assert [r.alive for r in replies.values()] == [False, True]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_check(mark: str, signum: signal.Signals) -> None:
    script = Path(__file__).parent / "check_driver.py"
    with subprocess.Popen([sys.executable, str(script), mark], stdout=subprocess.PIPE, text=True) as check:
        assert check.stdout is not None
        for line in check.stdout:
            if line.startswith("pairs"):
                check.send_signal(signum)
                break
        code = check.wait(timeout=WITHIN_S)
    assert code == (130 if signum == signal.SIGINT else -signum)
    wait_gone(mark)
