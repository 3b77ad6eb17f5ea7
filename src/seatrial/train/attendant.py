"""A rank's attendant: the thread that stands between it and its node's agent.

The main thread trains and may wait in a collective for ever; the attendant goes on listening. It tells the agent what
the rank is doing, breaks it out of collectives whose other ranks are gone, and ends the process when the agent is.
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
from typing import Any

from seatrial.base.errors import RunFailed
from seatrial.base.lines import Channel
from seatrial.train import flight
from seatrial.train.companion import Ending, Leaving
from seatrial.train.peers import break_connections

NAME = "SEATRIAL_ATTENDANT"
TOKEN = "SEATRIAL_ATTENDANT_TOKEN"

# While the main thread has not come out of an abandoned generation its connections are broken again and again: it may
# have been about to open one.
_BREAK_AGAIN_MS = 100


class Attendant:
    """The rank's side of the connection to its agent. All methods are for the main thread."""

    def __init__(self, channel: Channel, token: str) -> None:
        """Starts a thread: make it after the last fork of this process. `token` proves whose rank this is."""
        self._channel = channel
        self._changed = threading.Condition()
        # All below belongs to whoever holds `_changed`.
        self._orders: deque[dict[str, Any]] = deque()
        self._generation: int | None = None  # the main thread works on it
        self._abandoned = -1  # the newest generation that is given up
        self._yield: tuple[int, Leaving] | None = None  # the generation to leave, and how
        self._step = 0
        self._dismissed = False  # told to exit
        self._gone = False  # dismissed, and the agent has closed
        self._since_ns = time.time_ns()
        self._main = threading.main_thread().ident or 0
        channel.send({"hello": {"pid": os.getpid(), "token": token}})
        self._thread = threading.Thread(target=self._run, name="attendant", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls) -> Attendant | None:
        """The attendant of a rank that an agent started; None where nobody supervises. Call it before torch's groups.

        From then on SIGUSR2 writes the main thread's stack to stderr, also while native code holds the GIL.
        """
        name = os.environ.get(NAME)
        if name is None:
            return None
        try:
            channel = Channel.connect(name)
        except OSError as error:
            raise RunFailed(f"the agent of this node is gone: {error}") from error
        # Not of all threads: without the GIL the others may be running, and reading their stacks has crashed ranks.
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=False)
        return cls(channel, os.environ[TOKEN])

    def join(self) -> None:
        """Wait for the end of the thread, which comes when the agent closes after it has sent {"exit": ...}."""
        self._thread.join()

    # -- telling

    def tell(self, message: dict[str, Any]) -> None:
        """Send the agent a message. If it is gone this process ends anyway."""
        self._channel.send(message)

    def beat(self, step: int, seconds: float, first: bool) -> None:
        """`step` is done and took `seconds`; `first`: it is the first of this leg."""
        self._step = step
        values = {"step": step, "seconds": seconds, "generation": self._generation, "first": first}
        self._channel.send({"beat": values})

    def finding(
        self, signal: str, step: int, message: str, data: dict[str, Any], blamed: Sequence[int]
    ) -> None:
        """Something is wrong with `step`; `blamed` are the ranks that the evidence points at."""
        values = {"signal": signal, "step": step, "message": message, "data": data, "blamed": list(blamed)}
        self._channel.send({"finding": {**values, "generation": self._generation}})

    def parked(self, step: int, message: str) -> None:
        """This rank lost its peers after `step`, let go of them, and keeps its state for the next leg."""
        values = {"generation": self._leave(), "step": step, "message": message}
        self._channel.send({"parked": values})

    def finished(self, how: Ending, step: int) -> None:
        """This rank left its leg in order after `step`."""
        self._channel.send({"finished": {"generation": self._leave(), "how": how, "step": step}})

    def _leave(self) -> int | None:
        with self._changed:
            generation, self._generation = self._generation, None
        return generation

    # -- being told

    def wants(self) -> Leaving | None:
        """What this rank is asked to do at the end of the step that begins now. Never waits."""
        asked = self._yield
        return asked[1] if asked is not None and asked[0] == self._generation else None

    @property
    def abandoned(self) -> bool:
        """Whether the generation that the main thread works on is given up."""
        return self._generation is not None and self._generation <= self._abandoned

    def next_order(self) -> dict[str, Any] | None:
        """The next {"leg": ...} or {"exit": ...}, waiting for it; None when nothing more will come.

        A leg that was abandoned before it began is answered with `parked` and never seen.
        """
        with self._changed:
            while True:
                while not self._orders and not self._gone:
                    self._changed.wait()
                if not self._orders:
                    return None
                order = self._orders.popleft()
                leg = order.get("leg")
                if leg is None:
                    return order
                generation = leg["generation"]
                if generation > self._abandoned:
                    self._generation = generation
                    self._since_ns = time.time_ns()
                    return order
                message = "the generation was abandoned before it began"
                self._channel.send(
                    {"parked": {"generation": generation, "step": self._step, "message": message}}
                )

    # -- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # noqa: BLE001  a rank that nobody can reach any more must not go on, whatever it was
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> None:
        waiting = select.poll()
        waiting.register(self._channel.fileno(), select.POLLIN)
        while not self._channel.closed:
            waiting.poll(_BREAK_AGAIN_MS if self.abandoned else None)
            for message in self._channel.receive():
                for kind, values in message.items():
                    self._take(kind, values)
            with self._changed:  # so that no connection of the next leg is among those that are broken
                if self.abandoned:
                    break_connections()
        if not self._dismissed:
            # Nobody could stop this process any more, nor hear of it. Cleaning up could wait for ever.
            os._exit(1)
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _take(self, kind: str, values: Any) -> None:
        if kind == "dump":
            self._channel.send({"dump": self._describe(values["id"])})
            return
        with self._changed:
            if kind in ("leg", "exit"):
                self._orders.append({kind: values})
                self._dismissed = self._dismissed or kind == "exit"
                self._changed.notify_all()
            elif kind == "abandon":
                self._abandoned = max(self._abandoned, values["generation"])
            elif kind == "yield":
                self._yield = (values["generation"], values["how"])

    def _describe(self, number: Any) -> dict[str, Any]:
        answer = {"id": number, "generation": self._generation, "step": self._step, "time": time.time()}
        try:
            return {**answer, **flight.describe(self._main, self._since_ns)}
        except Exception as error:  # noqa: BLE001  an answer without the recorder still proves that this rank lives
            return {**answer, "flight": [], "error": f"{type(error).__name__}: {error}"}
