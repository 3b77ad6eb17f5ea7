"""The processes of one node: begun, parked, replaced, killed, and told of as what they were."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from node_processes import Node, node

from seatrial.base import process
from seatrial.record import messages as msg

pytestmark = pytest.mark.cluster  # slow together

__all__ = ["node"]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While nobody opens it to write, importing the worker's module takes."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    monkeypatch.setenv("STANDIN_GATE", str(path))
    return path


def alive(pid: int) -> bool:
    return pid in process.living()


def test_ranks_start_and_are_reported(node: Node) -> None:
    node.start(1, {0: ["beat"], 1: [{"beat": 7}]})
    node.pump.until(lambda: node.workers.workers[0].step and node.workers.workers[1].step)
    assert node.state("running", "running")()
    assert node.kinds(1, 10) == ["started", "beat"]  # of two processes: of the rank and of the fork server
    assert node.values("started", 11)["in_place"] is False
    assert node.workers.workers[1].step == 7
    assert node.workers.fork_server_ready
    pid = node.workers.workers[0].pid
    assert pid is not None
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"STANDIN" not in environment


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: bound or not is the same")
def test_a_rank_with_a_gpu_is_bound_to_the_cpus_near_it(node: Node) -> None:
    """From its first instruction, so that what it allocates is near too."""
    node.workers.spec = dataclasses.replace(node.spec, device="cuda")
    every = os.sched_getaffinity(0)
    one = frozenset({max(every)})
    node.workers.cpus = {0: one, 1: frozenset()}
    node.start(1, {0: ["beat"], 1: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step and node.workers.workers[1].step)
    bound, free = (node.workers.workers[local].pid for local in (0, 1))
    assert bound is not None
    assert free is not None
    assert (os.sched_getaffinity(bound), os.sched_getaffinity(free)) == (one, every)


def test_cpus_that_were_taken_away_do_not_stop_a_rank(node: Node) -> None:
    node.workers.spec = dataclasses.replace(node.spec, device="cuda")
    node.workers.cpus = {0: frozenset({1023})}
    node.start(1, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)
    assert "could not bind this rank" in node.spec.rank_log(1, 10).read_text()


def test_a_parked_rank_goes_on_in_its_process(node: Node) -> None:
    node.start(1, {0: [{"beat": 17}, "park"], 1: ["park"]})
    node.pump.until(node.state("parked", "parked"))
    before = {local: w.pid for local, w in node.workers.workers.items()}
    node.start(2, {0: [], 1: ["beat"]})
    assert node.values("started", 10)["in_place"] is True
    first = node.workers.workers[0]
    assert (first.step, first.generation, first.state) == (0, 2, "running"), (
        "step 17 was of another generation"
    )
    assert first.log == node.spec.rank_log(2, 10)
    node.pump.until(lambda: node.workers.workers[1].step)
    assert {local: w.pid for local, w in node.workers.workers.items()} == before


def test_where_it_may_not_go_on_a_parked_rank_is_replaced(node: Node) -> None:
    node.start(1, {0: ["park"]})
    node.pump.until(node.state("parked"))
    old = node.workers.workers[0].pid
    assert old is not None
    node.start(2, {0: ["beat"]}, in_place=False)
    node.pump.until(lambda: node.workers.workers[0].step)
    assert node.workers.workers[0].pid != old
    node.pump.until(lambda: not alive(old))
    node.pump.settle()
    assert "exited" not in node.kinds(2, 10), "its end says nothing of its successor"


def test_leave_order_reaches_ranks_that_are_still_starting(node: Node) -> None:
    """Also where their start waits for snapshots; the ranks of the next generation are not meant."""
    node.start(1, {0: [], 1: []})
    node.workers.leave(msg.Yield(1, "yielded"))
    node.pump.until(node.state("finished", "finished"))
    assert {w.how for w in node.workers.workers.values()} == {"yielded"}
    node.workers.leave(msg.Yield(2, "preempted"))
    node.start(2, {0: [], 1: []})
    node.pump.until(node.state("finished", "finished"))
    assert {w.how for w in node.workers.workers.values()} == {"preempted"}
    assert node.values("started", 10)["in_place"] is True
    node.start(3, {0: ["beat"], 1: ["beat"]}, in_place=False)
    node.pump.until(lambda: node.workers.workers[0].step and node.workers.workers[1].step)
    node.pump.settle()
    assert node.state("running", "running")()


def test_what_is_parked_where_no_rank_is_wanted_ends(node: Node) -> None:
    """The last node of a smaller layout has fewer ranks."""
    node.start(1, {0: ["park"], 1: ["park"]})
    node.pump.until(node.state("parked", "parked"))
    node.start(2, {0: ["beat"]})
    node.pump.until(node.state("running", "exited"))
    assert node.kinds(1, 11)[-1] == "exited"
    assert node.values("exited", 11)["signalled"] is not None, "it is no failure"


def test_a_disconnected_parked_rank_gets_no_new_generation(node: Node) -> None:
    node.start(1, {0: ["park", "close"]})
    node.pump.until(lambda: node.workers.workers[0].state == "parked" and not node.workers.workers[0].listens)
    old = node.workers.workers[0].pid
    assert old is not None
    node.start(2, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)
    node.pump.until(lambda: not alive(old))


def test_a_killed_rank_is_reported_with_its_signal(node: Node) -> None:
    node.start(1, {0: [{"die": signal.SIGKILL}], 1: [{"exit": 3}]})
    node.pump.until(node.state("exited", "exited"))
    killed, ended = node.values("exited", 10), node.values("exited", 11)
    assert (killed["status"], killed["signalled"], killed["ran"]) == (-9, None, True)
    assert (ended["status"], ended["signalled"], ended["never_began"]) == (3, None, False)


def test_the_last_messages_are_received_before_the_exit(node: Node) -> None:
    node.start(1, {0: ["beat", {"finish": "done"}, {"exit": 0}]})
    node.pump.until(node.state("exited"))
    assert node.kinds(1, 10) == ["started", "beat", "finished", "exited"]
    assert node.values("exited", 10)["ran"] is False
    assert node.workers.workers[0].how == "done"


@pytest.mark.cluster  # slow
def test_ranks_park_on_stop_and_unresponsive_ones_are_killed(node: Node) -> None:
    node.start(1, {0: ["beat"], 1: ["deaf", "beat"]})
    node.pump.until(lambda: node.workers.workers[0].step and node.workers.workers[1].step)
    began = time.monotonic()
    node.workers.stop(1, 0.3, park=True)
    node.pump.until(node.state("parked", "exited"))
    assert time.monotonic() - began >= 0.3
    assert node.values("exited", 11)["signalled"] is not None


def test_a_stop_of_an_older_generation_ends_no_newer_worker(node: Node) -> None:
    node.start(2, {0: [], 1: ["park"]})
    node.pump.until(node.state("running", "parked"))
    node.workers.stop(1, 0.0, park=True)
    assert node.workers.deadline is None, "nobody is waited for"
    assert node.workers.at_work(1) == []
    node.workers.stop(2, 0.0, park=True)
    node.pump.until(node.state("exited", "parked"))
    assert node.values("exited", 10)["signalled"] is not None


def test_reports_of_an_earlier_generation_do_not_count(node: Node) -> None:
    stale = {"parked": {"generation": 1, "step": 9, "message": "late"}}
    node.start(2, {0: [{"say": stale}, "beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)
    node.pump.until(lambda: node.kinds(2, 10) == ["started", "beat"])
    assert node.workers.workers[0].runs


# -- the fork server


def test_a_stop_before_any_rank_exists_ends_at_once(gate: Path, node: Node) -> None:
    """Importing torch takes seconds. What was asked for meanwhile is called off, and the import goes on."""
    node.start(1, {0: ["beat"], 1: ["beat"]})
    node.workers.stop(1, 5.0, park=True)
    assert node.state("exited", "exited")()
    assert all(node.values("exited", rank)["never_began"] for rank in (10, 11))
    assert all(w.status != 0 for w in node.workers.workers.values()), "nobody has left in order"
    signalled = [w.signalled is not None for w in node.workers.workers.values()]
    assert all(signalled), "killed by us: the agent must not say that they still run"
    fork_server = node.workers.fork_server
    node.start(2, {0: ["beat"], 1: ["beat"]})
    assert node.workers.fork_server == fork_server
    gate.write_text("")
    node.pump.until(lambda: node.workers.workers[0].step and node.workers.workers[1].step)
    node.pump.until(lambda: node.kinds(2, 11) == ["started", "beat"])
    assert node.kinds(1, 10) == ["exited"], "nobody has begun it"
    wanted = {w.pid for w in node.workers.workers.values()} | {fork_server}
    node.pump.until(lambda: process.descendants(os.getpid()) - node.before == wanted)


def test_start_right_after_fork_server_kill_reports_a_failure(node: Node) -> None:
    node.start(1, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)
    old = node.workers.fork_server
    assert old is not None
    os.kill(old, signal.SIGKILL)
    os.waitid(os.P_PID, old, os.WEXITED | os.WNOWAIT)  # it is dead, and we do not know yet
    node.start(2, {0: ["beat"]}, in_place=False)
    node.pump.until(lambda: [k for k, *_ in node.told if k == "fork_server_exited"])
    assert "exited" in node.kinds(2, 10)
    values = node.values("fork_server_exited")
    assert values["status"] == -9, "a failure of generation 2, which is told"
    node.start(3, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)


def test_killed_fork_server_takes_its_ranks_along_and_restarts(node: Node) -> None:
    node.start(1, {0: ["beat"], 1: ["park"]})
    node.pump.until(node.state("running", "parked"))
    node.pump.until(lambda: node.workers.workers[0].step)
    old = node.workers.fork_server
    assert old is not None
    os.kill(old, signal.SIGKILL)
    node.pump.until(node.state("exited", "exited"))
    node.pump.until(lambda: [k for k, *_ in node.told if k == "fork_server_exited"])
    assert node.values("exited", 10)["signalled"] is not None, (
        "it died with the fork server, which is to blame"
    )
    assert node.workers.fork_server not in (None, old), "for the next start, or a spare that waits"
    node.pump.until(lambda: node.workers.fork_server_ready)
    assert [k for k, *_ in node.told].count("fork_server_ready") == 2
    node.start(2, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)


def test_unimportable_module_is_reported_and_not_retried_forever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("STANDIN_BROKEN", "1")
    node: Node = request.getfixturevalue("node")
    node.start(1, {0: ["beat"]})
    node.pump.until(lambda: [k for k, *_ in node.told if k == "fork_server_exited"])
    assert node.values("fork_server_exited")["status"] == 1
    assert node.values("exited", 10)["never_began"]
    assert node.workers.fork_server is None
    assert "as the test asked" in node.spec.fork_server_log.read_text()


def test_a_fork_server_without_memory_is_reported_as_a_failure(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.pump.until(lambda: node.workers.fork_server_ready)
    os.kill(node.workers.fork_server or 0, signal.SIGKILL)

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(process, "fork", refuse)
        node.pump.until(lambda: [k for k, *_ in node.told if k == "fork_server_exited"])
        node.start(1, {0: ["beat"]})
        values = node.values("exited", 10)
        assert (values["status"], values["never_began"]) == (1, False)
    node.start(2, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)


# -- protocol errors


@pytest.mark.parametrize("values", [{"forked": {"pid": 1}}, {"exited": 3}, {"started": {}}])
def test_a_fork_server_with_a_protocol_error_is_replaced(node: Node, values: dict[str, Any]) -> None:
    node.pump.until(lambda: node.workers.fork_server_ready)
    channel = node.workers._fork_server_channel
    assert channel is not None
    channel.receive = lambda: [values]  # type: ignore[method-assign]
    node.workers._on_fork_server()
    node.pump.until(lambda: [k for k, *_ in node.told if k == "fork_server_exited"])
    assert node.values("fork_server_exited")["status"] == -signal.SIGKILL
    node.start(1, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)


@pytest.mark.parametrize(
    "action",
    [
        {"raw": "no JSON\n"},
        {"raw": "[1]\n"},
        {"say": {"beat": 3}},
        {"say": {"beat": {"generation": 1, "step": "3", "first": False, "seconds": 0.1}}},
        {"say": {"beat": {"generation": 1, "step": 3, "first": False, "seconds": 0.1, "loss": 1}}},
        {"say": {"held": {}}},
        {"say": {}},
        {"say": {"finished": {"generation": 1}}},
        {"say": {"parked": None}},
        {"say": {"finding": {"generation": 1, "signal": None, "message": ""}}},
    ],
    ids=json.dumps,
)
def test_only_the_rank_with_a_protocol_error_is_killed(node: Node, action: Any) -> None:
    node.start(1, {0: [action], 1: ["beat"]})
    node.pump.until(lambda: node.workers.workers[1].step)
    node.pump.until(node.state("exited", "running"))
    values = node.values("exited", 10)
    assert values["status"] != 0
    assert values["signalled"] is None, "it counts as its own failure"


def test_unknown_connections_are_closed(node: Node) -> None:
    node.start(1, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)
    worker = node.workers.workers[0]
    said = [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"hello": {"token": "guess"}}\n',
        b'{"hello": [1, 2]}\n',
        b'{"hello": {"token": null}}\n',
        json.dumps({"hello": {"token": worker.token}}).encode() + b"\n",  # somebody has read its environment
        b"",
    ]
    for text in said:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + node.workers._name)
            sock.sendall(text)
            sock.shutdown(socket.SHUT_WR)
            sock.setblocking(False)

            def closed(sock: socket.socket = sock) -> bool:
                try:
                    return sock.recv(1000) == b""
                except BlockingIOError:
                    return False

            node.pump.until(closed)
    assert worker.runs
    assert worker.listens


RECORD = {"time": 1.5, "generation": 1, "kind": "sample", "severity": "info", "message": "m"}


@pytest.mark.parametrize("last", [{"exit": 0}, {"die": 9}])
def test_last_records_of_a_rank_are_delivered_before_its_exit(node: Node, last: Any) -> None:
    records: list[Any] = [{"say": {"record": RECORD | {"rank": n}}} for n in range(200)]
    node.start(1, {0: [*records, last]})
    node.pump.until(lambda: "exited" in node.kinds(1, 10))
    of_rank = [(kind, values) for kind, _, rank, values in node.told if rank == 10 and kind != "started"]
    assert [values["rank"] for kind, values in of_rank if kind == "record"] == list(range(200))
    assert of_rank[-1][0] == "exited"


def test_a_rank_that_records_an_invalid_event_is_killed(node: Node) -> None:
    node.start(1, {0: [{"say": {"record": RECORD | {"time": "now"}}}]})
    node.pump.until(lambda: "exited" in node.kinds(1, 10))
    assert "record" not in node.kinds(1, 10)
