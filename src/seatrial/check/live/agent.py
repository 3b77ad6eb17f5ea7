"""The check's agent, one process per host: it executes the conductor's orders and leaves no process behind.

    python -m seatrial.check.live.agent

Orders arrive on stdin, one per line; results go to stdout in the same form: messages.py. A failure is always reported.
When stdin ends or a parent dies, everything that was started is killed: by the parent-death signal, by process group,
and by the mark (base/process.py). It never blocks on a single source.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from io import FileIO
from typing import Any

from seatrial.base import process
from seatrial.base.address import interface_towards
from seatrial.base.event_loop import EventLoop
from seatrial.base.files import parse_json
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue
from seatrial.check.live import messages as msg
from seatrial.check.live.agent_tasks import Task, executes, last_lines, listens, start
from seatrial.check.live.reach import hello, reach

_LISTEN_POLL_S = 0.05
_STUCK_S = 2.0  # how long a killed process may take to exit before its order is reported as failed
_FORK_SERVER_START_S = 120.0  # to import torch from a slow disk


class Agent:
    """The agent's event loop and the processes that it has started."""

    def __init__(self, mark: str, conductor: Channel) -> None:
        self.mark = mark
        self.conductor = conductor
        self.tasks: dict[int, Task] = {}  # by pid
        self.listening: dict[int, int] = {}  # pid of a tool -> port that it should listen on, until it does
        self.fork_server: Task | None = None
        self.channel: Channel | None = None
        self.forwarded: dict[int, float] = {}  # orders in progress in the fork server -> deadline
        self.terminated = False
        self.signals = SignalQueue((signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
        self.listener = socket.create_server(("", 0), backlog=128)
        self.listener.setblocking(False)
        self.sources = EventLoop()
        self.sources.watch(conductor, self._orders)
        self.sources.watch(self.signals, self._on_signals)
        self.sources.watch(self.listener, self._accept)

    def serve(self) -> None:
        """Run until stdin ends or a termination signal arrives."""
        self._send(hello(self.listener.getsockname()[1]))
        while not (self.terminated or self.conductor.closed):
            self.sources.wait(self._timeout_s())
            self._clock()

    def end(self) -> None:
        """Kill every process that was started here, including those with another parent by now."""
        for task in self.tasks.values():
            task.kill()
        process.kill_all(lambda: process.descendants(os.getpid()) | process.marked(self.mark))

    # -- input

    def _orders(self) -> None:
        for values in self.conductor.receive():
            number = -1
            # What fails is reported, so that nobody waits for a reply.
            try:
                match msg.decode(values, msg.ToAgent, exact=False):
                    case msg.Cancel(number):
                        self._cancel(number)
                    case msg.Ask(number, limit_s, order):
                        self._on_order(number, limit_s, order)
            except ValueError as error:  # from another version
                self._fail(number, f"unknown order: {error}")
            except OSError as error:  # this host lacks a resource
                self._fail(number, f"{type(error).__name__}: {error}")

    def _on_signals(self) -> None:
        arrived = self.signals.read()
        self.terminated = not {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}.isdisjoint(arrived)
        if not self.terminated:
            process.reap(self._reaped)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:  # closed again before it was accepted
            return
        connection.close()

    def _on_order(self, number: int, limit_s: float, values: dict[str, Any]) -> None:
        match msg.decode(values, msg.AnyOrder):
            case msg.Ping():
                self._done(number, msg.Clock(time.time()))
            case msg.FindPorts(count):
                self._done(number, msg.Ports(free_ports(count)))
            case msg.Reach(targets):
                body = partial(_reach, targets, limit_s)
                self._watch(start(number, body, limit_s + 1, prints_answer=True))
            case msg.MeasureNode(options, toward):
                arguments = json.dumps([options, toward])
                command = process.python("seatrial.check.live.agent", "--node", arguments)
                self._watch(start(number, executes(command, os.environ), limit_s, prints_answer=True))
            case msg.RunTool(argv, listen):
                self._run(number, argv, limit_s, listen)
            case msg.Prepare():
                self._forward(number, values, max(limit_s, _FORK_SERVER_START_S))
            case msg.RunRanks():
                self._forward(number, values, limit_s)

    def _run(self, number: int, argv: list[str], limit_s: float, port: int | None) -> None:
        if shutil.which(argv[0]) is None:
            self._done(number, msg.ToolResult(None))
            return
        task = self._watch(start(number, executes(argv, os.environ), limit_s))
        if port is not None:
            self.listening[task.pid] = port

    def _watch(self, task: Task) -> Task:
        self.tasks[task.pid] = task
        for pipe in task.pipes:
            self.sources.watch(pipe, partial(self._read, task, pipe))
        return task

    def _read(self, task: Task, pipe: FileIO) -> None:
        if not task.read(pipe):
            self.sources.unwatch(pipe)
            pipe.close()

    def _drop(self, pid: int) -> None:
        """Read the remaining output of a task, and forget the task."""
        self.listening.pop(pid, None)
        task = self.tasks.pop(pid)
        for pipe in task.pipes:
            task.read(pipe)
            self.sources.unwatch(pipe)
            pipe.close()

    def _cancel(self, order: int) -> None:
        for task in self.tasks.values():
            if task.order == order and task is not self.fork_server:
                task.kill()
        if order in self.forwarded and self.channel is not None:
            self.channel.post(msg.encode(msg.Cancel(order)))

    # -- fork server

    def _forward(self, number: int, order: dict[str, Any], limit_s: float) -> None:
        """Have the fork server execute an order."""
        if self.channel is None:
            self.channel, other = Channel.pair()
            command = process.python("seatrial.check.live.fork_server", str(other.fileno()))
            body = executes(command, {**os.environ, "OMP_NUM_THREADS": "1"})
            # It runs as long as this process; its orders have their own deadlines.
            self.fork_server = self._watch(start(-1, body, float("inf"), keep=[other.fileno()]))
            other.close()
            self.sources.watch(self.channel, self._fork_server_said)
        self.forwarded[number] = time.monotonic() + limit_s + _STUCK_S
        self.channel.post(msg.encode(msg.Ask(number, limit_s, order)))

    def _fork_server_said(self) -> None:
        if self.channel is None:
            return
        for values in self.channel.receive():
            message = msg.decode(values, msg.FromAgent)
            if message.id in self.forwarded:  # else it was given up
                if not isinstance(message, msg.Listening):
                    del self.forwarded[message.id]
                self._send(message)
        if self.channel.closed:
            self._close_fork_server_channel()

    def _close_fork_server_channel(self) -> None:
        if self.channel is not None:
            self.sources.unwatch(self.channel)
            self.channel.close()
            self.channel = None

    def _fork_server_ended(self, task: Task, status: int) -> None:
        self.fork_server = None
        self._fork_server_said()
        self._close_fork_server_channel()
        for number in list(self.forwarded):
            del self.forwarded[number]
            why = f"the fork server for ranks {process.status_text(status)}: {task.stderr_tail}"
            self._fail(number, why.rstrip(": "))

    # -- exits and timeouts

    def _reaped(self, pid: int, status: int) -> None:
        task = self.tasks.get(pid)
        if task is None:
            return
        self._drop(pid)
        if task is self.fork_server:
            self._fork_server_ended(task, status)
        elif task.too_late:
            self._late(task)
        else:
            out, err = task.out.decode("utf-8", "replace"), task.err.decode("utf-8", "replace")
            if task.prints_answer:
                self._pass_on(task.order, status, out, err)
            else:
                seconds = round(time.monotonic() - task.started_at, 3)
                self._done(task.order, msg.ToolResult(status, out, err, seconds))

    def _pass_on(self, number: int, status: int, out: str, err: str) -> None:
        """The answer that a process has printed."""
        if status != 0:
            self._fail(number, f"ended with {status}: {err.strip()[-300:]}")
            return
        try:
            answer = parse_json(out)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            self._send(msg.Done(number, answer))
        else:
            self._fail(number, "printed no readable output")

    def _late(self, task: Task) -> None:
        text = f"did not end within {task.limit_s:g} s"
        self._fail(task.order, f"{text}; stderr: {task.stderr_tail}" if task.err else text)

    def _timeout_s(self) -> float | None:
        times = [t.until for t in self.tasks.values()] + list(self.forwarded.values())
        if self.listening:
            times.append(time.monotonic() + _LISTEN_POLL_S)
        soonest = min(times, default=float("inf"))
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _clock(self) -> None:
        now = time.monotonic()
        for pid, port in list(self.listening.items()):
            if listens(port):
                del self.listening[pid]
                self._send(msg.Listening(self.tasks[pid].order, port))
        for task in [t for t in self.tasks.values() if t.until <= now]:
            if task.too_late:
                # Killed, and still there: in an uninterruptible system call. Report it to the conductor.
                self._drop(task.pid)
                self._fail(task.order, f"did not end within {task.limit_s:g} s, and survived SIGKILL")
            else:
                task.too_late, task.until = True, now + _STUCK_S
                task.kill()
        if [
            number for number, until in self.forwarded.items() if until <= now
        ] and self.fork_server is not None:
            # It missed its own deadlines. When it exits, all its orders fail.
            self.fork_server.kill()
            self.forwarded = dict.fromkeys(self.forwarded, now + _STUCK_S)

    # -- output

    def _done(self, number: int, answer: msg.Message) -> None:
        self._send(msg.Done(number, msg.encode(answer)))

    def _fail(self, number: int, why: str) -> None:
        self._send(msg.Failed(number, why))

    def _send(self, message: msg.FromAgent) -> None:
        self.conductor.send(msg.encode(message))


def free_ports(count: int) -> list[int]:
    """TCP ports that are currently unused on this host."""
    taken = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in taken]
    for s in taken:
        s.close()
    return ports


def _reach(targets: list[msg.Endpoint], limit_s: float) -> int:
    print(json.dumps(msg.encode(reach(targets, limit_s))))
    return 0


def _node(text: str) -> int:
    from seatrial.check.node.node_stage import NodeOptions, measure

    def progress(doing: str) -> None:
        print(doing, file=sys.stderr, flush=True)

    options, toward = json.loads(text)
    if options["interface"] is None and toward is not None:
        options["interface"] = interface_towards(toward)
    print(json.dumps(msg.encode(msg.NodeMeasured(measure(NodeOptions(**options), progress)))))
    return 0


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m seatrial.check.live.agent`."""
    process.die_with_parent(os.getppid())
    if argv[:1] == ["--node"]:
        return _node(argv[1])
    process.become_subreaper()
    # Without a mark in the environment no process carries this one: `end` then finds processes by descent only.
    agent = Agent(os.environ.get(process.MARK, f"check-{os.getpid()}"), Channel.stdio(log=2))
    try:
        agent.serve()
    except Exception as error:  # report it: the conductor reads stderr
        print(last_lines(f"{type(error).__name__}: {error}".encode()), file=sys.stderr)
        raise
    finally:
        agent.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
