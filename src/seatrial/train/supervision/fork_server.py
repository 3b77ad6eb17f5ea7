"""The fork server: one process per node that has already imported torch and forks a rank for each request.

Importing torch costs about two seconds of CPU. Paid once per node instead of once per rank, eight ranks on two cores
start after 3 s instead of 20 s, and share the imported pages. Ranks on GPUs may be forked as long as nothing has
initialised CUDA: a forked process cannot use its parent's context.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.base.complain import complain
from seatrial.base.fork_server import ForkServer, import_to_share
from seatrial.base.lines import Channel
from seatrial.record import messages as msg


class RankForkServer:
    """Forks ranks, reaps them, and reports both to the agent."""

    def __init__(self, worker: Any, channel: Channel, mark: str) -> None:
        self.worker = worker
        self.channel = channel
        self.mark = mark
        self.ranks: dict[int, int] = {}  # pid -> rank
        self.server = ForkServer(channel, self._handle, self._reaped)

    def serve(self) -> None:
        """Serve until the agent exits; then kill every process of this node."""
        self._send(msg.ForkServerReady())
        while self.server.wait():
            pass
        # A healthy agent kills its fork server. So the agent has died, and this process cleans up.
        for pid in self.ranks:
            process.signal_group(pid, signal.SIGKILL)
        process.kill_all(lambda: process.descendants(os.getpid()) | process.marked(self.mark))

    def _handle(self, values: dict[str, Any]) -> None:
        order: msg.ToForkServer = msg.decode(values, msg.ToForkServer)
        match order:
            case msg.Ping():
                self.channel.post(msg.encode(msg.Pong()))
            case msg.Fork():
                self._fork(order)

    def _send(self, message: msg.FromForkServer) -> None:
        self.channel.send(msg.encode(message))

    def _fork(self, order: msg.Fork) -> None:
        def body() -> int:
            os.environ.update(order.env)
            if order.cpus:
                try:
                    os.sched_setaffinity(0, order.cpus)
                except OSError as error:  # these CPUs were removed from this node's cpuset since
                    complain(f"could not bind this rank to its GPU's CPUs: {error}")
            sys.argv = [self.worker.__name__, *order.argv]
            code = self.worker.main(order.argv)
            return 0 if code is None else int(code)

        pid = self.server.fork(body, Path(order.log))
        self.ranks[pid] = order.rank
        self._send(msg.Forked(order.rank, pid, order.token))

    def _reaped(self, pid: int, status: int) -> None:
        rank = self.ranks.pop(pid)
        self._send(msg.ForkedExited(rank, pid, status, time.time()))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m seatrial.train.supervision.fork_server`."""
    parser = argparse.ArgumentParser(description="Imports the worker module once and forks ranks on request.")
    parser.add_argument("--worker-module", required=True)
    parser.add_argument("--channel", type=int, required=True, metavar="FD")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="the agent")
    parser.add_argument("--mark", required=True, help="what marks the processes of this node")
    arguments = parser.parse_args(argv)
    # SIGKILL while importing, when nothing could handle another signal and there is nothing to clean up.
    process.die_with_parent(arguments.parent)
    channel = Channel.from_fd(arguments.channel)
    worker = import_to_share(arguments.worker_module)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(f"importing {arguments.worker_module} initialised CUDA: no rank could use it")
    fork_server = RankForkServer(worker, channel, arguments.mark)
    process.die_with_parent(arguments.parent, signal.SIGTERM)
    fork_server.serve()
    return 0


if __name__ == "__main__":
    process.exit_now(main())
