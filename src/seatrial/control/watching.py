"""The sources that an agent's loop waits for, each with what to call when it is ready."""

from __future__ import annotations

import resource
import selectors
from collections.abc import Callable
from typing import Any

_FILES = 1 << 16


class Watching:
    """A selector whose sources may be let go of at any moment, also while others are being handled."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Callable[[], None]] = {}  # id of what is watched

    def watch(self, source: Any, handle: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        """Call `handle` whenever `source` is ready."""
        self._selector.register(source, events, handle)
        self._handlers[id(source)] = handle

    def unwatch(self, source: Any) -> None:
        """Call nothing any more; `source` must not be closed yet."""
        self._selector.unregister(source)
        del self._handlers[id(source)]

    def wait_for(self, source: Any, events: int) -> None:
        """From now on wait for these events of a source that is watched."""
        if self._selector.get_key(source).events != events:
            self._selector.modify(source, events, self._handlers[id(source)])

    def wait(self, seconds: float) -> None:
        """Wait until something is ready, `seconds` at most, and handle it."""
        for key, _ in self._selector.select(seconds):
            # Unless somebody has unwatched it since `select` returned; another source may have its number by now.
            handle = self._handlers.get(id(key.fileobj))
            if handle is not None and handle is key.data:
                handle()


def allow_files() -> None:
    """Whoever coordinates has a connection to every node, and the usual limit is 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
