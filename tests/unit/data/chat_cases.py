"""A small byte-level BPE tokenizer and chat templates, written as Hugging Face folders."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from seatrial.data.prepare import prepare
from seatrial.data.store import TokenStore

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

MARKED = """
{%- macro header(role) %}{{ '<|im_start|>' + role + '\\n' }}{% endmacro %}
{%- if tools %}
    {{- header('system') + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- header(message.role) }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.reasoning_content | default('') }}{{ message.content | default('') | trim }}
            {%- for call in message.tool_calls or [] %}
                {{- '<call>' + (call.function | tojson) + '</call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""

LLAMA = """
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

# As Qwen3's: what an assistant thought is left out once the next turn begins.
FORGETFUL = CHATML.replace(
    "message['content'] +",
    "('<think>' + message.reasoning_content + '</think>' if loop.last and message.reasoning_content else '')"
    " + message['content'] +",
)

CORPUS = [
    "The tide is the sea, twice a day. user assistant system What is it? Éa! \n\n ships and harbours",
    '{"name": "tide", "arguments": {"port": "Brest"}} think deep water, low water, high water',
]


def write_tokenizer(folder: Path, template: str | None, **config: Any) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json with `template`; returns the path of the former."""
    engine = Tokenizer(BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator(CORPUS * 8, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {
            "__type": "AddedToken",
            "content": "</s>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
        },
        "added_tokens_decoder": {},
        **config,
    }
    if template is not None:
        content["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


def said(*turns: str, **more: Any) -> dict[str, Any]:
    """A line with user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages, **more}


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest é <x>"}}}


def rows(seed: int, n: int = 40) -> list[dict[str, Any]]:
    """Conversations of one to four turns with odd text: white space at both ends, marks of other scripts, emoji, nothing."""
    draw = random.Random(seed)
    words = [
        "tide",
        " the sea",
        "Éa",
        "\n\n",
        "  ",
        "漁港",
        "🚢🚢",
        "<|im_end|>x",
        "water.",
        "\t",
        "e\u0301",
        "assistant",
    ]

    def text() -> str:
        return "".join(draw.choices(words, k=draw.randint(0, 9)))

    return [said(*(text() for _ in range(2 * draw.randint(1, 4)))) for _ in range(n)]


def documents(store: TokenStore) -> list[tuple[list[int], list[bool]]]:
    edges = [*store.document_starts().tolist(), store.n_tokens]
    return [
        (store.read(a, b - a).tolist(), store.counted([a], b - a)[0].tolist())
        for a, b in itertools.pairwise(edges)
    ]


def prepared(tmp_path: Path, template: str | None, lines: list[Any], **options: Any) -> TokenStore:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template, **options.pop("config", {}))
    source = write_lines(tmp_path / "chats.jsonl", lines)
    return prepare([str(source)], str(tokenizer), tmp_path / "out", **options)
