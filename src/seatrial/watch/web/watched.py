"""One run, read by one thread for all browsers, with its encoded pages cached for all."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from seatrial.record.folder import RunFolder
from seatrial.watch.web.feed import Feed, encode
from seatrial.watch.web.now import now
from seatrial.watch.web.polled_run import PolledRun, PolledRunReader

Result = TypeVar("Result")

POLL_S = 1.0  # between two polls
_EVENT_S = 0.25  # between two checks for new events, which may be faults
_SHARE = 4  # at most 1/4 of the time is spent reading, unless there are new events
_IDLE_S = 30.0  # without a request: reading pauses
_FORGET_S = 900.0  # without a request: what was read is dropped, which can be hundreds of MB
_PAGE_S, _PAGE_SHARE = 1.0, 20  # minimum interval of making a page, and maximum share of the time
_LEAST_TO_PACK = 1400  # bytes: a smaller body fits one packet uncompressed


@dataclass(frozen=True)
class Body:
    """A response body, plain and compressed; `tag` is its ETag."""

    raw: bytes
    packed: bytes
    tag: str


def body_of(value: Any) -> Body:
    """`value` encoded as JSON."""
    raw = encode(value)
    packed = gzip.compress(raw, 1, mtime=0) if len(raw) >= _LEAST_TO_PACK else b""
    return Body(raw, packed, f'"{hashlib.blake2b(raw, digest_size=12).hexdigest()}"')


class Watched:
    """Reads the run while browsers request it. Thread-safe except for the feed."""

    def __init__(self, name: str, folder: RunFolder, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.folder = name, folder
        self.feed = Feed(loop)
        self._lock = threading.Lock()  # protects the reader and the latest poll
        self._wanted, self._ending = threading.Event(), threading.Event()
        self._read = threading.Event()  # set once there is a poll
        self._asked = time.monotonic()
        self._reader: PolledRunReader | None = None
        self._polled: PolledRun | None = None
        self._bodies: dict[tuple[str, ...], tuple[float, Body]] = {}
        self._problem = ""
        self._thread = threading.Thread(target=self._follow, name=f"watch {name}", daemon=True)

    def want(self) -> None:
        """Start or continue reading, for a while."""
        self._asked = time.monotonic()
        if not self._wanted.is_set():
            self._read.clear()
            self._wanted.set()
        if not self._thread.is_alive() and not self._ending.is_set():
            with self._lock:
                if self._thread.ident is None:
                    self._thread.start()

    def end(self) -> None:
        """Stop reading, and end the streams. Called in the event loop's thread."""
        self._ending.set()
        self._wanted.set()
        self.feed.end()

    def body(
        self, key: tuple[str, ...], make: Callable[[PolledRun], Mapping[str, Any]], wait_s: float = 30.0
    ) -> Body:
        """The page `key`, made at most once per second. Raises TimeoutError if the run cannot be read in time."""
        self.want()
        if not self._read.wait(wait_s):
            raise TimeoutError(f"{self.name} is still being read")
        with self._lock:
            until, body = self._bodies.get(key, (0.0, None))
            started_at = time.monotonic()
            if body is not None and started_at < until:
                return body
            if self._polled is None:
                return body_of({"blocks": [], "missing": [self._problem]})
            body = body_of(make(self._polled))
            if len(self._bodies) > 200:  # bounds the cache: metrics and logs have many keys
                self._bodies.clear()
            duration_s = time.monotonic() - started_at
            self._bodies[key] = (started_at + duration_s + max(_PAGE_S, _PAGE_SHARE * duration_s), body)
            return body

    def use(self, take: Callable[[PolledRun], Result], wait_s: float = 30.0) -> Result | None:
        """`take` applied to the latest poll; None if the run could not be read. Raises as `body`."""
        self.want()
        if not self._read.wait(wait_s):
            raise TimeoutError(f"{self.name} is still being read")
        with self._lock:
            return None if self._polled is None else take(self._polled)

    def _follow(self) -> None:
        while not self._ending.is_set():
            started_at, seen = time.monotonic(), self._events_bytes()
            if self.feed.readers:
                self._asked = started_at
            if started_at - self._asked > _IDLE_S:
                self._wanted.clear()
                if not self._wanted.wait(_FORGET_S):
                    with self._lock:
                        self._reader = self._polled = None
                        self._bodies.clear()
                    self._wanted.wait()
                continue
            try:
                self._poll()
            except Exception:  # noqa: BLE001 - the thread's last frame: shown on the page, and the next poll retries
                self._problem = f"reading it failed, a bug in Seatrial: {traceback.format_exc(limit=-3)}"
                self.feed.publish({"name": self.name, "broken": self._problem})
                self._reader = None
                self._read.set()
            duration_s = time.monotonic() - started_at
            self._rest(started_at + max(POLL_S, _SHARE * duration_s), seen)

    def _rest(self, until: float, seen: int) -> None:
        """Wait until `until`, or until events.jsonl is larger than `seen` bytes: a fault does not wait."""
        while not self._ending.wait(_EVENT_S) and time.monotonic() < until and self._events_bytes() == seen:
            pass

    def _events_bytes(self) -> int:
        try:
            return self.folder.events.stat().st_size
        except OSError:
            return 0

    def _poll(self) -> None:
        with self._lock:
            if self._reader is None:
                self._reader = PolledRunReader(self.folder)
                for polled in self._reader.first():
                    self._polled = polled
                    self.feed.publish(now(polled))
                    self._read.set()
            self._polled = self._reader.poll()
            self._problem = ""
            document = now(self._polled)
        self.feed.publish(document)
        self._read.set()
