"""The channel of an attended agent to its launcher, with heartbeats where it crosses a network.

A cut cable or a lost host leaves a TCP connection open for hours. So a launcher of other hosts sends a heartbeat every
`HEARTBEAT_S`, the agent answers with its own, and each considers the other dead after `SILENT_S` without one. A launcher on
the same machine sends none: there the end of stdin is certain, and a launcher that is only suspended may continue.
"""

from __future__ import annotations

import time

from seatrial.base.complain import complain
from seatrial.base.lines import Channel
from seatrial.record import messages as msg

HEARTBEAT_S = 5.0
SILENT_S = 120.0  # long, because a user may suspend the launcher for a moment


class LauncherLink:
    """The agent's side."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._broken = False
        # When the launcher's last heartbeat arrived, if it sends any.
        self._last_heartbeat: float | None = None
        self._next_heartbeat = 0.0

    @property
    def closed(self) -> bool:
        """Whether the launcher has certainly exited, or does not follow the protocol."""
        return self._broken or self._channel.closed

    @property
    def deadline(self) -> float | None:
        """When `tick` is due, on the monotonic clock."""
        return None if self._last_heartbeat is None else self._next_heartbeat

    def fileno(self) -> int:
        return self._channel.fileno()

    def receive(self) -> list[msg.EndRun | msg.LauncherRecord]:
        """Orders of the launcher that have arrived."""
        orders: list[msg.EndRun | msg.LauncherRecord] = []
        try:
            for values in self._channel.receive():
                message: msg.FromLauncher = msg.decode(values, msg.FromLauncher)
                if isinstance(message, msg.LauncherAlive):
                    self._last_heartbeat = time.monotonic()
                else:
                    orders.append(message)
        except ValueError as error:
            complain(f"protocol error from the launcher: {error}")
            self._broken = True
        return orders

    def send(self, message: msg.ToLauncher) -> None:
        """Send a message without blocking: the launcher may be suspended or unreachable."""
        if not self.closed:
            self._channel.post(msg.encode(message))

    def tick(self) -> bool:
        """Send a heartbeat if one is due; False once the launcher has been silent for too long."""
        now = time.monotonic()
        if self._last_heartbeat is None:
            return True
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            self.send(msg.AgentAlive())  # also makes the kernel notice a broken connection
        return now - self._last_heartbeat < SILENT_S
