"""The agent of one node: starts the node's ranks, watches them, stops all when one fails, and reports.

It never loads torch, has one thread, and waits on four things: its launcher, its nursery, signals, and deadlines.
When its launcher is gone, for whatever reason, it kills everything it started and ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from seatrial.base import process
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue
from seatrial.control.oom import OomWatch
from seatrial.control.reports import Kind, Report
from seatrial.control.spec import AgentSpec, LocalOptions, clean_environment, parse_agent_arguments

Why = Literal["failure", "interrupt", "now"]

# Seconds from the order to stop until SIGTERM and until SIGKILL. After a failure the peers first have time to fail
# by themselves, so that the one that was first can tell of it even if it is slow to end; then there is nothing left
# to save, and they are stopped. An interrupted run is asked at once and given time to end in order.
STOP_TIMES: dict[Why, tuple[float, float]] = {
    "failure": (0.7, 1.0),
    "interrupt": (0.0, 2.0),
    "now": (0.0, 0.0),
}


@dataclass
class Rank:
    """One rank as its agent knows it."""

    number: int
    pid: int | None = None
    ended: bool = False
    signalled: float | None = None


class Agent:
    """Runs until each of its ranks has ended."""

    def __init__(self, spec: AgentSpec, options: LocalOptions) -> None:
        self.spec = spec
        self.parent = options.parent
        self.ranks = {n: Rank(n) for n in spec.ranks}
        self.nursery: int | None = None  # pid
        self.nursery_signalled: float | None = None
        self.nursery_channel: Channel | None = None
        self.terminate_at: float | None = None  # on the monotonic clock
        self.kill_at: float | None = None
        self.abandoned = False
        self.oom = OomWatch()
        self.selector = selectors.DefaultSelector()
        self.signals = SignalQueue((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        self.channel = None if options.channel is None else Channel.from_fd(options.channel)
        self._watch(self.signals, self._on_signals)
        if self.channel is not None:
            self._watch(self.channel, self._on_launcher)
        if self.parent is not None:
            # SIGTERM, not SIGKILL: what the ranks started themselves has no such bond, and is ours to kill.
            process.die_with_parent(self.parent, signal.SIGTERM)
        process.become_subreaper()

    def run(self) -> int:
        """Start the ranks, watch them to their end, leave nothing behind; the exit code."""
        self._report("agent_started", pid=os.getpid())
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        os.environ.update(self.spec.node_environment())
        try:
            if self.spec.device == "cpu":
                self._start_nursery()
            else:
                self._start_ranks()
            while not self.abandoned and not all(r.ended for r in self.ranks.values()):
                for key, _ in self.selector.select(self._time_to_next_deadline()):
                    key.data()
                self._meet_deadlines()
        finally:
            self._clean_up()
        if self.abandoned:
            return 1
        self._report("agent_done")
        return 0

    # -- starting

    def _start_ranks(self) -> None:
        command = self.spec.worker_command()
        for rank in self.ranks.values():
            environment = clean_environment(os.environ) | self.spec.rank_environment(rank.number)
            pid = process.fork(partial(_execute, command, environment), log=self.spec.rank_log(rank.number))
            self._started(rank.number, pid)

    def _start_nursery(self) -> None:
        ours, theirs = Channel.pair()
        options = [
            "--channel",
            str(theirs.fileno()),
            "--parent",
            str(os.getpid()),
            "--mark",
            os.environ[process.MARK],
        ]
        command = self.spec.nursery_command() + options

        def body() -> int:
            os.set_inheritable(theirs.fileno(), True)
            return _execute(command, clean_environment(os.environ))

        self.nursery = process.fork(body, log=self.spec.nursery_log)
        theirs.close()
        self.nursery_channel = ours
        self._watch(ours, self._on_nursery)
        # The requests lie in the socket until the nursery has imported torch: no round trip is lost.
        for rank in self.ranks.values():
            log = str(self.spec.rank_log(rank.number))
            environment = self.spec.rank_environment(rank.number)
            ours.send(
                {
                    "fork": {
                        "rank": rank.number,
                        "log": log,
                        "env": environment,
                        "argv": self.spec.worker_arguments(),
                    }
                }
            )

    # -- what happens

    def _on_nursery(self) -> None:
        assert self.nursery_channel is not None
        for message in self.nursery_channel.receive():
            match message:
                case {"ready": pid}:
                    self._report("nursery_ready", pid=pid)
                case {"forked": {"rank": rank, "pid": pid}}:
                    self._started(rank, pid)
                case {"exited": {"rank": rank, "status": status, "time": when}}:
                    self._ended(rank, status, when)
        if self.nursery_channel.closed:
            self.selector.unregister(self.nursery_channel)
            self.nursery_channel.close()
            self.nursery_channel = None

    def _on_launcher(self) -> None:
        assert self.channel is not None
        for message in self.channel.receive():
            match message:
                case {"stop": "failure" | "interrupt" | "now" as why}:
                    self._stop(why)
        if self.channel.closed:
            self.abandoned = True

    def _on_signals(self) -> None:
        arrived = self.signals.read()
        if any(s in arrived for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
            self.abandoned = True
        if signal.SIGCHLD in arrived:
            process.reap(self._reaped)

    def _reaped(self, pid: int, status: int) -> None:
        now = time.time()
        if pid == self.nursery:
            self._nursery_ended(status, now)
            return
        for rank in self.ranks.values():
            if rank.pid == pid and not rank.ended:
                if self.spec.device == "cpu" and rank.signalled is None:
                    rank.signalled = now  # it became our child by its nursery's death, which took it along
                self._ended(rank.number, status, now)

    def _nursery_ended(self, status: int, now: float) -> None:
        pid, self.nursery = self.nursery, None
        if self.nursery_channel is not None:
            self._on_nursery()  # what it said before it died
        self._report(
            "nursery_exited",
            when=now,
            pid=pid,
            status=status,
            signalled=self.nursery_signalled,
            oom_killed=self._oom_killed(status),
        )
        for rank in self.ranks.values():
            rank.signalled = rank.signalled or now
            if rank.pid is None:
                rank.ended = True  # never began
        self._stop("now")

    def _started(self, number: int, pid: int) -> None:
        self.ranks[number].pid = pid
        self._report("rank_started", rank=number, pid=pid)

    def _ended(self, number: int, status: int, when: float) -> None:
        rank = self.ranks[number]
        rank.ended = True
        report = self._report(
            "rank_exited",
            when=when,
            rank=number,
            pid=rank.pid,
            status=status,
            signalled=rank.signalled,
            oom_killed=self._oom_killed(status),
        )
        if report.failed:
            self._stop("failure")

    # -- stopping

    def _stop(self, why: Why) -> None:
        now = time.monotonic()
        terminate, kill = (now + seconds for seconds in STOP_TIMES[why])
        self.terminate_at = terminate if self.terminate_at is None else min(self.terminate_at, terminate)
        self.kill_at = kill if self.kill_at is None else min(self.kill_at, kill)

    def _time_to_next_deadline(self) -> float | None:
        deadlines = [d for d in (self.terminate_at, self.kill_at) if d is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            self.terminate_at = self.kill_at = None
            self._signal_all(signal.SIGKILL)
        elif self.terminate_at is not None and now >= self.terminate_at:
            self.terminate_at = None
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, signum: signal.Signals) -> None:
        now = time.time()
        for rank in self.ranks.values():
            if rank.pid is not None and not rank.ended:
                rank.signalled = rank.signalled or now
                process.signal_group(rank.pid, signum)
        if any(r.pid is None for r in self.ranks.values()) and self.nursery is not None:
            # Some rank is still to be forked. Nothing of it can be lost, and importing torch takes seconds.
            self.nursery_signalled = now
            process.signal_group(self.nursery, signal.SIGKILL)

    def _clean_up(self) -> None:
        """Kill whatever still lives of this node: the nursery, and what the ranks started and left behind."""
        if self.abandoned:
            self._signal_all(signal.SIGKILL)
        mark = os.environ[process.MARK]
        process.kill_all(lambda: process.descendants(os.getpid()) | process.marked(mark))
        process.reap(lambda pid, status: None)

    # -- telling

    def _report(self, kind: Kind, *, when: float | None = None, **values: Any) -> Report:
        report = Report(kind, self.spec.node, time.time() if when is None else when, **values)
        if self.channel is not None:
            self.channel.send(
                report.to_message()
            )  # if nobody listens any more, the closed channel will say so
        return report

    def _oom_killed(self, status: int) -> bool | None:
        return self.oom.struck() if status == -signal.SIGKILL else False

    def _watch(self, source: Any, handle: Callable[[], None]) -> None:
        self.selector.register(source, selectors.EVENT_READ, handle)


def _execute(command: list[str], environment: dict[str, str]) -> int:
    os.execve(command[0], command, environment)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m seatrial.control.agent`."""
    spec, options = parse_agent_arguments(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(process.MARK, f"{os.getpid()}/node{spec.node}")
    return Agent(spec, options).run()


if __name__ == "__main__":
    sys.exit(main())
