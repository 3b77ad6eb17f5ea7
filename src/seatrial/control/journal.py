"""What a coordinator must not miss of a node: told again to each new one, and marked, so that it is recorded once."""

from __future__ import annotations

import secrets
from typing import Any

from seatrial.control.member import Member


class Journal:
    """Of one agent. Every entry has a mark of its own; a coordinator writes no event for a mark that has one already."""

    def __init__(self, member: Member) -> None:
        # Not of the process id: the agent of another start may have the same.
        self.name = secrets.token_hex(6)
        self._member = member
        self._marks = 0
        self._of_generation: list[dict[str, Any]] = []
        # With the number of the last beat that was sent before it. Orders and answers keep their order: once a later
        # beat has come back, whoever returned it has dealt with the message.
        self._until_heard: list[tuple[int, dict[str, Any]]] = []

    def tell(self, message: dict[str, Any]) -> None:
        """Tell what counts until the next generation begins: every coordinator until then hears it."""
        self._of_generation.append(self._marked(message))
        self._member.send(message)

    def tell_once(self, message: dict[str, Any]) -> None:
        """Tell what one coordinator must hear, whichever that is and however long it takes to find one."""
        self._forget_heard()
        self._until_heard.append((self._member.beats_sent, self._marked(message)))
        self._member.send(message)

    def tell_again(self) -> None:
        """A coordinator has just been found."""
        self._forget_heard()
        self._until_heard = [(self._member.beats_sent, message) for _, message in self._until_heard]
        for message in [*self._of_generation, *(message for _, message in self._until_heard)]:
            self._member.send(message)

    def forget_generation(self) -> None:
        """Another one begins: whoever began it has heard what there was to tell of this one."""
        self._of_generation.clear()

    def _forget_heard(self) -> None:
        returned = self._member.beats_returned
        self._until_heard = [(sent, message) for sent, message in self._until_heard if returned <= sent]

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        for values in message.values():
            for one in values if isinstance(values, list) else [values]:
                self._marks += 1
                one["told"] = f"{self.name}-{self._marks}"
        return message
