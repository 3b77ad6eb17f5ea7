"""The same global batches for every number of ranks, every microbatch, every stop and every change of size."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from seatrial.base.batches import BatchSizes
from seatrial.data.blend import Blend
from seatrial.data.loader import Batch, BatchLoader
from seatrial.data.order import sample_index
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter, ledger_gaps, read_ledger

T, GLOBAL_BATCH, SEED = 16, 24, 11
BATCHES = BatchSizes.of(GLOBAL_BATCH)
RANKS = (1, 2, 3, 4, 8)
STEPS = 40


class WideTokenizer(ByteTokenizer):
    vocab_size = 1 << 20


def write(
    folder: Path, first_token: int, n: int, *, shard_tokens: int = 777, documents: int = 9
) -> TokenStore:
    """Token i is first_token + i, so a token says where it stands. Documents of one to `documents` x 2 tokens."""
    lengths = np.random.default_rng(n).integers(1, 2 * documents, n)
    starts = np.concatenate([[0], lengths.cumsum()])
    with StoreWriter(folder, WideTokenizer(), shard_tokens=shard_tokens) as w:
        w.append(np.arange(first_token, first_token + n), starts[starts < n])
        return w.finish({})


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    folder = tmp_path_factory.mktemp("order")
    sizes = [(0, 5000), (100_000, 1700), (200_000, 330)]
    return [write(folder / f"s{i}", first, n) for i, (first, n) in enumerate(sizes)]


def one(stores: list[TokenStore], **changes: object) -> BatchLoader:
    sizes = {"sequence_length": T, "batches": BATCHES, "seed": SEED, "vocab_size": 1 << 20}
    return BatchLoader(stores[0], **(sizes | changes))  # type: ignore[arg-type]


def blended(stores: list[TokenStore], **changes: object) -> BatchLoader:
    sizes = {"sequence_length": T, "batches": BATCHES, "seed": SEED, "vocab_size": 1 << 20}
    return BatchLoader(stores, blend=Blend([0.6, 0.3, 0.1]), **(sizes | changes))  # type: ignore[arg-type]


LOADERS = {"one": one, "blend": blended}


def same(a: Batch, b: Batch) -> bool:
    return all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def joined(parts: list[Batch]) -> Batch:
    documents = [p.document_BT for p in parts if p.document_BT is not None]
    return Batch(
        torch.cat([p.ids_BT for p in parts]),
        torch.cat([p.target_BT for p in parts]),
        torch.cat(documents) if documents else None,
    )


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("across", [True, False])
def test_global_batches_do_not_depend_on_ranks_or_microbatches(
    kind: str, across: bool, stores: list[TokenStore]
) -> None:
    whole = LOADERS[kind](stores, attend_across_documents=across)
    steps = [whole.batch(step, 0, GLOBAL_BATCH) for step in range(1, STEPS + 1)]
    whole.close()
    for ranks in RANKS:
        share = GLOBAL_BATCH // ranks
        loaders = [LOADERS[kind](stores, attend_across_documents=across) for _ in range(ranks)]
        for step, expected in enumerate(steps, start=1):
            parts = [x.batch(step, r * share, share) for r, x in enumerate(loaders)]
            assert same(joined(parts), expected), (ranks, step)
        for loader in loaders:
            loader.close()
        for microbatch in (m for m in (1, 2, 3, share) if share % m == 0):
            data = LOADERS[kind](stores, attend_across_documents=across, ahead=0)
            parts = [data.batch(7, first, microbatch) for first in range(0, GLOBAL_BATCH, microbatch)]
            assert same(joined(parts), steps[6]), (ranks, microbatch)


def test_the_rows_are_the_samples_of_the_order(stores: list[TokenStore]) -> None:
    """The order of existing runs: each row from the definition, one position at a time."""
    data = one(stores)
    for step in (1, 2, 13, 14, 1000):
        ids, targets, _ = data.batch(step, 0, GLOBAL_BATCH)
        for row in range(GLOBAL_BATCH):
            position = (step - 1) * GLOBAL_BATCH + row
            _, index = sample_index(position, seed=SEED, samples_per_epoch=data.samples_of[0])
            assert ids[row].tolist() == list(range(index * T, index * T + T))
            assert targets[row].tolist() == list(range(index * T + 1, index * T + T + 1))
    data.close()


def test_a_blend_keeps_its_weights_and_every_source_its_epochs(stores: list[TokenStore]) -> None:
    data = blended(stores)
    firsts = torch.cat([data.batch(s, 0, GLOBAL_BATCH).ids_BT[:, 0] for s in range(1, 41)]).tolist()
    data.close()
    sources = [f // 100_000 for f in firsts]
    for prefix in range(len(sources)):
        for source, share in enumerate((0.6, 0.3, 0.1)):
            assert abs(sources[:prefix].count(source) - share * prefix) < 1
    for source, n in enumerate(data.samples_of):
        seen = [(f % 100_000) // T for f, s in zip(firsts, sources, strict=True) if s == source]
        for epoch in range(len(seen) // n):
            assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))
        # Sources of a blend are not in step with each other, nor with a run on one of them alone.
        alone = [sample_index(p, seed=SEED, samples_per_epoch=n)[1] for p in range(len(seen))]
        assert seen != alone


@pytest.mark.parametrize("kind", LOADERS)
def test_documents_are_numbered_as_the_index_has_them(kind: str, stores: list[TokenStore]) -> None:
    data = LOADERS[kind](stores, attend_across_documents=False)
    starts = {
        int(first): set((s.document_starts().astype(np.int64) + first).tolist())
        for first, s in zip((0, 100_000, 200_000), stores, strict=True)
    }
    begins = set.union(*starts.values())
    seen = 0
    for step in range(1, 20):
        ids, _, documents = data.batch(step, 0, GLOBAL_BATCH)
        assert documents is not None
        assert documents.dtype == torch.int32
        for row, numbers in zip(ids.tolist(), documents.tolist(), strict=True):
            expected = np.cumsum([0, *(token in begins for token in row[1:])]).tolist()
            assert numbers == expected
            seen += expected[-1]
    data.close()
    assert seen > 500


@pytest.mark.cluster  # for its time only
@pytest.mark.parametrize("kind", LOADERS)
def test_ledger_is_exact_after_100_stops_and_size_changes(
    kind: str, stores: list[TokenStore], tmp_path: Path
) -> None:
    """A run that is killed after any step, goes on from a checkpoint before it, with another number of ranks."""
    draw = random.Random(kind)
    reference = LOADERS[kind](stores, ahead=0)
    folder = RunFolder(tmp_path)
    ledger = LedgerWriter(folder)
    trained: dict[int, Batch] = {}  # step -> what its last doing trained on
    saved, generation, stops = 0, 1, 0
    while saved < 400:
        ranks = draw.choice(RANKS)
        share = GLOBAL_BATCH // ranks
        loaders = [LOADERS[kind](stores) for _ in range(ranks)]
        last = saved + draw.randint(1, 9)
        for step in range(saved + 1, last + 1):
            trained[step] = joined([x.batch(step, r * share, share) for r, x in enumerate(loaders)])
            first, end = loaders[0].samples(step)
            assert {x.samples(step) for x in loaders} == {(first, end)}
            ledger.write(LedgerRecord(step, first, end, generation))
        for loader in loaders:
            loader.close()
        saved = draw.randint(saved, last)  # the newest checkpoint may be of any step before the stop
        for step in [step for step in trained if step > saved]:
            del trained[step]
        generation += 1
        stops += 1
    ledger.close()
    assert stops >= 100
    records, problems = read_ledger(folder)
    assert not problems
    assert not ledger_gaps([r for r in records if r.step <= saved], BATCHES)
    for step in range(1, saved + 1):
        assert same(trained[step], reference.batch(step, 0, GLOBAL_BATCH)), step


def test_two_seeds_differ(stores: list[TokenStore]) -> None:
    a, b = one(stores, seed=1, ahead=0), one(stores, seed=2, ahead=0)
    assert not torch.equal(a.batch(1, 0, GLOBAL_BATCH).ids_BT, b.batch(1, 0, GLOBAL_BATCH).ids_BT)


def test_a_blend_needs_as_many_stores(stores: list[TokenStore]) -> None:
    for wrong in (stores[:2], [], stores[0]):
        with pytest.raises(ValueError, match="stores with"):
            BatchLoader(
                wrong,
                blend=Blend([1, 1, 1]),
                sequence_length=T,
                batches=BatchSizes.of(8),
                seed=1,
                vocab_size=1 << 20,
            )
    with pytest.raises(ValueError, match="3 stores with None"):
        BatchLoader(stores, sequence_length=T, batches=BatchSizes.of(8), seed=1, vocab_size=1 << 20)
