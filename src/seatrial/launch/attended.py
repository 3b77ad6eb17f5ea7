"""Follows the agents of one launch until all have ended, and returns the outcome.

What happens in the run is decided and recorded by the coordinator. This process knows which agents are alive: an agent
cannot report its own death, and this process is the parent of all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from seatrial.base.complain import complain
from seatrial.base.errors import EXIT_INTERRUPTED, InputError
from seatrial.base.event_loop import EventLoop
from seatrial.base.signals import SignalQueue
from seatrial.control.agent.launcher_link import HEARTBEAT_S, SILENT_S
from seatrial.control.net import lease
from seatrial.control.node.spec import AgentSpec
from seatrial.launch.agents import AgentHandle, end_agents
from seatrial.launch.base import Outcome
from seatrial.launch.evidence import agent_failure, completed
from seatrial.record import events
from seatrial.record import messages as msg
from seatrial.record.failure import Failure
from seatrial.record.folder import RunFolder
from seatrial.record.recent import recorded_marks

if TYPE_CHECKING:
    from seatrial.job import Job

_TICK_S = 0.05
_NOTICE_LAG_S = 1.0  # our notice of an agent's death may lag behind the coordinator's by this much
_NONE_LEFT_S = 60.0  # how long no agent may be alive while restarts are pending
_RETRY_S = 5.0  # until a failed start of an agent is retried
_OUTCOME_GRACE_S = 2.0  # from the outcome until agents that have not ended are killed
# From the stop command until agents that have not ended are killed.
_STOP_GRACE_S: dict[msg.Why, float] = {"preempt": 5.0, "interrupt": 4.0, "now": 1.5}


def attend(
    job: Job,
    folder: RunFolder,
    generation: int,
    specs: Sequence[AgentSpec],
    start: Callable[[int], AgentHandle],
    *,
    returns: Callable[[AgentHandle], float | None],
    tick: Callable[[], None] | None,
    heartbeats: bool = False,
) -> Outcome:
    """Start the agent of every spec and follow them all to the end. See `AttendedRun`.

    Raises InputError if a log folder cannot be made.
    """
    for spec in specs:
        try:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(
                f"cannot make the log folder {spec.log.parent}: {e.strerror}",
                hint="choose a folder that you may write to",
            ) from e
    with _queued_signals() as signals:
        attended_run = AttendedRun(
            folder,
            generation,
            start,
            preempt_grace_s=job.resilience.preempt_grace_s,
            returns=returns,
            heartbeats=heartbeats,
            tick=tick,
        )
        try:
            for spec in specs:
                attended_run.start(spec.node)
            return attended_run.follow(signals)
        finally:
            attended_run.close()


@contextlib.contextmanager
def _queued_signals() -> Iterator[SignalQueue | None]:
    """A queue of the signals that end a run; None outside the main thread, where Python delivers no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    queue = SignalQueue((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield queue
    finally:
        queue.close()


class AttendedRun:
    """Receives the agents' messages, forwards the stop command, and waits until every agent has ended."""

    def __init__(
        self,
        folder: RunFolder,
        generation: int,
        start: Callable[[int], AgentHandle],
        *,
        preempt_grace_s: float,
        returns: Callable[[AgentHandle], float | None] = lambda _: None,
        heartbeats: bool = False,
        tick: Callable[[], None] | None = None,
    ) -> None:
        """`start(node)` starts a node's agent. `returns`: seconds until one that has ended is restarted, or None.

        `heartbeats`: agents are on other hosts and are sent heartbeats, see control/agent/launcher_link.py.
        """
        self.folder = folder
        self.generation = generation
        self.agents: list[AgentHandle] = []
        self._start_agent = start
        self._returns = returns
        self._ended_once: set[int] = set()  # nodes whose agent has ended at least once
        self._none_left_since: float | None = None  # since when no agent is alive, on the monotonic clock
        self._over = threading.Event()
        # A thread of its own, because this one blocks when the terminal accepts no output.
        self._heartbeats = threading.Thread(target=self._send_heartbeats, daemon=True) if heartbeats else None
        self._start_at: dict[int, float] = {}  # node -> when to restart its agent, on the monotonic clock
        self._tick = tick
        self._stop_grace_s = _STOP_GRACE_S | {"preempt": preempt_grace_s + _STOP_GRACE_S["preempt"]}
        self._stopping: msg.Why | None = None
        self._kill_at: float | None = None  # on the monotonic clock
        self._outcome: msg.RunOver | None = None
        self._exit_events: dict[str, events.Event] = {}  # by the mark of each report
        self._forwarder: AgentHandle | None = None  # the agent that was sent them
        self._sources = EventLoop()

    def start(self, node: int) -> None:
        """Start the agent of `node`. Raises OSError."""
        agent = self._start_agent(node)
        self.agents.append(agent)
        self._sources.watch(agent.channel, lambda: self._on_channel(agent))
        self._sources.watch(agent.pidfd, lambda: self._on_end(agent))

    def follow(self, signals: SignalQueue | None) -> Outcome:
        """Run until every agent has ended or has reported that nothing of its node is left."""
        if signals is not None:
            self._sources.watch(signals, lambda: self._on_signals(signals))
        if self._heartbeats is not None:
            self._heartbeats.start()
        while self._start_at or not all(a.gone for a in self.agents):
            self._sources.wait(_TICK_S)
            self._meet_deadlines()
            if self._tick is not None:
                self._tick()
        self._write_exit_events()
        return self._result()

    def close(self) -> None:
        """Kill whatever is left; nothing that was started survives this."""
        self._over.set()
        if self._heartbeats is not None and self._heartbeats.is_alive():
            self._heartbeats.join()
        end_agents(self.agents)
        self._sources.close()

    # -- what happens

    def _on_signals(self, signals: SignalQueue) -> None:
        for signum in signals.read():
            # A second signal ends the run without waiting.
            first: msg.Why = "interrupt" if signum == signal.SIGINT else "preempt"
            self._stop(first if self._stopping is None else "now")

    def _stop(self, why: msg.Why) -> None:
        self._stopping = why
        self._start_at.clear()
        for agent in self.agents:
            if not agent.gone:
                agent.channel.send(msg.encode(msg.EndRun(why)))
        self._kill_after(self._stop_grace_s[why])

    def _on_channel(self, agent: AgentHandle) -> None:
        try:
            for values in agent.channel.receive():
                self._on_message(agent, msg.decode(values, msg.ToLauncher))
        except ValueError as error:
            complain(f"protocol error from the agent of node {agent.spec.node}: {error}")
            if not agent.ended:
                agent.popen.kill()  # its end counts as its own failure
        if agent.channel.closed:
            self._sources.unwatch(agent.channel)

    def _on_message(self, agent: AgentHandle, message: msg.ToLauncher) -> None:
        agent.connected = True
        match message:
            case msg.AgentAlive():
                agent.heard = time.monotonic()
            case msg.RunOver():
                self._on_outcome(message)
            case msg.AgentFinished():
                agent.bye = True
            case msg.AgentStarted():
                pass  # the coordinator records it

    def _on_outcome(self, outcome: msg.RunOver) -> None:
        # A partitioned coordinator may not know yet that it has lost the lease.
        if outcome.term < lease.last_term(self.folder.leases):
            return
        self._outcome = outcome
        self._start_at.clear()
        self._kill_after(_OUTCOME_GRACE_S)

    def _on_end(self, agent: AgentHandle) -> None:
        agent.reap()
        self._sources.unwatch(agent.pidfd)
        if not agent.channel.closed:
            self._on_channel(agent)  # what it sent before it ended
        if not agent.channel.closed:  # something that it started still has the other end
            self._sources.unwatch(agent.channel)
        if not agent.bye:
            agent.kill_rest()
        node = agent.spec.node
        again = node in self._ended_once and not agent.connected
        self._ended_once.add(node)
        if again:  # still unreachable, as already reported
            self.agents.remove(agent)
        elif agent.died:
            self._report_exit(agent)
        agent.close()
        wait_s = self._returns(agent)
        if wait_s is not None and self._outcome is None and self._stopping is None:
            self._start_at[node] = time.monotonic() + wait_s

    def _report_exit(self, agent: AgentHandle) -> None:
        """Report a death through a live agent, which forwards it to the coordinator, the recorder during the run."""
        text = f"launcher-{secrets.token_hex(6)}"
        self._exit_events[text] = events.Event(
            time.time(),
            max(self.generation, self.folder.last_generation()),
            "agent_failed",
            "warning",  # whether the run survives it is not decided here
            f"agent of node {agent.spec.node} {agent.cause}",
            agent.spec.node,
            data={"pid": agent.popen.pid, "status": agent.status, "time": agent.ended_at, "told": text},
        )
        unsent = {text: self._exit_events[text]}
        if self._forwarder is None or self._forwarder.gone:
            self._forwarder = next((a for a in self.agents if not a.gone), None)
            # The previous forwarder may have exited before it forwarded the earlier ones.
            unsent = self._exit_events
        if self._forwarder is not None:
            for mark, event in unsent.items():
                self._forwarder.channel.post(msg.encode(msg.LauncherRecord(**vars(event), told=mark)))

    def _write_exit_events(self) -> None:
        """Write the deaths that no agent has forwarded; none is alive any more."""
        recorded = recorded_marks(self.folder) if self._exit_events else set()
        # With a full disk the run must still be followed to its end, which will report that the disk is full.
        with contextlib.suppress(OSError):
            for mark, event in self._exit_events.items():
                if mark not in recorded:
                    events.write(self.folder, event)

    def _kill_after(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def _send_heartbeats(self) -> None:
        while True:
            for agent in list(self.agents):
                with contextlib.suppress(OSError):  # closed in the meantime
                    agent.channel.post(msg.encode(msg.LauncherAlive()))
            if self._over.wait(HEARTBEAT_S):
                return

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        for agent in self.agents:
            if agent.heard is not None and now - agent.heard > SILENT_S and not agent.ended:
                agent.popen.kill()
        if any(not a.gone and (a.connected or a.spec.node not in self._ended_once) for a in self.agents):
            self._none_left_since = None
        elif self._start_at:
            self._none_left_since = self._none_left_since or now
            if now - self._none_left_since > _NONE_LEFT_S:
                self._stop("now")  # no agent is left whose run a restarted one could join
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for agent in self.agents:
                agent.kill()
        for node in [node for node, when in self._start_at.items() if now >= when]:
            del self._start_at[node]
            try:
                self.start(node)
            except OSError as error:  # out of processes or file descriptors: the other nodes keep training
                complain(f"could not start the agent of node {node} again: {error}")
                self._start_at[node] = now + _RETRY_S

    # -- how it ended

    def _result(self) -> Outcome:
        died = sorted((a for a in self.agents if a.died), key=lambda a: a.ended_at)
        if self._outcome is None:
            return self._without_outcome(died)
        code, failure = self._outcome.exit_code, self._outcome.failure
        if failure is None:
            return Outcome(code)
        if failure.rank is None:
            # The coordinator only noticed that an agent is missing; its parent knows how it ended.
            known = (
                a for a in died if a.spec.node == failure.node and a.ended_at < failure.time + _NOTICE_LAG_S
            )
            agent = next(known, None)
            if agent is not None:
                failure = dataclasses.replace(agent_failure(agent), hint=failure.hint)
        return Outcome(code, completed(failure, self.folder))

    def _without_outcome(self, died: list[AgentHandle]) -> Outcome:
        if self._stopping is not None and self._none_left_since is None:
            return Outcome(EXIT_INTERRUPTED)
        return Outcome(1, self._failure_of(died))

    def _failure_of(self, died: list[AgentHandle]) -> Failure:
        if died:
            return completed(agent_failure(died[0]), self.folder)
        first = self.agents[0]
        return completed(
            Failure(
                node=None,
                rank=None,
                message="all agents exited without reporting how the run ended",
                cause="no outcome",
                time=time.time(),
                log=str(first.spec.log),
            ),
            self.folder,
        )
