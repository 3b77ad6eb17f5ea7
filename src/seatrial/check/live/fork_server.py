"""Fork server for the ranks of pairs and groups: `python -m seatrial.check.live.fork_server FD`, a child of the agent.

It imports torch once; a rank then starts within milliseconds, which makes many short rounds affordable. A CUDA context
does not survive a fork, so nothing here touches a GPU: each rank creates its own. Each rank has a deadline, after which
it is killed, whatever it waits for: a dead partner, a link that carries nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from seatrial.base import process
from seatrial.base.fork_server import ForkServer, import_to_share
from seatrial.base.lines import Channel
from seatrial.check.live import messages as msg
from seatrial.check.live import probe_pair
from seatrial.check.live.agent_tasks import last_lines
from seatrial.check.live.nccl_lines import topology_lines

_GIVE_UP_S = 1.0  # for a killed rank to exit; one in an uninterruptible system call does not


@dataclass
class _Rank:
    """One rank: its process and its messages. `log` is an in-memory file with its stdout and stderr."""

    number: int
    pid: int
    channel: Channel | None  # None once it has closed its end
    log: int
    measured: msg.Measured = field(default_factory=msg.Measured)
    failed: str = ""  # why, by itself
    status: int | None = None


@dataclass
class _Order:
    """One order of the agent, and its ranks on this host."""

    number: int
    last: float  # final deadline
    limit_s: float
    stall_s: float  # the longest time without a message from its ranks
    until: float = 0.0  # the next deadline
    ranks: dict[int, _Rank] = field(default_factory=dict)  # by pid
    why: str = ""  # why it was ended: a deadline, the conductor


class ProbeForkServer:
    """The orders in progress and their ranks. Ends with the agent."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.orders: dict[int, _Order] = {}
        self.server = ForkServer(channel, self._on_order, self._reaped)

    def serve(self) -> None:
        """Run until the agent has exited; then kill the ranks."""
        while self.server.wait(self._timeout_s()):
            self._clock()
        for order in self.orders.values():
            self._kill(order)

    def _timeout_s(self) -> float | None:
        soonest = min((o.until for o in self.orders.values()), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def _on_order(self, values: dict[str, Any]) -> None:
        match msg.decode(values, msg.ToAgent):
            case msg.Cancel(number):
                if (order := self.orders.get(number)) is not None:
                    order.why = order.why or "cancelled: its partner failed"
                    order.until = time.monotonic() + _GIVE_UP_S
                    self._kill(order)
            case msg.Ask(number, limit_s, content):
                match msg.decode(content, msg.AnyOrder):
                    case msg.Prepare():
                        self._done(number, msg.Prepared(torch.__version__))
                    case msg.RunRanks() as spec:
                        self._begin(number, limit_s, spec)

    def _begin(self, number: int, limit_s: float, spec: msg.RunRanks) -> None:
        now = time.monotonic()
        order = _Order(number, now + limit_s, limit_s, spec.durations.stall_s)
        order.until = min(order.last, now + order.stall_s)
        self.orders[number] = order
        for local in range(len(spec.ranks)):
            rank = self._fork(spec, local, limit_s)
            order.ranks[rank.pid] = rank

    def _fork(self, spec: msg.RunRanks, local: int, limit_s: float) -> _Rank:
        number = spec.ranks[local]
        ours, theirs = Channel.pair()
        log = os.memfd_create(f"rank{number}")

        def body() -> int:
            ours.close()
            return probe_pair.run(spec, local, limit_s, theirs)

        rank = _Rank(number, self.server.fork(body, log), ours, log)
        theirs.close()
        self.server.sources.watch(ours, lambda: self._on_rank(rank))
        return rank

    def _on_rank(self, rank: _Rank) -> None:
        if rank.channel is None:
            return
        order = self._of(rank.pid)
        for values in rank.channel.receive():
            if order is not None and not order.why:
                order.until = min(order.last, time.monotonic() + order.stall_s)
            match msg.decode(values, msg.FromRank):
                case msg.StoreServed(port) if order is not None:
                    self.channel.send(msg.encode(msg.Listening(order.number, port)))
                case msg.Measured() as measured:
                    rank.measured = measured
                case msg.RankFailed(why):
                    rank.failed = why
        if rank.channel.closed:
            self._close_channel(rank)

    def _close_channel(self, rank: _Rank) -> None:
        if rank.channel is not None:
            self.server.sources.unwatch(rank.channel)
            rank.channel.close()
            rank.channel = None

    def _of(self, pid: int) -> _Order | None:
        return next((o for o in self.orders.values() if pid in o.ranks), None)

    def _reaped(self, pid: int, status: int) -> None:
        order = self._of(pid)
        if order is None:
            return
        self._on_rank(order.ranks[pid])
        order.ranks[pid].status = status
        if all(r.status is not None for r in order.ranks.values()):
            self._finish(order)
        elif not order.ranks[pid].measured.whole and not order.why:
            # The other ranks of this host would only wait for it.
            order.last = order.until = min(order.until, time.monotonic() + _GIVE_UP_S)

    def _finish(self, order: _Order) -> None:
        del self.orders[order.number]
        results = []
        for rank in order.ranks.values():
            text = _text(rank.log)
            os.close(rank.log)
            self._close_channel(rank)
            failed = rank.failed
            if not rank.measured.whole and not failed:
                failed = order.why or process.status_text(rank.status or 0)
                if text:
                    failed += f"; stderr: {last_lines(text)}"
            lines = topology_lines(text.decode("utf-8", "replace"))
            results.append(msg.RankResult(rank.number, rank.measured, failed, lines))
        self._done(order.number, msg.RanksEnded(results))

    def _done(self, number: int, answer: msg.Message) -> None:
        self.channel.send(msg.encode(msg.Done(number, msg.encode(answer))))

    def _kill(self, order: _Order) -> None:
        for rank in order.ranks.values():
            if rank.status is None:
                process.signal_group(rank.pid, signal.SIGKILL)

    def _clock(self) -> None:
        now = time.monotonic()
        for order in [o for o in self.orders.values() if o.until <= now]:
            if order.why:
                self._finish(order)  # killed, and still there: report it without waiting
                continue
            gone = any(r.status is not None and not r.measured.whole for r in order.ranks.values())
            stalled = f"no data received for {order.stall_s:g} s"
            late = f"no result within {order.limit_s:g} s" if order.last <= now else stalled
            order.why = "another rank on this host failed" if gone else late
            order.until = now + _GIVE_UP_S
            self._kill(order)


def _text(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, min(size, 8 << 20), 0)


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m seatrial.check.live.fork_server`."""
    process.die_with_parent(os.getppid())
    import_to_share("torch")
    ProbeForkServer(Channel.from_fd(int(argv[0]))).serve()
    return 0


if __name__ == "__main__":
    process.exit_now(main(sys.argv[1:]))
