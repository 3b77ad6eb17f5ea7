"""One rank's process as its agent knows it, and what it may say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from seatrial.base.lines import Channel

Leg = dict[str, Any]
State = Literal["starting", "running", "parked", "finished", "exited"]

# What a worker's messages must have; the others are taken as they are, or not at all.
_CONTENT: dict[str, dict[str, type]] = {
    "beat": {"generation": int, "step": int, "first": bool},
    "parked": {"generation": int, "message": str},
    "finished": {"generation": int, "how": str},
    "finding": {"generation": int, "signal": str, "message": str},
}


@dataclass
class Worker:
    """One process and the rank that it is now."""

    local: int
    generation: int
    rank: int
    token: str
    leg: Leg
    state: State = "starting"
    pid: int | None = None
    channel: Channel | None = None
    how: str = "done"  # how it left its generation, once finished
    done: bool = False  # it has reported its end
    step: int = 0  # last step it has told of
    status: int | None = None
    signalled: float | None = None  # when we first sent it a signal
    log: Path = field(default_factory=Path)

    @property
    def alive(self) -> bool:
        return self.state != "exited"

    @property
    def listens(self) -> bool:
        """Whether it can be told something."""
        return self.channel is not None and not self.channel.closed

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.state == "exited" and not self.left

    @property
    def left(self) -> bool:
        """Whether it has left its generation cleanly; after its report only its exit is missing."""
        if self.state == "exited":
            return self.status == 0 or (self.done and self.signalled is not None)
        return self.state == "finished" and self.how != "done"

    @property
    def waits(self) -> bool:
        """Whether it waits for its next leg."""
        return self.state == "parked" or (self.state == "finished" and self.how == "yielded")

    @property
    def runs(self) -> bool:
        """Whether it works for its generation still."""
        return self.state in ("starting", "running")


def check_message(kind: str, values: Any) -> None:
    """ValueError unless this is what a worker may say."""
    if not isinstance(values, dict):
        raise ValueError(f"{kind}: {str(values)[:80]}")
    for key, wanted in _CONTENT.get(kind, {}).items():
        if type(values.get(key)) is not wanted:
            raise ValueError(f"{kind} with {key} = {str(values.get(key))[:80]}")
