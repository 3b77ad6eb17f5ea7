"""Make a token store of a Megatron dataset: by a link to its .bin if possible, else by a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from seatrial.base.errors import InputError, RunFailed
from seatrial.base.files import open_file
from seatrial.data.megatron import Pair, Positions, Progress, open_pair
from seatrial.data.store import TokenStore
from seatrial.data.tokenise import token_type
from seatrial.data.tokenizer import load_tokenizer
from seatrial.data.writer import DEFAULT_SHARD_TOKENS, StoreWriter

# A non-negative int32 has the same bytes as a uint32.
_SAME_BYTES: dict[str, np.dtype[np.unsignedinteger]] = {"uint16": np.dtype("<u2"), "int32": np.dtype("<u4")}
_TOKENS = 1 << 22


def import_pair(
    source: Path,
    tokenizer_spec: str,
    out: Path,
    *,
    copy: bool = False,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    force: bool = False,
    progress: Progress | None = None,
) -> TokenStore:
    """The Megatron dataset `source` (NAME, NAME.bin or NAME.idx) as a token store at `out`.

    The store has a link to NAME.bin, which must not change. The tokens are copied instead with `copy`, and if
    NAME.bin is not laid out as a shard: another type than uint16 or int32, or sequences that are not contiguous.
    InputError for a damaged index, ids beyond the tokenizer's, an existing `out`. RunFailed: the disk failed.
    """
    pair = open_pair(source)
    tokenizer = load_tokenizer(tokenizer_spec)
    linked = not copy and pair.contiguous and pair.kind.name in _SAME_BYTES
    values = {
        "sources": [str(source)],
        "format": "megatron",
        "linked": linked,
        "n_files": 2,
        "n_bytes": pair.bin.stat().st_size + pair.idx.stat().st_size,
    }
    kind = _SAME_BYTES[pair.kind.name] if linked else token_type(tokenizer)
    total = pair.n_tokens * pair.kind.itemsize

    def report(done: int) -> None:
        if progress is not None:
            progress(done, total, pair.bin.name)

    try:
        with StoreWriter(out, tokenizer, shard_tokens=shard_tokens, replace=force, dtype=kind) as writer:
            if linked:
                writer.link(pair.bin, pair.document_starts(), report)
            else:
                done = 0
                for tokens, starts in _copied(pair):
                    if int(tokens.min()) < 0 or int(tokens.max()) >= tokenizer.vocab_size:
                        wrong = int(tokens[(tokens < 0) | (tokens >= tokenizer.vocab_size)][0])
                        raise InputError(
                            f"{pair.bin} has the id {wrong}, and the tokenizer {tokenizer.name!r} has "
                            f"{tokenizer.vocab_size} ids",
                            hint="name the tokenizer that made these tokens: --tokenizer, or data.tokenizer",
                        )
                    writer.append(tokens, starts)
                    done += len(tokens) * pair.kind.itemsize
                    report(done)
            return writer.finish(values)
    except OSError as e:
        raise RunFailed(
            f"cannot make the token store {out}: {e.strerror or e}",
            hint="check the disk, or give another folder, and run it again",
        ) from e


def _copied(pair: Pair) -> Iterator[tuple[Positions, Positions]]:
    """(tokens, starts of documents among them): the sequences in order, some megabytes at a time."""
    starts = _Starts(pair)
    at = 0
    with open(open_file(pair.bin, links=True), "rb", buffering=0) as f:
        for begins, lengths in pair.sequences():
            # Sequences that are adjacent in the file are read as one run.
            breaks = np.flatnonzero(begins[1:] != begins[:-1] + lengths[:-1]) + 1
            for first, last in zip([0, *breaks], [*breaks, len(begins)], strict=True):
                left, offset = int(lengths[first:last].sum()), int(begins[first])
                while left:
                    n = min(left, _TOKENS)
                    f.seek(offset * pair.kind.itemsize)
                    tokens = np.fromfile(f, dtype=pair.kind, count=n)
                    if len(tokens) != n:
                        raise OSError(None, f"{pair.bin} became shorter while it was read")
                    yield tokens.astype(np.int64), starts.until(at + n) - at
                    at, offset, left = at + n, offset + n, left - n


class _Starts:
    """Starts of documents, consumed in order."""

    def __init__(self, pair: Pair) -> None:
        self._blocks = pair.document_starts()
        self._rest = np.empty(0, dtype=np.int64)

    def until(self, end: int) -> Positions:
        """The remaining starts before `end`; removes them."""
        while (not len(self._rest) or self._rest[-1] < end) and (
            more := next(self._blocks, None)
        ) is not None:
            self._rest = np.concatenate([self._rest, more])
        n = int(np.searchsorted(self._rest, end))
        taken, self._rest = self._rest[:n], self._rest[n:]
        return taken
