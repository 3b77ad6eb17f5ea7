import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.data.loader import BatchLoader
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
    sizes = {"sequence_length": 9, "global_batch": 8, "seed": 5, "vocab_size": 1000}
    return BatchLoader(store, **{**sizes, **changes})


def test_targets_are_the_next_tokens(store: TokenStore) -> None:
    inputs, targets = loader(store).batch(1, 0, 8)
    assert inputs.shape == targets.shape == (8, 9)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs + 1, targets)
    assert (inputs[:, 0] % 9 == 0).all()


def test_an_epoch_has_every_sample_once_and_runs_on_into_the_next(store: TokenStore) -> None:
    data = loader(store)
    assert data.n_samples == 111
    firsts = torch.cat([data.batch(step, 0, 8)[0][:, 0] for step in range(1, 29)]).tolist()
    assert sorted(firsts[:111]) == [i * 9 for i in range(111)]
    assert sorted(firsts[111:222]) == [i * 9 for i in range(111)]
    assert firsts[:111] != firsts[111:222]
    assert [data.epoch(s) for s in (1, 14, 15, 28)] == [0, 0, 1, 1]


@settings(max_examples=30, deadline=None)
@given(step=st.integers(1, 10**9), ranks=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 2**40))
def test_the_batch_does_not_depend_on_who_reads_it(
    store: TokenStore, step: int, ranks: int, seed: int
) -> None:
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
    real = TokenStore.read_rows

    def read_rows(self: TokenStore, starts: list[int], length: int) -> np.ndarray:
        asked.append(len(starts) * length)
        return real(self, starts, length)

    monkeypatch.setattr(TokenStore, "read_rows", read_rows)
    loader(store).batch(3, 2, 2)
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
    assert loader(store, sequence_length=999).n_samples == 1
    with pytest.raises(InputError, match="not one sample of 1000"):
        loader(store, sequence_length=1000)
