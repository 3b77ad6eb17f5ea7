"""The end of a process, as reported by its agent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["rank_exited", "fork_server_exited", "agent_exited"]


@dataclass(frozen=True)
class Report:
    """One process exit on a node. `agent_exited` is created by the launcher: a dead agent cannot report itself.

    `status` is the exit code, or minus the number of the signal. `signalled` is the time at which the agent first
    sent the process a signal itself: what happens to it afterwards is not its fault. `oom_killed` is None where
    that cannot be known.
    """

    kind: Kind
    node: int
    time: float  # unix seconds
    rank: int | None = None
    pid: int | None = None
    status: int | None = None
    signalled: float | None = None
    oom_killed: bool | None = None

    @property
    def failed(self) -> bool:
        """Whether the process failed by itself, without a signal from its agent."""
        return self.kind in ("rank_exited", "fork_server_exited", "agent_exited") and (
            self.status != 0 and self.signalled is None
        )

    def to_message(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Report:
        return cls(**message)
