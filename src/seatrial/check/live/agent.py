"""The check's agent, one process per host: it executes the conductor's orders and leaves no process behind.

    python -m seatrial.check.live.agent

Orders are JSON objects, one per line, on stdin; results go to stdout in the same form:

| order | what it does | reply |
|---|---|---|
| `{"id": 1, "do": "ping"}` | | `{"id": 1, "done": {"clock": ...}}` |
| `"node", "options": {...}, "toward": ADDRESS` | the node stage (node_stage.py), in a process of its own; its interface is the one with the route to another host | its facts |
| `"prepare"` | starts the fork server for ranks (fork_server.py) | its versions |
| `"ranks", "spec": {...}` | ranks of a pair or a group; `{"id", "note": {"port": ...}}` first | what they measured |
| `"run", "argv": [...], "listen": PORT` | a tool; with `listen`, a note once it listens | exit code, stdout, stderr |
| `"reach", "targets": [[ADDRESS, PORT], ...]` | connects to other agents, all at once | which of them it reached |
| `"port", "count": N` | | free TCP ports |
| `"cancel", "order": 7` | kills everything that order has started | |

Every order but ping, port and cancel has a timeout `limit_s`, after which what it has started is killed. A failure is
always reported, as `{"id", "failed": "..."}`. When stdin ends or a parent dies, everything that was started is killed:
by the parent-death signal, by process group, and by the mark (base/process.py). It never blocks on a single source.
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
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue
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
        self.conductor.send({"hello": hello(self.listener.getsockname()[1])})
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
        for order in self.conductor.receive():
            try:
                self._on_order(order)
            except (KeyError, TypeError, ValueError, OSError) as error:
                # From another version, or this host lacks a resource: report it, so that nobody waits for a reply.
                self._fail(order.get("id", -1), f"{type(error).__name__}: {error}")

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

    def _on_order(self, order: dict[str, Any]) -> None:
        number, do = int(order["id"]), order["do"]
        limit_s = float(order.get("limit_s", 60.0))
        if do == "ping":
            self._done(number, {"clock": time.time()})
        elif do == "port":
            self._done(number, {"ports": free_ports(int(order["count"]))})
        elif do == "cancel":
            self._cancel(int(order["order"]))
        elif do == "node":
            arguments = json.dumps([order["options"], order["toward"]])
            self._start(number, process.python("seatrial.check.live.agent", "--node", arguments), limit_s)
        elif do == "run":
            self._run(number, [str(word) for word in order["argv"]], limit_s, order.get("listen"))
        elif do == "reach":
            body = partial(_reach, [(str(a), int(p)) for a, p in order["targets"]], limit_s)
            self._watch(start(number, body, limit_s + 1))
        elif do in ("prepare", "ranks"):
            self._forward(number, order, limit_s)
        else:
            raise ValueError(f"unknown order: {do!r}")

    def _run(self, number: int, argv: list[str], limit_s: float, port: int | None) -> None:
        if shutil.which(argv[0]) is None:
            self._done(number, {"absent": True})
            return
        pid = self._start(number, argv, limit_s)
        if port is not None:
            self.listening[pid] = port

    def _start(self, number: int, argv: list[str], limit_s: float) -> int:
        return self._watch(start(number, executes(argv, os.environ), limit_s)).pid

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
            self.channel.post({"cancel": order})

    # -- fork server

    def _forward(self, number: int, order: dict[str, Any], limit_s: float) -> None:
        if self.channel is None:
            self.channel, other = Channel.pair()
            command = process.python("seatrial.check.live.fork_server", str(other.fileno()))
            body = executes(command, {**os.environ, "OMP_NUM_THREADS": "1"})
            # It runs as long as this process; its orders have their own deadlines.
            self.fork_server = self._watch(start(-1, body, float("inf"), keep=[other.fileno()]))
            other.close()
            self.sources.watch(self.channel, self._fork_server_said)
        if order["do"] == "prepare":
            limit_s = max(limit_s, _FORK_SERVER_START_S)
        self.forwarded[number] = time.monotonic() + limit_s + _STUCK_S
        self.channel.post({**order, "limit_s": limit_s})

    def _fork_server_said(self) -> None:
        if self.channel is None:
            return
        for message in self.channel.receive():
            number = message["id"]
            if number in self.forwarded:  # else it was given up
                if "note" not in message:
                    del self.forwarded[number]
                self.conductor.send(message)
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
            seconds = round(time.monotonic() - task.started_at, 3)
            values = {"rc": status, "out": task.out.decode("utf-8", "replace"), "seconds": seconds}
            self._done(task.order, values | {"err": task.err.decode("utf-8", "replace")})

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
                self.conductor.send({"id": self.tasks[pid].order, "note": {"listening": port}})
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

    def _done(self, number: int, value: dict[str, Any]) -> None:
        self.conductor.send({"id": number, "done": value})

    def _fail(self, number: int, why: str) -> None:
        self.conductor.send({"id": number, "failed": why})


def free_ports(count: int) -> list[int]:
    """TCP ports that are currently unused on this host."""
    taken = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in taken]
    for s in taken:
        s.close()
    return ports


def _reach(targets: list[tuple[str, int]], limit_s: float) -> int:
    print(json.dumps(reach(targets, limit_s)))
    return 0


def _node(text: str) -> int:
    from seatrial.check.node.node_stage import NodeOptions, measure

    def progress(doing: str) -> None:
        print(doing, file=sys.stderr, flush=True)

    options, toward = json.loads(text)
    if options["interface"] is None and toward is not None:
        options["interface"] = interface_towards(toward)
    print(json.dumps(measure(NodeOptions(**options), progress)))
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
