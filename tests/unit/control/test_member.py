"""An agent finds whoever coordinates, takes the lease in its turn, and knows until when it may run ranks."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wired import SECRET, Clock, Hub, Pump, agent_joins

from seatrial.control.agent import member as member_module
from seatrial.control.agent.member import Member
from seatrial.control.net.lease import Hold, Lease, Leases
from seatrial.control.net.wire import Listener
from seatrial.record import messages as msg

SILENCE_S = 3.0
HEARTBEAT_S = 0.25


class Agent:
    """A member, and what it has told its agent."""

    def __init__(self, pump: Pump, folder: Path, node: int) -> None:
        self.pump, self.folder = pump, folder
        self.listener = Listener("127.0.0.1", SECRET)
        self.became: list[tuple[Lease, int | None]] = []
        self.joined = 0
        self.orders: list[msg.ToAgent] = []
        self.may_run: list[bool] = []
        self._source: Any = None
        self.member = Member(
            node=node,
            address="127.0.0.1",
            port=self.listener.port,
            secret=SECRET,
            folder=folder,
            heartbeat_s=HEARTBEAT_S,
            silence_s=SILENCE_S,
            hello=lambda term: agent_joins(node, self.listener.port, term=term),
            became=lambda hold, dead: self.became.append((hold.lease, dead)),
            joined=self._joined,
            release=self._release,
        )
        pump.ticks.append(self.tick)

    def _joined(self) -> None:
        self.joined += 1

    def _release(self) -> None:
        if self._source is not None:
            assert self._source.fileno() >= 0, "it must not be closed while it is waited for"
            self.pump.unwatch(self._source)
            self._source = None

    def tick(self) -> None:
        self.may_run.append(self.member.tick(lambda number: msg.Beat(number, 1, 2, 0)))
        source = self.member.source
        if source is not self._source:
            self._release()
            self._source = source
            if source is not None:
                self.pump.watch(source, lambda: self.orders.extend(self.member.receive()), source.events)
        elif source is not None:
            self.pump.sources.wait_for(source, source.events)

    def close(self) -> None:
        self.member.leave()
        self.listener.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(member_module, "time", clock)
    return clock


@pytest.fixture
def pump() -> Pump:
    return Pump()


@pytest.fixture
def hub(pump: Pump) -> Iterator[Hub]:
    hub = Hub(pump)
    yield hub
    hub.close()


@pytest.fixture
def agents(pump: Pump, tmp_path: Path) -> Iterator[Any]:
    made: list[Agent] = []

    def make(node: int) -> Agent:
        made.append(Agent(pump, tmp_path / "leases", node))
        return made[-1]

    files = set(os.listdir("/proc/self/fd"))
    yield make
    for agent in made:
        agent.close()
    assert set(os.listdir("/proc/self/fd")) <= files


def claim(folder: Path, term: int, node: int, port: int) -> Hold:
    hold = Leases(folder).claim(Lease(term, node, "127.0.0.1", port, 0.0), SILENCE_S)
    assert hold is not None
    return hold


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_without_a_coordinator_the_first_agent_claims_at_once(agents: Any, pump: Pump, clock: Clock) -> None:
    agent = agents(0)
    pump.round()
    ((lease, dead),) = agent.became
    assert (lease.term, lease.node, lease.port, dead) == (1, 0, agent.listener.port, None)


def test_others_wait_for_their_turn(agents: Any, pump: Pump, clock: Clock) -> None:
    first, second = agents(1), agents(2)
    for _ in range(4):
        pump.round()
        assert not first.became
        assert not second.became
        clock.now += 0.06
    clock.now += 0.05  # a quarter of a second for node 0
    pump.round()
    assert len(first.became) == 1
    assert not second.became


def test_it_joins_the_lease_holder_which_returns_heartbeats(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 3, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: hub.beats)
    pump.settle()
    assert hub.hellos == [msg.encode(agent_joins(1, agent.listener.port, term=3))]
    assert agent.joined == 1
    assert not agent.became
    assert agent.member.valid_until == clock.now + SILENCE_S
    hub.links[0].send(msg.encode(msg.Idle(1)))
    pump.until(lambda: agent.orders)
    assert agent.orders == [msg.Idle(1)]
    assert agent.member.send(msg.HeldSnapshots([]))
    pump.until(lambda: hub.heard)
    assert hub.heard == [msg.encode(msg.HeldSnapshots([]))]


@pytest.mark.parametrize("values", [{"idle": {}}, {"idle": 1}, {"beat": {"number": 1}}, {"what": {}}, {}])
def test_an_invalid_order_ends_only_the_connection(
    agents: Any,
    hub: Hub,
    pump: Pump,
    clock: Clock,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    values: dict[str, Any],
) -> None:
    claim(tmp_path / "leases", 3, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: agent.joined)
    hub.links[0].send(values)
    pump.until(lambda: agent.joined == 2)
    assert agent.orders == []
    assert "protocol error from the coordinator: " in capfd.readouterr().err


def test_ranks_may_run_silence_s_after_last_acked_heartbeat(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 1, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: hub.beats)
    pump.settle()
    sent = clock.now
    hub.answers = False
    while clock.now < sent + SILENCE_S - 0.01:
        assert all(agent.may_run)
        clock.now += HEARTBEAT_S / 2
        pump.settle(3)
    clock.now = sent + SILENCE_S + 1e-6
    pump.settle(3)
    assert not agent.may_run[-1]
    assert len(hub.beats) > 5, "it went on to beat"


def test_late_heartbeat_echo_counts_from_its_send_time(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 1, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: hub.beats)
    hub.answers = False
    clock.now += 1.0
    sent = clock.now
    before = len(hub.beats)
    pump.until(lambda: len(hub.beats) > before)
    clock.now += 1.5
    hub.links[0].send(msg.encode(msg.BeatReturned(hub.beats[before], 0.0)))
    pump.settle()
    assert agent.member.valid_until == sent + SILENCE_S


def test_coordinator_proof_counts_from_when_it_was_made(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 1, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: hub.beats)
    pump.settle()
    until = agent.member.valid_until
    clock.now += HEARTBEAT_S
    hub.proof_age_s = 2.0
    pump.settle()
    assert agent.member.valid_until == until, "older than what is known"
    clock.now += 1.9
    pump.settle()
    assert agent.member.valid_until == clock.now - 2.0 + SILENCE_S


def test_an_agent_that_stalled_ignores_older_orders(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 1, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: hub.beats)
    pump.settle()
    hub.answers = False
    hub.links[0].send(msg.encode(msg.Idle(1)))
    clock.now += SILENCE_S + 0.1
    pump.settle()
    assert not agent.may_run[-1]
    assert not agent.orders


def test_one_that_left_does_not_live_on_beats_of_before(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 1, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: hub.beats)
    pump.settle()
    until = agent.member.valid_until
    hub.answers = False
    clock.now += HEARTBEAT_S
    pump.settle()
    agent.member.leave()
    pump.until(lambda: agent.joined == 2)
    hub.links[-1].send(msg.encode(msg.BeatReturned(2, 0.0)))  # sent on the connection of before
    pump.settle()
    assert agent.member.valid_until == until


def test_a_coordinator_whose_process_is_gone_is_replaced_at_once(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 4, node=0, port=hub.port)
    agent = agents(1)
    pump.until(lambda: agent.joined)
    hub.close()

    def replaced() -> bool:
        clock.now += 0.01
        return bool(agent.became)

    began = clock.now
    pump.until(replaced)
    ((lease, dead),) = agent.became
    assert (lease.term, lease.node, dead) == (5, 1, 0)
    assert clock.now - began < 0.25, "the dead one has no turn"


def test_isolated_agent_does_not_claim_a_lease_still_renewed(
    agents: Any, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    """The coordinator listens, and its answers do not come: to this agent it looks frozen."""
    frozen = Listener("127.0.0.1", SECRET)
    hold = claim(tmp_path / "leases", 2, node=9, port=frozen.port)
    agent = agents(0)
    for _ in range(12):
        hold.beat()
        for _ in range(5):
            clock.now += 0.2
            pump.settle(2)
    assert not agent.became
    for _ in range(30):  # from now on nobody renews it
        clock.now += 0.2
        pump.settle(2)
    ((lease, dead),) = agent.became
    assert (lease.term, dead) == (3, None), "nobody knows whether its ranks live"
    frozen.close()


def test_a_coordinator_with_much_to_do_is_called_once(
    agents: Any, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    """Where thousands join it comes to this agent late; of a second call it would think that the ranks are gone."""
    busy = Listener("127.0.0.1", SECRET)
    hold = claim(tmp_path / "leases", 2, node=9, port=busy.port)
    agent = agents(0)
    for _ in range(2 * int(SILENCE_S)):
        hold.beat()
        clock.now += 0.9
        pump.settle(2)
    calls = busy.accept()
    assert len(calls) == 1
    while not agent.joined:
        calls[0].advance()
        pump.settle(2)
    assert agent.may_run[-1], "its right begins with its greeting, not with its call"
    calls[0].close()
    busy.close()


def test_a_busy_coordinator_is_left_for_its_successor(
    agents: Any, pump: Pump, clock: Clock, tmp_path: Path, hub: Hub
) -> None:
    busy = Listener("127.0.0.1", SECRET)
    claim(tmp_path / "leases", 2, node=9, port=busy.port)
    agent = agents(0)
    pump.settle(2)
    claim(tmp_path / "leases", 3, node=8, port=hub.port)
    clock.now += SILENCE_S / 2 + 0.01
    pump.settle(2)
    clock.now += 0.06
    pump.until(lambda: agent.joined)
    assert agent.member.term == 3
    busy.close()


def test_waiting_for_an_answer_it_sleeps(agents: Any, pump: Pump, clock: Clock, tmp_path: Path) -> None:
    frozen = Listener("127.0.0.1", SECRET)
    claim(tmp_path / "leases", 2, node=9, port=frozen.port)
    agent = agents(0)
    pump.until(lambda: agent.member.dialing is not None)
    clock.now += 0.5
    pump.settle()
    assert agent.member.dialing is not None
    assert agent.member.deadline > clock.now + 0.4
    frozen.close()


def test_orders_without_the_secret_are_ignored(agents: Any, pump: Pump, clock: Clock, tmp_path: Path) -> None:
    """The old coordinator's port may be another run's by now."""
    stranger = Hub(pump, secret=b"another")
    claim(tmp_path / "leases", 2, node=9, port=stranger.port)
    agent = agents(0)

    def replaced() -> bool:
        clock.now += 0.05
        return bool(agent.became)

    began = clock.now
    pump.until(replaced)
    assert not stranger.hellos
    assert agent.became[0][1] is None
    assert clock.now - began > SILENCE_S, "it may be a coordinator that we cannot reach"
    stranger.close()


def test_an_agent_started_again_does_not_call_its_predecessor(
    agents: Any, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 6, node=0, port=free_port())
    agent = agents(0)
    pump.round()
    ((lease, dead),) = agent.became
    assert (lease.term, dead) == (7, None)


def test_an_old_death_does_not_count_for_the_next_holder(
    agents: Any, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 4, node=9, port=free_port())
    agent = agents(1)
    pump.until(lambda: agent.member._dead_node == 9)  # it waits for its turn
    claim(tmp_path / "leases", 5, node=1, port=free_port())  # of an agent of our own node that is gone
    clock.now += 1.0
    pump.settle()
    ((lease, dead),) = agent.became
    assert (lease.term, dead) == (6, None)


def test_of_two_that_claim_the_other_joins(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agents(0)
    original = Leases.claim

    def claim_later(self: Leases, lease: Lease, silence_s: float) -> Hold | None:
        # Between our look and our claim somebody else is quicker.
        monkeypatch.undo()
        claim(tmp_path / "leases", 1, node=3, port=hub.port)
        monkeypatch.setattr(member_module, "time", clock)
        return original(self, lease, silence_s)

    monkeypatch.setattr(Leases, "claim", claim_later)
    pump.round()
    assert not agent.became
    clock.now += 0.06
    pump.until(lambda: agent.joined)
    assert not agent.became


def test_it_leaves_the_old_coordinator_when_a_newer_one_appears(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    """It does not have to look: a cache of its file system may still know the term before for a minute."""
    claim(tmp_path / "leases", 1, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: agent.joined)
    following = Hub(pump)
    agent.member.learn_of(Lease(2, 8, "127.0.0.1", following.port, 0.0))
    clock.now += 0.06
    pump.until(lambda: agent.joined == 2)
    assert following.hellos == [msg.encode(agent_joins(1, agent.listener.port, term=2))]
    agent.member.learn_of(Lease(1, 7, "127.0.0.1", hub.port, 0.0, count=99))
    pump.settle()
    assert len(following.links) == 1
    following.close()


def test_a_full_disk_does_not_end_the_agent_at_once(
    agents: Any, pump: Pump, clock: Clock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full = [True]
    original = Leases.claim

    def claim_on_full_disk(self: Leases, lease: Lease, silence_s: float) -> Hold | None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, lease, silence_s)

    monkeypatch.setattr(Leases, "claim", claim_on_full_disk)
    agent = agents(0)
    for _ in range(10):
        pump.round()
        clock.now += 0.5
    full[0] = False
    pump.round()
    assert len(agent.became) == 1
    assert capfd.readouterr().err.count("could not take the lease") == 1


def test_a_run_that_no_agent_can_coordinate_ends(
    agents: Any, pump: Pump, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Leases, lease: Lease, silence_s: float) -> Hold | None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Leases, "claim", refuse)
    agents(0)

    def go_on() -> None:
        for _ in range(100):
            pump.round()
            clock.now += 0.2

    with pytest.raises(OSError, match="Read-only"):
        go_on()


def test_one_that_resigned_lets_the_others_go_first(agents: Any, pump: Pump, clock: Clock) -> None:
    agent = agents(0)
    agent.member.resign()
    for _ in range(20):
        clock.now += 1.0
        pump.round()
    assert not agent.became
    clock.now += 60.0
    pump.round()
    assert len(agent.became) == 1
