"""The end of a run: whoever still works stops, and everybody hears of the outcome."""

from __future__ import annotations

import time
from typing import Any

from seatrial.control.executor import Executor
from seatrial.control.machine_types import Finish
from seatrial.control.peers import Peers
from seatrial.control.settings import STOP_GRACE_S
from seatrial.control.verdicts import Verdicts

_FINISH_S = 2.0


class Ending:
    """What one coordinator does once its machine has finished."""

    def __init__(self, own: int, term: int, peers: Peers, executor: Executor, verdicts: Verdicts) -> None:
        """`own`: the node of the coordinator itself."""
        self.outcome: dict[str, Any] | None = None
        self._own, self._term = own, term
        self._peers, self._executor, self._verdicts = peers, executor, verdicts
        self._finish: Finish | None = None
        self._stopping: set[int] = set()  # nodes that are to tell that they have stopped, before the end
        self._until = 0.0

    @property
    def deadline(self) -> float | None:
        return self._until if self._finish is not None and self.outcome is None else None

    def tick(self, now: float) -> None:
        """What time demands."""
        if self.deadline is not None and now >= self.deadline:
            self._conclude()

    def begin(self, finish: Finish) -> None:
        """The machine has decided that it is over."""
        self._finish = finish
        world = self._executor.world
        self._stopping = {n for n in (world.nodes if world is not None else []) if n in self._peers}
        if finish.how in ("done", "preempted") or not self._stopping:
            self._conclude()
            return
        # After a failure the peers first have time to fail by themselves, so that the one that was first can tell of
        # it even if it is slow to end.
        self._until = time.monotonic() + _FINISH_S
        self._executor.end(sorted(self._stopping), STOP_GRACE_S)

    def stopped(self, node: int) -> None:
        """Nothing runs on `node` any more, or it is lost."""
        self._stopping.discard(node)
        if self.deadline is not None and not self._stopping:
            self._conclude()

    def _conclude(self) -> None:
        assert self._finish is not None
        self.outcome = self._verdicts.outcome(self._finish, self._term)
        for node in self._peers.nodes():
            if node != self._own:
                self._peers.send(node, {"outcome": self.outcome})
        # Our own agent last: it ends with this, and passes on what the others have still to hear.
        self._peers.send(self._own, {"outcome": self.outcome})
