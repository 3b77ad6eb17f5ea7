import json
from collections.abc import Callable
from pathlib import Path

import pytest

VOCABULARY = {"[UNK]": 0, "def": 1, "return": 2, "x": 3}


def _write_tokenizer(
    path: Path, *, special: str | None = "<|endoftext|>", special_id: int = 4, **extra: object
) -> Path:
    added = []
    vocabulary = dict(VOCABULARY)
    if special is not None:
        vocabulary[special] = special_id
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added.append({"id": special_id, "content": special, **flags})
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
        **extra,
    }
    path.write_text(json.dumps(definition))
    return path


@pytest.fixture
def write_tokenizer() -> Callable[..., Path]:
    """Writes a tokenizer.json of four words and one special token to a path."""
    return _write_tokenizer
