"""An agent finds whoever coordinates, takes the lease in its turn, and knows until when it may run ranks."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wired import SECRET, Clock, Hub, Pump

from seatrial.control import lease as leases
from seatrial.control import member as member_module
from seatrial.control.lease import Lease
from seatrial.control.member import Member
from seatrial.control.wire import Listener

SILENCE_S = 3.0
HEARTBEAT_S = 0.25


class Agent:
    """A member, and what it has told its agent."""

    def __init__(self, pump: Pump, folder: Path, node: int) -> None:
        self.pump, self.folder = pump, folder
        self.listener = Listener("127.0.0.1", SECRET)
        self.became: list[tuple[Lease, int | None]] = []
        self.joined = 0
        self.orders: list[dict[str, Any]] = []
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
            hello=lambda: {"node": node},
            became=lambda lease, dead: self.became.append((lease, dead)),
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
        self.may_run.append(self.member.tick(lambda: {"generation": 1, "step": 2}))
        source = self.member.source
        if source is not self._source:
            self._release()
            self._source = source
            if source is not None:
                self.pump.watch(source, lambda: self.orders.extend(self.member.receive()), source.events)
        elif source is not None:
            self.pump.sources.wait_for(source, source.events)

    def close(self) -> None:
        self.member.close()
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


def claim(folder: Path, term: int, node: int, port: int) -> None:
    folder.mkdir(exist_ok=True)
    assert leases.claim(folder, Lease(term, node, "127.0.0.1", port, 0.0))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_where_nobody_coordinates_the_first_claims_at_once(agents: Any, pump: Pump, clock: Clock) -> None:
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


def test_it_joins_whoever_has_the_lease_and_its_beats_come_back(
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    claim(tmp_path / "leases", 3, node=7, port=hub.port)
    agent = agents(1)
    pump.until(lambda: hub.beats)
    pump.settle()
    assert hub.hellos == [{"role": "agent", "term": 3, "node": 1}]
    assert agent.joined == 1
    assert not agent.became
    assert agent.member.valid_until == clock.now + SILENCE_S
    hub.links[0].send({"start": {"generation": 1}})
    pump.until(lambda: agent.orders)
    assert agent.orders == [{"start": {"generation": 1}}]
    assert agent.member.send({"held": []})
    pump.until(lambda: hub.heard)
    assert hub.heard == [{"held": []}]


def test_it_may_run_ranks_for_so_long_after_it_sent_the_last_beat_that_came_back(
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


def test_a_beat_that_comes_back_late_counts_from_when_it_was_sent(
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
    hub.links[0].send({"beat": hub.beats[before]})
    pump.settle()
    assert agent.member.valid_until == sent + SILENCE_S


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
    hub.links[-1].send({"beat": 2})  # sent on the connection of before
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


def test_who_is_cut_off_does_not_claim_while_the_lease_is_renewed(
    agents: Any, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    """The coordinator listens, and its answers do not come: to this agent it looks frozen."""
    frozen = Listener("127.0.0.1", SECRET)
    claim(tmp_path / "leases", 2, node=9, port=frozen.port)
    agent = agents(0)
    for second in range(12):
        os.utime(tmp_path / "leases" / "00000002.json", (second, second))
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


def test_whoever_does_not_know_the_secret_is_not_obeyed(
    agents: Any, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
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


def test_a_death_of_before_says_nothing_of_the_next_holder(
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
    agents: Any, hub: Hub, pump: Pump, clock: Clock, tmp_path: Path
) -> None:
    agent = agents(0)
    # Between our look and our claim somebody else is quicker.
    original = leases.last_term
    taken = []

    def last_term(folder: Path) -> int:
        found = original(folder)
        if not taken:
            taken.append(found)
            claim(folder, found + 1, node=3, port=hub.port)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "last_term", last_term)
        # `newest` asks too: let that one through.
        patch.setattr(
            leases,
            "newest",
            lambda folder: None if not taken else leases.Lease(1, 3, "127.0.0.1", hub.port, 0),
        )
        pump.round()
        assert not agent.became
        clock.now += 0.06
        pump.until(lambda: agent.joined)
    assert not agent.became


def test_a_full_disk_does_not_end_the_agent_at_once(
    agents: Any, pump: Pump, clock: Clock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full = [True]
    original = leases.claim

    def claim_on_full_disk(folder: Path, lease: Lease) -> bool:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(folder, lease)

    monkeypatch.setattr(leases, "claim", claim_on_full_disk)
    agent = agents(0)
    for _ in range(10):
        pump.round()
        clock.now += 0.5
    full[0] = False
    pump.round()
    assert len(agent.became) == 1
    assert capfd.readouterr().err.count("could not take the lease") == 1


def test_a_run_that_nobody_can_coordinate_ends(
    agents: Any, pump: Pump, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, lease: Lease) -> bool:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(leases, "claim", refuse)
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
