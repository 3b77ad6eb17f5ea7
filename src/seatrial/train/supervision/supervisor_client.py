"""A rank's supervisor client: its connection to the node's agent, with a thread that serves it.

The main thread trains and may block in a collective forever; the client's thread keeps receiving. It answers the
agent's dump requests, interrupts collectives whose peers are lost, and ends the process if the agent dies.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from seatrial.base.errors import RunFailed
from seatrial.base.lines import Channel
from seatrial.record import messages as msg
from seatrial.record.events import Event
from seatrial.record.jsonl import plain
from seatrial.record.messages import Ending, Leaving
from seatrial.train.supervision import flight
from seatrial.train.supervision.peers import break_connections, release_connections

NAME = "SEATRIAL_SUPERVISOR"
TOKEN = "SEATRIAL_SUPERVISOR_TOKEN"

# Until the main thread has left an abandoned generation, its connections are shut down repeatedly: it may be opening
# new ones, and peers wait for the end of those that gloo has closed.
_BREAK_AGAIN_MS = 5


class SupervisorClient:
    """The rank's side of the connection to its agent. All methods are for the main thread."""

    def __init__(self, channel: Channel, token: str) -> None:
        """Starts a thread: construct it after the last fork of this process. `token` authenticates this rank."""
        self._channel = channel
        self._changed = threading.Condition()
        # Everything below is guarded by `_changed`.
        self._orders: deque[msg.RankSpec | msg.Exit] = deque()
        self._generation: int | None = None  # the one that the main thread works on
        self._abandoned = -1  # the newest abandoned generation
        self._yield: tuple[int, Leaving] | None = None  # the generation to leave, and how
        self._step = 0
        self._dismissed = False  # ordered to exit
        self._gone = False  # dismissed, and the agent has closed the connection
        self._recorded = 0  # events sent
        # How many of them the agent confirmed last, and the errno if they could not be written to disk.
        self._settled: tuple[int, int | None] = (0, None)
        self._since_ns = time.time_ns()
        self._main = threading.main_thread().ident or 0
        self.send(msg.RankHello(os.getpid(), token))
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls) -> SupervisorClient | None:
        """The client of a rank that an agent started; None if unsupervised. Call it before creating torch's groups.

        From then on SIGUSR2 writes the main thread's stack to stderr, also while native code holds the GIL.
        """
        name = os.environ.get(NAME)
        if name is None:
            return None
        try:
            channel = Channel.connect(name)
        except OSError as error:
            raise RunFailed(f"the agent of this node has exited: {error}") from error
        # Not all threads: without the GIL others may be running, and reading their stacks has crashed ranks.
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=False)
        return cls(channel, os.environ[TOKEN])

    def join(self) -> None:
        """Wait for the thread to end, when the agent closes the connection after sending `Exit`."""
        self._thread.join()

    # -- sending

    def send(self, message: msg.FromRank) -> None:
        """Send the agent a message. If the agent has exited, this process ends anyway."""
        self._channel.send(msg.encode(message))

    def record(self, event: Event) -> None:
        """Have `event` written to the run's events.jsonl, even if this process exits right afterwards."""
        self._recorded += 1
        self.send(msg.RankRecord(**plain(vars(event))))

    def settle(self) -> None:
        """Wait until every recorded event is on disk. OSError if that fails, or if the generation is abandoned."""
        if self._settled[0] != self._recorded:
            self.send(msg.RankSettle(os.getpid(), self._recorded))
        with self._changed:
            while self._settled[0] != self._recorded:
                if self.abandoned or self._gone:
                    raise ConnectionError("the generation was abandoned before its events were recorded")
                self._changed.wait()
            if self._settled[1] is not None:
                raise OSError(self._settled[1], os.strerror(self._settled[1]), "events.jsonl")

    def beat(self, step: int, seconds: float, first: bool) -> None:
        """Send a heartbeat: `step` is done and took `seconds`; `first`: it is the first of this generation."""
        self._step = step
        self.send(msg.RankBeat(self._current, step, seconds, first))

    def validating(self, step: int, batch: int) -> None:
        """Send a heartbeat: `batch`, from 1, of the validation after `step` begins."""
        self._step = step
        self.send(msg.RankValidating(self._current, batch))

    def finding(
        self, signal: str, step: int, message: str, data: dict[str, Any], blamed: Sequence[int]
    ) -> None:
        """Report that something is wrong with `step`; `blamed` are the ranks that the evidence points to."""
        self.send(msg.StepFinding(self._current, signal, step, message, data, list(blamed)))

    def parked(self, step: int, message: str) -> None:
        """Report that this rank lost its peers after `step`, left them, and keeps its state for the next generation."""
        self.send(msg.Parked(self._leave(), step, message))

    def finished(self, how: Ending, step: int) -> None:
        """Report that this rank left its generation normally after `step`."""
        self.send(msg.Finished(self._leave(), how, step))

    @property
    def _current(self) -> int:
        assert self._generation is not None, "the main thread works on a generation"
        return self._generation

    def _leave(self) -> int:
        with self._changed:
            generation, self._generation = self._current, None
        return generation

    # -- receiving

    def leave_request(self) -> Leaving | None:
        """The request to leave at the end of the step that starts now, if any. Never blocks."""
        request = self._yield
        return request[1] if request is not None and request[0] == self._generation else None

    @property
    def abandoned(self) -> bool:
        """Whether the main thread's current generation is abandoned."""
        return self._generation is not None and self._generation <= self._abandoned

    def next_order(self) -> msg.RankSpec | msg.Exit | None:
        """Wait for the next order; None when no more will come.

        A generation that was abandoned before it began is answered with `parked` and not returned.
        """
        with self._changed:
            while True:
                while not self._orders and not self._gone:
                    self._changed.wait()
                if not self._orders:
                    return None
                order = self._orders.popleft()
                if isinstance(order, msg.Exit):
                    return order
                if order.generation > self._abandoned:
                    self._generation = order.generation
                    self._since_ns = time.time_ns()
                    release_connections()  # every rank of the generation before has left it
                    return order
                message = "the generation was abandoned before it began"
                self.send(msg.Parked(order.generation, self._step, message))

    # -- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # noqa: BLE001  an unreachable rank must not continue, whatever the error was
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        waiting = select.poll()
        waiting.register(self._channel.fileno(), select.POLLIN)
        while not self._channel.closed:
            waiting.poll(_BREAK_AGAIN_MS if self.abandoned else None)
            for values in self._channel.receive():
                self._handle(msg.decode(values, msg.ToRank))
            with self._changed:  # so that no connection of the next generation is shut down
                if self.abandoned:
                    break_connections()
        if not self._dismissed:
            # Without its agent nothing can stop this process or receive its reports. Cleaning up could block forever.
            os._exit(1)
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _handle(self, message: msg.ToRank) -> None:
        if isinstance(message, msg.AskDump):
            self.send(self._describe(message.id))
            return
        with self._changed:
            match message:
                case msg.RankSpec() | msg.Exit():
                    self._orders.append(message)
                    self._dismissed = self._dismissed or isinstance(message, msg.Exit)
                    self._changed.notify_all()
                case msg.Abandon():
                    self._abandoned = max(self._abandoned, message.generation)
                    self._changed.notify_all()
                case msg.RankSettled() if message.pid == os.getpid():
                    self._settled = (message.count, message.errno)
                    self._changed.notify_all()
                case msg.RankYield():
                    self._yield = (message.generation, message.how)

    def _describe(self, number: int) -> msg.Dump:
        answer = msg.Dump(number, self._generation, self._step, time.time(), flight=[])
        try:
            return replace(answer, **flight.describe(self._main, self._since_ns))
        except Exception as error:  # noqa: BLE001  an answer without the recorder still shows that this rank is alive
            return replace(answer, error=f"{type(error).__name__}: {error}")
