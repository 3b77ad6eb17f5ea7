"""Conversations: from a line with `messages` to a text, and which of its tokens count in the loss.

Only what the assistant says counts. Where the chat template marks that with {% generation %} blocks, these decide.
Elsewhere an answer begins where the text of the messages before it, with the prompt for an answer, ends, and it ends where
the text up to its message ends. Each of these texts must be the begin of the next; a template that renders messages
differently once others follow is refused, because then nothing says where the answer is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from seatrial.data.chat_template import (
    BEGIN,
    END,
    ChatTemplate,
    Renderer,
    TemplateError,
    load_chat_template,
)
from seatrial.data.conversation import MESSAGES, ChatError, Conversation
from seatrial.data.mask import Bits

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

_ASSISTANT = "assistant"
# Names that a message's reasoning has had; a template reads the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_GENERATION_HINT = (
    "mark the answers in the template with {% generation %} and {% endgeneration %}, or give each answer as a "
    "conversation of its own"
)


class Chat:
    """Converts conversations with a tokenizer and its chat template."""

    def __init__(self, template: ChatTemplate, engine: Engine) -> None:
        self.digest = template.digest
        self._template = template
        self._engine = engine

    def conversation(self, row: dict[str, Any], time_ns: int) -> Conversation:
        """The conversation in `row`, which has `messages` and may have `tools`; ChatError if it cannot be used.

        `time_ns` (since 1970) is the date for templates that ask for today's: the same row must always give the same text.
        """
        messages, tools = _messages(row), _tools(row)
        try:
            renderer = self._template.renderer(tools, time_ns)
        except TemplateError as error:
            raise ChatError(f"the tokenizer's chat template cannot be used: {error}") from error
        text, answers = (_marked if renderer.marks else _by_prefix)(renderer, messages)
        answers = [(begin, end) for begin, end in answers if begin < end]
        if not answers:
            raise ChatError("no answer is in the text that the chat template makes of it", _GENERATION_HINT)
        return Conversation(text, tuple(answers))

    def encode(self, conversations: Sequence[Conversation]) -> list[tuple[npt.NDArray[np.integer], Bits]]:
        """(ids, which of them count in the loss) of each: those with at least one character of an answer."""
        # With `encode_batch_fast` there would be no offsets.
        found = self._engine.encode_batch([c.text for c in conversations], add_special_tokens=False)
        return [
            (np.array(e.ids, dtype=np.uint32), _counted(e.offsets, c.answers))
            for e, c in zip(found, conversations, strict=True)
        ]


def load_chat(folder: Path, engine: Engine) -> Chat | None:
    """`Chat` with the chat template in `folder`; None if there is none, InputError if it cannot be read."""
    template = load_chat_template(folder)
    return None if template is None else Chat(template, engine)


def _counted(offsets: list[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> Bits:
    spans = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    counted = np.zeros(len(spans), dtype=np.bool_)
    for begin, end in answers:
        touching = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > begin))
        if touching.size:
            counted[touching[0] : touching[-1] + 1] = True
    return counted


def _marked(renderer: Renderer, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """(text, generation blocks in it)."""
    text = _text(renderer, messages)
    if BEGIN in text or END in text:
        raise ChatError(f"the text contains U+{ord(BEGIN):04X} or U+{ord(END):04X}, which are not characters")
    parts = re.split(f"([{BEGIN}{END}])", _text(renderer, messages, marked=True))
    marks = "".join(parts[1::2])
    # A template may also process what a block rendered, and do so differently with the marks in it.
    if "".join(parts[::2]) != text or marks != (BEGIN + END) * (len(marks) // 2):
        raise ChatError(
            "the chat template changes or nests what its generation blocks render",
            "write these blocks where the text is output, not around what is processed further",
        )
    edges = np.cumsum([len(part) for part in parts[::2]]).tolist()
    return text, list(zip(edges[0:-1:2], edges[1::2], strict=True))


def _by_prefix(renderer: Renderer, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """(text, answers in it), found from texts of the first messages."""
    whole, answers = _text(renderer, messages), []
    for i, message in enumerate(messages):
        if message["role"] != _ASSISTANT:
            continue
        before = _text(renderer, messages[:i], add_generation_prompt=True)
        until = _text(renderer, messages[: i + 1])
        for shorter, longer, up_to, what in (
            (before, until, i, f"before message {i + 1}"),
            (until, whole, i + 1, "where others follow"),
        ):
            if not longer.startswith(shorter):
                raise ChatError(
                    f"the chat template renders messages 1 to {up_to} differently {what}: nothing says where the "
                    "answer is",
                    _GENERATION_HINT,
                )
        answers.append((len(before), len(until)))
    return whole, answers


def _text(renderer: Renderer, messages: list[dict[str, Any]], **options: bool) -> str:
    try:
        return renderer.text(messages, **options)
    except TemplateError as error:
        raise ChatError(f"the chat template does not accept it: {error}") from error


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of `row`, checked, as templates expect them."""
    messages = row[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise ChatError(f"{MESSAGES!r} must be a list of messages, with at least one")
    found = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ChatError(f"message {number} must be an object with 'role' and 'content'")
        # Chat APIs write null for what is absent; templates ask whether a key is there.
        message = {key: value for key, value in message.items() if value is not None}
        if not isinstance(message.get("role"), str):
            raise ChatError(f"message {number} has no 'role'", f"keys there: {', '.join(message)}")
        content, calls = message.get("content"), message.get("tool_calls")
        if content is None and not (message["role"] == _ASSISTANT and calls):
            raise ChatError(f"message {number} has no 'content'", f"keys there: {', '.join(message)}")
        if content is not None and not isinstance(content, str):
            hint = "join the text of its parts; images and audio are not supported"
            raise ChatError(f"the content of message {number} must be a string", hint)
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        found.append(message)
    if all(message["role"] != _ASSISTANT for message in found):
        raise ChatError(f"no message has the role {_ASSISTANT!r}: nothing would count in the loss")
    return found


def _tools(row: dict[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise ChatError("'tools' must be a list of JSON schemas", "parse the text, if it is one")
    return tools
