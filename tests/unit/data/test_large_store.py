"""10^12 tokens, as sparse files: what a start and a seek cost, and what they keep in memory."""

from __future__ import annotations

import itertools
import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from large_stores import write_sparse

from seatrial.base.batches import BatchSizes
from seatrial.data.loader import BatchLoader
from seatrial.data.store import TokenStore

N_TOKENS = 10**12
SHARD_TOKENS = 1 << 28  # what `seatrial data prepare` makes
T, GLOBAL_BATCH, RANKS = 4096, 1024, 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "store"
    write_sparse(path, N_TOKENS, SHARD_TOKENS)
    return path


def make_loader(folder: Path) -> BatchLoader:
    # Sizes are compared by whoever starts the run, once, not by each rank.
    store = TokenStore.open(folder, check_sizes=False)
    return BatchLoader(
        store, sequence_length=T, batches=BatchSizes.of(GLOBAL_BATCH), seed=1, vocab_size=257, ahead=0
    )


@pytest.mark.cluster  # slow
def test_the_first_batch_and_a_seek(folder: Path) -> None:
    """CPU time over that of parsing the manifest, in turn: so a slow machine changes nothing. `bench/data.py` has the seconds.

    The first batch took 2.9 to 3.0 times as long, a seek 0.0007 to 0.0013.
    """
    starts, parses = [], []
    seeks: dict[int, list[float]] = {}
    manifest = (folder / "manifest.json").read_bytes()
    share = GLOBAL_BATCH // RANKS
    for turn in range(5):
        begin = time.thread_time()
        data = make_loader(folder)
        batch = data.batch(1 + 1000 * turn, 0, share)
        starts.append(time.thread_time() - begin)
        assert batch.ids_BT.shape == (share, T)
        begin = time.thread_time()
        json.loads(manifest)
        parses.append(time.thread_time() - begin)
    n = data.samples_of[0]
    assert n == (N_TOKENS - 1) // T
    for step in (2, 10**5, n // GLOBAL_BATCH, 10**7, 10**9, 10**12) * 5:
        begin = time.thread_time()
        sources, first = data.places(data.samples(step)[0], 1)
        seeks.setdefault(step, []).append(time.thread_time() - begin)
        assert sources.tolist() == [0]
        assert 0 <= int(first[0]) < N_TOKENS
    for step in seeks:
        assert int(data.batch(step, 0, 1).ids_BT.sum()) == 0
    assert min(starts) < 5 * min(parses)
    assert max(map(min, seeks.values())) < min(parses) / 20


@pytest.mark.cluster  # slow
def test_memory_does_not_grow_with_what_was_read(folder: Path) -> None:
    data = make_loader(folder)
    data.batch(1, 0, 8)
    tracemalloc.start()
    try:
        for step in range(2, 60):
            data.batch(step, 0, 8)  # 460 samples, of as many shards
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Hashes of 128 open shards (32 KiB each), a bit for each of their chunks, and one batch.
    assert peak < 24 * 2**20


def test_memory_of_a_start_is_the_manifests(folder: Path) -> None:
    """A bit for 256 KiB, and the manifest: nothing for each token, sample or document."""
    tracemalloc.start()
    try:
        make_loader(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * 2**20


def test_every_part_of_the_corpus_is_reached(folder: Path) -> None:
    data = make_loader(folder)
    _, starts = data.places(0, 20_000)
    counts, _ = np.histogram(starts, bins=100, range=(0, N_TOKENS))
    expected = 200
    assert ((counts - expected) ** 2 / expected).sum() < 99 + 5 * (2 * 99) ** 0.5
    assert len(set(starts.tolist())) == 20_000
    assert all(a != b for a, b in itertools.pairwise(starts.tolist()))
