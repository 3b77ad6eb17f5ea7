"""The end of a run: stop the remaining ranks and send the outcome to all agents."""

from __future__ import annotations

import time
from collections.abc import Callable

from seatrial.control.coordinator.executor import Executor
from seatrial.control.coordinator.peers import Peers
from seatrial.control.coordinator.settings import STOP_GRACE_S
from seatrial.control.coordinator.verdicts import Verdicts
from seatrial.control.machine.types import Finish
from seatrial.record import messages as msg

_FINISH_S = 2.0


class Ending:
    """What one coordinator does once its machine has finished."""

    def __init__(
        self,
        own: int,
        term: int,
        peers: Peers,
        executor: Executor,
        verdicts: Verdicts,
        record: Callable[[msg.Outcome, str], None],
    ) -> None:
        """`own`: the coordinator's own node. `record(outcome, message)` writes the outcome to the run folder."""
        self.outcome: msg.Outcome | None = None
        self._own, self._term = own, term
        self._peers, self._executor, self._verdicts, self._record = peers, executor, verdicts, record
        self._finish: Finish | None = None
        self._stopping: set[int] = set()  # nodes that have yet to report that they have stopped
        self._until = 0.0

    @property
    def deadline(self) -> float | None:
        return self._until if self._finish is not None and self.outcome is None else None

    def tick(self, now: float) -> None:
        """Conclude if the time for stopping is over."""
        if self.deadline is not None and now >= self.deadline:
            self._conclude()

    def begin(self, finish: Finish) -> None:
        """Begin the end of the run, which the machine has decided."""
        self._finish = finish
        world = self._executor.world
        self._stopping = {n for n in (world.nodes if world is not None else []) if n in self._peers}
        if finish.how in ("done", "preempted") or not self._stopping:
            self._conclude()
            return
        # After a failure the ranks first get time to fail by themselves, so that the first failure is reported even if
        # its rank is slow to exit.
        self._until = time.monotonic() + _FINISH_S
        self._executor.end(sorted(self._stopping), STOP_GRACE_S)

    def stopped(self, node: int) -> None:
        """`node` runs nothing any more, or is lost."""
        self._stopping.discard(node)
        if self.deadline is not None and not self._stopping:
            self._conclude()

    def _conclude(self) -> None:
        assert self._finish is not None
        self.outcome = self._verdicts.outcome(self._finish, self._term)
        self._record(self.outcome, self._finish.message)  # first: agents that miss the message can read it
        for node in self._peers.nodes():
            if node != self._own:
                self._peers.send(node, self.outcome)
        # Our own agent last: it exits on this message, after sending what is still pending for the others.
        self._peers.send(self._own, self.outcome)
