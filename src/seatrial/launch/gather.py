"""Following the agents of one launch to the end, whatever ends them, and saying how it ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.base.errors import EXIT_INTERRUPTED
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue
from seatrial.control.agent import STOP_TIMES, Why
from seatrial.control.reports import Report
from seatrial.control.spec import AgentSpec
from seatrial.control.verdict import Finding, first_failure
from seatrial.launch.base import Failure, Outcome
from seatrial.record import events
from seatrial.record.folder import RunFolder

_TICK_S = 0.05
_AGENT_GRACE_S = 1.5  # beyond the agent's own deadlines, before an agent that does not stop is killed
_LITTLE_SPACE = 1 << 20  # bytes
_TAIL_LINES = 20
_TAIL_BYTES = 16384


@dataclass
class AgentHandle:
    """One running agent, as its launcher holds it."""

    spec: AgentSpec
    mark: str
    popen: subprocess.Popen[bytes]
    channel: Channel
    pidfd: int
    done: bool = False  # said that all its ranks have ended and nothing is left
    signalled: float | None = None
    ended: bool = False


class Gathering:
    """Merges the agents' reports, passes on the order to stop, and outlives them all."""

    def __init__(
        self,
        folder: RunFolder,
        generation: int,
        agents: list[AgentHandle],
        on_report: Callable[[Report], None] | None,
        tick: Callable[[], None] | None,
    ) -> None:
        self.folder = folder
        self.generation = generation
        self.agents = agents
        self.on_report = on_report
        self.tick = tick
        self.reports: list[Report] = []
        self.stopping: Why | None = None
        self.kill_agents_at: float | None = None  # on the monotonic clock
        self.interrupted_at: float | None = None  # unix seconds
        self.selector = selectors.DefaultSelector()

    def follow(self, signals: SignalQueue | None) -> Outcome:
        """Until every agent has ended; nothing that they started is left afterwards, also if this raises."""
        try:
            if signals is not None:
                self.selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals))
            for agent in self.agents:
                self.selector.register(
                    agent.channel, selectors.EVENT_READ, lambda a=agent: self._on_channel(a)
                )
                self.selector.register(agent.pidfd, selectors.EVENT_READ, lambda a=agent: self._on_end(a))
            while not all(a.ended for a in self.agents):
                for key, _ in self.selector.select(_TICK_S):
                    key.data()
                if self.kill_agents_at is not None and time.monotonic() >= self.kill_agents_at:
                    self._kill_agents()
                if self.tick is not None:
                    self.tick()
            return self._outcome()
        finally:
            end_agents(self.agents)
            self.selector.close()

    def _on_signals(self, signals: SignalQueue) -> None:
        for signum in signals.read():
            if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Whoever asks twice has waited long enough.
                self._stop("interrupt" if self.interrupted_at is None else "now")
                self.interrupted_at = self.interrupted_at or time.time()

    def _on_channel(self, agent: AgentHandle) -> None:
        for message in agent.channel.receive():
            self._take(agent, Report.from_message(message))
        if agent.channel.closed:
            self.selector.unregister(agent.channel)

    def _on_end(self, agent: AgentHandle) -> None:
        status = agent.popen.wait()
        now = time.time()
        self.selector.unregister(agent.pidfd)
        if not agent.channel.closed:
            self._on_channel(agent)  # its last words
        agent.ended = True
        if not agent.done:
            # Its ranks die with it. What they had started themselves is found by its mark.
            process.kill_all(lambda: process.marked(agent.mark))
            self._take(
                agent,
                Report(
                    "agent_exited",
                    agent.spec.node,
                    now,
                    pid=agent.popen.pid,
                    status=status or 1,  # ending without a word is a failure, whatever the code
                    signalled=agent.signalled,
                ),
            )

    def _take(self, agent: AgentHandle, report: Report) -> None:
        self.reports.append(report)
        if report.kind == "agent_done":
            agent.done = True
        if report.kind == "agent_started":
            self._event("agent_started", f"agent of node {report.node} started", report)
        if report.kind == "rank_started":
            self._event("rank_started", f"rank {report.rank} on node {report.node} started", report)
        if report.failed:
            kind = report.kind.removesuffix("_exited")
            what = kind if report.rank is None else f"rank {report.rank}"
            ended = process.status_text(report.status or 0)
            severity: events.Severity = "error"
            if self._error_file(report).get("consequence"):
                severity, ended = "info", f"{ended}, because a peer had gone away"
            self._event(f"{kind}_failed", f"{what} on node {report.node} {ended}", report, severity)
            self._stop("failure")
        if self.on_report is not None:
            self.on_report(report)

    def _event(self, kind: str, message: str, report: Report, severity: events.Severity = "info") -> None:
        data = {k: v for k, v in report.to_message().items() if k not in ("kind", "node", "rank")}
        events.append(
            self.folder,
            kind,
            message,
            severity=severity,
            generation=self.generation,
            node=report.node,
            rank=report.rank,
            data=data,
        )

    def _stop(self, why: Why) -> None:
        if why == self.stopping:
            return
        self.stopping = why
        for agent in self.agents:
            if not agent.ended:
                agent.channel.send({"stop": why})
        deadline = time.monotonic() + STOP_TIMES[why][1] + _AGENT_GRACE_S
        self.kill_agents_at = deadline if self.kill_agents_at is None else min(self.kill_agents_at, deadline)

    def _kill_agents(self) -> None:
        self.kill_agents_at = None
        for agent in self.agents:
            if not agent.ended:
                agent.signalled = time.time()
                agent.popen.kill()

    def _outcome(self) -> Outcome:
        finding = first_failure(self.reports, self._error_files())
        if self.interrupted_at is not None and (finding is None or finding.time >= self.interrupted_at):
            return Outcome(EXIT_INTERRUPTED)
        if finding is None:
            return Outcome()
        return Outcome(finding.exit_code, self._failure(finding))

    def _error_files(self) -> dict[int, dict[str, Any]]:
        errors = {}
        for report in self.reports:
            if report.rank is not None and (error := self._error_file(report)):
                errors[report.rank] = error
        return errors

    def _error_file(self, report: Report) -> dict[str, Any]:
        """What the rank wrote of its end; empty where it wrote nothing, or was killed while it did."""
        if report.kind != "rank_exited" or report.status == 0 or report.rank is None:
            return {}
        path = self.folder.rank_error(self.generation, report.node, report.rank)
        try:
            error = json.loads(path.read_text())
            return dict(error | {"time": float(error["time"])})
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _failure(self, finding: Finding) -> Failure:
        spec = self.agents[finding.node].spec
        if finding.rank is not None:
            log = spec.rank_log(finding.rank)
        else:
            log = spec.nursery_log if finding.process == "nursery" else spec.log
        return Failure(
            node=finding.node,
            rank=finding.rank,
            message=finding.message,
            cause=finding.cause if finding.rank is not None else f"the {finding.process} {finding.cause}",
            time=finding.time,
            exit_code=finding.exit_code,
            log=log,
            tail=_last_lines(finding.traceback or "", 2 * _TAIL_LINES) or _tail_of(log),
            hint=finding.hint or self._disk_hint() or f"the whole log is {log}",
        )

    def _disk_hint(self) -> str | None:
        """A rank that could write nothing of its end may have had no room to."""
        try:
            disk = os.statvfs(self.folder.path)
        except OSError:
            return f"{self.folder.path} cannot be reached: was it moved, or unmounted?"
        if disk.f_bavail * disk.f_frsize < _LITTLE_SPACE:
            return f"the disk of {self.folder.path} is full: make room, then run the same command again"
        return None


def end_agents(agents: list[AgentHandle]) -> None:
    """Kill what still lives of `agents` and of everything they started, and free what they held here."""
    for agent in agents:
        if agent.popen.poll() is None:
            agent.popen.kill()
            agent.popen.wait()
    if agents:
        process.kill_all(lambda: process.marked(*(a.mark for a in agents)))
    for agent in agents:
        agent.channel.close()
        os.close(agent.pidfd)


def _tail_of(log: Path) -> str:
    try:
        with open(log, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return _last_lines(f.read().decode(errors="replace"), _TAIL_LINES)
    except OSError:
        return ""


def _last_lines(text: str, count: int) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])
