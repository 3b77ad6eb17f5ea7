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
from typing import Any

import pytest
from wired import SECRET, Pump, link_pair

from seatrial.control import confirm
from seatrial.control import lease as leases
from seatrial.control import peers as peers_module
from seatrial.control.coordinator import Coordinator
from seatrial.control.hangs import Culprit
from seatrial.control.lease import Lease
from seatrial.control.spec import AgentSpec
from seatrial.control.wire import Listener
from seatrial.job import Job, job_from_text
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder

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


class Agent:
    """A node's agent, in the test's hands."""

    def __init__(self, term: Term, node: int, *, port: int, **hello: Any) -> None:
        self.term, self.node = term, node
        ours, self.link = link_pair()
        plain = {"node": node, "address": "127.0.0.1", "port": port, "pid": 1000 + node, "ready": True}
        plain |= {"running": None, "left": None, "offer_port": 7000 + node, "held": []}
        term.coordinator.join(plain | hello, ours)

    def tell(self, **message: Any) -> None:
        self.link.send(message)
        self.term.pump.settle()

    def beat(self, generation: int, step: int, failed: int = 0) -> None:
        self.tell(beat=1, generation=generation, step=step, failed=failed)

    def exits(self, rank: int, generation: int, status: int = -9) -> None:
        about = {"rank": rank, "generation": generation, "local": 0, "pid": 5, "status": status, "time": 1.0}
        more = {"signalled": None, "oom_killed": False, "ran": True, "never_began": False}
        self.tell(worker={"kind": "exited", **about, **more, "error": None, "log": "", "tail": ""})

    def stops(self, generation: int) -> None:
        self.tell(stopped={"generation": generation, "parked": 2, "offer_port": 7100 + self.node})

    def orders(self, kind: str) -> list[dict[str, Any]]:
        """What has come of that kind since the last call; all else is dropped."""
        return [message[kind] for message in self.link.receive() if kind in message]

    def close(self) -> None:
        self.link.close()


class Term:
    """A coordinator and its agents."""

    def __init__(self, pump: Pump, folder: RunFolder, job: Job, number: int, **more: Any) -> None:
        self.pump, self.folder, self.agents = pump, folder, dict[int, Agent]()
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
        assert leases.claim(folder.leases, lease)
        self.listener = Listener("127.0.0.1", SECRET)  # where the agents are said to listen
        self.coordinator = Coordinator(spec, job, INPUTS, lease, SECRET, pump.watch, pump.unwatch, **more)
        self.pump.ticks.append(self.coordinator.tick)

    def join(self, *nodes: int, **hello: Any) -> None:
        for node in nodes:
            self.agents[node] = Agent(self, node, port=hello.pop("port", self.listener.port), **hello)

    def orders(self, kind: str) -> dict[int, list[dict[str, Any]]]:
        """By node, for those that got some."""
        found = {node: agent.orders(kind) for node, agent in self.agents.items()}
        return {node: orders for node, orders in found.items() if orders}

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.folder.control_state.read_text())
        return found

    def close(self) -> None:
        """Another term begins."""
        if self.coordinator.tick in self.pump.ticks:
            self.pump.ticks.remove(self.coordinator.tick)
        self.coordinator.close()
        for agent in self.agents.values():
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
    starts = term.orders("start")
    assert set(starts) == {0, 1}
    for node in (0, 1):
        term.agents[node].beat(GENERATION, 4)
    return term


def kinds(term: Term) -> list[str]:
    return [e.kind for e in read_events(term.folder)[0]]


def test_what_each_node_is_told(begin: Begin) -> None:
    term = begin()
    term.join(1, 2, 0)
    orders = {node: order for node, (order,) in term.orders("start").items()}
    assert {node: (o["slot"], o["ranks"], o["guards"], o["buddy"]["node"]) for node, o in orders.items()} == {
        0: (0, [0, 1], [2, 3], 1),
        1: (1, [2, 3], [0, 1], 0),
    }
    for order in orders.values():
        assert (order["generation"], order["world_size"], order["master_port"]) == (GENERATION, 4, 7000)
        assert (order["in_place"], order["again"], order["fetch"]) == (False, False, [])
        assert order["inputs"] == INPUTS
    assert term.memory()["machine"]["generation"] == GENERATION
    assert term.folder.generation_file.read_text() == f"{GENERATION}\n"


def test_a_failure_stops_all_and_starts_anew_when_all_have_stopped(begin: Begin) -> None:
    term = running(begin)
    term.agents[1].exits(3, GENERATION)
    assert {n: o[0]["kill"] for n, o in term.orders("stop").items()} == {0: [], 1: []}
    term.agents[0].stops(GENERATION)
    assert term.orders("start") == {}
    term.agents[1].stops(GENERATION)
    orders = term.orders("start")
    assert {o["generation"] for (o,) in orders.values()} == {GENERATION + 1}
    assert all(o["in_place"] and o["again"] and o["master_port"] == 7100 for (o,) in orders.values())
    (event,) = [e for e in read_events(term.folder)[0] if e.kind == "recovering"]
    assert (event.node, event.rank, event.message) == (1, 3, "rank 3: was killed by SIGKILL")


class Refused:
    """A connection that the kernel refuses at once, as it may on one host."""

    events = selectors.EVENT_WRITE
    why = os.strerror(errno.ECONNREFUSED)

    def __init__(self, *_: Any) -> None:
        self.sock = socket.socket()

    def fileno(self) -> int:
        return self.sock.fileno()

    def advance(self) -> str:
        return "refused"

    def close(self) -> None:
        self.sock.close()


def test_a_loss_that_shows_while_orders_are_given_is_handled_after_them(
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
    assert set(term.orders("start")) == {2}, "a smaller layout, at once"
    assert term.coordinator.world is not None
    assert term.coordinator.world.generation == GENERATION + 1
    memory = term.memory()
    assert (memory["world"]["generation"], memory["machine"]["phase"]) == (GENERATION + 1, "running")
    assert term.coordinator.hangs.watching, "its steps are watched"


@pytest.mark.parametrize("older", [GENERATION - 1, GENERATION])
def test_a_stop_of_an_older_generation_leaves_the_current_one_at_work(begin: Begin, older: int) -> None:
    """A node comes back and says that it still runs what the others left long ago."""
    term = running(begin)
    if older == GENERATION:
        term.agents[1].exits(3, GENERATION)
        term.agents[0].stops(GENERATION)
        term.agents[1].stops(GENERATION)
        for node in (0, 1):
            term.agents[node].beat(GENERATION + 1, 5)
    newest = term.coordinator.machine.generation
    term.orders("stop")
    term.agents[2].close()
    term.join(2, running=older)
    assert {n: [o["generation"] for o in orders] for n, orders in term.orders("stop").items()} == {2: [older]}
    assert term.coordinator.hangs.watching, "its steps are still watched"
    limit = term.coordinator.hangs.deadline
    assert limit is not None
    assert limit - time.monotonic() < 100, "as closely as before, not as at a start"
    term.agents[0].exits(1, newest)
    assert set(term.orders("stop")) >= {0, 1}, "and a failure has its consequence"


def test_a_smaller_start_follows_where_there_is_nothing_to_flush(begin: Begin) -> None:
    term = running(begin, "cluster.spares=0")
    term.agents[2].link.close()
    term.agents[1].exits(3, GENERATION)
    term.agents[0].stops(GENERATION)
    term.coordinator._lost(2, True, "its agent ended")
    term.coordinator._lost(1, True, "its agent ended")
    ((order,),) = term.orders("start").values()
    assert (order["world_size"], order["layout"]["replicate"], order["slots"]) == (2, 1, 1)
    assert "shrunk" in kinds(term)


def test_several_ranks_that_hang_are_killed_in_one_stop_and_no_later_one(begin: Begin) -> None:
    term = running(begin)
    culprits = [Culprit(0, 1, "stopped", "1 is stopped"), Culprit(1, 2, "stopped", "2 is stopped")]
    term.coordinator._fail_for_hang(culprits)
    assert {n: o[0]["kill"] for n, o in term.orders("stop").items()} == {0: [1], 1: [2]}
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    assert len(term.orders("start")) == 2
    term.agents[0].exits(0, GENERATION + 1)
    assert {n: o[0]["kill"] for n, o in term.orders("stop").items()} == {0: [], 1: []}


def test_a_finding_of_an_earlier_generation_stops_nobody(begin: Begin) -> None:
    """An agent tells again, to whoever coordinates, what it told before."""
    term = running(begin, "resilience.evict_after=9")
    finding = {"kind": "finding", "rank": 0, "generation": GENERATION, "local": 0, "signal": "corruption"}
    finding |= {"step": 4, "message": "rank 2 has other weights", "data": {}, "blamed": [2]}
    term.agents[0].tell(worker=finding)
    assert set(term.orders("stop")) == {0, 1}
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    term.pump.settle()
    term.orders("start")
    before = kinds(term).count("recovering")
    term.agents[0].tell(worker=finding)
    assert term.orders("stop") == {}
    assert kinds(term).count("recovering") == before


def test_the_gpu_that_a_signal_named_is_the_one_to_be_reset(begin: Begin) -> None:
    term = running(begin)
    signal = {
        "signal": "xid:95",
        "gpu": "0000:3b:00",
        "port": None,
        "message": "Xid 95",
        "evidence": {},
        "time": 1.0,
    }
    term.agents[1].tell(signals=[signal])
    term.orders("stop")
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    (order,) = term.agents[1].orders("external")
    assert (order["what"], order["gpu"]) == ("reset_gpu", "0000:3b:00")


def test_whoever_has_lost_the_lease_starts_and_ends_nothing(begin: Begin) -> None:
    term = running(begin)
    term.agents[1].exits(3, GENERATION)
    term.orders("stop")
    term.coordinator._renew_at = float("inf")  # it has not looked yet
    assert leases.claim(term.folder.leases, Lease(2, 0, "127.0.0.1", 2, 0.0))
    term.agents[0].stops(GENERATION)
    term.agents[1].stops(GENERATION)
    assert term.orders("start") == {}
    assert term.coordinator.deposed


def test_whoever_has_lost_the_lease_does_not_end_the_run(begin: Begin) -> None:
    term = running(begin)
    term.coordinator._renew_at = float("inf")
    assert leases.claim(term.folder.leases, Lease(2, 0, "127.0.0.1", 2, 0.0))
    term.agents[0].tell(asked="now")
    assert term.coordinator.deposed
    assert term.orders("outcome") == {}


# -- the next term


def test_the_next_one_notices_what_happens_to_a_run_that_goes_on(begin: Begin) -> None:
    running(begin)
    term = begin()
    term.join(0, 1, running=GENERATION)
    term.join(2)
    assert term.orders("start") == {}
    assert term.orders("stop") == {}
    assert term.coordinator.hangs.watching
    term.agents[1].exits(3, GENERATION)
    assert set(term.orders("stop")) == {0, 1}
    (event,) = [e for e in read_events(term.folder)[0] if e.kind == "recovering"]
    assert (event.rank, event.generation) == (3, GENERATION)


def test_what_is_told_to_one_after_the_other_is_one_event_and_counts_each_time(begin: Begin) -> None:
    """The first of them recorded it and died before it could act."""
    term = running(begin)
    exited = {"rank": 3, "generation": GENERATION, "local": 0, "pid": 5, "status": -9, "time": 1.0}
    exited |= {"signalled": None, "oom_killed": False, "ran": True, "never_began": False, "told": "a-1"}
    exited |= {"kind": "exited", "error": None, "log": "", "tail": ""}
    term.coordinator._fail = lambda *_: None  # type: ignore[method-assign]
    term.agents[1].tell(worker=exited)
    term = begin()
    term.join(0, 1, running=GENERATION)
    term.agents[1].tell(worker=exited)
    assert kinds(term).count("rank_failed") == 1
    assert set(term.orders("stop")) == {0, 1}


def test_a_node_that_had_left_in_order_has_lost_nothing(begin: Begin) -> None:
    """Its word of that went down with the coordinator."""
    running(begin)
    term = begin()
    left = {"generation": GENERATION, "how": "done", "offer_port": 1}
    term.join(0, left=left)
    term.join(1, running=GENERATION)
    term.join(2)
    assert term.orders("stop") == {}
    assert "recovering" not in kinds(term)
    term.agents[1].tell(left=left)
    assert {o["exit_code"] for (o,) in term.orders("outcome").values()} == {0}


def test_the_node_that_coordinated_and_died_is_lost_for_certain(begin: Begin) -> None:
    running(begin)
    term = begin(dead=0)
    term.join(1, running=GENERATION)
    term.join(2)
    assert set(term.orders("stop")) == {1}
    term.agents[1].stops(GENERATION)
    orders = {node: order["slot"] for node, (order,) in term.orders("start").items()}
    assert orders == {2: 0, 1: 1}


def test_an_end_that_was_decided_is_told_by_the_next_one(begin: Begin) -> None:
    once = ("resilience.max_restarts=0", "cluster.spares=0")
    term = running(begin, *once)
    term.agents[1].exits(3, GENERATION)
    term = begin(*once)
    term.join(0, running=GENERATION)
    term.pump.until(lambda: term.coordinator.ending.outcome is not None)
    (outcome,) = term.agents[0].orders("outcome")
    assert outcome["exit_code"] == 1


def test_memory_of_an_earlier_launch_is_not_ours(begin: Begin) -> None:
    term = running(begin)
    memory = term.memory()
    term.folder.control_state.write_text(json.dumps(memory | {"launch": GENERATION - 1}))
    term = begin()
    assert not term.coordinator.machine.started
    term.folder.control_state.write_text("{")
    term = begin()
    assert not term.coordinator.machine.started


def test_one_that_hears_too_few_resigns_and_goes_on_alone_if_nobody_took_over(begin: Begin) -> None:
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
    assert set(term.orders("stop")) == {1}, "to go on without them"


# -- what stands still


def test_a_rank_that_its_agent_found_stopped_is_blamed_and_killed(begin: Begin) -> None:
    term = running(begin)
    about = {"kind": "stopped", "rank": 3, "generation": GENERATION, "local": 1, "told": "a-1"}
    message = "process 77 has been stopped by a signal for 5 s"
    term.agents[1].tell(worker={**about, "message": message})
    assert {n: o[0]["kill"] for n, o in term.orders("stop").items()} == {0: [], 1: [3]}
    events = {e.kind: e for e in read_events(term.folder)[0]}
    assert (events["hang_blamed"].node, events["hang_blamed"].rank) == (1, 3)
    assert events["hang_blamed"].message == f"rank 3: {message}"
    assert events["recovering"].data is not None
    assert events["recovering"].data["signal"] == "stopped"


def test_a_rank_of_an_earlier_generation_that_was_stopped_is_nobodys_business(begin: Begin) -> None:
    term = running(begin)
    about = {"kind": "stopped", "rank": 3, "generation": GENERATION - 1, "local": 1, "message": "stopped"}
    term.agents[1].tell(worker=about)
    assert term.orders("stop") == {}


def test_ranks_that_ended_without_a_report_are_missed_by_the_beats(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "WAIT_S", 0.0)
    term = running(begin)
    term.agents[0].beat(GENERATION, 4, failed=1)
    assert set(term.orders("stop")) == {0, 1}
    (event,) = [e for e in read_events(term.folder)[0] if e.kind == "recovering"]
    assert event.message == "node 0: 1 of its ranks have ended, and nobody said why"
    term.agents[0].beat(GENERATION, 4, failed=1)
    assert kinds(term).count("recovering") == 1, "it is being stopped"
