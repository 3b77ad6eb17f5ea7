"""The agents of all hosts, as the conductor sees them: send orders to many, collect replies, never wait without limit.

One thread, one poll: a thousand hosts are a thousand pipes. A host that does not reply in time and one whose agent has
exited are replies like any other, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Generic

from seatrial.base import process
from seatrial.base.files import parse_json
from seatrial.check.live import messages as msg
from seatrial.check.live.agent_tasks import last_lines
from seatrial.check.live.hosts import Host
from seatrial.check.live.messages import Answer, Order

_LEAVE_S = 5.0  # for agents to exit on their own, before they are killed
_TAIL_BYTES = 4096
_FILES_A_HOST, _OTHER_FILES = 3, 128
_GRACE_S = 5.0  # beyond an order's own limit: for the agent to kill and report, and for the reply to arrive

Key = tuple[int, int]


@dataclass(frozen=True)
class Reply(Generic[Answer]):
    """The result of an order. `value` is None if there is none; then `problem` is the reason.

    `alive`: the agent itself has replied, whatever the reply contains.
    """

    value: Answer | None
    problem: str = ""
    alive: bool = True


class _AgentConnection:
    """The connection to one agent: its local process (which may be ssh), its output, and its unread input."""

    def __init__(self, host: Host, python: str, mark: str) -> None:
        self.host, self.mark = host, mark
        self.rest = b""
        self.waiting = b""  # orders that its pipe has not accepted yet
        self.err = b""
        self.ended = ""  # the reason, once it has ended
        self.hello: msg.Hello | None = None
        agent = process.python("seatrial.check.live.agent", interpreter=python)
        command = host.command(*agent, environment={process.MARK: mark})
        try:
            # A process group of its own: Ctrl-C goes to the conductor, which then ends its agents.
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:
            self.process = None
            self.ended = f"cannot start {command[0]}: {error.strerror}"
            return
        for stream in _pipes(self.process):
            os.set_blocking(stream.fileno(), False)

    @property
    def reads(self) -> list[int]:
        """Open descriptors to read from."""
        if self.process is None or self.ended:
            return []
        _, stdout, stderr = _pipes(self.process)
        return [stream.fileno() for stream in (stdout, stderr) if not stream.closed]

    def read(self) -> list[msg.FromAgent]:
        """The messages that have arrived."""
        if self.process is None or self.ended:
            return []
        self._read_stderr()
        over = not self._read_stdout()
        *lines, self.rest = self.rest.split(b"\n")
        found = []
        for line in lines:
            try:
                found.append(_message(line))
            except ValueError:  # output of a login script: reported if nothing better arrives
                self.err = (self.err + line + b"\n")[-_TAIL_BYTES:]
        if over:
            self._on_end()
        return found

    def _read_stdout(self) -> bool:
        assert self.process is not None
        _, stdout, _ = _pipes(self.process)
        while True:
            try:
                data = os.read(stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.rest += data

    def _read_stderr(self) -> None:
        assert self.process is not None
        _, _, stderr = _pipes(self.process)
        while not stderr.closed:
            try:
                data = os.read(stderr.fileno(), 1 << 16)
            except BlockingIOError:
                return
            self.err = (self.err + data)[-_TAIL_BYTES:]
            if not data:
                stderr.close()

    def _on_end(self) -> None:
        """Handle the end of its stdout. The reason: its stderr and its exit code, which may take a moment to arrive."""
        assert self.process is not None
        try:
            how = process.status_text(self.process.wait(timeout=1.0))
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        self._read_stderr()
        words = last_lines(self.err)
        self.ended = f"its agent {how}" + (f": {words}" if words else "")

    def send(self, message: msg.ToAgent | None = None) -> None:
        """Send a message, and what it has not accepted of earlier ones; never blocks."""
        if message is not None:
            self.waiting += json.dumps(msg.encode(message)).encode() + b"\n"
        while self.waiting and not self.ended:
            try:
                sent = os.write(self.stdin, self.waiting)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.waiting = b""  # it is exiting; the end of its stdout shows that
                return
            self.waiting = self.waiting[sent:]

    @property
    def stdin(self) -> int:
        """The descriptor that orders are written to."""
        assert self.process is not None
        return _pipes(self.process)[0].fileno()

    def leave(self) -> None:
        """Close its stdin: the agent then kills what it has started and exits."""
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):
                _pipes(self.process)[0].close()

    def kill(self) -> None:
        """SIGKILL the local process group and close the pipes."""
        if self.process is None:
            return
        process.signal_group(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in _pipes(self.process):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _message(line: bytes) -> msg.FromAgent:
    values = parse_json(line)
    if not isinstance(values, dict):
        raise ValueError("not a message")
    message: msg.FromAgent = msg.decode(values, msg.FromAgent, exact=False)
    return message


def _pipes(started: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    assert started.stdin is not None
    assert started.stdout is not None
    assert started.stderr is not None
    return started.stdin, started.stdout, started.stderr


class AgentPool:
    """An agent on every host. A context manager: after it exits, nothing of it is running."""

    def __init__(self, hosts: Sequence[Host], python: str | None = None) -> None:
        self.hosts = list(hosts)
        self.python = python or sys.executable
        self.lines: list[_AgentConnection] = []
        self._mark = uuid.uuid4().hex
        self._last = 0
        self._epoll = select.epoll()
        self._of: dict[int, int] = {}  # descriptor -> position of the host

    def __enter__(self) -> AgentPool:
        """Start the agents. Those that cannot be started reply with the reason.

        Raises InputError for more hosts than this process may have pipes to: they would all look faulty.
        """
        process.allow_files(_FILES_A_HOST * len(self.hosts) + _OTHER_FILES, "agents on this many hosts")
        try:
            for number, host in enumerate(self.hosts):
                self.lines.append(_AgentConnection(host, self.python, f"{self._mark}-{number}"))
                for fd in self.lines[-1].reads:
                    self._of[fd] = number
                    self._epoll.register(fd, select.EPOLLIN)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all agents, and kill what remains of them on this machine (virtual hosts, network namespaces)."""
        for line in self.lines:
            line.leave()
        until = time.monotonic() + _LEAVE_S
        for line in self.lines:
            if line.process is not None:
                # An agent that does not exit hangs, or its host is unreachable.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    line.process.wait(timeout=max(0.0, until - time.monotonic()))
        for line in self.lines:
            line.kill()
        process.kill_all(lambda: process.marked(*(line.mark for line in self.lines)))
        self.lines = []
        self._epoll.close()

    def greet(self, timeout_s: float) -> dict[int, Reply[msg.Hello]]:
        """What each agent reports about its host; waits at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        while any(line.hello is None and not line.ended for line in self.lines):
            if time.monotonic() >= until:
                break
            self._pump(until)
        found = {}
        for number, line in enumerate(self.lines):
            if line.hello is not None:
                found[number] = Reply(line.hello)
            else:
                silent = f"agent did not start within {timeout_s:g} s"
                words = last_lines(line.err)
                why = line.ended or (f"{silent}: {words}" if words else silent)
                found[number] = Reply(None, why, alive=False)
        return found

    def ask(
        self,
        orders: Mapping[Key, Order[Answer]],
        *,
        limit_s: float,
        listening: Callable[[Key, int], Mapping[Key, Order[Answer]]] | None = None,
        wait_s: float = _GRACE_S,
        failed: Callable[[Reply[Answer]], bool] | None = None,
    ) -> dict[Key, Reply[Answer]]:
        """Send orders to hosts and collect all replies. A key is (position of the host, what distinguishes its orders).

        Each has `limit_s` from when it is sent; without a reply after another `wait_s` it fails and is cancelled.
        `listening` is called with the port that an order's tool or store listens on by now, and returns further orders.
        With `failed`, orders whose keys have the same second part belong together: once `failed` is true for a reply, the
        others are cancelled.
        """
        asking = _PendingOrders(self, limit_s, wait_s, listening, failed)
        asking.send(orders)
        while asking.open:
            for host, message in self._pump(min(until for _, until in asking.open.values())):
                asking.on_message(host, message)
            asking.expire(time.monotonic())
        return asking.replies

    def send(self, host: int, order: Order[Any], limit_s: float) -> int:
        """Send an order to a host and return the order's number. Only `ask` receives the reply."""
        self._last += 1
        self.lines[host].send(msg.Ask(self._last, limit_s, msg.encode(order)))
        return self._last

    def _pump(self, until: float) -> list[tuple[int, msg.FromAgent | None]]:
        """The next messages of any hosts, waiting for them until `until`; None for an agent that has ended."""
        writes = {line.stdin: n for n, line in enumerate(self.lines) if line.waiting and not line.ended}
        for fd in writes:
            self._epoll.register(fd, select.EPOLLOUT)
        ready = self._epoll.poll(max(0.0, until - time.monotonic()))
        for fd in writes:
            self._epoll.unregister(fd)
        found: list[tuple[int, msg.FromAgent | None]] = []
        for number in dict.fromkeys(writes.get(fd, self._of.get(fd, -1)) for fd, _ in ready):
            line = self.lines[number]
            line.send()
            before = line.reads
            for message in line.read():
                if isinstance(message, msg.Hello):
                    line.hello = message
                else:
                    found.append((number, message))
            for fd in set(before) - set(line.reads):
                del self._of[fd]
                with contextlib.suppress(OSError):  # closed, and so unregistered already
                    self._epoll.unregister(fd)
            if line.ended:
                found.append((number, None))
        return found


class _PendingOrders(Generic[Answer]):
    """Orders in flight, and the replies so far."""

    def __init__(
        self,
        agent_pool: AgentPool,
        limit_s: float,
        wait_s: float,
        listening: Callable[[Key, int], Mapping[Key, Order[Answer]]] | None,
        failed: Callable[[Reply[Answer]], bool] | None,
    ) -> None:
        self.agent_pool, self.limit_s, self.wait_s = agent_pool, limit_s, wait_s
        self.listening, self.failed = listening, failed
        self.open: dict[Key, tuple[int, float]] = {}  # number of the order, deadline
        self.sent: dict[int, tuple[Key, Order[Answer]]] = {}
        self.replies: dict[Key, Reply[Answer]] = {}

    def send(self, orders: Mapping[Key, Order[Answer]]) -> None:
        for key, order in orders.items():
            assert key not in self.open, f"two orders of one name: {key}"
            assert key not in self.replies, f"two orders of one name: {key}"
            line = self.agent_pool.lines[key[0]]
            if line.ended or line.hello is None:
                self._reply(key, Reply(None, line.ended or "its agent never responded", alive=False))
                continue
            number = self.agent_pool.send(key[0], order, self.limit_s)
            self.open[key] = (number, time.monotonic() + self.limit_s + self.wait_s)
            self.sent[number] = key, order

    def on_message(self, host: int, message: msg.FromAgent | None) -> None:
        if message is None:
            for key in [key for key in self.open if key[0] == host]:
                self._reply(key, Reply(None, self.agent_pool.lines[host].ended, alive=False))
            return
        if isinstance(message, msg.Hello) or message.id not in self.sent:
            return
        key, order = self.sent[message.id]
        if key[0] != host or key not in self.open:
            return  # late, for an order that was cancelled
        match message:
            case msg.Listening(port=port):
                self.send({} if self.listening is None else self.listening(key, port))
            case msg.Failed(why=why):
                self._reply(key, Reply(None, why))
            case msg.Done(answer=values):
                try:
                    self._reply(key, Reply(order.answer(values)))
                except ValueError as error:  # from another version
                    self._reply(key, Reply(None, f"an unknown reply: {error}"))

    def expire(self, now: float) -> None:
        for key, (number, until) in list(self.open.items()):
            if until <= now:
                self._cancel(key[0], number)
                why = f"no reply within {self.limit_s + self.wait_s:g} s"
                self._reply(key, Reply(None, why, alive=False))

    def _reply(self, key: Key, reply: Reply[Answer]) -> None:
        self.open.pop(key, None)
        self.replies[key] = reply
        if self.failed is None or not self.failed(reply):
            return
        for other, (number, until) in list(self.open.items()):
            soon = time.monotonic() + self.wait_s
            if other[1] == key[1] and until > soon:
                self._cancel(other[0], number)
                self.open[other] = (number, soon)

    def _cancel(self, host: int, number: int) -> None:
        self.agent_pool.lines[host].send(msg.Cancel(number))
