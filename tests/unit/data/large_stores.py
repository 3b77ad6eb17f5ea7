"""A token store of any size in sparse files; bench/data.py uses it too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from seatrial.data.chunks import CHUNK_BYTES
from seatrial.data.tokenizer import ByteTokenizer


def write_sparse(folder: Path, n_tokens: int, shard_tokens: int) -> None:
    """A store of zeros whose files take no room: one file of tokens, and one of hashes, under many names."""
    folder.mkdir()
    empty = {"file": "none.idx", "sha256": "", "bytes": 0, "n_documents": 0}
    (folder / "none.idx").touch()
    shards = []
    sizes = [min(shard_tokens, n_tokens - at) for at in range(0, n_tokens, shard_tokens)]
    for size in sorted(set(sizes)):
        with open(folder / f"zeros-{size}.bin", "wb") as f:
            os.truncate(f.fileno(), 2 * size)
        chunk = xxhash.xxh3_128(bytes(CHUNK_BYTES)).digest()
        whole, rest = divmod(2 * size, CHUNK_BYTES)
        digests = chunk * whole + (xxhash.xxh3_128(bytes(rest)).digest() if rest else b"")
        (folder / f"zeros-{size}.xxh3").write_bytes(digests)
    for i, size in enumerate(sizes):
        os.link(folder / f"zeros-{size}.bin", folder / f"shard-{i:05d}.bin")
        os.link(folder / f"zeros-{size}.xxh3", folder / f"shard-{i:05d}.xxh3")
        hashes = (folder / f"shard-{i:05d}.xxh3").read_bytes()
        shards.append(
            {
                "file": f"shard-{i:05d}.bin",
                "n_tokens": size,
                "sha256": f"{i:064x}",
                "bytes": 2 * size,
                "max_token": 0,
                "index": empty,
                "chunks": {
                    "file": f"shard-{i:05d}.xxh3",
                    "xxh3_128": xxhash.xxh3_128(hashes).hexdigest(),
                    "bytes": len(hashes),
                    "chunk_bytes": CHUNK_BYTES,
                },
            }
        )
    tokenizer = ByteTokenizer()
    manifest = {
        "schema_version": 1,
        "tokenizer": {
            "name": tokenizer.name,
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
        },
        "dtype": "uint16",
        "n_tokens": n_tokens,
        "n_documents": 0,
        "max_token": 0,
        "shards": shards,
        "source": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
