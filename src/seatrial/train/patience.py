"""Asking a storage for a bounded time: a mount that hangs holds whoever looks at it until it is back, maybe for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from seatrial.base import units
from seatrial.storage import StorageError

T = TypeVar("T")
GivenUp = Callable[[], bool]

# By address, the call that has not returned. A thread and not a process: what a rank has loaded must not be forked, and
# whatever it hangs in lets go of a thread when the rank is killed.
_out: dict[str, threading.Thread] = {}


def within(seconds: float, url: str, call: Callable[[GivenUp], T]) -> T:
    """What `call` gives or raises, on a thread of its own; StorageError if that takes longer than `seconds`.

    While an earlier call to `url` has not returned another one is not made, and not waited for. `call` is given a
    function that is true once nobody waits any more: from then on it must change nothing.
    """
    before = _out.get(url)
    if before is not None and before.is_alive():
        raise StorageError("unreachable", "look into", url, "it has still not answered the call before")
    done: list[tuple[Any, Exception | None]] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            done.append((call(given_up.is_set), None))
        except Exception as error:  # noqa: BLE001  # the thread's last frame: raised again below
            done.append((None, error))

    thread = _out[url] = threading.Thread(target=run, name="storage", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        given_up.set()
        cause = f"no answer within {units.duration(seconds)}"
        raise StorageError("unreachable", "look into", url, cause, hint="is the mount alive?")
    value, error = done[0]
    if error is not None:
        raise error
    answer: T = value
    return answer
