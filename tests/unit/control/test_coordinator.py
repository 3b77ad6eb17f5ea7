"""One term of coordination with agents that a test plays: what it orders, what it writes, what the next one makes of it."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from wired import SECRET, Pump, agent_joins, link_pair

from seatrial.control.coordinator import confirm
from seatrial.control.coordinator import peers as peers_module
from seatrial.control.coordinator.coordinator import Coordinator
from seatrial.control.coordinator.hang_watch import Culprit
from seatrial.control.net.lease import Lease, Leases
from seatrial.control.net.wire import Listener
from seatrial.control.node.spec import AgentSpec
from seatrial.job import Job, job_from_text
from seatrial.record import messages as msg
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.launches import read_outcome

JOB = """
name = "coordinated"
[model]
vocab_size = 264
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
[data]
train = "builtin:python-library"
[cluster]
nodes = 2
gpus_per_node = 2
spares = 1
device = "cpu"
[parallel]
tensor = 2
replicate = 2
[train]
steps = 100
sequence_length = 32
global_batch = 64
[optimizer]
lr = 1e-2
[checkpoint]
every_steps = 50
"""
GENERATION = 3  # the first of this launch
INPUTS = {"job.toml": "ab", "plan.json": "cd"}


Order = TypeVar("Order", bound=msg.ToAgent)


def exited(rank: int, generation: int, status: int = -9, **more: Any) -> msg.RankExited:
    about = {"rank": rank, "generation": generation, "local": 0, "pid": 5, "status": status, "time": 1.0}
    about |= {"signalled": None, "oom_killed": False, "ran": True, "never_began": False}
    return msg.RankExited(**about | more)


class Agent:
    """A node's agent, in the test's hands."""

    def __init__(self, term: Term, node: int, *, port: int, **hello: Any) -> None:
        self.term, self.node = term, node
        ours, self.link = link_pair()
        term.coordinator.join(agent_joins(node, port, **hello), ours)

    def tell(self, message: msg.FromAgent) -> None:
        self.link.send(msg.encode(message))
        self.term.pump.settle()

    def beat(self, generation: int, step: int, failed: int = 0) -> None:
        self.tell(msg.Beat(1, generation, step, failed))

    def exits(self, rank: int, generation: int, status: int = -9) -> None:
        self.tell(exited(rank, generation, status))

    def stops(self, generation: int) -> None:
        self.tell(msg.Stopped(generation, parked=2, offer_port=7100 + self.node))

    def orders(self, kind: type[Order]) -> list[Order]:
        """What has come of that kind since the last call; all else is dropped."""
        came = [msg.decode(values, msg.ToAgent) for values in self.link.receive()]
        return [message for message in came if isinstance(message, kind)]

    def close(self) -> None:
        self.link.close()


class Term:
    """A coordinator and its agents."""

    def __init__(self, pump: Pump, folder: RunFolder, job: Job, number: int, **more: Any) -> None:
        self.pump, self.folder, self.agents = pump, folder, dict[int, Agent]()
        self.older: list[Agent] = []
        spec = AgentSpec(
            folder.path,
            GENERATION,
            node=2,
            nodes=2,
            ranks_per_node=2,
            device="cpu",
            spares=1,
        )
        lease = Lease(number, 2, "127.0.0.1", 1, 0.0)
        folder.leases.mkdir(exist_ok=True)
        hold = Leases(folder.leases).claim(lease, job.resilience.silence_s)
        assert hold is not None
        self.listener = Listener("127.0.0.1", SECRET)  # where the agents are said to listen
        self.coordinator = Coordinator(spec, job, INPUTS, hold, SECRET, pump.watch, pump.unwatch, **more)
        self.pump.ticks.append(self.coordinator.tick)

    def join(self, *nodes: int, **hello: Any) -> None:
        for node in nodes:
            if node in self.agents:
                self.older.append(self.agents[node])
            self.agents[node] = Agent(self, node, port=hello.pop("port", self.listener.port), **hello)

    def orders(self, kind: type[Order]) -> dict[int, list[Order]]:
        """By node, for those that got some."""
        found = {node: agent.orders(kind) for node, agent in self.agents.items()}
        return {node: orders for node, orders in found.items() if orders}

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.coordinator.hold.state.read_text())
        return found

    def close(self) -> None:
        """Another term begins."""
        if self.coordinator.tick in self.pump.ticks:
            self.pump.ticks.remove(self.coordinator.tick)
        self.coordinator.close()
        for agent in (*self.agents.values(), *self.older):
            agent.close()
        self.listener.close()


Begin = Callable[..., Term]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    pump = Pump()
    terms: list[Term] = []

    def start(*overrides: str, **more: Any) -> Term:
        job = job_from_text(JOB, name="job.toml", base_folder=tmp_path, overrides=list(overrides))
        folder.job_toml.write_text(job.to_toml())
        if terms:
            terms[-1].close()
        terms.append(Term(pump, folder, job, len(terms) + 1, **more))
        return terms[-1]

    yield start
    terms[-1].close()


def running(begin: Begin, *overrides: str) -> Term:
    """Two nodes at work, and a spare."""
    term = begin(*overrides)
    term.join(0, 1, 2)
    starts = term.orders(msg.Start)
    assert set(starts) == {0, 1}
    for node in (0, 1):
        term.agents[node].beat(GENERATION, 4)
    return term


def kinds(term: Term) -> list[str]:
    return [e.kind for e in read_events(term.folder)[0]]


def test_the_orders_to_each_node(begin: Begin) -> None:
    term = begin()
    term.join(1, 2, 0)
    orders = {node: order for node, (order,) in term.orders(msg.Start).items()}
    assert {node: (o.slot, o.ranks, o.guards, o.buddy and o.buddy.node) for node, o in orders.items()} == {
        0: (0, [0, 1], [2, 3], 1),
        1: (1, [2, 3], [0, 1], 0),
    }
    for order in orders.values():
        assert (order.generation, order.world_size, order.master_port) == (GENERATION, 4, 7000)
        assert (order.in_place, order.again, order.fetch) == (False, False, [])
        assert order.inputs == INPUTS
    assert term.memory()["machine"]["generation"] == GENERATION
    assert term.folder.generation_file.read_text() == f"{GENERATION}\n"


def test_failure_stops_all_nodes_before_restarting(begin: Begin) -> None:
    term = running(begin)
    term.agents[1].exits(3, GENERATION)
    assert {n: o[0].kill for n, o in term.orders(msg.Stop).items()} == {0: [], 1: []}
    term.agents[0].stops(GENERATION)
    assert term.orders(msg.Start) == {}
    term.agents[1].stops(GENERATION)
    orders = term.orders(msg.Start)
    assert {o.generation for (o,) in orders.values()} == {GENERATION + 1}
    assert all(o.in_place and o.again and o.master_port == 7100 for (o,) in orders.values())
    (event,) = [e for e in read_events(term.folder)[0] if e.kind == "recovering"]
    assert (event.node, event.rank, event.message) == (1, 3, "rank 3: was killed by SIGKILL")


class Refused:
    """A connection that the kernel refuses at once, as it may on one host."""

    events = selectors.EVENT_WRITE
    why, nothing_listens = os.strerror(errno.ECONNREFUSED), True

    def __init__(self, *_: Any) -> None:
        self.sock = socket.socket()

    def fileno(self) -> int:
        return self.sock.fileno()

    def advance(self) -> str:
        return "refused"

    def close(self) -> None:
        self.sock.close()


def test_loss_detected_while_sending_orders_is_handled_after(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 has died unnoticed. The order to stop finds out, and what follows from that must be what counts."""
    monkeypatch.setattr(peers_module, "Outgoing", Refused)
    term = running(begin)
    term.agents[0].link.close()
    term.agents[1].link.close()
    # Not yet read: the coordinator hears of both when it sends. Then nobody is left that has to stop.
    term.coordinator._fail(0, None, "worker_killed", "the test says so")
    assert [e.node for e in read_events(term.folder)[0] if e.kind == "node_lost"] == [0, 1]
    assert set(term.orders(msg.Start)) == {2}, "a smaller layout, at once"
    assert term.coordinator.world is not None
    assert term.coordinator.world.generation == GENERATION + 1
    memory = term.memory()
    assert (memory["world"]["generation"], memory["machine"]["phase"]) == (GENERATION + 1, "running")
    assert term.coordinator.hangs.watching, "its steps are watched"


@pytest.mark.parametrize("older", [GENERATION - 1, GENERATION])
def test_stop_of_an_older_generation_does_not_stop_the_current(begin: Begin, older: int) -> None:
    """A node comes back and says that it still runs what the others left long ago."""
    term = running(begin)
    if older == GENERATION:
        term.agents[1].exits(3, GENERATION)
        term.agents[0].stops(GENERATION)
        term.agents[1].stops(GENERATION)
        for node in (0, 1):
            term.agents[node].beat(GENERATION + 1, 5)
    newest = term.coordinator.machine.generation
    term.orders(msg.Stop)
    term.agents[2].close()
    term.join(2, running=older)
    assert {n: [o.generation for o in orders] for n, orders in term.orders(msg.Stop).items()} == {2: [older]}
    assert term.coordinator.hangs.watching, "its steps are still watched"
    limit = term.coordinator.hangs.deadline
    assert limit is not None
    assert limit - time.monotonic() < 100, "as closely as before, not as at a start"
    term.agents[0].exits(1, newest)
    assert set(term.orders(msg.Stop)) >= {0, 1}, "and a failure has its consequence"


def test_a_smaller_start_follows_where_there_is_nothing_to_flush(begin: Begin) -> None:
    term = running(begin, "cluster.spares=0")
    term.agents[2].link.close()
    term.agents[1].exits(3, GENERATION)
    term.agents[0].stops(GENERATION)
    term.coordinator._lost(2, True, "its agent exited")
    term.coordinator._lost(1, True, "its agent exited")
    ((order,),) = term.orders(msg.Start).values()
    assert (order.world_size, order.layout["replicate"], order.slots) == (2, 1, 1)
    assert "shrunk" in kinds(term)


def test_several_hung_ranks_are_killed_in_one_stop_only(begin: Begin) -> None:
    term = running(begin)
    culprits = [Culprit(0, 1, "stopped", "1 is stopped"), Culprit(1, 2, "stopped", "2 is stopped")]
    term.coordinator._fail_for_hang(culprits)
    assert {n: o[0].kill for n, o in term.orders(msg.Stop).items()} == {0: [1], 1: [2]}
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    assert len(term.orders(msg.Start)) == 2
    term.agents[0].exits(0, GENERATION + 1)
    assert {n: o[0].kill for n, o in term.orders(msg.Stop).items()} == {0: [], 1: []}


def test_a_finding_of_an_earlier_generation_stops_no_rank(begin: Begin) -> None:
    """An agent tells again, to whoever coordinates, what it told before."""
    term = running(begin, "resilience.evict_after=9")
    text = "rank 2 has other weights"
    finding = msg.RankFinding(GENERATION, 0, 0, "corruption", 4, text, data={}, blamed=[2])
    term.agents[0].tell(finding)
    assert set(term.orders(msg.Stop)) == {0, 1}
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    term.pump.settle()
    term.orders(msg.Start)
    before = kinds(term).count("recovering")
    term.agents[0].tell(finding)
    assert term.orders(msg.Stop) == {}
    assert kinds(term).count("recovering") == before


def test_the_gpu_that_a_signal_named_is_the_one_to_be_reset(begin: Begin) -> None:
    term = running(begin)
    term.agents[1].tell(msg.HardwareSignal("xid:95", "0000:3b:00", None, "Xid 95", {}, 1.0))
    term.orders(msg.Stop)
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    (order,) = term.agents[1].orders(msg.ResetGpu)
    assert order.gpu == "0000:3b:00"


def test_a_coordinator_without_the_lease_starts_and_ends_nothing(begin: Begin) -> None:
    term = running(begin)
    term.agents[1].exits(3, GENERATION)
    term.orders(msg.Stop)
    term.coordinator.hold.renew_at = float("inf")  # it has not looked yet
    assert Leases(term.folder.leases).claim(Lease(2, 0, "127.0.0.1", 2, 0.0), 3.0)
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    assert term.orders(msg.Start) == {}
    assert term.coordinator.deposed


def test_a_coordinator_without_the_lease_does_not_end_the_run(begin: Begin) -> None:
    term = running(begin)
    term.coordinator.hold.renew_at = float("inf")
    assert Leases(term.folder.leases).claim(Lease(2, 0, "127.0.0.1", 2, 0.0), 3.0)
    term.agents[0].tell(msg.EndRequested("now"))
    assert term.coordinator.deposed
    assert term.orders(msg.Outcome) == {}


# -- the next term


def test_the_next_one_notices_what_happens_to_a_run_that_goes_on(begin: Begin) -> None:
    running(begin)
    term = begin()
    term.join(0, 1, running=GENERATION)
    term.join(2)
    assert term.orders(msg.Start) == {}
    assert term.orders(msg.Stop) == {}
    assert term.coordinator.hangs.watching
    term.agents[1].exits(3, GENERATION)
    assert set(term.orders(msg.Stop)) == {0, 1}
    (event,) = [e for e in read_events(term.folder)[0] if e.kind == "recovering"]
    assert (event.rank, event.generation) == (3, GENERATION)


def test_report_to_successive_coordinators_is_logged_once(begin: Begin) -> None:
    """The first of them recorded it and died before it could act."""
    term = running(begin)
    report = exited(3, GENERATION, told="a-1")
    term.coordinator._fail = lambda *_: None  # type: ignore[method-assign]
    term.agents[1].tell(report)
    term = begin()
    term.join(0, 1, running=GENERATION)
    term.agents[1].tell(report)
    assert kinds(term).count("rank_failed") == 1
    assert set(term.orders(msg.Stop)) == {0, 1}


def test_a_node_that_had_left_in_order_has_lost_nothing(begin: Begin) -> None:
    """Its word of that went down with the coordinator."""
    running(begin)
    term = begin()
    left = msg.GenerationLeft(GENERATION, "done", 1)
    term.join(0, left=left)
    term.join(1, running=GENERATION)
    term.join(2)
    assert term.orders(msg.Stop) == {}
    assert "recovering" not in kinds(term)
    term.agents[1].tell(left)
    assert {o.exit_code for (o,) in term.orders(msg.Outcome).values()} == {0}


def test_the_node_that_coordinated_and_died_is_lost_for_certain(begin: Begin) -> None:
    running(begin)
    term = begin(dead=0)
    term.join(1, running=GENERATION)
    term.join(2)
    assert set(term.orders(msg.Stop)) == {1}
    term.agents[1].stops(GENERATION)
    orders = {node: order.slot for node, (order,) in term.orders(msg.Start).items()}
    assert orders == {2: 0, 1: 1}


@pytest.mark.cluster  # slow
def test_a_decided_end_is_carried_out_by_the_next_coordinator(begin: Begin) -> None:
    once = ("resilience.max_restarts=0", "cluster.spares=0")
    term = running(begin, *once)
    term.agents[1].exits(3, GENERATION)
    term = begin(*once)
    term.join(0, running=GENERATION)
    term.pump.until(lambda: term.coordinator.ending.outcome is not None)
    (outcome,) = term.agents[0].orders(msg.Outcome)
    assert outcome.exit_code == 1


def test_memory_of_an_earlier_launch_is_not_ours(begin: Begin) -> None:
    term = running(begin)
    memory = term.memory()
    term.coordinator.hold.state.write_text(json.dumps(memory | {"launch": GENERATION - 1}))
    term = begin()
    assert not term.coordinator.machine.started
    term.coordinator.hold.state.write_text("{")
    term = begin()
    assert not term.coordinator.machine.started


def test_coordinator_without_majority_resigns_unless_alone(begin: Begin) -> None:
    """More than half of the nodes lost power: from outside that looks as if this node had been cut off."""
    running(begin)
    term = begin()
    term.join(1, running=GENERATION)
    term.coordinator._lost(0, False, "silent")
    assert not term.coordinator.deposed, "one against one"
    term.coordinator._lost(2, False, "silent")
    assert (term.coordinator.deposed, term.coordinator.resigned) == (True, True)
    term = begin("cluster.spares=0", alone=True)
    term.join(1, running=GENERATION)
    term.coordinator._lost(2, False, "silent")
    term.coordinator._lost(0, False, "silent")
    assert not term.coordinator.deposed
    assert "node_lost" in kinds(term)
    assert set(term.orders(msg.Stop)) == {1}, "to go on without them"


# -- what stands still


def test_rank_reported_as_stopped_is_blamed_and_killed(begin: Begin) -> None:
    term = running(begin)
    message = "process 77 has been stopped by a signal for 5 s"
    term.agents[1].tell(msg.RankStopped(GENERATION, 3, 1, message, told="a-1"))
    assert {n: o[0].kill for n, o in term.orders(msg.Stop).items()} == {0: [], 1: [3]}
    events = {e.kind: e for e in read_events(term.folder)[0]}
    assert (events["hang_blamed"].node, events["hang_blamed"].rank) == (1, 3)
    assert events["hang_blamed"].message == f"rank 3: {message}"
    assert events["recovering"].data is not None
    assert events["recovering"].data["signal"] == "stopped"


def test_stopped_rank_of_an_earlier_generation_is_ignored(begin: Begin) -> None:
    term = running(begin)
    term.agents[1].tell(msg.RankStopped(GENERATION - 1, 3, 1, "stopped"))
    assert term.orders(msg.Stop) == {}


def test_unreported_rank_exits_are_noticed_from_heartbeats(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "WAIT_S", 0.0)
    term = running(begin)
    term.agents[0].beat(GENERATION, 4, failed=1)
    assert set(term.orders(msg.Stop)) == {0, 1}
    (event,) = [e for e in read_events(term.folder)[0] if e.kind == "recovering"]
    assert event.message == "node 0: 1 of its ranks have exited without a failure report"
    term.agents[0].beat(GENERATION, 4, failed=1)
    assert kinds(term).count("recovering") == 1, "it is being stopped"


# -- records of others


def told(step: int, mark: str) -> msg.Record:
    """An event of rank 0, of another time and generation than the coordinator's."""
    return msg.Record(5.5, 2, "checkpoint_saved", "info", "saved", None, 0, {"step": step}, told=mark)


def test_records_are_written_once_as_they_happened_and_settled(begin: Begin) -> None:
    term = running(begin)
    before = len(read_events(term.folder)[0])
    term.agents[1].tell(told(40, "a-1"))
    term.agents[1].tell(msg.Settle(0, 7, 1, told="a-2"))
    (settled,) = term.agents[1].orders(msg.Settled)
    assert settled == msg.Settled(local=0, pid=7, count=1, errno=None)
    later = begin()
    later.join(1)
    later.agents[1].tell(told(40, "a-1"))  # told again to whoever coordinates next
    later.agents[1].tell(told(41, "a-3"))
    saved = [e for e in read_events(later.folder)[0][before:] if e.kind == "checkpoint_saved"]
    assert [(e.time, e.generation, e.rank, e.data) for e in saved] == [
        (5.5, 2, 0, {"step": 40, "told": "a-1"}),
        (5.5, 2, 0, {"step": 41, "told": "a-3"}),
    ]


def test_unwritable_records_stay_unsettled_and_are_written_once(begin: Begin) -> None:
    term = running(begin)
    kept = term.folder.events.with_name("kept")
    term.folder.events.rename(kept)
    term.folder.events.mkdir()
    term.agents[0].tell(told(40, "b-1"))
    term.agents[0].tell(msg.Settle(0, 7, 1, told="b-2"))
    assert term.agents[0].orders(msg.Settled)[0].errno == errno.EINVAL  # not a file
    term.folder.events.rmdir()
    kept.rename(term.folder.events)
    for mark in ("b-3", "b-4"):
        term.agents[0].tell(msg.Settle(0, 7, 1, told=mark))
        assert term.agents[0].orders(msg.Settled)[0].errno is None
    assert kinds(term).count("checkpoint_saved") == 1


@pytest.mark.parametrize(
    "values",
    [
        {"record": vars(told(40, "c-1")) | {"data": "text"}},
        {"beat": 3, "generation": GENERATION},
        {"beat": {"number": 1, "generation": GENERATION, "step": 4}},
        {"no such message": {}},
    ],
)
def test_an_invalid_message_ends_only_its_connection(
    begin: Begin, capfd: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    term = running(begin)
    term.agents[0].link.send(values)
    term.pump.settle()
    for _ in range(2):  # what came before, and the end
        term.agents[0].link.receive()
    assert term.agents[0].link.closed, "and it can join again"
    assert "protocol error from node 0: " in capfd.readouterr().err
    term.agents[1].tell(told(41, "c-2"))
    assert [e.data for e in read_events(term.folder)[0] if e.kind == "checkpoint_saved"] == [
        {"step": 41, "told": "c-2"}
    ]


# -- nodes that leave, and agents that are replaced


def test_second_agent_of_a_node_replaces_the_first(begin: Begin) -> None:
    """Their process ids may be equal: they may be on two hosts."""
    term = running(begin)
    first = term.agents[1]
    term.join(1, incarnation="second 1", pid=1001)
    assert first.orders(msg.Replaced) == [msg.Replaced()]
    assert term.memory()["incarnations"]["1"] == ["first 1", "second 1"]
    assert term.memory()["machine"]["roster"]["fenced"] == [1]
    assert "node_replaced" in kinds(term)
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    assert term.orders(msg.Start) == {}, "the first agent's ranks may still run, whatever the second one says"


def test_messages_of_a_replaced_agent_are_ignored(begin: Begin) -> None:
    term = running(begin)
    term.join(1, incarnation="second 1")
    old = Agent(term, 1, port=term.listener.port, running=GENERATION)
    term.pump.settle()
    assert old.orders(msg.Replaced) == [msg.Replaced()]
    old.close()
    second = begin()
    second.join(0)
    old = Agent(second, 1, port=second.listener.port, running=GENERATION)
    second.pump.settle()
    assert old.orders(msg.Replaced) == [msg.Replaced()], "nor by the next coordinator"
    old.close()
    second.join(1, incarnation="second 1")
    assert second.agents[1].orders(msg.Replaced) == []


def test_the_same_agent_may_connect_again(begin: Begin) -> None:
    term = running(begin)
    term.join(1, running=GENERATION)
    assert term.memory()["incarnations"]["1"] == ["first 1"]
    assert term.orders(msg.Stop) == {}


@pytest.mark.cluster  # slow
def test_a_spare_that_leaves_is_let_go_and_not_lost(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "Outgoing", Refused)
    term = begin("cluster.spares=2")
    term.join(0, 1, 2, 3)
    for node in (0, 1):
        term.agents[node].beat(GENERATION, 4)
    term.agents[3].tell(msg.NodeLeaving("SIGTERM", 2.0, told="a-1"))
    term.pump.until(lambda: "node_left" in kinds(term))
    assert term.agents[3].orders(msg.ReleaseAgent) == [msg.ReleaseAgent()]
    term.agents[3].close()
    term.pump.settle()
    assert "node_lost" not in kinds(term)
    (event,) = [e for e in read_events(term.folder)[0] if e.kind == "node_leaving"]
    assert (event.node, event.message) == (3, "node 3 is leaving: its agent received SIGTERM")


def test_how_the_run_ended_is_in_the_run_folder(begin: Begin) -> None:
    term = running(begin)
    for node in (0, 1):
        term.agents[node].tell(msg.NodeLeaving("SIGUSR1", 30.0, told=f"{node}-1"))
    for node in (0, 1):
        term.agents[node].tell(msg.GenerationLeft(GENERATION, "preempted", 1))
    found = read_outcome(term.folder, GENERATION)
    assert found is not None
    assert (found.exit_code, found.term, found.message, found.failure) == (75, 1, "the state is saved", None)
    assert {n: o.exit_code for n, (o,) in term.orders(msg.Outcome).items()} == {0: 75, 1: 75, 2: 75}
