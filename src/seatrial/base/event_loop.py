"""The event loop of agents, fork servers and launchers: sources to wait for, each with a handler to call when it is ready."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_TURN_S = 0.05  # thousands may be ready at once, and the caller must check its deadlines in between


class EventLoop:
    """A selector whose sources may be unregistered at any time, even while others are being handled."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Callable[[], None]] = {}  # id of what is watched
        self._ready: deque[selectors.SelectorKey] = deque()  # not yet handled

    def watch(self, source: Any, handle: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        """Call `handle` whenever `source` is ready."""
        self._selector.register(source, events, handle)
        self._handlers[id(source)] = handle

    def unwatch(self, source: Any) -> None:
        """Stop watching `source`, which must not be closed yet."""
        self._selector.unregister(source)
        del self._handlers[id(source)]

    def wait_for(self, source: Any, events: int) -> None:
        """Change the events that a watched source is watched for."""
        if self._selector.get_key(source).events != events:
            self._selector.modify(source, events, self._handlers[id(source)])

    def wait(self, seconds: float | None) -> None:
        """Wait up to `seconds` (None: no limit) for ready sources and handle them.

        After `_TURN_S` the rest is left to the next call.
        """
        if not self._ready:
            self._ready.extend(key for key, _ in self._selector.select(seconds))
        until = time.monotonic() + _TURN_S
        while self._ready:
            key = self._ready.popleft()
            # Unless it was unwatched after `select` returned; another source may have the same id by now.
            handle = self._handlers.get(id(key.fileobj))
            if handle is not None and handle is key.data:
                handle()
            if time.monotonic() > until:
                break

    def close(self) -> None:
        """Close the selector; the sources stay open."""
        self._selector.close()
