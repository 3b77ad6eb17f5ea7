"""Convert text to token ids and back: bytes (built in), or any tokenizer.json."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from seatrial.base.errors import InputError
from seatrial.base.files import read_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from seatrial.data.chat import Chat

# End-of-document tokens by family, in order of trust: <|im_end|> and </s> can also end a chat turn.
_END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "</s>",
    "<|im_end|>",
    "<|eot_id|>",
)


class Tokenizer(Protocol):
    """The tokenizer interface that the rest of the package uses."""

    @property
    def name(self) -> str:
        """Name for display: `bytes`, or the folder of the tokenizer.json."""

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""

    @property
    def end_of_document(self) -> int | None:
        """The id written after each document; None if the tokenizer has none."""

    @property
    def digest(self) -> str:
        """SHA-256 of the definition: two tokenizers with the same digest give the same ids."""

    @property
    def chat(self) -> Chat | None:
        """What converts conversations; None without a chat template."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end of document or other special tokens around it."""

    def encode_many(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.integer]]:
        """`encode` of many valid UTF-8 texts at once, as arrays."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are omitted, invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_of_document = 256
    digest = hashlib.sha256(b"seatrial bytes 1: ids 0..255 are bytes, 256 ends a document").hexdigest()
    chat = None

    def encode(self, text: str) -> list[int]:
        # A lone surrogate has no UTF-8 encoding; it is replaced as in prepared data.
        return list(text.encode("utf-8", errors="replace"))

    def encode_many(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.integer]]:
        import numpy as np

        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # A model's vocabulary may be padded beyond 257, and an untrained model samples those ids as well:
        # 0xFF is not valid UTF-8, so they show as U+FFFD.
        return bytes(min(i, 255) for i in ids if i != 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json of the `tokenizers` library (any Hugging Face model's)."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Engine

        from seatrial.data.chat import load_chat

        hint = 'give the path of a tokenizer.json, or "bytes" for the built-in one'
        if not os.path.isfile(path):  # never read a device or a pipe, which may be endless
            what = "is not a file" if os.path.exists(path) else "does not exist"
            raise InputError(f"the tokenizer {path} {what}", hint=hint)
        try:
            definition = read_bytes(path, links=True)
        except OSError as e:
            raise InputError(f"cannot read the tokenizer {path}: {e.strerror}", hint=hint) from e
        try:
            self._engine = Engine.from_buffer(definition)
        except Exception as e:  # the library raises a bare Exception for every bad file
            raise InputError(
                f"{path} is not a tokenizer.json: {e}",
                hint="it is the file of that name in a Hugging Face model's folder (not tokenizer_config.json)",
            ) from e
        # Some files contain the padding and truncation of their training script: both would change the data.
        self._engine.no_padding()
        self._engine.no_truncation()
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(f"the tokenizer {path} has an empty vocabulary")
        self.name = path.resolve().parent.name if path.name == "tokenizer.json" else path.stem
        # Ids may have gaps: the relevant size is the exclusive upper bound of the ids.
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document: int | None = next(
            (vocabulary[t] for t in _END_OF_DOCUMENT if t in vocabulary), None
        )
        self.digest = hashlib.sha256(definition).hexdigest()
        self.chat = load_chat(path.parent, self._engine)

    def encode(self, text: str) -> list[int]:
        return list(self._engine.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.integer]]:
        import numpy as np

        found = self._engine.encode_batch_fast([t.decode("utf-8") for t in texts], add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._engine.decode(list(ids), skip_special_tokens=True))


def digest_with_template(tokenizer: Tokenizer) -> str:
    """SHA-256 of what prepared data depends on: the tokenizer and, where there is one, its chat template."""
    if tokenizer.chat is None:
        return tokenizer.digest
    return hashlib.sha256(f"{tokenizer.digest} {tokenizer.chat.digest}".encode()).hexdigest()


def load_tokenizer(spec: str) -> Tokenizer:
    """`"bytes"`, or the path of a tokenizer.json or of the folder that holds one; InputError if unusable."""
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if os.path.isdir(path):
        path = path / "tokenizer.json"
    return FileTokenizer(path)
