"""Following the agents of one launch to the end, whatever ends them, and saying how it ended.

What happens in the run is the coordinator's to decide and to record. Here it is known who lives: an agent cannot
report its own death, and this process is the parent of all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from seatrial.base.errors import EXIT_INTERRUPTED
from seatrial.base.signals import SignalQueue
from seatrial.control import lease
from seatrial.launch.agents import AgentHandle, end_agents
from seatrial.launch.base import Failure, Outcome
from seatrial.launch.evidence import agent_failure, completed, read_failure
from seatrial.record import events
from seatrial.record.folder import RunFolder

Why = Literal["preempt", "interrupt", "now"]

_TICK_S = 0.05
_NOTICED_S = 1.0  # we may hear of an agent's death so much later than the coordinator does
_OUTCOME_GRACE_S = 2.0  # from the outcome until agents that have not ended are killed
# From the order to stop until the same.
_STOP_GRACE_S: dict[Why, float] = {"preempt": 5.0, "interrupt": 4.0, "now": 1.5}


class Gathering:
    """Takes in what the agents say, passes on the order to stop, and outlives them all."""

    def __init__(
        self,
        folder: RunFolder,
        generation: int,
        start: Callable[[int], AgentHandle],
        *,
        preempt_grace_s: float,
        returns: Mapping[int, float] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        """`start(node)` starts a node's agent. `returns`: node -> seconds after which a dead agent is started again."""
        self.folder = folder
        self.generation = generation
        self.agents: list[AgentHandle] = []
        self._start_agent = start
        self._returns = dict(returns or {})
        self._start_at: dict[int, float] = {}  # node -> on the monotonic clock
        self._tick = tick
        self._stop_grace_s = _STOP_GRACE_S | {"preempt": preempt_grace_s + _STOP_GRACE_S["preempt"]}
        self._stopping: Why | None = None
        self._kill_at: float | None = None  # on the monotonic clock
        self._outcome: dict[str, Any] | None = None
        self._selector = selectors.DefaultSelector()

    def start(self, node: int) -> None:
        """Start the agent of `node`. Raises OSError."""
        agent = self._start_agent(node)
        self.agents.append(agent)
        self._selector.register(agent.channel, selectors.EVENT_READ, lambda: self._on_channel(agent))
        self._selector.register(agent.pidfd, selectors.EVENT_READ, lambda: self._on_end(agent))

    def follow(self, signals: SignalQueue | None) -> Outcome:
        """Until every agent has ended or has said that nothing of it is left."""
        if signals is not None:
            self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals))
        while self._start_at or not all(a.gone for a in self.agents):
            for key, _ in self._selector.select(_TICK_S):
                key.data()
            self._meet_deadlines()
            if self._tick is not None:
                self._tick()
        return self._result()

    def close(self) -> None:
        """Kill whatever is left. Nothing that was started survives this."""
        end_agents(self.agents)
        self._selector.close()

    # -- what happens

    def _on_signals(self, signals: SignalQueue) -> None:
        for signum in signals.read():
            if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Whoever asks twice has waited long enough.
                first: Why = "interrupt" if signum == signal.SIGINT else "preempt"
                self._stop(first if self._stopping is None else "now")

    def _stop(self, why: Why) -> None:
        self._stopping = why
        self._start_at.clear()
        self._returns.clear()
        for agent in self.agents:
            if not agent.gone:
                agent.channel.send({"stop": why})
        self._kill_after(self._stop_grace_s[why])

    def _on_channel(self, agent: AgentHandle) -> None:
        for message in agent.channel.receive():
            match message:
                case {"outcome": outcome}:
                    self._take_outcome(outcome)
                case {"bye": _}:
                    agent.bye = True
        if agent.channel.closed:
            self._selector.unregister(agent.channel)

    def _take_outcome(self, outcome: dict[str, Any]) -> None:
        # Whoever was cut off and lost the lease may still believe that the run is its own to end.
        if int(outcome["term"]) < lease.last_term(self.folder.leases):
            return
        self._outcome = outcome
        self._start_at.clear()
        self._returns.clear()
        self._kill_after(_OUTCOME_GRACE_S)

    def _on_end(self, agent: AgentHandle) -> None:
        agent.take_end()
        self._selector.unregister(agent.pidfd)
        if not agent.channel.closed:
            self._on_channel(agent)  # its last words
        if not agent.bye:
            agent.kill_rest()
        if agent.died:
            self._tell_death(agent)
        node = agent.spec.node
        if node in self._returns:
            self._start_at[node] = time.monotonic() + self._returns[node]

    def _tell_death(self, agent: AgentHandle) -> None:
        node = agent.spec.node
        # Where the disk takes no more, the run must still be followed to its end; that it is full will be told then.
        with contextlib.suppress(OSError):
            events.append(
                self.folder,
                "agent_failed",
                f"agent of node {node} {agent.cause}",
                severity="warning",  # whether the run survives it is not decided here
                generation=max(self.generation, self.folder.last_generation()),
                node=node,
                data={"pid": agent.popen.pid, "status": agent.status, "time": agent.ended_at},
            )

    def _kill_after(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for agent in self.agents:
                agent.kill()
        for node in [node for node, when in self._start_at.items() if now >= when]:
            del self._start_at[node]
            self.start(node)

    # -- how it ended

    def _result(self) -> Outcome:
        died = sorted((a for a in self.agents if a.died), key=lambda a: a.ended_at)
        if self._outcome is None:
            return self._without_outcome(died)
        code, told = int(self._outcome["exit_code"]), self._outcome.get("failure")
        if not told:
            return Outcome(code)
        failure = read_failure(told, self.folder)
        if failure.rank is None:
            # The coordinator has only missed an agent; how it ended is known to its parent.
            known = (
                a for a in died if a.spec.node == failure.node and a.ended_at < failure.time + _NOTICED_S
            )
            agent = next(known, None)
            if agent is not None:
                failure = dataclasses.replace(agent_failure(agent), hint=failure.hint)
        return Outcome(code, completed(failure, self.folder))

    def _without_outcome(self, died: list[AgentHandle]) -> Outcome:
        if self._stopping is not None:
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
                message="every agent ended, and none said how the run ended",
                cause="no outcome",
                time=time.time(),
                exit_code=1,
                log=first.spec.log,
                tail="",
                hint="",
            ),
            self.folder,
        )
