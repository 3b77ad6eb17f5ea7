"""Throughput of reading training data, compared with PyTorch's DataLoader over a memory map, torchdata and mosaicml-streaming.

    python bench/data.py [--tokens 64e6] [--sequence 4096] [--batch 32] [--rounds 5] [--large 1e12] [--out FILE]

All read the same tokens, shuffled, from warm files, as int64 ids and targets, in one process without workers. Throughput is tokens per
second of CPU time over all threads. Libraries alternate, and ratios are of medians. The first read,
in which every chunk is verified, is measured separately. The DataLoader does
what Megatron-LM does: an index array of the shuffled samples, and a memory map. Libraries that are not installed are skipped
and listed.

Seeking is the time to the first batch at a distant position in an open loader: the cost of a resume. Ours computes
it; the others load their own state. Last, a store of --large tokens in sparse files: time to open it and get the first batch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from seatrial.base import units
from seatrial.base.batches import BatchSizes
from seatrial.data.loader import BatchLoader
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter

TOKENS_A_SECOND = 20e6
SEEK_S = 0.001
FIRST_BATCH_S = 0.1
SEED = 1

Ids = tuple[torch.Tensor, torch.Tensor]


class Peer(Protocol):
    """One way to read batches."""

    def batches(self, n: int) -> None:
        """Read the next `n` batches."""

    def seek(self, batch: int) -> float:
        """Seconds to the first batch from `batch` on, as after a restart."""


class Ours:
    def __init__(self, store: TokenStore, sequence: int, batch: int, *, ahead: int) -> None:
        self._sizes = {
            "sequence_length": sequence,
            "batches": BatchSizes.of(batch),
            "seed": SEED,
            "vocab_size": 257,
        }
        self._batch, self._ahead = batch, ahead
        self._loader = BatchLoader(store, **self._sizes, ahead=ahead)
        self._step = 0

    def batches(self, n: int) -> None:
        for _ in range(n):
            self._step += 1
            self._loader.batch(self._step, 0, self._batch)

    def seek(self, batch: int) -> float:
        begin = time.perf_counter()
        self._loader.batch(batch + 1, 0, self._batch)
        return time.perf_counter() - begin


class MappedSamples(Dataset[Ids]):
    """Samples of a memory map in the order of an array, as Megatron-LM's GPTDataset has them."""

    def __init__(self, path: Path, sequence: int) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self._sequence = sequence
        n = (len(self._tokens) - 1) // sequence
        self._order = np.random.default_rng(SEED).permutation(n)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Ids:
        start = int(self._order[index]) * self._sequence
        row = torch.from_numpy(self._tokens[start : start + self._sequence + 1].astype(np.int64))
        return row[:-1], row[1:]


class Loaders:
    """DataLoader, or torchdata's StatefulDataLoader, over the map."""

    def __init__(self, data: Dataset[Ids], batch: int, kind: Any) -> None:
        self._make = lambda: kind(data, batch_size=batch, num_workers=0, drop_last=True)
        self._has_state = hasattr(kind, "load_state_dict")
        self._loader = self._make()
        self._batches: Iterator[Any] = iter(self._loader)

    def batches(self, n: int) -> None:
        for _ in range(n):
            self._next()

    def _next(self) -> None:
        try:
            next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            next(self._batches)

    def seek(self, batch: int) -> float:
        if not self._has_state:
            # What one does without state: read up to there, and throw it away.
            batches = iter(self._make())
            begin = time.perf_counter()
            for _ in range(batch + 1):
                next(batches)
            return time.perf_counter() - begin
        loader = self._make()
        batches = iter(loader)
        for _ in range(batch):
            next(batches)
        state = loader.state_dict()
        loader = self._make()
        begin = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - begin


class Mosaic:
    """StreamingDataset over local shards, of samples that were cut beforehand."""

    def __init__(self, folder: Path, tokens: np.ndarray, sequence: int, batch: int) -> None:
        self._streaming = importlib.import_module("streaming")
        self._folder, self._batch = folder, batch
        # Of an earlier process that was killed: it would be taken for another rank of this one.
        importlib.import_module("streaming.base.util").clean_stale_shared_memory()
        if not folder.exists():
            columns = {"tokens": "ndarray:uint16"}
            with self._streaming.MDSWriter(out=str(folder), columns=columns) as out:
                for start in range(0, len(tokens) - sequence, sequence):
                    out.write({"tokens": tokens[start : start + sequence + 1]})
        self._loader = self._make()
        self._batches: Iterator[Any] = iter(self._loader)

    def _make(self) -> Any:
        streaming = self._streaming
        data = streaming.StreamingDataset(
            local=str(self._folder),
            shuffle=True,
            shuffle_seed=SEED,
            batch_size=self._batch,
            num_canonical_nodes=1,
        )

        def collate(samples: list[dict[str, np.ndarray]]) -> Ids:
            rows = torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))
            return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

        return streaming.StreamingDataLoader(
            data, batch_size=self._batch, num_workers=0, drop_last=True, collate_fn=collate
        )

    def batches(self, n: int) -> None:
        for _ in range(n):
            try:
                next(self._batches)
            except StopIteration:
                self._batches = iter(self._loader)
                next(self._batches)

    def end(self) -> None:
        """Read an epoch to its end, so that its threads are idle."""
        for _ in self._loader:
            pass

    def seek(self, batch: int) -> float:
        batches = iter(self._loader)
        for _ in range(batch):
            next(batches)
        state = self._loader.state_dict()
        assert state is not None
        del batches
        loader = self._loader
        begin = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - begin


def make_store(folder: Path, n_tokens: int) -> TokenStore:
    """Random bytes with an end of document every 500 tokens, in shards of 2^24."""
    draw = np.random.default_rng(SEED)
    with StoreWriter(folder, ByteTokenizer(), shard_tokens=1 << 24) as writer:
        for first in range(0, n_tokens, 1 << 22):
            n = min(1 << 22, n_tokens - first)
            tokens = draw.integers(0, 256, n, dtype=np.uint16)
            tokens[499::500] = 256
            writer.append(tokens, np.arange(0, n, 500))
        return writer.finish({})


def peers(folder: Path, store: TokenStore, sequence: int, batch: int) -> tuple[dict[str, Peer], list[str]]:
    """(installed libraries by name, names of libraries that are not installed)."""
    tokens = np.concatenate([np.fromfile(folder / "store" / s.file, "<u2") for s in store.manifest.shards])
    tokens.tofile(folder / "mapped.bin")
    mapped = MappedSamples(folder / "mapped.bin", sequence)
    found: dict[str, Peer] = {
        "ours": Ours(store, sequence, batch, ahead=0),
        "ours, a batch ahead": Ours(store, sequence, batch, ahead=1),
        "DataLoader over a map": Loaders(mapped, batch, DataLoader),
    }
    missing = []
    try:
        kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
        found["torchdata"] = Loaders(mapped, batch, kind)
    except ImportError as error:
        missing.append(f"torchdata ({error})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others deprecate inside is not ours to show
            found["mosaicml-streaming"] = Mosaic(folder / "mds", tokens, sequence, batch)
    except ImportError as error:
        missing.append(f"mosaicml-streaming ({error})")
    return found, missing


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def large_store(folder: Path, n_tokens: int, sequence: int) -> dict[str, float]:
    """CPU seconds of opening a store of `n_tokens`, of its first batch, and of one far away."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "data"))
    from large_stores import write_sparse

    write_sparse(folder, n_tokens, 1 << 28)
    opened, seeks = [], []
    for turn in range(5):
        begin = time.thread_time()
        loader = BatchLoader(
            TokenStore.open(folder, check_sizes=False),
            sequence_length=sequence,
            batches=BatchSizes.of(1024),
            seed=SEED,
            vocab_size=257,
            ahead=0,
        )
        loader.batch(1 + turn, 0, 8)
        opened.append(time.thread_time() - begin)
        begin = time.thread_time()
        loader.places(loader.samples(10**7 + turn)[0], 8)
        seeks.append(time.thread_time() - begin)
    return {"first_batch_s": statistics.median(opened), "position_s": statistics.median(seeks)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=64e6)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", type=float, default=1e12, help="tokens of the sparse store; 0: none")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sequence, batch = arguments.sequence, arguments.batch
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = make_store(folder / "store", int(arguments.tokens))
        n = max(1, int(arguments.tokens) // (sequence * batch))
        first = cpu_seconds(
            lambda: Ours(TokenStore.open(folder / "store"), sequence, batch, ahead=0).batches(n)
        )
        found, missing = peers(folder, store, sequence, batch)
        rates: dict[str, list[float]] = {peer: [] for peer in found}
        for turn in range(arguments.rounds + 1):
            for peer, reader in list(found.items())[:: 1 if turn % 2 else -1]:
                rate = n * batch * sequence / cpu_seconds(lambda reader=reader: reader.batches(n))
                if turn:  # the first turn warms up
                    rates[peer].append(rate)
        seeks = {peer: statistics.median(r.seek(n // 2) for _ in range(3)) for peer, r in found.items()}
        large = large_store(folder / "large", int(arguments.large), sequence) if arguments.large else {}
        for mosaic in [peer for peer in found.values() if isinstance(peer, Mosaic)]:
            mosaic.end()  # its threads look for their files else, when those are gone
    return report(arguments, n * batch * sequence / first, rates, seeks, large, missing)


def report(
    arguments: argparse.Namespace,
    first: float,
    rates: dict[str, list[float]],
    seeks: dict[str, float],
    large: dict[str, float],
    missing: list[str],
) -> int:
    """Print and write the figures; returns 1 if a limit is exceeded."""
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ours = middle["ours"]
    print(
        f"{units.count(int(arguments.tokens))} tokens, sequences of {arguments.sequence}, batches of {arguments.batch}"
    )
    print(f"{'':<24} {'M tokens/s':>11} {'ours is':>9} {'seek':>10}")
    for name, rate in middle.items():
        print(f"{name:<24} {rate / 1e6:11.1f} {ours / rate:8.2f}x {seeks[name] * 1e3:7.2f} ms")
    print(f"{'ours, first read':<24} {first / 1e6:11.1f} {ours / first:8.2f}x   every chunk verified")
    for name in missing:
        print(f"not installed: {name}")
    if large:
        print(
            f"{arguments.large:.0e} tokens: opened and first batch {large['first_batch_s'] * 1e3:.1f} ms, "
            f"a position {large['position_s'] * 1e6:.0f} us"
        )
    kept = ours >= TOKENS_A_SECOND and all(
        [
            large.get("first_batch_s", 0.0) < FIRST_BATCH_S,
            large.get("position_s", 0.0) < SEEK_S,
        ]
    )
    if arguments.out is not None:
        figures = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokens_a_second": middle | {"ours, first time": first},
            "ratio": {name: ours / rate for name, rate in middle.items()},
            "seek_s": seeks,
            "large": large,
            "missing": missing,
        }
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(
        f"limits: {TOKENS_A_SECOND / 1e6:.0f} M tokens/s, first batch {FIRST_BATCH_S * 1e3:.0f} ms, ", end=""
    )
    print(f"position {SEEK_S * 1e3:.0f} ms: {'ok' if kept else 'MISSED'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
