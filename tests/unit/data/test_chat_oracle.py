"""Conversations against transformers: text, ids, and which tokens count."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from chat_cases import (
    CALL,
    CHATML,
    LLAMA,
    MARKED,
    TOOLS,
    documents,
    prepared,
    rows,
    said,
    write_tokenizer,
)

from seatrial.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.cluster  # the import takes seconds


@pytest.fixture(scope="module")
def hub() -> Any:
    """Loads a folder as transformers does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it deprecates inside is not ours to fail on
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained


@pytest.mark.parametrize("seed", range(3))
def test_marked_answers_are_those_of_transformers(hub: Any, tmp_path: Path, seed: int) -> None:
    lines = [
        *rows(seed),
        said("What?", "  Low water.  ", tools=TOOLS),
        {
            "messages": [
                {"role": "system", "content": "s", "name": None},
                {"role": "user", "content": "when?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "deep"},
                {"role": "tool", "content": "12:00"},
                {"role": "assistant", "content": "Noon."},
            ],
            "tools": TOOLS,
        },
    ]
    store = prepared(tmp_path, MARKED, lines)
    theirs = hub(tmp_path / "tokenizer")
    found = documents(store)
    assert len(found) == len(lines)
    for row, (ids, counted) in zip(lines, found, strict=True):
        expected = theirs.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_assistant_tokens_mask=True, return_dict=True
        )
        assert ids == expected["input_ids"]
        assert counted == [m == 1 for m in expected["assistant_masks"]]
    assert 0 < store.manifest.n_counted < store.n_tokens
    assert store.verify() == []


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_answers_found_from_prefixes(hub: Any, tmp_path: Path, template: str) -> None:
    """The ids are those of transformers, and the counted ones are the answers with what ends them."""
    lines = [row for row in rows(7) if all(m["content"] for m in row["messages"])]
    store = prepared(tmp_path, template, lines)
    theirs = hub(tmp_path / "tokenizer")
    form = "{}<|im_end|>\n" if template == CHATML else " {}</s>"
    for row, (ids, counted) in zip(lines, documents(store), strict=True):
        assert ids == theirs.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        kept = [i for i, c in zip(ids, counted, strict=True) if c]
        answers = [form.format(m["content"]) for m in row["messages"] if m["role"] == "assistant"]
        # A token that touches an answer counts: here what is beyond the answer's ends in one is white space.
        assert theirs.decode(kept).split() == "".join(answers).split()


def test_templates_in_files_take_precedence(hub: Any, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "config")
    (tmp_path / "chat_template.jinja").write_text(
        "file {% generation %}{{ messages[1].content }}{% endgeneration %}"
    )
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "tools {% generation %}A{% endgeneration %}"
    )
    chat = load_tokenizer(str(path)).chat
    theirs = hub(tmp_path)
    for row in (said("a", "b"), said("a", "b", tools=TOOLS), said("a", "b", tools=[])):
        expected = theirs.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        assert chat.conversation(row, 0).text == expected


def test_named_templates_and_old_special_tokens(hub: Any, tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "{{ bos_token }}{% generation %}{{ eos_token }}{% endgeneration %}"}
    ]
    path = write_tokenizer(tmp_path, None, chat_template=named)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "[INST]"}}))
    theirs = hub(tmp_path)
    row = said("a", "b")
    found = load_tokenizer(str(path)).chat.conversation(row, 0)
    assert found.text == theirs.apply_chat_template(row["messages"], tokenize=False) == "[INST]</s>"
    assert found.answers == ((6, 10),)
