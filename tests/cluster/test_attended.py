"""How a launcher follows its agents: what they say, how they end, what is left, whatever the order of it."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.base import process
from seatrial.control.net.lease import Lease, Leases
from seatrial.control.node.spec import AgentSpec
from seatrial.launch import attended
from seatrial.launch.agents import AgentHandle, start_agent
from seatrial.launch.attended import AttendedRun
from seatrial.launch.base import Outcome
from seatrial.record import messages as msg
from seatrial.record.events import read_events
from seatrial.record.failure import Failure
from seatrial.record.folder import RunFolder

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

STANDIN = Path(__file__).with_name("standin_agent.py")
BYE = {"say": msg.encode(msg.AgentFinished())}
Script = list[Any]


def outcome(code: int = 0, term: int = 1, **failure: Any) -> dict[str, Any]:
    """An agent's action: say how the run ended."""
    values = {"node": None, "rank": None, "message": "m", "cause": "c", "time": 9e10, "exit_code": code}
    return {"say": msg.encode(msg.RunOver(code, term, Failure(**values | failure) if failure else None))}


class Signals:
    """A queue of signals that the test fills."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)

    def fileno(self) -> int:
        return self.reader.fileno()

    def read(self) -> list[int]:
        try:
            return list(self.reader.recv(64))
        except BlockingIOError:
            return []

    def send(self, signum: int) -> None:
        self.writer.send(bytes([signum]))


class Launch:
    """Agents that follow scripts: node -> one script for each time that its agent is started."""

    def __init__(self, folder: RunFolder, scripts: dict[int, list[Script]], **options: Any) -> None:
        self.folder = folder
        self.scripts = scripts
        self.started: list[int] = []
        self.signals = Signals()
        self.when: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self.attended_run = AttendedRun(
            folder, 4, self._start, **({"preempt_grace_s": 30.0, "tick": self._tick} | options)
        )

    def _start(self, node: int) -> AgentHandle:
        script = self.scripts[node][self.started.count(node)]
        self.started.append(node)
        spec = AgentSpec(
            run=self.folder.path,
            generation=4,
            node=node,
            nodes=len(self.scripts),
            ranks_per_node=1,
            device="cpu",
        )
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(STANDIN), json.dumps(script)]
        return start_agent(spec, f"test-{id(self)}-{len(self.started)}", command)

    def _tick(self) -> None:
        for pair in list(self.when):
            if pair[0]():
                self.when.remove(pair)
                pair[1]()

    def once_ended(self, node: int, then: Callable[[], object]) -> None:
        """Call `then` when the first agent of `node` has ended."""
        self.when.append(
            (lambda: any(a.ended for a in self.attended_run.agents if a.spec.node == node), then)
        )

    def say(self, node: int, message: dict[str, Any]) -> None:
        self.attended_run.agents[node].channel.send(message)

    def follow(self) -> Outcome:
        try:
            for node in self.scripts:
                self.attended_run.start(node)
            return self.attended_run.follow(self.signals)  # type: ignore[arg-type]
        finally:
            self.attended_run.close()
            self.signals.reader.close()
            self.signals.writer.close()


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Launch]:
    def begin(*scripts: Script, again: dict[int, list[Script]] | None = None, **options: Any) -> Launch:
        all_scripts = {node: [script, *(again or {}).get(node, [])] for node, script in enumerate(scripts)}
        return Launch(RunFolder(tmp_path), all_scripts, **options)

    return begin


Begin = Callable[..., Launch]


def test_the_outcome_is_the_coordinators(launch: Begin) -> None:
    for code in (0, 75, 130):
        assert launch([outcome(code), BYE], [outcome(code), BYE]).follow() == Outcome(code)


def test_a_killed_agent_is_recorded_and_the_others_continue(launch: Begin, tmp_path: Path) -> None:
    run = launch([{"wait": "go"}, outcome(), BYE], [{"spawn": str(tmp_path / "pid")}, "die"])
    left: list[bool] = []

    def go_on() -> None:
        left.append(int((tmp_path / "pid").read_text()) in process.living())
        run.say(0, {"go": 1})

    run.once_ended(1, go_on)
    assert run.follow() == Outcome(0)
    assert left == [False], "what it had started is gone at once, not only at the end"
    (told,) = read_events(run.folder)[0]
    assert (told.kind, told.severity, told.node) == ("agent_failed", "warning", 1)
    assert told.message == "agent of node 1 was killed by SIGKILL"


def test_the_death_of_an_agent_is_recorded_by_a_living_one(launch: Begin, tmp_path: Path) -> None:
    """The coordinator writes while agents live; what the one that was to pass it on has not is told to another."""
    path = str(RunFolder(tmp_path).events)
    run = launch([{"wait": "record"}, "die"], [{"record": path, "count": 2}, outcome(), BYE], ["die"])
    assert run.follow() == Outcome(0)
    events = read_events(run.folder)[0]
    assert [(e.kind, e.node) for e in events] == [("agent_failed", 2), ("agent_failed", 0)]
    assert len({(e.data or {})["told"] for e in events}) == 2, "each once, with a mark"


def test_without_an_outcome_the_first_agent_that_died_is_named(launch: Begin) -> None:
    run = launch([{"wait": "go"}, "die"], [{"exit": 7}])
    run.once_ended(1, lambda: run.say(0, {"go": 1}))
    result = run.follow()
    failure = result.failure
    assert failure is not None
    assert (result.exit_code, failure.exit_code, failure.node, failure.rank) == (1, 1, 1, None)
    assert failure.message == "agent of node 1 ended with exit code 7"
    assert failure.tail == "an agent says hello"
    assert failure.hint == f"the whole log is {failure.log}"


def test_agents_that_leave_in_order_without_an_outcome(launch: Begin) -> None:
    result = launch([BYE], [BYE]).follow()
    assert result.failure is not None
    assert result.failure.message == "all agents exited without reporting how the run ended"
    assert read_events(RunFolder(Path(result.failure.log).parents[3]))[0] == []


def test_a_lost_nodes_failure_reports_its_agents_end(launch: Begin) -> None:
    """The coordinator has only missed it; the launcher is its parent."""
    lost = outcome(1, node=1, message="node 1 is lost", cause="its agent exited", hint="max_restarts is 0")
    run = launch([{"wait": "go"}, lost, BYE], ["die"])
    run.once_ended(1, lambda: run.say(0, {"go": 1}))
    failure = run.follow().failure
    assert failure is not None
    assert failure.message == "agent of node 1 was killed by SIGKILL"
    assert (failure.hint, failure.tail) == ("max_restarts is 0", "an agent says hello")


def test_a_rank_s_failure_is_reported_by_the_coordinator(launch: Begin, tmp_path: Path) -> None:
    log = tmp_path / "rank3.log"
    log.write_text("first\nlast\n")
    told = outcome(
        2, node=1, rank=3, message="rank 3", cause="bad", log=str(log), tail="", hint="do otherwise"
    )
    result = launch([told, BYE], ["die"]).follow()
    failure = result.failure
    assert failure is not None
    assert (result.exit_code, failure.message, failure.cause) == (2, "rank 3", "bad")
    assert (failure.tail, failure.hint, failure.log) == ("first\nlast", "do otherwise", str(log))


def test_an_outcome_of_an_old_term_is_ignored(launch: Begin) -> None:
    run = launch([outcome(1, term=1, node=0), BYE], [{"wait": "go"}, outcome(0, term=2), BYE])
    run.folder.control.mkdir(exist_ok=True)
    Leases(run.folder.leases).claim(Lease(2, 1, "127.0.0.1", 1, 0.0), 3.0)
    run.when.append((lambda: run.attended_run.agents[0].gone, lambda: run.say(1, {"go": 1})))
    assert run.follow() == Outcome(0)


def test_an_agent_that_does_not_end_is_killed(launch: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attended, "_OUTCOME_GRACE_S", 0.1)
    run = launch([outcome(0), BYE], ["hang"])
    assert run.follow() == Outcome(0)
    assert run.attended_run.agents[1].killed
    assert read_events(run.folder)[0] == [], "we killed it: it did not fail"


@pytest.mark.parametrize(
    ("signum", "why"), [(signal.SIGTERM, "preempt"), (signal.SIGHUP, "preempt"), (signal.SIGINT, "interrupt")]
)
def test_what_a_signal_asks_for(launch: Begin, signum: int, why: str) -> None:
    """The second one, whichever it is, does not wait."""
    run = launch([{"repeat": "stop"}, {"repeat": "stop"}, outcome(75), BYE])
    heard: list[str] = []
    take = run.attended_run.agents

    def listen() -> None:
        channel = take[0].channel
        receive = channel.receive

        def spy() -> list[dict[str, Any]]:
            messages = receive()
            for m in messages:
                if "heard" in m:
                    heard.append(m["heard"]["why"])
                    if len(heard) == 1:
                        run.signals.send(signal.SIGTERM)
            return [m for m in messages if "heard" not in m]

        channel.receive = spy  # type: ignore[method-assign]
        run.signals.send(signum)

    run.when.append((lambda: True, listen))
    assert run.follow() == Outcome(75)
    assert heard == [why, "now"]


@pytest.mark.parametrize("said", [{"outcome": {"exit_code": 0}}, {"bye": 1}, {"hello": {}}])
def test_an_agent_with_a_protocol_error_is_killed(
    launch: Begin, capfd: pytest.CaptureFixture[str], said: dict[str, Any]
) -> None:
    run = launch([{"wait": "record"}, outcome(), BYE], [{"say": said}, "hang"])
    assert run.follow() == Outcome(0)
    assert "protocol error from the agent of node 1: " in capfd.readouterr().err
    assert run.attended_run.agents[1].status == -signal.SIGKILL


def test_agents_exiting_silently_after_a_signal_were_interrupted(launch: Begin) -> None:
    run = launch([{"wait": "stop"}, BYE], [{"wait": "stop"}, {"exit": 1}])
    run.when.append((lambda: True, lambda: run.signals.send(signal.SIGINT)))
    assert run.follow() == Outcome(130)


def test_a_node_that_comes_back(launch: Begin) -> None:
    run = launch(
        [{"wait": "go"}, outcome(), BYE],
        ["die"],
        again={1: [[{"exit": 3}], [BYE]]},
        returns=lambda a: 0.0 if a.spec.node == 1 else None,
    )
    run.when.append((lambda: run.started.count(1) == 3, lambda: run.say(0, {"go": 1})))
    assert run.follow() == Outcome(0)
    assert run.started == [0, 1, 1, 1]


def test_failed_agent_restart_is_retried_later(
    launch: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = launch(
        [{"wait": "go"}, outcome(), BYE],
        ["die"],
        again={1: [[BYE]]},
        returns=lambda a: 0.0 if a.died else None,
    )
    start, refusals = run.attended_run._start_agent, [OSError("no more processes")]

    def start_agent(node: int) -> AgentHandle:
        if run.started.count(1) and refusals:
            raise refusals.pop()
        return start(node)

    run.attended_run._start_agent = start_agent
    monkeypatch.setattr(attended, "_RETRY_S", 0.01)
    run.when.append((lambda: run.started.count(1) == 2, lambda: run.say(0, {"go": 1})))
    assert run.follow().exit_code == 0
    assert "could not start the agent of node 1 again: no more processes" in capfd.readouterr().err


def test_the_last_node_comes_back(launch: Begin) -> None:
    """With every agent dead the run is not over while one is still to return."""
    run = launch(["die"], again={0: [[outcome(), BYE]]}, returns=lambda _: 0.2)
    assert run.follow() == Outcome(0)


def test_no_agent_is_restarted_after_the_outcome(launch: Begin) -> None:
    run = launch([{"wait": "go"}, outcome(), BYE], ["die"], returns=lambda _: 60.0)
    run.once_ended(1, lambda: run.say(0, {"go": 1}))
    assert run.follow() == Outcome(0)
    assert run.started == [0, 1]


def test_a_run_whose_agents_keep_dying_ends(launch: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attended, "_NONE_LEFT_S", 0.5)
    run = launch(["die"], again={0: [[{"exit": 3}]] * 100}, returns=lambda _: 0.1)
    result = run.follow()
    assert result.failure is not None
    assert (result.exit_code, result.failure.message) == (1, "agent of node 0 was killed by SIGKILL")
    assert len(run.started) > 1
    assert [e.message for e in read_events(run.folder)[0]] == [result.failure.message], "not each time anew"
