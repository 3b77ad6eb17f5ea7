"""The process that writes what a rank has staged, while the rank trains on: `python -m seatrial.checkpoint.writer`.

It receives orders over a channel, processes them in sequence, and answers each with an outcome:

    {"part": {...}}      write the staged memory as this rank's part      -> {"outcome": {"what": "part", ...}}
    {"commit": {...}}    make all ranks' parts a checkpoint (rank 0)      -> {"outcome": {"what": "commit", ...}}
                         then remove old ones in the background           -> {"outcome": {"what": "removed", ...}}
    {"abandon": {...}}   remove what was written of an abandoned save     no answer

It dies with its rank, at any moment; what it leaves is a complete checkpoint, or a recognisable leftover.
Without torch, whose import would take longer than most saves.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seatrial.base import process, units
from seatrial.base.complain import complain
from seatrial.base.errors import SeatrialError
from seatrial.base.lines import Channel
from seatrial.checkpoint.commit import Superseded, fence
from seatrial.checkpoint.manifest import Damaged, Manifest, folder_name
from seatrial.checkpoint.place import Place, open_place
from seatrial.checkpoint.retention import retire
from seatrial.record.folder import RunFolder
from seatrial.storage import StorageError

# Training has priority on the cores: next to a busy rank this process gets 3 % of one.
_NICENESS = 15
_LOG_EVERY_S = 10.0

Order = dict[str, Any]


class Writer:
    """Executes the orders of one rank."""

    def __init__(self, channel: Channel, memory: int) -> None:
        """`memory`: descriptor of the file that the rank stages into."""
        self._channel, self._memory = channel, memory
        self._orders: deque[Order] = deque()
        self._retention: Order | None = None  # of the last commit, while in progress
        self._removed: list[str] = []  # by an interrupted retention, not reported yet
        self._places: dict[str, Place] = {}

    def serve(self) -> None:
        """Process orders until the rank closes its end."""
        while not self._channel.closed:
            self._receive(None if not self._orders and self._retention is None else 0)
            if self._orders:
                ((kind, values),) = self._orders.popleft().items()
                {"part": self._part, "commit": self._commit, "abandon": self._abandon}[kind](values)
            elif self._retention is not None:
                self._retire(self._retention)

    def _receive(self, timeout_s: float | None) -> bool:
        """Receive what has arrived; whether an order waits or the channel was closed."""
        if self._channel.readable(timeout_s):
            self._orders += self._channel.receive()
        return bool(self._orders) or self._channel.closed

    def _place(self, url: str) -> Place:
        if url not in self._places:
            self._places[url] = open_place(url)
        return self._places[url]

    # -- orders

    def _part(self, order: Order) -> None:
        def write() -> dict[str, Any]:
            index = json.loads(os.pread(self._memory, order["index_bytes"], order["index_at"]))
            size, step = order["size"], order["step"]
            passes = 2 if order["read_back"] else 1
            self._place(order["url"]).put_part(
                step,
                order["generation"],
                order["rank"],
                self._memory,
                size,
                index,
                order["read_back"],
                beat=_LoggedProgress(f"step {step}", passes * size),
            )
            return {"bytes": size}

        self._answer("part", order, write)

    def _commit(self, order: Order) -> None:
        def commit() -> dict[str, Any]:
            manifest = Manifest.from_text(order["manifest"])
            step, generation = manifest.progress.step, manifest.progress.generation
            check = fence(RunFolder(Path(order["fence"])), generation)
            done = self._place(order["url"]).commit(step, generation, manifest, order["world_size"], check)
            self._retention = order
            return {"bytes": sum(file.bytes for file in done.files), "names": [folder_name(step)]}

        self._answer("commit", order, commit)

    def _abandon(self, order: Order) -> None:
        try:
            self._place(order["url"]).abandon(order["step"], order["generation"])
        except (OSError, SeatrialError) as error:  # the next start removes it
            complain(f"could not remove the files of the abandoned save of step {order['step']}: {error}")

    def _retire(self, order: Order) -> None:
        stopped = False

        def stop() -> bool:
            nonlocal stopped
            stopped = stopped or self._receive(0)  # a waiting checkpoint is more urgent
            return stopped

        def retention() -> dict[str, Any]:
            place, sure = self._place(order["url"]), order.get("sure")
            done = retire(place, order["keep"], order["keep_every"], sure=sure, stop=stop)
            self._removed += done.removed
            values: dict[str, Any] = {"names": self._removed}
            if done.problems:
                values |= {"ok": False, "problem": "; ".join(done.problems)}
            return values

        # An interrupted retention is resumed later: on its own, or as part of the next commit's.
        if self._answer("removed", order, retention, unless=lambda: stopped):
            self._retention, self._removed = None, []

    def _answer(
        self,
        what: str,
        order: Order,
        work: Callable[[], dict[str, Any]],
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Do `work` and send its outcome; if `unless` is true afterwards, send nothing and return false."""
        begin = time.monotonic()
        answer: dict[str, Any] = {"ok": True, "problem": None, "kind": "", "bytes": 0, "names": []}
        try:
            answer |= work()
        except (OSError, ValueError, KeyError, TypeError, SeatrialError) as error:
            answer |= {"ok": False, "problem": _text(error), "kind": _kind(error)}
        if unless():
            return False
        answer |= {"what": what, "attempt": order["attempt"], "seconds": time.monotonic() - begin}
        self._channel.send({"outcome": answer})
        return True


class _LoggedProgress:
    """Logs progress to the rank's log periodically while a long write runs."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = time.monotonic()
        self._next = self._began + _LOG_EVERY_S

    def __call__(self, done: int) -> None:
        self._done += done
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _LOG_EVERY_S
            rate = units.memory(int(self._done / (now - self._began)))
            complain(
                f"checkpoint of {self._what}: {units.memory(self._done)} of {units.memory(self._total)} written "
                f"and read back, {rate}/s"
            )


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _kind(error: BaseException) -> str:
    match error:
        case StorageError():
            return error.kind
        case Damaged():
            return "damaged"
        case Superseded():
            return "superseded"
        case _:
            return "other"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(
        prog="seatrial.checkpoint.writer", description="Writes a rank's checkpoints."
    )
    parser.add_argument("--channel", type=int, required=True, metavar="FD")
    parser.add_argument("--memory", type=int, required=True, metavar="FD")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="the rank")
    arguments = parser.parse_args(argv)
    process.die_with_parent(arguments.parent)
    # Stop signals are for the ranks. They save their state on the way out, and end this process.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(_NICENESS)
    os.set_inheritable(arguments.memory, False)
    Writer(Channel.from_fd(arguments.channel), arguments.memory).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
