"""One rank's process as its agent knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from seatrial.base.lines import Channel
from seatrial.record.messages import Ending, RankSpec

State = Literal["starting", "running", "parked", "finished", "exited"]


@dataclass
class Worker:
    """One process and the rank that it is now."""

    local: int
    generation: int
    rank: int
    token: str
    rank_spec: RankSpec
    state: State = "starting"
    pid: int | None = None
    channel: Channel | None = None
    how: Ending = "done"  # how it left its generation, once finished
    done: bool = False  # it has reported its end
    step: int = 0  # last step it has reported
    validating: int = 0  # last batch of the validation after it, 0: none
    status: int | None = None
    signalled: float | None = None  # when we first sent it a signal
    log: Path = field(default_factory=Path)

    @property
    def alive(self) -> bool:
        return self.state != "exited"

    @property
    def listens(self) -> bool:
        """Whether it can receive messages."""
        return self.channel is not None and not self.channel.closed

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.state == "exited" and not self.left

    @property
    def left(self) -> bool:
        """Whether it has left its generation cleanly; after its report only its exit is still to come."""
        if self.state == "exited":
            return self.status == 0 or (self.done and self.signalled is not None)
        return self.state == "finished" and self.how != "done"

    @property
    def waits(self) -> bool:
        """Whether it waits for its next generation."""
        return self.state == "parked" or (self.state == "finished" and self.how == "yielded")

    @property
    def runs(self) -> bool:
        """Whether it still works on its generation."""
        return self.state in ("starting", "running")
