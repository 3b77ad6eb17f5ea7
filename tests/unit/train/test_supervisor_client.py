"""A rank's supervisor client: messages, answers, and connections that it shuts down."""

from __future__ import annotations

import errno
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

from rank_specs import rank_spec
from seatrial.base import process
from seatrial.base.errors import RunFailed
from seatrial.base.lines import Channel
from seatrial.record import messages as msg
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.train.records import into_file, through_agent
from seatrial.train.supervision.peers import (
    break_connections,
    release_connections,
    teardown,
    wait_for_store,
)
from seatrial.train.supervision.supervisor import Supervisor
from seatrial.train.supervision.supervisor_client import SupervisorClient

TIMEOUT_S = 20.0


def send(channel: Channel, message: msg.ToRank) -> None:
    channel.send(msg.encode(message))


def hear(channel: Channel, kind: str) -> Any:
    """The next message, which must be of this kind."""
    messages: list[dict[str, Any]] = []
    while not messages:
        assert select.select([channel], [], [], TIMEOUT_S)[0], f"no {kind}"
        messages = channel.receive()
    (message,) = messages
    return message[kind]


@pytest.fixture
def pair() -> Iterator[tuple[SupervisorClient, Channel]]:
    """An supervisor client of this process, and its agent's end."""
    ours, theirs = Channel.pair()
    supervisor_client = SupervisorClient(theirs, "secret")
    assert hear(ours, "hello") == {"pid": os.getpid(), "token": "secret"}
    yield supervisor_client, ours
    send(ours, msg.Exit(0))  # otherwise the end of the channel would be the end of this process
    while (order := supervisor_client.next_order()) is not None and order != msg.Exit(0):
        pass
    ours.close()
    supervisor_client.join()
    theirs.close()


def test_it_implements_the_supervisor_protocol(pair: tuple[SupervisorClient, Channel]) -> None:
    supervisor: Supervisor = pair[0]
    assert supervisor.leave_request() is None


def test_without_an_agent_there_is_no_supervisor_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEATRIAL_SUPERVISOR", raising=False)
    assert SupervisorClient.from_environment() is None


def test_an_exited_agent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    monkeypatch.setenv("SEATRIAL_SUPERVISOR", f"nobody-{secrets.token_hex(8)}")
    monkeypatch.setenv("SEATRIAL_SUPERVISOR_TOKEN", "secret")
    with pytest.raises(RunFailed, match="agent of this node has exited"):
        SupervisorClient.from_environment()
    assert signal.getsignal(signal.SIGUSR2) is before  # nothing was registered for nobody


def test_messages_carry_the_generation(pair: tuple[SupervisorClient, Channel]) -> None:
    supervisor_client, agent = pair
    send(agent, rank_spec(4))
    assert supervisor_client.next_order() == rank_spec(4)
    supervisor_client.beat(7, 0.5, True)
    assert hear(agent, "beat") == {"step": 7, "seconds": 0.5, "generation": 4, "first": True}
    supervisor_client.finding("nonfinite", 7, "inf", {"loss": None}, (3,))
    finding = hear(agent, "finding")
    assert (finding["generation"], finding["blamed"], finding["signal"]) == (4, [3], "nonfinite")
    filled = msg.SnapshotFilled(0, 7, 4, "shard=1", 9, "x", slot=1, index={}, seconds=0.1)
    supervisor_client.send(filled)
    assert hear(agent, "snapshot") == vars(filled)
    supervisor_client.parked(7, "gone")
    assert hear(agent, "parked") == {"generation": 4, "step": 7, "message": "gone"}
    send(agent, rank_spec(5))
    supervisor_client.next_order()
    supervisor_client.finished("done", 9)
    assert hear(agent, "finished") == {"generation": 5, "how": "done", "step": 9}


def test_orders_are_returned_one_at_a_time(pair: tuple[SupervisorClient, Channel]) -> None:
    supervisor_client, agent = pair
    send(agent, rank_spec(1))
    send(agent, rank_spec(2))
    assert supervisor_client.next_order() == rank_spec(1)
    assert supervisor_client.next_order() == rank_spec(2)


def answered(agent: Channel) -> None:
    """Everything sent before this has been taken."""
    send(agent, msg.AskDump(0))
    hear(agent, "dump")


def test_a_leave_request_is_for_its_generation_only(pair: tuple[SupervisorClient, Channel]) -> None:
    supervisor_client, agent = pair
    send(agent, rank_spec(1))
    send(agent, msg.RankYield(2, "preempted"))  # before its generation was taken
    send(agent, rank_spec(2))
    answered(agent)
    supervisor_client.next_order()
    assert supervisor_client.leave_request() is None
    supervisor_client.next_order()
    assert supervisor_client.leave_request() == "preempted"
    supervisor_client.finished("preempted", 3)
    assert supervisor_client.leave_request() is None


def test_abandoned_is_true_until_the_generation_is_left(pair: tuple[SupervisorClient, Channel]) -> None:
    supervisor_client, agent = pair
    send(agent, rank_spec(3))
    supervisor_client.next_order()
    send(agent, msg.Abandon(2))
    answered(agent)
    assert not supervisor_client.abandoned
    send(agent, msg.Abandon(3))
    answered(agent)
    assert supervisor_client.abandoned
    supervisor_client.parked(1, "abandoned")
    assert not supervisor_client.abandoned


def test_generation_abandoned_before_start_is_acked_and_skipped(
    pair: tuple[SupervisorClient, Channel],
) -> None:
    supervisor_client, agent = pair
    send(agent, rank_spec(3))
    send(agent, msg.Abandon(3))
    answered(agent)
    send(agent, rank_spec(4))
    assert supervisor_client.next_order() == rank_spec(4)
    assert hear(agent, "parked")["generation"] == 3


def test_abandoned_generation_has_connections_closed_repeatedly(
    pair: tuple[SupervisorClient, Channel],
) -> None:
    supervisor_client, agent = pair
    send(agent, rank_spec(1))
    supervisor_client.next_order()
    send(agent, msg.Abandon(1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(2):  # the second one did not exist when the order came
            with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
                other.settimeout(TIMEOUT_S)
                assert client.recv(1) == b""
        supervisor_client.parked(0, "")
        hear(agent, "parked")
        answered(agent)
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
            other.sendall(b"x")
            client.settimeout(TIMEOUT_S)
            assert client.recv(1) == b"x"


def test_a_dump_is_answered_while_the_main_thread_is_busy(pair: tuple[SupervisorClient, Channel]) -> None:
    supervisor_client, agent = pair
    send(agent, rank_spec(6))
    supervisor_client.next_order()
    supervisor_client.beat(2, 0.1, False)
    hear(agent, "beat")
    send(agent, msg.AskDump(5))
    answer = hear(agent, "dump")
    assert (answer["id"], answer["generation"], answer["step"]) == (5, 6, 2)
    assert answer["flight"] == []
    assert answer["at"]["in"] == "python"
    assert "thread supervisor:" in answer["python"]
    assert "in test_a_dump_is_answered_while_the_main_thread_is_busy" in answer["python"]
    assert answer["error"] == ""


# -- in a process of its own


def run_rank(body: Callable[[SupervisorClient], int], tmp_path: Path) -> tuple[int, Channel, Path]:
    """Fork a rank whose supervisor client finds its agent in the environment: pid, the agent's end, the rank's log."""
    name = f"seatrial-test-{os.getpid()}-{secrets.token_hex(4)}"
    log = tmp_path / "rank.log"

    def main() -> int:
        sys.stderr = sys.__stderr__  # pytest has another one
        os.environ.update(SEATRIAL_SUPERVISOR=name, SEATRIAL_SUPERVISOR_TOKEN="secret")
        supervisor_client = SupervisorClient.from_environment()
        assert supervisor_client is not None
        return body(supervisor_client)

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
        send(agent, msg.AskDump(1))
        if wanted(hear(agent, "dump")):
            return
    raise AssertionError("it never was")


def exit_code(pid: int) -> int:
    handle = os.pidfd_open(pid)
    assert select.select([handle], [], [], TIMEOUT_S)[0]
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hang(supervisor_client: SupervisorClient) -> int:
    while True:
        signal.pause()


def test_the_process_exits_with_its_agent(tmp_path: Path) -> None:
    pid, agent, _ = run_rank(hang, tmp_path)
    agent.close()
    assert exit_code(pid) == 1


def test_a_process_ordered_to_exit_ends_normally(tmp_path: Path) -> None:
    def wait_for_the_end(supervisor_client: SupervisorClient) -> int:
        assert supervisor_client.next_order() == msg.Exit(0)
        assert supervisor_client.next_order() is None  # once the agent is gone
        return 7

    pid, agent, _ = run_rank(wait_for_the_end, tmp_path)
    send(agent, msg.Exit(0))
    agent.close()
    assert exit_code(pid) == 7


@pytest.mark.parametrize("order", [{"abandon": "all"}, {"abandon": {"generation": "1"}}, {"halt": {}}])
def test_invalid_order_ends_the_process(tmp_path: Path, order: dict[str, Any]) -> None:
    pid, agent, log = run_rank(hang, tmp_path)
    agent.send(order)
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


ESTABLISHED = 1  # linux/tcp_states.h


def tcp_state(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def test_only_tcp_connections_are_shut_down() -> None:
    local, far = socket.socketpair()
    with local, far, socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as accepted:
            assert break_connections() >= 2
            assert client.recv(1) == accepted.recv(1) == b""
        # The one that listens does so still, and so does what is no TCP.
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            local.sendall(b"x")
            assert far.recv(1) == b"x"


def test_a_shut_down_connection_can_still_be_written() -> None:
    """gloo loses a message whose write fails before the connection's end is read: its sender would wait for ever."""
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as client, server.accept()[0] as accepted:
        break_connections()
        for end in (client, accepted):
            end.sendall(b"announced")
            end.sendall(b"sent")


def test_a_peer_can_send_until_teardown() -> None:
    """gloo's thread here closes a broken connection at once: that must not refuse what the peer sends meanwhile."""
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as client:
        accepted = server.accept()[0]
        break_connections()
        accepted.close()
        client.sendall(b"announced")
        client.sendall(b"sent")
        assert tcp_state(client) == ESTABLISHED
        teardown()
        assert tcp_state(client) != ESTABLISHED
        release_connections()


def test_teardown_without_groups_does_nothing() -> None:
    assert teardown() >= 0.0
    assert not dist.is_initialized()


def test_wait_for_store_waits_for_a_late_listener() -> None:
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


# -- records


def test_settle_waits_for_the_agents_confirmation(pair: tuple[SupervisorClient, Channel]) -> None:
    supervisor_client, agent = pair
    supervisor_client.settle()  # nothing was told: nobody is asked
    records = through_agent(supervisor_client, 4, 3)
    records.event("loss_spike", "text", severity="warning", data={"loss": float("nan")})
    record = hear(agent, "record")
    assert (record["generation"], record["rank"], record["node"]) == (4, 3, None)
    assert record["data"] == {"loss": "NaN"}
    asked: list[Any] = []

    def answer() -> None:
        asked.append(hear(agent, "settle"))
        send(agent, msg.RankSettled(os.getpid(), 0, None))  # of what was asked before
        send(agent, msg.RankSettled(1, 1, None))  # of the process that was this rank before
        send(agent, msg.RankSettled(os.getpid(), 1, None))

    answering = threading.Thread(target=answer)
    answering.start()
    records.settle()
    answering.join()
    assert asked == [{"pid": os.getpid(), "count": 1}]
    records.settle()
    send(agent, rank_spec(1))
    supervisor_client.next_order()
    assert agent.receive() == []


def test_settle_raises_if_events_cannot_be_written(pair: tuple[SupervisorClient, Channel]) -> None:
    supervisor_client, agent = pair
    records = through_agent(supervisor_client, 4, 0)
    records.event("sample", "text")
    hear(agent, "record")
    send(agent, msg.RankSettled(os.getpid(), 1, errno.ENOSPC))
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            records.settle()


def test_settling_records_fails_when_generation_is_abandoned(
    pair: tuple[SupervisorClient, Channel],
) -> None:
    supervisor_client, agent = pair
    send(agent, rank_spec(4))
    supervisor_client.next_order()
    records = through_agent(supervisor_client, 4, 0)
    records.event("sample", "text")
    send(agent, msg.Abandon(4))
    with pytest.raises(ConnectionError, match="abandoned before"):
        records.settle()


def test_without_an_agent_a_rank_writes_its_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    records = into_file(folder, 2, 1)
    records.event("sample", "text", data={"a": 1})
    records.settle()
    (event,) = read_events(folder)[0]
    assert (event.generation, event.rank, event.kind, event.data) == (2, 1, "sample", {"a": 1})
