"""Storage calls with a timeout: a hung mount can block its callers forever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from seatrial.base import units
from seatrial.storage import StorageError

T = TypeVar("T")
GivenUp = Callable[[], bool]

# Address -> thread of the last call, which may not have returned. A thread, not a process: a running rank has
# threads and perhaps a CUDA context, and must not fork; a hung thread ends when the rank is killed.
_calls: dict[str, threading.Thread] = {}


def call_with_timeout(seconds: float, url: str, call: Callable[[GivenUp], T]) -> T:
    """Run `call` on its own thread; return or raise what it does, or StorageError if it takes longer than `seconds`.

    While an earlier call to `url` has not returned, it raises StorageError at once. `call` is passed a function that
    returns true once the caller has given up waiting: from then on it must change nothing.
    """
    before = _calls.get(url)
    if before is not None and before.is_alive():
        raise StorageError("unreachable", "access", url, "it has not answered the previous call yet")
    done: list[tuple[Any, Exception | None]] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            done.append((call(given_up.is_set), None))
        except Exception as error:  # noqa: BLE001  # the thread's last frame: re-raised below
            done.append((None, error))

    thread = _calls[url] = threading.Thread(target=run, name="storage", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        given_up.set()
        cause = f"no answer within {units.duration(seconds)}"
        raise StorageError("unreachable", "access", url, cause, hint="check the mount")
    value, error = done[0]
    if error is not None:
        raise error
    answer: T = value
    return answer
