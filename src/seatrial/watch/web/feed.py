"""Server-sent events: a document whose changed keys are pushed, encoded once for all browsers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from seatrial.record.jsonl import plain

_KEPT = 64  # deltas kept; a browser further behind gets the whole document
_ALIVE_S = 15.0  # keep-alive interval: proxies close idle connections


def encode(value: Any) -> bytes:
    """Strict JSON: NaN and infinities become null."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", errors="backslashreplace"
    )


class Feed:
    """The latest state of a document, and its last changes. `publish` is thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._document: dict[str, bytes] = {}
        self._deltas: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self._version = 0
        self._news = asyncio.Event()
        self._ended = False
        self.readers = 0

    def publish(self, document: Mapping[str, Any]) -> None:
        """Publish a new state; changed keys are sent."""
        new = {key: encode(value) for key, value in document.items()}
        changed = {key: value for key, value in new.items() if self._document.get(key) != value}
        if changed:
            self._document = new
            with contextlib.suppress(
                RuntimeError
            ):  # the server ended while a run was read: its loop is closed
                self._loop.call_soon_threadsafe(self._sent, changed)

    def end(self) -> None:
        """End all streams. Called in the event loop's thread."""
        self._ended = True
        self._wake()

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events for one browser: first the whole document, then each change."""
        self.readers += 1
        seen = -1
        try:
            while not self._ended:
                news = self._news
                if seen != self._version:
                    # Taken together: more may be published while this is sent.
                    message, seen = (
                        self._since(seen),
                        self._version,
                    )
                    yield message
                    continue
                try:
                    await asyncio.wait_for(news.wait(), _ALIVE_S)
                except TimeoutError:
                    yield b": alive\n\n"
        finally:
            self.readers -= 1

    def _since(self, seen: int) -> bytes:
        missing = [data for version, data in self._deltas if version > seen]
        if seen < 0 or len(missing) < self._version - seen:
            return _message(self._document)
        return b"".join(missing)

    def _sent(self, changed: dict[str, bytes]) -> None:
        self._version += 1
        self._deltas.append((self._version, _message(changed)))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _message(values: Mapping[str, bytes]) -> bytes:
    inside = b",".join(json.dumps(key).encode() + b":" + value for key, value in values.items())
    return b"data: {" + inside + b"}\n\n"
