"""Ask the workers of one node what they are doing, and the kernel about those that do not answer."""

from __future__ import annotations

import time
from collections.abc import Iterable

from seatrial.control.agent.worker import Worker
from seatrial.control.hangs.evidence import Observation
from seatrial.record import messages as msg

_PATIENCE_S = 0.5  # a responsive rank has answered by then


class Inspection:
    """One round of requests. It is over when all have answered, or at its deadline."""

    def __init__(self, number: int, seconds: float, workers: Iterable[Worker]) -> None:
        """`seconds`: for the whole of it, a second or more, so that there is time to look twice at a silent process."""
        self.number = number
        self._until = time.monotonic() + seconds
        self._look_at: float | None = time.monotonic() + _PATIENCE_S
        self._dumps: dict[int, msg.Dump] = {}
        self._observations: dict[int, Observation] = {}
        workers = list(workers)
        self._left = [w.rank for w in workers if w.state == "finished" or w.status == 0]
        self._asked = {w.rank: w for w in workers if w.runs and w.pid is not None}
        for worker in self._asked.values():
            if worker.channel is not None:
                worker.channel.post(msg.encode(msg.AskDump(number)))

    @property
    def deadline(self) -> float:
        return self._until if self._look_at is None else min(self._until, self._look_at)

    def add_answer(self, rank: int, dump: msg.Dump) -> None:
        """Add the answer of a rank."""
        if dump.id == self.number:
            self._dumps[rank] = dump

    def over(self) -> bool:
        """Whether all have answered, or the time is over; call it at the deadline."""
        now = time.monotonic()
        if self._asked.keys() <= self._dumps.keys() or now >= self._until:
            return True
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None
            for rank in self._asked.keys() - self._dumps.keys():
                worker = self._asked[rank]
                assert worker.pid is not None
                self._observations[rank] = Observation(worker.pid, worker.log)
        return False

    def result(self) -> msg.Inspected:
        """For the coordinator: by rank, the answers, the kernel's view of silent ranks, and which exited cleanly."""
        return msg.Inspected(
            id=self.number,
            left=self._left,
            dumps={str(rank): vars(dump) for rank, dump in self._dumps.items()},
            evidence={str(rank): look.end().as_dict() for rank, look in self._observations.items()},
        )
