"""Event loops on loopback under a test's control: nobody sleeps, everybody waits for what comes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from seatrial.base.event_loop import EventLoop
from seatrial.control.net.acceptor import Acceptor
from seatrial.control.net.wire import Incoming, Link, Listener, _Keys
from seatrial.record import messages as msg

SECRET = b"s" * 32
TIMEOUT_S = 10.0  # nothing takes that long unless it is broken


class Clock:
    """Stands in for the module `time`: it goes on when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Pump:
    """One loop for everything in a test."""

    def __init__(self) -> None:
        self.sources = EventLoop()
        self.watch, self.unwatch = self.sources.watch, self.sources.unwatch
        self.ticks: list[Callable[[], object]] = []  # called in each round

    def round(self, seconds: float = 0.0) -> None:
        self.sources.wait(seconds)
        for tick in list(self.ticks):
            tick()

    def until(self, condition: Callable[[], object]) -> None:
        """Go on until `condition` holds."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, "it did not come"
            self.round(0.01)

    def settle(self, rounds: int = 20) -> None:
        """Handle what is on its way on loopback, where sending is arriving."""
        for _ in range(rounds):
            self.round()

    def close(self) -> None:
        """Close everything that is still watched."""
        selector = self.sources._selector
        for key in list(selector.get_map().values()):
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        selector.close()


class Hub:
    """Somebody whom agents connect to: keeps what they say, and returns their beats while `answers`."""

    def __init__(self, pump: Pump, secret: bytes = SECRET, port: int = 0) -> None:
        self.pump = pump
        self.listener = Listener("127.0.0.1", secret, port)
        self.port = self.listener.port
        self.answers = True
        self.proof_age_s = 0.0
        self.hellos: list[dict[str, Any]] = []
        self.links: list[Link] = []
        self.heard: list[dict[str, Any]] = []
        self.beats: list[int] = []
        self.acceptor = Acceptor(self.listener, pump.watch, pump.unwatch, self._proven)

    def _proven(self, incoming: Incoming) -> None:
        self.hellos.append(incoming.hello)
        link = incoming.link()
        self.links.append(link)
        self.pump.watch(link, lambda: self._on_link(link))

    def _on_link(self, link: Link) -> None:
        for message in link.receive():
            if "beat" in message:
                number = message["beat"]["number"]
                self.beats.append(number)
                if self.answers:
                    link.send(msg.encode(msg.BeatReturned(number, self.proof_age_s)))
            else:
                self.heard.append(message)
        if link.closed:
            self.hang_up(link)

    def hang_up(self, link: Link) -> None:
        self.pump.unwatch(link)
        link.close()
        self.links.remove(link)

    def close(self) -> None:
        """As if its process had ended."""
        for link in list(self.links):
            self.hang_up(link)
        if self.listener.fileno() >= 0:
            self.pump.unwatch(self.listener)
            self.listener.close()


def agent_joins(node: int, port: int, **more: Any) -> msg.AgentJoins:
    """What the agent of `node` says to a coordinator at first."""
    plain: dict[str, Any] = {
        "term": 1,
        "node": node,
        "address": "127.0.0.1",
        "port": port,
        "pid": 1000 + node,
    }
    plain |= {"incarnation": f"first {node}", "order": "", "leaving": None, "told": f"journal {node}"}
    plain |= {"ready": True, "running": None, "left": None, "offer_port": 7000 + node, "held": []}
    return msg.AgentJoins(**plain | more)


def link_pair() -> tuple[Link, Link]:
    """Both ends of a proven connection; the first is the server's."""
    ours, theirs = socket.socketpair()
    server, client = (_Keys(SECRET, "server", "client", server=side) for side in (True, False))
    return Link(ours, server), Link(theirs, client)
