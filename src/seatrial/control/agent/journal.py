"""Messages of a node that a coordinator must not miss: resent to each new one, and marked to be recorded only once."""

from __future__ import annotations

import secrets
from dataclasses import replace

from seatrial.control.agent.member import Member
from seatrial.record.messages import Journalled


class Journal:
    """The journal of one agent. Every entry has a unique mark; coordinators record one event per mark."""

    def __init__(self, member: Member) -> None:
        # Not the process id: the agent of another start may have the same.
        self.name = secrets.token_hex(6)
        self._member = member
        self._marks = 0
        self._of_generation: list[Journalled] = []
        # With the number of the last heartbeat that was sent before it. Messages keep their order: once a later
        # heartbeat has come back, the coordinator that returned it has processed the message.
        self._unacknowledged: list[tuple[int, Journalled]] = []

    def send(self, message: Journalled) -> None:
        """Send what counts until the next generation starts: every coordinator until then receives it."""
        message = self._marked(message)
        self._of_generation.append(message)
        self._member.send(message)

    def send_once(self, message: Journalled) -> None:
        """Send what one coordinator must receive, whichever that is and however long it takes to find one."""
        self._drop_acknowledged()
        message = self._marked(message)
        self._unacknowledged.append((self._member.beats_sent, message))
        self._member.send(message)

    def resend(self) -> None:
        """Resend all pending entries to a newly found coordinator."""
        self._drop_acknowledged()
        self._unacknowledged = [(self._member.beats_sent, message) for _, message in self._unacknowledged]
        for message in [*self._of_generation, *(message for _, message in self._unacknowledged)]:
            self._member.send(message)

    def forget_generation(self) -> None:
        """Drop the entries of this generation: the coordinator that started the next one has received them."""
        self._of_generation.clear()

    def _drop_acknowledged(self) -> None:
        returned = self._member.beats_returned
        self._unacknowledged = [(sent, message) for sent, message in self._unacknowledged if returned <= sent]

    def _marked(self, message: Journalled) -> Journalled:
        self._marks += 1
        if message.told is not None:  # by the launcher
            return message
        return replace(message, told=f"{self.name}-{self._marks}")
