"""Thousands of damaged sources: each is refused in words that name it, or becomes exactly the documents that are in it.

What is in a file is told by other code than ours (gzip.decompress and its like, json, pyarrow.parquet.read_table).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from seatrial.base.errors import InputError
from seatrial.data import parts, readers, tokenise
from seatrial.data.prepare import prepare
from seatrial.data.tokenizer import ByteTokenizer

FEW, MANY = 600, 20_000


def streams(new: Callable[[], Any]) -> Callable[[bytes], bytes]:
    """What unpacks all streams in a file; zeros between them are padding, and anything else is an error."""

    def unpack(data: bytes) -> bytes:
        out = b""
        while data := data.lstrip(b"\0"):
            decoder = new()
            out += decoder.decompress(data)
            if not decoder.eof:
                raise EOFError
            data = decoder.unused_data
        return out

    return unpack


PACK: dict[str, tuple[str, Callable[[bytes], bytes], Callable[[bytes], bytes], tuple[bytes, ...]]] = {
    "gzip": (".gz", gzip.compress, gzip.decompress, (b"\x1f\x8b\x08",)),
    "bzip2": (".bz2", bz2.compress, streams(bz2.BZ2Decompressor), (b"BZh91AY&SY", b"BZh9\x17rE8P\x90")),
    "xz": (".xz", lzma.compress, streams(lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)), (b"\xfd7zXZ\0",)),
    "zstd": (
        ".zst",
        zstandard.ZstdCompressor(write_checksum=True).compress,
        streams(lambda: zstandard.ZstdDecompressor().decompressobj()),
        (b"\x28\xb5\x2f\xfd",),
    ),
}
WORDS = [
    "the",
    "def f(x):",
    "\n",
    "\n\n",
    "größer",
    "漢字",
    "мир",
    "🚀",
    "مرحبا",
    " ",
    "\t",
    "a\u0301",
    '"',
    "\\",
    "NULL",
]
KINDS = {"text": ".txt", "jsonl": ".jsonl", "parquet": ".parquet"}


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(n)))


def content(rng: random.Random, kind: str) -> bytes:
    if kind == "text":
        return (b"\xef\xbb\xbf" if rng.random() < 0.1 else b"") + words(rng, 200).encode()
    rows = [words(rng, 30) for _ in range(rng.randrange(1, 12))]
    if kind == "jsonl":
        return "".join(
            json.dumps({"id": i, "text": r}, ensure_ascii=i % 2 == 0) + "\n" for i, r in enumerate(rows)
        ).encode()
    out = io.BytesIO()
    packing = rng.choice(["none", "snappy", "zstd"])
    pq.write_table(
        pa.table({"text": rows, "n": list(range(len(rows)))}),
        out,
        compression=packing,
        write_page_checksum=True,
    )
    return out.getvalue()


def mutate(rng: random.Random, data: bytes) -> bytes:
    """`data` with one thing done to it."""
    at, n = rng.randrange(len(data) + 1), rng.randrange(1, 40)
    how = rng.randrange(10)
    if how == 0 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if how == 1:
        return data[:at] + rng.randbytes(n) + data[at + n :]
    if how == 2:
        return data[:at]
    if how == 3:
        return data[at:]
    if how == 4:
        return data[:at] + data[at + n :]
    if how == 5:
        return data[:at] + data[max(0, at - n) :]
    if how == 6:
        return data[:at] + rng.choice([b"\0", b"\xff", b"\n", b"{", b"\xe9", b'"', b"PAR1"]) * n + data[at:]
    if how == 7:
        return data + rng.randbytes(n)
    if how == 8:
        return (
            rng.choice([b"\xff\xfe", b"\xef\xbb\xbf", b"PK\x03\x04", b"\x1f\x8b\x08", b"(\xb5/\xfd", b"BZh9"])
            + data
        )
    return data + data


def documents_in(name: str, data: bytes) -> list[str] | None:
    """The documents of a file; None where it must be refused."""
    named = next((packing for packing, (suffix, *_) in PACK.items() if name.endswith(suffix)), None)
    for packing, (_, _, unpack, magic) in PACK.items():
        cut_off = packing == named and any(m.startswith(data) for m in magic)
        if data.startswith(magic) or cut_off:
            try:
                data = unpack(data)
            except (OSError, EOFError, lzma.LZMAError, zstandard.ZstdError, gzip.zlib.error):  # type: ignore[attr-defined]
                return None
            if cut_off and not data:
                return None
            if data.startswith(tuple(m for *_, magic in PACK.values() for m in magic)):
                return None  # twice compressed
            break
    if data.startswith(b"PAR1\x15") or ".parquet" in name:
        try:
            rows = pq.read_table(io.BytesIO(data), columns=["text"], page_checksum_verification=True)["text"]
            texts = [text for text in rows.to_pylist() if text]
        except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError):
            return None
        return None if is_rubbish("".join(texts).encode()) else texts
    if is_rubbish(data):
        return None
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    if ".jsonl" not in name:
        return [text] if text else []
    try:
        lines = [line for line in text.split("\n") if line.strip(" \t\r\x0b\x0c")]
        rows = [json.loads(line.rstrip("\r")) for line in lines]
        texts = [row["text"] for row in rows]
        # Half of a surrogate pair, which JSON can spell, is no character.
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        return [text for text in texts if text]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_rubbish(data: bytes) -> bool:
    """More than 1 % (of little: more than a handful) of what no text has."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    invalid = data.decode("utf-8", "replace").count("\ufffd") - data.count("\ufffd".encode())
    controls = sum(byte == 127 or (byte < 32 and byte not in b"\b\t\n\v\f\r\x1a\x1b") for byte in data)
    return data.startswith((b"\xff\xfe", b"\xfe\xff", b"PK\x03\x04")) or invalid + controls > max(
        len(data) // 100, min(8, len(data) // 5 + 1)
    )


def play(seed: int, folder: Path) -> str:
    """Make a source, damage it or not, and prepare it; what came of it."""
    rng = random.Random(seed)
    kind, packing = rng.choice(list(KINDS)), rng.choice([None, None, *PACK])
    data = content(rng, kind)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        data = mutate(rng, data)
    if packing is not None:
        data = PACK[packing][1](data)
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        data = mutate(rng, data)
    suffix = PACK[packing][0] if packing is not None else ""
    if rng.random() < 0.15:
        suffix = rng.choice(["", *(s for s, *_ in PACK.values())])
    source = folder / f"source{KINDS[kind]}{suffix}"
    source.write_bytes(data)
    wanted = documents_in(source.name, data)
    out = folder / "out"
    said = None
    try:
        store = prepare([str(source)], "bytes", out, force=True)
    except InputError as error:
        said = error.render()
    source.unlink()
    if said is not None:
        assert str(source) in said
        assert not out.exists()
        assert not wanted, f"seed {seed}: {said}"
        shutil.rmtree(folder / ".out.tmp-work", ignore_errors=True)
        return "refused" if wanted is None else "no text"
    assert wanted is not None, f"seed {seed}: a store was made of {data!r}"
    tokens = store.read(0, store.n_tokens)
    pieces = np.split(tokens, store.document_starts()[1:].astype(np.int64))
    assert [ByteTokenizer().decode(p.tolist()) for p in pieces] == wanted, f"seed {seed}"
    shutil.rmtree(out)
    return "a store"


def play_many(n: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no power is lost here
    counted = Counter(play(seed, folder) for seed in range(n // 2))
    for module, name in (
        (parts, "_FEWEST_BYTES"),
        (parts, "_MOST_BYTES"),
        (readers, "PIECE_BYTES"),
        (tokenise, "_BATCH_BYTES"),
    ):
        monkeypatch.setattr(module, name, 64 if module is readers else 256)  # files are cut
    return counted + Counter(play(seed, folder) for seed in range(n // 2, n))


@pytest.mark.cluster  # slow
def test_damaged_sources_are_refused_or_are_what_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = play_many(FEW, tmp_path, monkeypatch)
    assert min(counted["refused"], counted["a store"]) > FEW // 5


@pytest.mark.long
def test_many_damaged_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = play_many(MANY, tmp_path, monkeypatch)
    print(dict(counted))
    assert min(counted["refused"], counted["a store"]) > MANY // 5
