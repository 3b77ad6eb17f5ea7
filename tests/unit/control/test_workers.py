"""The processes of one node: begun, parked, replaced, killed, and told of as what they were."""

from __future__ import annotations

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


def test_ranks_begin_and_are_told_of(node: Node) -> None:
    node.start(1, {0: ["beat"], 1: [{"beat": 7}]})
    node.pump.until(lambda: node.workers.workers[0].step and node.workers.workers[1].step)
    assert node.state("running", "running")()
    assert node.kinds(1, 10) == ["started", "beat"]  # of two processes: of the rank and of the nursery
    assert node.values("started", 11) == {"in_place": False}
    assert node.workers.workers[1].step == 7
    assert node.workers.nursery_ready
    pid = node.workers.workers[0].pid
    assert pid is not None
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"STANDIN" not in environment


def test_a_parked_rank_goes_on_in_its_process(node: Node) -> None:
    node.start(1, {0: [{"beat": 17}, "park"], 1: ["park"]})
    node.pump.until(node.state("parked", "parked"))
    before = {local: w.pid for local, w in node.workers.workers.items()}
    node.start(2, {0: [], 1: ["beat"]})
    assert node.values("started", 10) == {"in_place": True}
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


def test_what_is_parked_where_no_rank_is_wanted_ends(node: Node) -> None:
    """The last node of a smaller layout has fewer ranks."""
    node.start(1, {0: ["park"], 1: ["park"]})
    node.pump.until(node.state("parked", "parked"))
    node.start(2, {0: ["beat"]})
    node.pump.until(node.state("running", "exited"))
    assert node.kinds(1, 11)[-1] == "exited"
    assert node.values("exited", 11)["signalled"] is not None, "it is no failure"


def test_a_parked_rank_that_has_hung_up_is_not_given_another_leg(node: Node) -> None:
    node.start(1, {0: ["park", "close"]})
    node.pump.until(lambda: node.workers.workers[0].state == "parked" and not node.workers.workers[0].listens)
    old = node.workers.workers[0].pid
    assert old is not None
    node.start(2, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)
    node.pump.until(lambda: not alive(old))


def test_a_killed_rank_is_told_with_its_signal(node: Node) -> None:
    node.start(1, {0: [{"die": signal.SIGKILL}], 1: [{"exit": 3}]})
    node.pump.until(node.state("exited", "exited"))
    killed, ended = node.values("exited", 10), node.values("exited", 11)
    assert (killed["status"], killed["signalled"], killed["ran"]) == (-9, None, True)
    assert (ended["status"], ended["signalled"], ended["never_began"]) == (3, None, False)


def test_last_words_are_heard_before_the_end(node: Node) -> None:
    node.start(1, {0: ["beat", {"finish": "done"}, {"exit": 0}]})
    node.pump.until(node.state("exited"))
    assert node.kinds(1, 10) == ["started", "beat", "finished", "exited"]
    assert node.values("exited", 10)["ran"] is False
    assert node.workers.workers[0].how == "done"


def test_ranks_park_when_they_are_told_to_stop_and_the_deaf_are_killed(node: Node) -> None:
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


def test_what_was_said_of_an_earlier_generation_does_not_count(node: Node) -> None:
    stale = {"parked": {"generation": 1, "step": 9, "message": "late"}}
    node.start(2, {0: [{"say": stale}, "beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)
    assert node.kinds(2, 10) == ["started", "beat"]
    assert node.workers.workers[0].runs


# -- the nursery


def test_a_stop_before_there_is_a_rank_waits_for_nobody(gate: Path, node: Node) -> None:
    """Importing torch takes seconds. What was asked for meanwhile is called off, and the import goes on."""
    node.start(1, {0: ["beat"], 1: ["beat"]})
    node.workers.stop(1, 5.0, park=True)
    assert node.state("exited", "exited")()
    assert all(node.values("exited", rank)["never_began"] for rank in (10, 11))
    assert all(w.status != 0 for w in node.workers.workers.values()), "nobody has left in order"
    signalled = [w.signalled is not None for w in node.workers.workers.values()]
    assert all(signalled), "killed by us: the agent must not say that they still run"
    nursery = node.workers.nursery
    node.start(2, {0: ["beat"], 1: ["beat"]})
    assert node.workers.nursery == nursery
    gate.write_text("")
    node.pump.until(lambda: node.workers.workers[0].step and node.workers.workers[1].step)
    assert node.kinds(2, 11) == ["started", "beat"]
    assert node.kinds(1, 10) == ["exited"], "nobody has begun it"
    wanted = {w.pid for w in node.workers.workers.values()} | {nursery}
    node.pump.until(lambda: process.descendants(os.getpid()) - node.before == wanted)


def test_a_start_right_after_the_nursery_was_killed_is_not_lost(node: Node) -> None:
    node.start(1, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)
    old = node.workers.nursery
    assert old is not None
    os.kill(old, signal.SIGKILL)
    os.waitid(os.P_PID, old, os.WEXITED | os.WNOWAIT)  # it is dead, and we do not know yet
    node.start(2, {0: ["beat"]}, in_place=False)
    node.pump.until(lambda: [k for k, *_ in node.told if k == "nursery_exited"])
    assert "exited" in node.kinds(2, 10)
    values = node.values("nursery_exited")
    assert (values["status"], values["signalled"]) == (-9, None), "a failure of generation 2, which is told"
    node.start(3, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)


def test_a_nursery_that_is_killed_takes_its_ranks_along_and_comes_again(node: Node) -> None:
    node.start(1, {0: ["beat"], 1: ["park"]})
    node.pump.until(node.state("running", "parked"))
    node.pump.until(lambda: node.workers.workers[0].step)
    old = node.workers.nursery
    assert old is not None
    os.kill(old, signal.SIGKILL)
    node.pump.until(node.state("exited", "exited"))
    node.pump.until(lambda: [k for k, *_ in node.told if k == "nursery_exited"])
    assert node.values("exited", 10)["signalled"] is not None, "it died with the nursery, which is to blame"
    assert node.workers.nursery not in (None, old), "for the next start, or a spare that waits"
    node.pump.until(lambda: node.workers.nursery_ready)
    assert [k for k, *_ in node.told].count("nursery_ready") == 2
    node.start(2, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)


def test_a_module_that_cannot_be_imported_is_told_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("STANDIN_BROKEN", "1")
    node: Node = request.getfixturevalue("node")
    node.start(1, {0: ["beat"]})
    node.pump.until(lambda: [k for k, *_ in node.told if k == "nursery_exited"])
    assert node.values("nursery_exited")["status"] == 1
    assert node.values("exited", 10)["never_began"]
    assert node.workers.nursery is None
    assert "as the test asked" in node.spec.nursery_log.read_text()


def test_no_memory_for_a_nursery_is_a_failure_that_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.pump.until(lambda: node.workers.nursery_ready)
    os.kill(node.workers.nursery or 0, signal.SIGKILL)

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(process, "fork", refuse)
        node.pump.until(lambda: [k for k, *_ in node.told if k == "nursery_exited"])
        node.start(1, {0: ["beat"]})
        values = node.values("exited", 10)
        assert (values["status"], values["never_began"]) == (1, False)
    node.start(2, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)


# -- who talks nonsense


@pytest.mark.parametrize(
    "action",
    [
        {"raw": "no JSON\n"},
        {"raw": "[1]\n"},
        {"say": {"beat": 3}},
        {"say": {"beat": {"generation": 1, "step": "3", "first": False}}},
        {"say": {"finished": {"generation": 1}}},
        {"say": {"parked": None}},
        {"say": {"finding": {"generation": 1, "signal": None, "message": ""}}},
    ],
    ids=json.dumps,
)
def test_a_rank_that_talks_nonsense_is_killed_and_nobody_else(node: Node, action: Any) -> None:
    node.start(1, {0: [action], 1: ["beat"]})
    node.pump.until(lambda: node.workers.workers[1].step)
    node.pump.until(node.state("exited", "running"))
    values = node.values("exited", 10)
    assert values["status"] != 0
    assert values["signalled"] is None, "it counts as its own failure"


def test_strangers_are_not_heard(node: Node) -> None:
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
