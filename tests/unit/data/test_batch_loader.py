import gc
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.batches import BatchSizes
from seatrial.base.errors import InputError
from seatrial.data.blend import Blend
from seatrial.data.loader import NO_TARGET, Batch, BatchLoader
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter


class WideTokenizer(ByteTokenizer):
    vocab_size = 70_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Token i is i: 1,000 of them in shards of 70."""
    with StoreWriter(tmp_path_factory.mktemp("loader") / "store", WideTokenizer(), shard_tokens=70) as w:
        w.append(np.arange(1000), np.array([0]))
        return w.finish({})


def loader(store: TokenStore, **changes: int) -> BatchLoader:
    sizes = {"sequence_length": 9, "batches": BatchSizes.of(8), "seed": 5, "vocab_size": 1000}
    return BatchLoader(store, **{**sizes, **changes})


def test_targets_are_the_next_tokens(store: TokenStore) -> None:
    inputs, targets, documents = loader(store).batch(1, 0, 8)
    assert documents is None
    assert inputs.shape == targets.shape == (8, 9)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs + 1, targets)
    assert (inputs[:, 0] % 9 == 0).all()


def test_epoch_has_each_sample_once_and_continues_into_the_next(store: TokenStore) -> None:
    data = loader(store)
    assert data.samples_of == [111]
    firsts = torch.cat([data.batch(step, 0, 8)[0][:, 0] for step in range(1, 29)]).tolist()
    assert sorted(firsts[:111]) == [i * 9 for i in range(111)]
    assert sorted(firsts[111:222]) == [i * 9 for i in range(111)]
    assert firsts[:111] != firsts[111:222]


@settings(max_examples=30, deadline=None)
@given(step=st.integers(1, 10**9), ranks=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 2**40))
def test_the_batch_does_not_depend_on_its_reader(store: TokenStore, step: int, ranks: int, seed: int) -> None:
    data = loader(store, seed=seed)
    whole = data.batch(step, 0, 8)
    share = 8 // ranks
    parts = [data.batch(step, r * share, share) for r in range(ranks)]
    assert torch.equal(torch.cat([p[0] for p in parts]), whole[0])
    assert torch.equal(torch.cat([p[1] for p in parts]), whole[1])


def test_steps_are_ranges_of_positions(store: TokenStore) -> None:
    data = loader(store)
    assert data.samples(1) == (0, 8)
    assert data.samples(12) == (88, 96)
    with pytest.raises(ValueError, match="steps count from 1"):
        data.samples(0)


def test_only_the_rows_asked_for_are_read(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = TokenStore.rows

    here = threading.get_ident()  # a loader of another test may still read ahead in its own thread

    def rows(self: TokenStore, starts: list[int], length: int) -> np.ndarray:
        if threading.get_ident() == here:
            asked.append(len(starts) * length)
        return real(self, starts, length)

    monkeypatch.setattr(TokenStore, "rows", rows)
    loader(store, ahead=0).batch(3, 2, 2)
    assert asked == [20]


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (7, 2), (8, 1)])
def test_rows_outside_the_batch(store: TokenStore, first: int, count: int) -> None:
    with pytest.raises(ValueError, match="outside a batch of 8"):
        loader(store).batch(1, first, count)


def test_an_id_beyond_the_vocabulary_is_found_in_its_file(store: TokenStore) -> None:
    data = loader(store, vocab_size=999)
    errors = []
    for step in range(1, 15):
        try:
            data.batch(step, 0, 8)
        except InputError as e:
            errors.append(e.render())
    # The last token is the target of the last sample; shard 14 begins at 980.
    (error,) = errors
    assert "shard-00014.bin: error: token 19 is id 999, beyond the vocabulary of 999" in error
    assert "seatrial data verify" in error


def test_a_store_that_is_too_small(store: TokenStore) -> None:
    assert loader(store, sequence_length=999).samples_of == [1]
    with pytest.raises(InputError, match="less than one sample of 1000"):
        loader(store, sequence_length=1000)


def test_the_next_batch_is_read_while_this_one_is_used(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[tuple[int, str]] = []
    real = BatchLoader._read

    def read(self: BatchLoader, step: int, first: int, count: int) -> Batch:
        threads.append((step, threading.current_thread().name))
        return real(self, step, first, count)

    monkeypatch.setattr(BatchLoader, "_read", read)
    data, plain = loader(store, ahead=2), loader(store, ahead=0)
    for step in (1, 2, 3, 4, 9, 10, 3, 4):  # the jumps are a resume, and a rollback
        assert torch.equal(data.batch(step, 2, 4).ids_BT, plain.batch(step, 2, 4).ids_BT)
    assert torch.equal(data.batch(5, 0, 8).ids_BT, plain.batch(5, 0, 8).ids_BT)  # another number of ranks
    data.close()
    mine = [step for step, name in threads if name == "MainThread"]
    # `plain` reads each itself; of `data`'s only those that nothing could have foreseen.
    assert Counter(mine) == Counter([1, 2, 3, 4, 9, 10, 3, 4, 5, *(1, 9, 3, 5)])


def test_a_batch_ramp_continues_the_order_and_is_prefetched(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine: list[int] = []
    real = BatchLoader._read

    def read(self: BatchLoader, step: int, first: int, count: int) -> Batch:
        if threading.current_thread().name == "MainThread":
            mine.append(step)
        return real(self, step, first, count)

    batches = BatchSizes.of(8, [(2, 2), (1, 4)])
    plain = loader(store, ahead=0)
    whole = torch.cat([plain.batch(step, 0, 8).ids_BT for step in (1, 2, 3)])
    monkeypatch.setattr(BatchLoader, "_read", read)
    data = loader(store, ahead=2, batches=batches)
    for rank in (0, 1):
        for step, (begin, end) in enumerate([(0, 2), (2, 4), (4, 8), (8, 16), (16, 24)], 1):
            assert data.samples(step) == (begin, end)
            half = (end - begin) // 2
            rows = data.batch(step, rank * half, half).ids_BT
            assert torch.equal(rows, whole[begin + rank * half :][:half])
    data.close()
    assert mine == [1, 1]


def test_nothing_is_read_after_the_last_step(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    real = BatchLoader._read

    def read(self: BatchLoader, step: int, first: int, count: int) -> Batch:
        steps.append(step)
        return real(self, step, first, count)

    monkeypatch.setattr(BatchLoader, "_read", read)
    data = loader(store, ahead=4, last_step=6)
    for step in (3, 4, 5, 6):
        data.batch(step, 0, 8)
    assert not data._coming
    data.close()
    assert sorted(steps) == [3, 4, 5, 6]


def test_a_prefetch_error_is_raised_at_its_step(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", ByteTokenizer(), shard_tokens=1 << 20) as w:
        w.append(np.arange(40) % 250, np.array([0]))
        store = w.finish({})
    plain = loader(store, batches=BatchSizes.of(1), ahead=0)
    order = [int(plain.batch(step, 0, 1).ids_BT[0, 0]) // 9 for step in range(1, 5)]
    # The fourth sample has the largest id of all: too large for this vocabulary.
    last = max(order)
    step = order.index(last) + 1
    data = loader(store, batches=BatchSizes.of(1), vocab_size=last * 9 + 9, ahead=3)
    for before in range(1, step):
        data.batch(before, 0, 1)
    for _ in range(2):
        with pytest.raises(InputError, match="beyond the vocabulary"):
            data.batch(step, 0, 1)
    data.close()


def test_a_loader_that_is_let_go_ends_its_thread(store: TokenStore) -> None:
    data = loader(store)
    data.batch(1, 0, 8)
    reader = data._reader
    assert reader is not None
    (thread,) = reader._threads
    del data, reader
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_what_does_not_count_is_no_target(store: TokenStore, tmp_path: Path) -> None:
    """Of a blend with a store in which all tokens count; ids stay what they are."""
    counted = np.random.default_rng(0).random(1000) < 0.4
    with StoreWriter(tmp_path / "masked", WideTokenizer(), shard_tokens=70) as w:
        w.append(np.arange(1000, 2000), np.array([0]), counted)
        masked = w.finish({})
    sizes = {"sequence_length": 9, "batches": BatchSizes.of(8), "seed": 5, "vocab_size": 2000}
    both = BatchLoader([store, masked], **sizes, blend=Blend([0.5, 0.5]))
    whole = BatchLoader([store, masked], **sizes, blend=Blend([0.5, 0.5]), loss="all")
    assert both.masked
    assert not whole.masked
    assert not loader(store).masked
    seen = 0
    for step in range(1, 30):
        ours, all_of_them = both.batch(step, 0, 8), whole.batch(step, 0, 8)
        assert torch.equal(ours.ids_BT, all_of_them.ids_BT)
        assert torch.equal(all_of_them.ids_BT + 1, all_of_them.target_BT)
        number = all_of_them.target_BT - 1000
        counts = (number < 0) | torch.from_numpy(counted)[number.clamp(min=0)]
        assert torch.equal(ours.target_BT, torch.where(counts, all_of_them.target_BT, NO_TARGET))
        seen += int((~counts).sum())
    assert seen > 400
    both.close()
    whole.close()
