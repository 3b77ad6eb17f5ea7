"""Accepts an agent's connections: each must prove in time that it knows the run's secret before it is served."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from seatrial.control.net.wire import Incoming, Listener

# Unauthenticated connections. At a start thousands of nodes may connect at once. The handshake takes milliseconds, so
# the one that has waited longest behind so many others is most likely not a peer.
MOST_WAITING = 512


class Acceptor:
    """Accepts connections from `listener` and passes authenticated ones to `proven`, which closes them."""

    def __init__(
        self,
        listener: Listener,
        watch: Callable[[Any, Callable[[], None]], None],
        unwatch: Callable[[Any], None],
        proven: Callable[[Incoming], None],
    ) -> None:
        self._listener, self._proven = listener, proven
        self._watch, self._unwatch = watch, unwatch
        self._waiting: list[Incoming] = []
        watch(listener, self._on_listener)

    @property
    def deadline(self) -> float | None:
        return min((incoming.deadline for incoming in self._waiting), default=None)

    def tick(self) -> None:
        """Close connections that did not authenticate in time, which would otherwise stay open forever."""
        now = time.monotonic()
        for incoming in [i for i in self._waiting if now >= i.deadline]:
            self._refuse(incoming)

    def _on_listener(self) -> None:
        for incoming in self._listener.accept():
            if len(self._waiting) >= MOST_WAITING:
                self._refuse(self._waiting[0])
            self._waiting.append(incoming)
            self._watch(incoming, partial(self._on_incoming, incoming))
            self._on_incoming(incoming)

    def _on_incoming(self, incoming: Incoming) -> None:
        progress = incoming.advance()
        if progress == "wait":
            return
        self._forget(incoming)
        if progress == "ready":
            self._proven(incoming)
        else:
            incoming.close()

    def _refuse(self, incoming: Incoming) -> None:
        self._forget(incoming)
        incoming.close()

    def _forget(self, incoming: Incoming) -> None:
        self._waiting.remove(incoming)
        self._unwatch(incoming)
