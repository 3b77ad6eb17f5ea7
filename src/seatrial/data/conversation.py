"""A conversation as text, with the places of the answers in it."""

from __future__ import annotations

from dataclasses import dataclass

MESSAGES = "messages"  # the key of a line with a conversation


@dataclass(frozen=True)
class Conversation:
    """The text of a conversation, and the [begin, end) of its answers, in characters."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatError(Exception):
    """What is wrong with a conversation; `hint` says what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
