"""Conversations in a token store: mask, hashes, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_cases import (
    CHATML,
    FORGETFUL,
    LLAMA,
    MARKED,
    documents,
    prepared,
    rows,
    said,
    write_lines,
    write_tokenizer,
)

from seatrial.base.errors import InputError
from seatrial.data.megatron import export_pair
from seatrial.data.prepare import prepare
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer, digest_with_template, load_tokenizer
from seatrial.data.writer import StoreWriter


def problems(tmp_path: Path, template: str | None, lines: list[Any]) -> str:
    with pytest.raises(InputError) as caught:
        prepared(tmp_path, template, lines)
    assert not (tmp_path / "out").exists()
    return "\n".join(d.render() for d in caught.value.diagnostics)


def test_both_ways_agree_where_both_apply(tmp_path: Path) -> None:
    answer = "message['content'] + '<|im_end|>' + '\\n'"
    assert answer in CHATML
    marked = CHATML.replace(
        "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}",
        "    {{- '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message.role == 'assistant' %}{% generation %}{{ X }}{% endgeneration %}{% else %}{{ X }}{% endif %}".replace(
            "X", answer
        ),
    )
    assert marked != CHATML
    lines = rows(3)
    a, b = (prepared(tmp_path / n, t, lines) for n, t in (("a", CHATML), ("b", marked)))
    assert documents(a) == documents(b)
    assert a.identity() == b.identity()


def test_the_store_does_not_depend_on_workers_or_shards(tmp_path: Path) -> None:
    lines = [*rows(1, 200), {"text": "a plain text"}, *rows(2, 200)]
    one = prepared(tmp_path / "one", MARKED, lines, workers=1)
    two = prepared(tmp_path / "two", MARKED, lines, workers=2, shard_tokens=997)
    assert documents(one) == documents(two)
    assert len(two.manifest.shards) > 5
    assert two.manifest.n_counted == one.manifest.n_counted == sum(sum(c) for _, c in documents(one))
    ids, counted = documents(one)[200]
    assert all(counted)
    assert ids[-1] == one.tokenizer.end_of_document
    assert two.verify() == []


def test_a_text_has_no_mask_and_the_manifest_of_before(tmp_path: Path) -> None:
    store = prepared(tmp_path, MARKED, [{"text": "one"}, {"text": "two", "messages": "ignored"}])
    assert not store.masked
    shard = json.loads((tmp_path / "out" / "manifest.json").read_text())["shards"][0]
    assert "n_counted" not in shard
    assert (tmp_path / "out" / shard["file"]).stat().st_size == 2 * store.n_tokens
    assert store.counted([0], store.n_tokens).all()


def test_a_damaged_mask_is_found(tmp_path: Path) -> None:
    store = prepared(tmp_path, MARKED, rows(1))
    shard = store.manifest.shards[0]
    path = tmp_path / "out" / shard.file
    data = bytearray(path.read_bytes())
    assert len(data) == 2 * store.n_tokens + -(-store.n_tokens // 8)
    data[-2] ^= 1
    path.write_bytes(data)
    damaged = TokenStore.open(tmp_path / "out")
    with pytest.raises(InputError, match="damaged: bytes"):
        damaged.counted([store.n_tokens - 20], 20)
    assert [place for place, _ in damaged.verify()] == [str(path)]


def test_mask_and_identity_template_and_preparation(tmp_path: Path) -> None:
    shorter = MARKED.replace(
        "{{- '<|im_end|>' }}\n        {%- endgeneration %}\n        {{- '\\n' }}",
        "{%- endgeneration %}\n        {{- '<|im_end|>\\n' }}",
    )
    assert shorter != MARKED
    lines = [said("a", "b", "c", "d"), said("e", "f")]
    a, b = (prepared(tmp_path / n, t, lines) for n, t in (("a", MARKED), ("b", shorter)))
    assert [ids for ids, _ in documents(a)] == [ids for ids, _ in documents(b)]
    assert a.manifest.n_counted == b.manifest.n_counted + 3
    assert a.identity() != b.identity()
    first, second = (load_tokenizer(str(tmp_path / n / "tokenizer")) for n in "ab")
    assert first.digest == second.digest == a.tokenizer.digest
    assert digest_with_template(first) != digest_with_template(second)


def test_the_date_is_that_of_the_file(tmp_path: Path) -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + MARKED
    row = said("a", "b")
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template)
    source = write_lines(tmp_path / "chats.jsonl", [row])
    os.utime(source, (1_700_000_000, 1_700_000_000))
    store = prepare([str(source)], str(tokenizer), tmp_path / "out")
    text = load_tokenizer(str(tokenizer)).decode(documents(store)[0][0])
    assert text.startswith("14 Nov 2023")


def test_everything_wrong_with_lines_is_reported_at_once(tmp_path: Path) -> None:
    a = {"role": "user", "content": "a"}
    bad = [
        said("fine", "line"),
        {"messages": []},
        {"messages": ["a"]},
        {"messages": [{"from": "human", "value": "a"}]},
        {"messages": [a, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]},
        {"messages": [a, {"role": "assistant"}]},
        {"messages": [a]},
        {"prompt": "a"},
        said("a", "b", tools="[]"),
        {"messages": [a, a, {"role": "assistant", "content": "b"}]},
        {"messages": "a"},
    ]
    text = problems(tmp_path, LLAMA, bad)
    place = str(tmp_path / "chats.jsonl")
    for line, message in (
        (2, "'messages' must be a list of messages, with at least one"),
        (3, "message 1 must be an object with 'role' and 'content'"),
        (4, "message 1 has no 'role'\n  hint: keys there: from, value"),
        (5, "the content of message 2 must be a string\n  hint: join the text of its parts"),
        (6, "message 2 has no 'content'\n  hint: keys there: role"),
        (7, "no message has the role 'assistant'"),
        (8, "no key 'text'"),
        (9, "'tools' must be a list of JSON schemas"),
        (10, "the chat template does not accept it: roles must alternate user/assistant/user/assistant"),
    ):
        assert f"{place}:{line}: error: {message}" in text
    assert f"{place}:1:" not in text
    assert "(2 such lines were read)" in text  # lines 2 and 11


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    text = problems(tmp_path, None, [said("a", "b")] * 30)
    assert text.count("error") == 1
    assert (
        "chats.jsonl:1: error: it is a conversation ('messages'), but the tokenizer has no chat template"
        in text
    )
    assert "(30 such lines were read)" in text
    with pytest.raises(InputError, match="no chat template"):
        prepare([str(tmp_path / "chats.jsonl")], "bytes", tmp_path / "out")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "the tokenizer's chat template cannot be used: line 1"),
        ("{{ messages[7].content }}", "the chat template does not accept it"),
        ("{{ 1 + messages[0].content }}", "the chat template does not accept it: unsupported operand"),
        ("{{ messages.append(1) }}", "the chat template does not accept it"),
        ("{{ ''.__class__.__mro__ }}", "the chat template does not accept it"),
        ("{{ namespace(_x=1) }}", "the chat template does not accept it"),
        ("no answer", "no answer is in the text"),
        ("{% set a %}{% generation %}b{% endgeneration %}{% endset %}{{ a | length }}", "changes or nests"),
        ("{% generation %}{% generation %}b{% endgeneration %}{% endgeneration %}", "changes or nests"),
        (
            "{{ messages | length }} {{ messages[-1].content }}",
            "renders messages 1 to 1 differently before message 2",
        ),
    ],
)
def test_templates_that_cannot_be_used(tmp_path: Path, template: str, message: str) -> None:
    assert message in problems(tmp_path, template, [said("a", "b")])


def test_a_template_that_forgets_is_refused_where_it_matters(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "b", "reasoning_content": "deep"}
    lines = [
        said("a", "b", "c", "d"),
        {"messages": [{"role": "user", "content": "a"}, thought]},
        {"messages": [{"role": "user", "content": "a"}, thought, *said("c", "d")["messages"]]},
    ]
    text = problems(tmp_path, FORGETFUL, lines)
    assert text.count("error") == 1
    assert (
        "chats.jsonl:3: error: the chat template renders messages 1 to 2 differently where others follow"
        in text
    )
    assert "generation" in text
    assert prepared(tmp_path, FORGETFUL, lines[:2]).n_documents == 2


def test_lone_surrogates_and_noncharacters(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", MARKED)
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps(said("\ud800a", "b\udfff")) + "\n")
    store = prepare([str(source)], str(tokenizer), tmp_path / "out")
    assert store.manifest.source["replaced_characters"] == 2
    ids, counted = documents(store)[0]
    assert load_tokenizer(str(tokenizer)).decode([i for i, c in zip(ids, counted, strict=True) if c]) == "b?"
    assert "which are not characters" in problems(tmp_path / "b", MARKED, [said("a\ufdd0", "b")])


def test_messages_as_the_text_key(tmp_path: Path) -> None:
    both = said("a", "b", text="c")
    assert not prepared(tmp_path / "text", MARKED, [both]).masked
    assert prepared(tmp_path / "chat", MARKED, [both], text_key="messages").masked
    assert not prepared(tmp_path / "string", MARKED, [{"messages": "a text"}], text_key="messages").masked


def test_a_mask_cannot_be_exported(tmp_path: Path) -> None:
    store = prepared(tmp_path, MARKED, rows(1))
    with pytest.raises(InputError, match="which a Megatron dataset cannot"):
        export_pair(store, tmp_path / "pair")


def test_random_masks_are_read_as_written(tmp_path: Path) -> None:
    """In pieces of any size, over shards with and without a mask."""
    draw = np.random.default_rng(3)
    mask = draw.random(5000) < 0.5
    mask[1000:3000] = True
    with StoreWriter(tmp_path / "s", ByteTokenizer(), shard_tokens=333) as w:
        at = 0
        while at < 5000:
            n = int(draw.integers(1, 60))
            piece = mask[at : at + n]
            given = None if piece.all() and draw.random() < 0.5 else piece
            w.append(np.zeros(len(piece), np.int64), np.array([0]), given)
            at += n
        store = w.finish({})
    whole = [bool(mask[a : a + 333].all()) for a in range(0, 5000, 333)]
    assert [s.n_counted is None for s in store.manifest.shards] == whole
    assert 5 <= sum(whole) < 16
    assert store.manifest.n_counted == mask.sum()
    for _ in range(200):
        a, b = sorted(draw.integers(0, 5001, 2).tolist())
        assert (store.counted([a], b - a)[0] == mask[a:b]).all()
    assert store.verify() == []
