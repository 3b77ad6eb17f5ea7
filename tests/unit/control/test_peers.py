"""When the coordinator counts an agent as lost: at once where its process is gone, after its silence otherwise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from wired import SECRET, Hub, Pump

from seatrial.control.coordinator import peers as peers_module
from seatrial.control.coordinator.peers import Peer, Peers
from seatrial.control.coordinator.rejoin_probe import RejoinProbe
from seatrial.control.net.lease import Lease
from seatrial.control.net.wire import Link, Listener, Outgoing
from seatrial.record import messages as msg

SILENCE_S = 3.0
LEASE = Lease(7, 2, "127.0.0.1", 1000, 0.0)


class Coordinator:
    """Peers with what they told."""

    def __init__(self, pump: Pump, silence_s: float = SILENCE_S) -> None:
        self.pump = pump
        self.told: list[tuple[int, msg.FromAgent]] = []
        self.lost: list[tuple[int, bool, str]] = []
        self.peers = Peers(
            secret=SECRET,
            silence_s=silence_s,
            watch=pump.watch,
            unwatch=pump.unwatch,
            received=lambda peer, message: self.told.append((peer.node, message)),
            lost=lambda peer, certain, cause: self.lost.append((peer.node, certain, cause)),
        )
        self.hub = Hub(pump)
        self.hub.acceptor._proven = self._join  # type: ignore[method-assign]
        pump.ticks.append(lambda: self.peers.tick(time.monotonic()))

    def _join(self, incoming: Any) -> None:
        hello = incoming.hello
        self.peers.add(Peer(hello["node"], incoming.link(), "127.0.0.1", hello["port"], 0, "first"))

    def close(self) -> None:
        self.peers.close()
        self.hub.close()


class Agent:
    """An agent's side: a listener that answers probes, and a connection to the coordinator."""

    def __init__(self, pump: Pump, coordinator: Coordinator, node: int) -> None:
        self.pump, self.coordinator, self.node = pump, coordinator, node
        self.hub = Hub(pump)
        self.link = self.connect()

    def connect(self) -> Link:
        outgoing = Outgoing(
            "127.0.0.1", self.coordinator.hub.port, SECRET, {"node": self.node, "port": self.hub.port}
        )
        states = [outgoing.advance()]
        self.pump.ticks.append(advance := lambda: states.append(outgoing.advance()))
        self.pump.until(lambda: states[-1] == "ready")
        self.pump.ticks.remove(advance)
        self.pump.until(lambda: self.node in self.coordinator.peers)
        return outgoing.link()

    def die(self) -> None:
        """As the kernel ends a process: its listener goes, then its connections."""
        self.hub.close()
        self.link.close()

    def close(self) -> None:
        self.die()


@pytest.fixture
def pump() -> Pump:
    return Pump()


@pytest.fixture
def coordinator(pump: Pump) -> Iterator[Coordinator]:
    files = set(os.listdir("/proc/self/fd"))
    coordinator = Coordinator(pump)
    yield coordinator
    coordinator.close()
    assert set(os.listdir("/proc/self/fd")) <= files


@pytest.fixture
def agent(pump: Pump, coordinator: Coordinator) -> Iterator[Agent]:
    agent = Agent(pump, coordinator, 1)
    yield agent
    agent.close()


def test_messages_go_both_ways(pump: Pump, coordinator: Coordinator, agent: Agent) -> None:
    agent.link.send(msg.encode(msg.Ready()))
    pump.until(lambda: coordinator.told)
    assert coordinator.told == [(1, msg.Ready())]
    assert coordinator.peers.send(1, msg.ReleaseAgent())
    assert agent.link.receive() == [msg.encode(msg.ReleaseAgent())]
    assert not coordinator.peers.send(2, msg.ReleaseAgent()), "nobody there"


def test_an_agent_whose_process_is_gone_is_lost_at_once(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    agent.die()
    pump.until(lambda: coordinator.lost)
    assert coordinator.lost == [(1, True, "its agent exited")]
    assert 1 not in coordinator.peers
    assert coordinator.peers.nodes() == []


def test_messages_sent_before_the_death_are_received(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    agent.link.send(msg.encode(msg.Stopped(4, 2, 7000)))
    agent.die()
    pump.until(lambda: coordinator.lost)
    assert coordinator.told == [(1, msg.Stopped(4, 2, 7000))]


def test_a_broken_connection_to_a_live_agent_is_not_a_loss(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    agent.link.close()
    pump.until(lambda: len(agent.hub.hellos) == 1)
    assert agent.hub.hellos == [msg.encode(msg.Probe(None))]
    pump.settle()
    assert not coordinator.lost
    assert 1 in coordinator.peers
    assert not coordinator.peers.send(1, msg.ReleaseAgent()), "but nothing can be sent to it now"
    agent.link = agent.connect()
    assert coordinator.peers.send(1, msg.ReleaseAgent())
    assert agent.link.receive() == [msg.encode(msg.ReleaseAgent())]
    assert not coordinator.lost


def test_one_that_does_not_come_back_is_lost_after_its_silence(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    agent.link.close()
    pump.until(lambda: agent.hub.hellos)
    heard = coordinator.peers[1].link.heard
    tick_until(coordinator, heard, heard + SILENCE_S - 0.01)
    assert not coordinator.lost
    coordinator.peers.tick(heard + SILENCE_S + 0.01)
    ((node, certain, cause),) = coordinator.lost
    assert (node, certain) == (1, False)
    assert cause == "has been silent for 3.0 s"


def tick_until(coordinator: Coordinator, begin: float, end: float) -> None:
    """As often as the coordinator looks at the time."""
    now = begin
    while now < end:
        coordinator.peers.tick(now)
        now += 0.25
    coordinator.peers.tick(end)


def test_coordinator_stall_does_not_make_agents_count_as_silent(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    heard = coordinator.peers[1].link.heard
    coordinator.peers.tick(heard)
    coordinator.peers.tick(heard + 2 * SILENCE_S)
    assert not coordinator.lost
    tick_until(coordinator, heard + 2 * SILENCE_S, heard + 3 * SILENCE_S + 0.01)
    assert [(node, certain) for node, certain, _ in coordinator.lost] == [(1, False)]


def test_one_whose_words_wait_to_be_read_is_not_silent(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    """A coordinator that has much to read comes late to some."""
    heard = coordinator.peers[1].link.heard
    agent.link.send(msg.encode(msg.Beat(1, 1, 1, 0)))
    tick_until(coordinator, heard, heard + SILENCE_S + 0.01)
    assert not coordinator.lost
    pump.until(lambda: coordinator.told)
    tick_until(coordinator, heard + SILENCE_S, heard + 2 * SILENCE_S + 0.02)
    assert [(node, certain) for node, certain, _ in coordinator.lost] == [(1, False)]


def test_silence_alone_is_a_loss_that_is_not_certain(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    heard = coordinator.peers[1].link.heard
    assert coordinator.peers.deadline == pytest.approx(heard + SILENCE_S)
    tick_until(coordinator, heard, heard + SILENCE_S + 0.01)
    tick_until(coordinator, heard + SILENCE_S, heard + SILENCE_S + 1.0)
    assert [(node, certain) for node, certain, _ in coordinator.lost] == [(1, False)], "told once"
    assert agent.link.receive() == []
    assert agent.link.closed, "it learns of it, and may join anew"
    agent.link.close()
    agent.link = agent.connect()
    assert 1 in coordinator.peers


@pytest.mark.cluster  # slow
def test_a_frozen_agent_is_not_taken_for_a_dead_one(pump: Pump, coordinator: Coordinator) -> None:
    """The kernel takes connections for it, and nothing answers."""
    frozen = Listener("127.0.0.1", SECRET)
    link = Agent(pump, coordinator, 5)
    coordinator.peers[5].port = frozen.port
    link.link.close()
    pump.until(lambda: coordinator.peers[5].probe is not None)
    pump.until(lambda: coordinator.peers[5].probe is None)
    assert not coordinator.lost
    link.close()
    frozen.close()


def test_a_connection_reset_on_the_way_is_asked_again(pump: Pump, coordinator: Coordinator) -> None:
    """A dying process may take a connection and reset it before its listener is gone."""
    agent = Agent(pump, coordinator, 2)
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    door.listen()
    coordinator.peers[2].port = door.getsockname()[1]
    agent.link.close()
    pump.until(lambda: coordinator.peers[2].probe is not None)
    connection, _ = door.accept()
    # No lingering: close() sends a reset.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    door.close()
    pump.until(lambda: coordinator.lost)
    assert coordinator.lost == [(2, True, "its agent exited")]
    agent.close()


def test_a_killed_process_is_lost_at_once(pump: Pump, coordinator: Coordinator) -> None:
    """The real thing: another process, SIGKILL."""
    body = (
        "import sys, time\n"
        "from seatrial.control.net.wire import Listener, dial\n"
        "own = Listener('127.0.0.1', b's' * 32)\n"
        "session = dial('127.0.0.1', int(sys.argv[1]), b's' * 32, {'node': 3, 'port': own.port}, 5)\n"
        "session.send({'ready': {}})\n"
        "session.receive()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", body, str(coordinator.hub.port)])
    pump.until(lambda: coordinator.told)
    child.kill()
    pump.until(lambda: coordinator.lost)
    assert coordinator.lost == [(3, True, "its agent exited")]
    child.wait()


def test_sending_to_one_that_has_just_died_loses_it_then(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    """The loss is told from within `send`: whoever sends must be ready for that."""
    agent.die()
    for _ in range(3):  # the first may still be taken by the kernel
        coordinator.peers.send(1, msg.ReleaseAgent())
        if coordinator.lost:
            break
    pump.until(lambda: coordinator.lost)
    assert not coordinator.peers.send(1, msg.ReleaseAgent())
    assert len(coordinator.lost) == 1


def test_replaced_connection_does_not_close_the_new_one(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    old = agent.link
    agent.link = agent.connect()
    old.close()
    pump.settle()
    assert not coordinator.lost
    assert coordinator.peers.send(1, msg.Idle(1))
    assert agent.link.receive() == [msg.encode(msg.Idle(1))]


def test_a_large_message_goes_when_the_agent_reads(
    pump: Pump, coordinator: Coordinator, agent: Agent
) -> None:
    big = msg.Drain("x" * 8_000_000)
    assert coordinator.peers.send(1, big)
    got: list[dict[str, Any]] = []
    pump.ticks.append(lambda: got.extend(agent.link.receive()))
    pump.until(lambda: got)
    assert got == [msg.encode(big)]


def test_flush_waits_for_slow_readers_but_not_for_ever(
    pump: Pump, coordinator: Coordinator, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_FLUSH_S", 0.05)
    coordinator.peers.send(1, msg.Drain("x" * 30_000_000))
    began = time.monotonic()
    coordinator.peers.flush()
    assert 0.05 <= time.monotonic() - began < 5.0


# -- nodes that have not come to a new coordinator yet


class Awaited:
    """`RejoinProbe`, and whom it gave up."""

    def __init__(self, pump: Pump, roster: dict[int, tuple[str, int]]) -> None:
        self.lost: list[tuple[int, bool]] = []
        self.rejoin_probe = RejoinProbe(
            roster,
            lease=LEASE,
            secret=SECRET,
            silence_s=SILENCE_S,
            watch=pump.watch,
            unwatch=pump.unwatch,
            lost=lambda node, certain, cause: self.lost.append((node, certain)),
        )
        pump.ticks.append(lambda: self.rejoin_probe.tick(time.monotonic()))


def test_of_those_that_do_not_come_the_dead_are_known_at_once(pump: Pump) -> None:
    dead = Listener("127.0.0.1", SECRET)
    port = dead.port
    dead.close()
    living = Hub(pump)
    frozen = Listener("127.0.0.1", SECRET)
    here = ("127.0.0.1", living.port)
    awaited = Awaited(pump, {0: ("127.0.0.1", port), 1: here, 2: ("127.0.0.1", frozen.port), 3: here})
    pump.until(lambda: awaited.lost)
    assert awaited.lost == [(0, True)]
    awaited.rejoin_probe.joined(3)
    pump.until(lambda: living.hellos)
    assert living.hellos[0] == msg.encode(msg.Probe(LEASE))
    assert len(awaited.lost) == 1
    awaited.rejoin_probe.tick(time.monotonic() + SILENCE_S + 0.1)
    assert awaited.lost == [(0, True), (1, False), (2, False)]
    assert awaited.rejoin_probe.deadline is None
    awaited.rejoin_probe.close()
    living.close()
    frozen.close()
