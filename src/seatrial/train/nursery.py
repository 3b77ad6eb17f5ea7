"""The nursery: one process a node that has imported torch already and forks a rank for each request.

Importing torch costs about two seconds of CPU. Paid once a node instead of once a rank, eight ranks on two cores
begin after 3 s instead of 20 s, and share the imported pages. Only where there is no CUDA: a CUDA context does not
survive a fork.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue


def preload(module: str) -> Any:
    """Import the worker module and make its memory fit to be shared; the module.

    Raises RuntimeError if the import left a second thread running: a lock that it holds at the moment of the fork
    would never be released in the child.
    """
    worker = importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"importing {module} started {threads - 1} threads: a rank forked now could hang")
    gc.collect()
    gc.freeze()  # the collector would write to every page that it looks at, and so copy it in each rank
    return worker


class Nursery:
    """Forks ranks, reaps them, and tells the agent of both."""

    def __init__(self, worker: Any, channel: Channel, mark: str) -> None:
        self.worker = worker
        self.channel = channel
        self.mark = mark
        self.ranks: dict[int, int] = {}  # pid -> rank
        self.signals = SignalQueue((signal.SIGCHLD, signal.SIGTERM))

    def serve(self) -> None:
        """Until the agent is gone; then nothing of this node is left."""
        self.channel.send({"ready": os.getpid()})
        selector = selectors.DefaultSelector()
        selector.register(self.channel, selectors.EVENT_READ)
        selector.register(self.signals, selectors.EVENT_READ)
        while not self.channel.closed:
            selector.select()
            arrived = self.signals.read()
            if signal.SIGTERM in arrived:
                break
            if signal.SIGCHLD in arrived:
                process.reap(self._reaped)
            for message in self.channel.receive():
                match message:
                    case {"ping": _}:
                        self.channel.post({"pong": {}})
                    case {"fork": order}:
                        self._fork(**order)
        # The agent kills its nursery itself when all is well: it has died, and this process inherits its last duty.
        for pid in self.ranks:
            process.signal_group(pid, signal.SIGKILL)
        process.kill_all(lambda: process.descendants(os.getpid()) | process.marked(self.mark))

    def _fork(self, *, rank: int, log: str, env: dict[str, str], argv: list[str], token: str) -> None:
        def body() -> int:
            self.channel.close()
            self.signals.close_in_child()
            os.environ.update(env)
            sys.argv = [self.worker.__name__, *argv]
            code = self.worker.main(argv)
            return 0 if code is None else int(code)

        pid = process.fork(body, log=Path(log))
        self.ranks[pid] = rank
        self.channel.send({"forked": {"rank": rank, "pid": pid, "token": token}})

    def _reaped(self, pid: int, status: int) -> None:
        rank = self.ranks.pop(pid)
        self.channel.send({"exited": {"rank": rank, "pid": pid, "status": status, "time": time.time()}})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m seatrial.train.nursery`."""
    parser = argparse.ArgumentParser(description="Imports the worker module once and forks ranks on request.")
    parser.add_argument("--worker-module", required=True)
    parser.add_argument("--channel", type=int, required=True, metavar="FD")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="the agent")
    parser.add_argument("--mark", required=True, help="what marks the processes of this node")
    arguments = parser.parse_args(argv)
    # SIGKILL while importing, when nothing could handle another signal and there is nothing to clean up.
    process.die_with_parent(arguments.parent)
    channel = Channel.from_fd(arguments.channel)
    nursery = Nursery(preload(arguments.worker_module), channel, arguments.mark)
    process.die_with_parent(arguments.parent, signal.SIGTERM)
    nursery.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
