"""manifest.json of a token store: its fields, and parsing with errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import parse_json, read_bytes

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1

Count = Annotated[int, Field(ge=0)]
# A plain name: a manifest must not make us read, or hash, a file outside its folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # also names files of hashes


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class TokenizerInfo(_Strict):
    """The tokenizer that made the store."""

    name: str
    digest: str
    vocab_size: Annotated[int, Field(ge=1)]
    end_of_document: Count | None


class IndexFile(_Strict):
    """Starts of the documents that begin in a shard (uint64, in tokens from the shard's start)."""

    file: FileName
    sha256: str
    bytes: Count
    n_documents: Count


class ChunkFile(_Strict):
    """Hashes of a shard's chunks: XXH3-128 (16 bytes, canonical) of each consecutive `chunk_bytes` of it."""

    file: FileName
    xxh3_128: str  # of this file itself
    bytes: Count
    chunk_bytes: Annotated[int, Field(ge=1)]


class ShardFile(_Strict):
    """One file of tokens. `chunks` is missing if it was written by a version of seatrial without chunk hashes.

    `n_counted`: how many tokens count in the loss. If it is missing, all do; else the tokens are followed by one bit for each
    (`data/mask.py`), so that the file's hashes and size cover them.
    """

    file: FileName
    n_tokens: Annotated[int, Field(ge=1)]
    sha256: Sha256
    bytes: Count
    max_token: Count
    index: IndexFile
    chunks: ChunkFile | None = None
    n_counted: Count | None = None

    @property
    def mask_bytes(self) -> int:
        """Bytes after the tokens."""
        return 0 if self.n_counted is None else -(-self.n_tokens // 8)

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The manifest of a store without masks, and its digest, are those of versions that knew none.
        values: dict[str, Any] = handler(self)
        if self.n_counted is None:
            del values["n_counted"]
        return values


class Manifest(_Strict):
    """All of manifest.json. `source` describes the origin of the text, for display."""

    schema_version: Literal[1]
    tokenizer: TokenizerInfo
    dtype: Literal["uint16", "uint32"]
    n_tokens: Count
    n_documents: Count
    max_token: Count
    shards: Annotated[list[ShardFile], Field(min_length=1)]
    source: dict[str, Any]

    @property
    def itemsize(self) -> int:
        """Bytes per token."""
        return 2 if self.dtype == "uint16" else 4

    @property
    def n_counted(self) -> int:
        """Tokens that count in the loss."""
        return sum(s.n_tokens if s.n_counted is None else s.n_counted for s in self.shards)


def prepare_hint(folder: Path) -> str:
    """The command to run if `folder` does not contain a token store."""
    return f"make one with: seatrial data prepare SOURCE... --out {folder}"


def is_store(folder: Path) -> bool:
    """Whether `folder` contains a token store, or the remains of one."""
    return (folder / MANIFEST).is_file() or (folder / "shard-00000.bin").is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the store in `folder`; InputError if it is missing or inconsistent."""
    path = folder / MANIFEST
    try:
        data = read_bytes(path, links=True)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise InputError(_absent(folder), hint=prepare_hint(folder)) from e
    except OSError as e:
        raise InputError(f"cannot read {path}: {e}", hint=prepare_hint(folder)) from e
    return parse_manifest(data, str(path), hint=prepare_hint(folder))


def parse_manifest(data: bytes, path: str, *, hint: str) -> Manifest:
    """The manifest in `data`, the content of `path`; InputError if it is invalid or inconsistent."""
    try:
        content = parse_json(data.decode("utf-8"))
    except json.JSONDecodeError as e:
        raise InputError(
            Diagnostic(
                f"bad JSON in the manifest of a token store: {e.msg}",
                file=path,
                line=e.lineno,
                column=e.colno,
                hint=f"{hint} --force",
            )
        ) from e
    except ValueError as e:  # not UTF-8, nested too deep, a number of thousands of digits
        raise InputError(
            Diagnostic(f"bad JSON in the manifest of a token store: {e}", path, hint=hint)
        ) from e
    if (
        isinstance(content, dict)
        and isinstance(version := content.get("schema_version"), int)
        and version > 1
    ):
        raise InputError(
            f"{path} has schema_version {version}; this version of seatrial reads up to {SCHEMA_VERSION}",
            hint="use the version of seatrial that made the store, or prepare it again",
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as e:
        raise InputError(
            [
                Diagnostic(
                    f"{'.'.join(str(p) for p in problem['loc']) or 'manifest'}: {problem['msg']}",
                    file=path,
                    hint=f"{hint} --force",
                )
                for problem in e.errors()
            ]
        ) from e
    if problems := _contradictions(manifest):
        raise InputError([Diagnostic(p, file=path, hint=f"{hint} --force") for p in problems])
    return manifest


def _absent(folder: Path) -> str:
    if not folder.exists():
        return f"no such data folder: {folder}"
    if not folder.is_dir():
        return f"{folder} is a file, not a folder of token shards"
    if not any(folder.iterdir()):
        return f"the data folder {folder} is empty"
    return f"{folder} is not a token store: it has no {MANIFEST}"


def _contradictions(m: Manifest) -> list[str]:
    problems = []
    for key, parts in (
        ("n_tokens", sum(s.n_tokens for s in m.shards)),
        ("n_documents", sum(s.index.n_documents for s in m.shards)),
        ("max_token", max(s.max_token for s in m.shards)),
    ):
        if getattr(m, key) != parts:
            problems.append(f"{key} is {getattr(m, key)}, but its shards give {parts}")
    if len({s.chunks is None for s in m.shards}) > 1:
        problems.append("some of its shards have chunk hashes, and others have none")
    for s in m.shards:
        if s.bytes != s.n_tokens * m.itemsize + s.mask_bytes:
            mask = " with a mask" if s.mask_bytes else ""
            problems.append(f"{s.file}: {s.n_tokens} tokens of {m.dtype}{mask} are not {s.bytes} bytes")
        if s.n_counted is not None and s.n_counted > s.n_tokens:
            problems.append(f"{s.file}: {s.n_counted} of {s.n_tokens} tokens cannot count")
        if s.index.bytes != s.index.n_documents * 8:
            problems.append(f"{s.index.file}: {s.index.n_documents} documents are not {s.index.bytes} bytes")
        if s.chunks is not None and s.chunks.bytes != 16 * -(-s.bytes // s.chunks.chunk_bytes):
            problems.append(f"{s.chunks.file}: {s.chunks.bytes} bytes are not the hashes of {s.bytes} bytes")
    return problems
