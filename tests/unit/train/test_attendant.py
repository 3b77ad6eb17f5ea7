"""What a rank's attendant tells and answers, and what it breaks."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from seatrial.base import process
from seatrial.base.errors import RunFailed
from seatrial.base.lines import Channel
from seatrial.train.attendant import Attendant
from seatrial.train.companion import Companion
from seatrial.train.peers import break_connections, teardown, wait_for_store

TIMEOUT_S = 20.0


def hear(channel: Channel, kind: str) -> Any:
    """The next message, which must be of this kind."""
    messages: list[dict[str, Any]] = []
    while not messages:
        assert select.select([channel], [], [], TIMEOUT_S)[0], f"no {kind}"
        messages = channel.receive()
    (message,) = messages
    return message[kind]


@pytest.fixture
def pair() -> Iterator[tuple[Attendant, Channel]]:
    """An attendant of this process, and its agent's end."""
    ours, theirs = Channel.pair()
    attendant = Attendant(theirs, "secret")
    assert hear(ours, "hello") == {"pid": os.getpid(), "token": "secret"}
    yield attendant, ours
    ours.send({"exit": 0})  # otherwise the end of the channel would be the end of this process
    while (order := attendant.next_order()) is not None and "exit" not in order:
        pass
    ours.close()
    attendant.join()
    theirs.close()


def leg(generation: int) -> dict[str, Any]:
    return {"leg": {"generation": generation}}


def test_it_is_what_the_loop_asks_for(pair: tuple[Attendant, Channel]) -> None:
    companion: Companion = pair[0]
    assert companion.wants() is None


def test_without_an_agent_there_is_no_attendant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEATRIAL_ATTENDANT", raising=False)
    assert Attendant.from_environment() is None


def test_an_agent_that_is_gone_already_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    monkeypatch.setenv("SEATRIAL_ATTENDANT", f"nobody-{secrets.token_hex(8)}")
    monkeypatch.setenv("SEATRIAL_ATTENDANT_TOKEN", "secret")
    with pytest.raises(RunFailed, match="agent of this node is gone"):
        Attendant.from_environment()
    assert signal.getsignal(signal.SIGUSR2) is before  # nothing was registered for nobody


def test_what_it_tells_carries_the_generation(pair: tuple[Attendant, Channel]) -> None:
    attendant, agent = pair
    agent.send(leg(4))
    assert attendant.next_order() == leg(4)
    attendant.beat(7, 0.5, True)
    assert hear(agent, "beat") == {"step": 7, "seconds": 0.5, "generation": 4, "first": True}
    attendant.finding("nonfinite", 7, "inf", {"loss": None}, (3,))
    finding = hear(agent, "finding")
    assert (finding["generation"], finding["blamed"], finding["signal"]) == (4, [3], "nonfinite")
    attendant.tell({"snapshot": {"slot": 1}})
    assert hear(agent, "snapshot") == {"slot": 1}
    attendant.parked(7, "gone")
    assert hear(agent, "parked") == {"generation": 4, "step": 7, "message": "gone"}
    agent.send(leg(5))
    attendant.next_order()
    attendant.finished("done", 9)
    assert hear(agent, "finished") == {"generation": 5, "how": "done", "step": 9}


def test_orders_come_one_after_the_other(pair: tuple[Attendant, Channel]) -> None:
    attendant, agent = pair
    agent.send(leg(1))
    agent.send(leg(2))
    assert attendant.next_order() == leg(1)
    assert attendant.next_order() == leg(2)


def answered(agent: Channel) -> None:
    """Everything sent before this has been taken."""
    agent.send({"dump": {"id": 0}})
    hear(agent, "dump")


def test_a_wish_counts_for_its_generation_only(pair: tuple[Attendant, Channel]) -> None:
    attendant, agent = pair
    agent.send(leg(1))
    agent.send({"yield": {"generation": 2, "how": "preempted"}})  # before its leg was taken
    agent.send(leg(2))
    answered(agent)
    attendant.next_order()
    assert attendant.wants() is None
    attendant.next_order()
    assert attendant.wants() == "preempted"
    attendant.finished("preempted", 3)
    assert attendant.wants() is None


def test_an_abandoned_generation_is_known_until_it_is_left(pair: tuple[Attendant, Channel]) -> None:
    attendant, agent = pair
    agent.send(leg(3))
    attendant.next_order()
    agent.send({"abandon": {"generation": 2}})
    answered(agent)
    assert not attendant.abandoned
    agent.send({"abandon": {"generation": 3}})
    answered(agent)
    assert attendant.abandoned
    attendant.parked(1, "abandoned")
    assert not attendant.abandoned


def test_a_leg_abandoned_before_it_began_is_answered_and_not_begun(pair: tuple[Attendant, Channel]) -> None:
    attendant, agent = pair
    agent.send(leg(3))
    agent.send({"abandon": {"generation": 3}})
    answered(agent)
    agent.send(leg(4))
    assert attendant.next_order() == leg(4)
    assert hear(agent, "parked")["generation"] == 3


def test_the_connections_of_an_abandoned_generation_are_broken_again_and_again(
    pair: tuple[Attendant, Channel],
) -> None:
    attendant, agent = pair
    agent.send(leg(1))
    attendant.next_order()
    agent.send({"abandon": {"generation": 1}})
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(2):  # the second one did not exist when the order came
            with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
                other.settimeout(TIMEOUT_S)
                assert client.recv(1) == b""
        attendant.parked(0, "")
        hear(agent, "parked")
        answered(agent)
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
            other.sendall(b"x")
            client.settimeout(TIMEOUT_S)
            assert client.recv(1) == b"x"


def test_a_dump_is_answered_while_the_main_thread_is_busy(pair: tuple[Attendant, Channel]) -> None:
    attendant, agent = pair
    agent.send(leg(6))
    attendant.next_order()
    attendant.beat(2, 0.1, False)
    hear(agent, "beat")
    agent.send({"dump": {"id": 5}})
    answer = hear(agent, "dump")
    assert (answer["id"], answer["generation"], answer["step"]) == (5, 6, 2)
    assert answer["flight"] == []
    assert answer["at"]["in"] == "python"
    assert "thread attendant:" in answer["python"]
    assert "in test_a_dump_is_answered_while_the_main_thread_is_busy" in answer["python"]
    assert "error" not in answer


# -- in a process of its own


def run_rank(body: Callable[[Attendant], int], tmp_path: Path) -> tuple[int, Channel, Path]:
    """Fork a rank whose attendant finds its agent in the environment: pid, the agent's end, the rank's log."""
    name = f"seatrial-test-{os.getpid()}-{secrets.token_hex(4)}"
    log = tmp_path / "rank.log"

    def main() -> int:
        sys.stderr = sys.__stderr__  # pytest has another one
        os.environ.update(SEATRIAL_ATTENDANT=name, SEATRIAL_ATTENDANT_TOKEN="secret")
        attendant = Attendant.from_environment()
        assert attendant is not None
        return body(attendant)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0" + name)
        server.listen(1)
        pid = process.fork(main, log=log)
        agent = Channel(server.accept()[0])
    assert hear(agent, "hello") == {"pid": pid, "token": "secret"}
    return pid, agent, log


def until(agent: Channel, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Ask for dumps until something is as wanted."""
    for _ in range(2000):
        agent.send({"dump": {"id": 1}})
        if wanted(hear(agent, "dump")):
            return
    raise AssertionError("it never was")


def exit_code(pid: int) -> int:
    handle = os.pidfd_open(pid)
    assert select.select([handle], [], [], TIMEOUT_S)[0]
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hang(attendant: Attendant) -> int:
    while True:
        signal.pause()


def test_the_process_ends_with_its_agent(tmp_path: Path) -> None:
    pid, agent, _ = run_rank(hang, tmp_path)
    agent.close()
    assert exit_code(pid) == 1


def test_a_process_that_was_told_to_exit_ends_in_its_own_time(tmp_path: Path) -> None:
    def wait_for_the_end(attendant: Attendant) -> int:
        assert attendant.next_order() == {"exit": 0}
        assert attendant.next_order() is None  # once the agent is gone
        return 7

    pid, agent, _ = run_rank(wait_for_the_end, tmp_path)
    agent.send({"exit": 0})
    agent.close()
    assert exit_code(pid) == 7


def test_an_order_that_makes_no_sense_ends_the_process_rather_than_leave_it_deaf(tmp_path: Path) -> None:
    pid, agent, log = run_rank(hang, tmp_path)
    agent.send({"abandon": "all"})
    assert exit_code(pid) == 1
    agent.close()
    assert "Traceback" in log.read_text()


def test_sigusr2_writes_the_stacks_to_the_log(tmp_path: Path) -> None:
    pid, agent, log = run_rank(hang, tmp_path)
    until(agent, lambda answer: "in hang" in answer["python"])
    os.kill(pid, signal.SIGUSR2)
    until(agent, lambda _: "in hang" in log.read_text())
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    agent.close()


# -- peers


def test_only_connections_are_broken() -> None:
    local, far = socket.socketpair()
    with local, far, socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as accepted:
            assert break_connections() >= 2
            assert client.recv(1) == accepted.recv(1) == b""
        # The one that listens does so still, and so does what is no TCP.
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            local.sendall(b"x")
            assert far.recv(1) == b"x"


def test_teardown_without_groups_does_nothing() -> None:
    assert teardown() >= 0.0
    assert not dist.is_initialized()


def test_a_store_that_listens_late_is_waited_for() -> None:
    tried = threading.Event()

    def listen() -> None:
        tried.wait(TIMEOUT_S)
        server.listen(1)

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        thread = threading.Thread(target=listen)
        thread.start()

        def refused_once() -> bool:
            tried.set()
            return False

        wait_for_store("127.0.0.1", port, timeout_s=TIMEOUT_S, stop=refused_once)
        thread.join()
        assert tried.is_set()
    with pytest.raises(ConnectionError, match=f"no store at 127.0.0.1:{port}: .*refused"):
        wait_for_store("127.0.0.1", port, timeout_s=TIMEOUT_S, stop=lambda: True)
    with pytest.raises(ConnectionError, match="no store"):
        wait_for_store("127.0.0.1", port, timeout_s=0.0)
