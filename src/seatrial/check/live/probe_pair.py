"""One rank of a pair or a group: measures torch's send and receive and its all-reduce, through gloo or NCCL.

Runs in a process forked by fork_server.py. What it is to measure: `RunRanks` of messages.py.

The receiver measures a flow, from its first message on: what the sender has put into a buffer has not arrived yet. The
best stretch of at least half of the time counts, since other load on the machine makes a flow slower, never faster.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from math import inf

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from seatrial.base.address import interface_towards
from seatrial.base.lines import Channel
from seatrial.check.live import messages as msg
from seatrial.hardware import accelerator
from seatrial.parallel.store import serve_store

_MIB = 1 << 20
# A message of a flow takes about this long: short enough for a slow link's deadline, long enough to hide its latency.
_MESSAGE_S = 0.01
_MESSAGES = {"cpu": (64 << 10, 8 * _MIB), "cuda": (16 * _MIB, 256 * _MIB)}  # minimum, maximum bytes
_LEAST_REPEATS, _MOST_REPEATS = 3, 20
_FAR_TOO_LONG = 4.0  # multiple of the time for all repeats of one size that a single one may take
_LEAVE_S = 2.0  # before its deadline, to report what went wrong instead of being killed


def run(spec: msg.RunRanks, local: int, limit_s: float, channel: Channel) -> int:
    """Measure as rank number `local` of this host; the result, or the failure, is sent to `channel`."""
    try:
        _Probe(spec, local, limit_s, channel).measure()
    except (RuntimeError, OSError, ValueError) as error:  # what torch and its backends raise
        # The first line is the message; C++ stacks follow.
        line = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:400]
        failed = msg.RankFailed("".join(c if c.isprintable() else "?" for c in line))
        channel.send(msg.encode(failed))
    # No destroy_process_group(): it would wait for partners that may have exited.
    os._exit(0)


class _Probe:
    def __init__(self, spec: msg.RunRanks, local: int, limit_s: float, channel: Channel) -> None:
        self.spec, self.rank, self.limit_s, self.channel = spec, spec.ranks[local], limit_s, channel
        self.gpu = 0 if spec.device == "cpu" else spec.gpus[local]
        self.device = torch.device("cpu")
        self.flow_s, self.sum_s = spec.durations.flow_s, spec.durations.sum_s

    def measure(self) -> None:
        """Send `Measured` whenever there is more, so that what was measured before a partner died is not lost."""
        torch.set_num_threads(1)
        self._environment()
        self.device = accelerator.claim(self.spec.device, self.gpu)
        timeout = timedelta(seconds=max(1.0, self.limit_s - _LEAVE_S))
        dist.init_process_group(
            self.spec.backend,
            store=self._store(timeout),
            rank=self.rank,
            world_size=self.spec.world_size,
            timeout=timeout,
            device_id=self.device if accelerator.is_accelerator(self.device) else None,
        )
        self._agree(0)
        flows: list[msg.Flow] = []
        sums: list[msg.AllReduces] = []
        for direction in sorted({direction for _, _, direction in self.spec.flows}):
            flows += self._direction(direction)
            self._send(msg.Measured(flows, sums))
        for size in sorted(self.spec.sizes):
            if self._agree(int(self._too_long(size, sums))):
                break
            sums.append(self._all_reduce(size))
            self._send(msg.Measured(flows, sums))
        self._send(msg.Measured(flows, sums, whole=True))

    def _send(self, message: msg.FromRank) -> None:
        self.channel.send(msg.encode(message))

    def _environment(self) -> None:
        name = self.spec.interface or interface_towards(self.spec.toward)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
        if self.spec.backend == "nccl":
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the node stage counts them
            os.environ["NCCL_DEBUG"] = "INFO"
            os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,GRAPH,NVLS,NET,ENV"
            if self.spec.hca:  # one rail: send and receive replace ib_write_bw
                os.environ["NCCL_IB_HCA"] = f"={self.spec.hca}"

    def _store(self, timeout: timedelta) -> Store:
        if (at := self.spec.store) is not None:
            return TCPStore(at.address, at.port, None, is_master=False, timeout=timeout)
        store = serve_store(self.spec.listen, 0, timeout)
        self._send(msg.StoreServed(store.port))
        return store

    def _agree(self, vote: int) -> int:
        """The sum of all votes. Also a barrier for all ranks."""
        votes = torch.tensor([vote], dtype=torch.int64, device=self.device)
        dist.all_reduce(votes)
        return int(votes.item())

    # -- flows

    def _direction(self, direction: int) -> list[msg.Flow]:
        mine = [(a, b) for a, b, w in self.spec.flows if w == direction and self.rank in (a, b)]
        self._agree(0)
        found = []
        for sender, receiver in mine:
            size = self._message_bytes(sender, receiver)
            if self.rank == sender:
                self._send_flow(receiver, size)
            elif (gbit_s := self._receive_flow(sender, size)) is not None:
                found.append(msg.Flow(sender, receiver, gbit_s, size))
        self._agree(0)
        return found

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _sent(self, buffer: torch.Tensor, peer: int) -> None:
        dist.send(buffer, peer)
        self._wait()

    def _got(self, buffer: torch.Tensor, peer: int) -> int:
        dist.recv(buffer, peer)
        return int(buffer[0].item())

    def _wait(self) -> None:
        if accelerator.is_accelerator(self.device):
            torch.accelerator.synchronize(self.device)

    def _message_bytes(self, sender: int, receiver: int) -> int:
        """Choose a message size that takes about `_MESSAGE_S`, by round trips of growing size; the sender decides."""
        least, most = _MESSAGES[self.device.type]
        size = least
        while True:
            buffer = self._buffer(size)
            if self.rank == receiver:
                more = self._got(buffer, sender)
                self._sent(buffer, sender)
                if self._got(buffer, sender) == 0:
                    return size
                size *= 4
                continue
            begin = time.perf_counter()
            self._sent(buffer, receiver)
            self._got(buffer, receiver)
            more = int(time.perf_counter() - begin < _MESSAGE_S and size * 4 <= most)
            self._sent(self._buffer(size).fill_(more), receiver)
            if not more:
                return size
            size *= 4

    def _send_flow(self, peer: int, size: int) -> None:
        buffer = self._buffer(size)
        until = time.monotonic() + self.flow_s
        last = False
        while not last:
            last = time.monotonic() >= until
            if last:
                buffer[0] = 1
            self._sent(buffer, peer)

    def _receive_flow(self, peer: int, size: int) -> float | None:
        """Gb/s; None if too little has arrived."""
        buffer = self._buffer(size)
        marks = []
        last = 0
        while not last:
            last = self._got(buffer, peer)
            marks.append(time.perf_counter())
        span = marks[-1] - marks[0]
        if len(marks) < 2 or span <= 0:
            return None
        best = best_stretch(marks, max(span, self.flow_s) / 2) or (len(marks) - 1) / span
        return best * size * 8 / 1e9

    # -- all-reduce

    def _too_long(self, size: int, sums: list[msg.AllReduces]) -> bool:
        """Whether messages of `size` would take far longer than allowed, extrapolated from the previous size."""
        if not sums or not sums[-1].seconds:
            return False
        return min(sums[-1].seconds) * size / sums[-1].size_bytes > _FAR_TOO_LONG * self.sum_s

    def _all_reduce(self, size: int) -> msg.AllReduces:
        """Seconds of all-reduces of `size` bytes of fp32, as seen by this rank, and the number of wrong sums."""
        values = torch.empty(max(1, size // 4), dtype=torch.float32, device=self.device)
        times: list[float] = []
        spent, wrong = 0.0, 0
        while True:
            values.fill_(1.0)
            # The first is the warm-up. Over a link that is far too slow, one that counts must suffice.
            late = spent > self.sum_s * (1 if len(times) > _LEAST_REPEATS else 3 if len(times) > 1 else inf)
            # The vote is also the barrier from which all ranks start.
            if self._agree(int(late or len(times) > _MOST_REPEATS)):
                break
            begin = time.perf_counter()
            dist.all_reduce(values)
            self._wait()
            times.append(time.perf_counter() - begin)
            spent += times[-1]
            wrong += int((values != float(self.spec.world_size)).sum().item())
        return msg.AllReduces(values.numel() * 4, [round(t, 7) for t in times[1:]], wrong)


def best_stretch(marks: list[float], least_s: float) -> float | None:
    """The highest message rate per second over any stretch of at least `least_s`; None if there is no such stretch."""
    best: float | None = None
    first = 0
    for last in range(1, len(marks)):
        while first + 1 < last and marks[last] - marks[first + 1] >= least_s:
            first += 1
        span = marks[last] - marks[first]
        if span >= least_s:
            best = max(best or 0.0, (last - first) / span)
    return best
