"""Map a step number to its batch: the loader's whole state is that number.

Letters in names: B rows of the batch, T tokens of a sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from seatrial.base.batches import BatchSizes
from seatrial.base.errors import Diagnostic, InputError
from seatrial.data.blend import Blend, source_seed
from seatrial.data.documents import numbered
from seatrial.data.order import sample_indices
from seatrial.data.store import Tokens, TokenStore
from seatrial.hardware.accelerator import upload

_Key = tuple[int, int, int]  # step, first row, rows

NO_TARGET = -1  # a position that does not count in the loss


class Batch(NamedTuple):
    """Rows of a global batch."""

    ids_BT: torch.Tensor  # int64
    target_BT: torch.Tensor  # int64: the token after each, or NO_TARGET
    # int32, always on the host: the number, from 0, of the document within its row; None if attention crosses documents.
    document_BT: torch.Tensor | None

    def to(self, device: torch.device) -> Batch:
        """The same on `device`; the copy to a GPU is asynchronous."""
        return Batch(upload(self.ids_BT, device), upload(self.target_BT, device), self.document_BT)


class BatchLoader:
    """Batches of sequences in an order that depends on `seed` alone, never on the world size.

    Sample i of a store is the tokens [i T, i T + T + 1): neighbours share one token, which one of them
    predicts and the other reads. Steps count from 1; each has the next positions, as many as `batches` says,
    of the endless sequence of samples, which passes from one epoch to the next in the middle of a batch.
    With several stores a `Blend` decides the source of each position; each has its own order and its own epochs.
    `masked`: some targets may be `NO_TARGET`.

    After each batch a thread prefetches the rows of the next `ahead` steps: then reading from a disk or an object
    store, and verifying what was read, delay no step. An error there is raised by the `batch` call that asks for
    those rows.
    """

    def __init__(
        self,
        stores: TokenStore | Sequence[TokenStore],
        *,
        sequence_length: int,
        batches: BatchSizes,
        seed: int,
        vocab_size: int,
        blend: Blend | None = None,
        attend_across_documents: bool = True,
        ahead: int = 1,
        last_step: int | None = None,
        loss: Literal["answers", "all"] = "answers",
    ) -> None:
        """`blend` is required for more than one store, with as many sources.

        With `loss` "all" every token is a target, whatever the masks of the stores say.
        Nothing after `last_step` is prefetched: the end of a run does not wait for an unneeded request.

        Raises InputError for every store that does not contain one sample.
        """
        self.stores = (stores,) if isinstance(stores, TokenStore) else tuple(stores)
        if not self.stores or (blend.n_sources if blend is not None else 1) != len(self.stores):
            raise ValueError(f"{len(self.stores)} stores with {blend}")
        self.sequence_length = sequence_length
        self.batches = batches
        self.seed = seed
        self.vocab_size = vocab_size
        self.attend_across_documents = attend_across_documents
        self.masked = loss == "answers" and any(store.masked for store in self.stores)
        self._blend = blend
        self._seeds = [source_seed(seed, i, len(self.stores)) for i in range(len(self.stores))]
        self.samples_of = [max(0, store.n_tokens - 1) // sequence_length for store in self.stores]
        self._refuse_empty()
        self._ahead = ahead
        self._last_step = last_step
        self._coming: OrderedDict[_Key, Future[Batch]] = OrderedDict()
        self._reader: ThreadPoolExecutor | None = None

    def _refuse_empty(self) -> None:
        problems = [
            Diagnostic(
                f"{store.place} has {store.n_tokens} tokens: less than one sample of {self.sequence_length}",
                hint="provide more data or use a smaller train.sequence_length",
            )
            for store, n in zip(self.stores, self.samples_of, strict=True)
            if n == 0
        ]
        if problems:
            raise InputError(problems)

    @property
    def store(self) -> TokenStore:
        """The only store."""
        (store,) = self.stores
        return store

    def samples(self, step: int) -> tuple[int, int]:
        """(first, end) positions of step's global batch."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        return self.batches.samples(step)

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows [first, first + count) of step's global batch. Reads only those rows, then prefetches the next steps'.

        InputError names file and position of an id beyond the vocabulary, and of damaged data.
        """
        begin, end = self.samples(step)
        if first < 0 or count < 1 or begin + first + count > end:
            raise ValueError(f"rows [{first}, {first + count}) are outside a batch of {end - begin}")
        ready = self._coming.pop((step, first, count), None)
        try:
            return self._read(step, first, count) if ready is None else ready.result()
        finally:
            self._read_ahead(step, first, count)

    def close(self) -> None:
        """Stop prefetching, and wait for the read in progress."""
        self._coming.clear()
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._reader = None

    def _read_ahead(self, step: int, first: int, count: int) -> None:
        if not self._ahead:
            return
        end = step + self._ahead if self._last_step is None else min(step + self._ahead, self._last_step)
        wanted, size = [], self.batches.size(step)
        for later in range(step + 1, end + 1):
            larger = self.batches.size(later)  # the same part of it
            wanted.append((later, first * larger // size, count * larger // size))
        for key in [key for key in self._coming if key not in wanted]:
            self._coming.pop(key).cancel()
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        for key in wanted:
            if key not in self._coming:
                self._coming[key] = self._reader.submit(self._read, *key)

    def _read(self, step: int, first: int, count: int) -> Batch:
        sources, starts = self.places(self.samples(step)[0] + first, count)
        T = self.sequence_length
        ids_BT = np.empty((count, T), dtype=np.int64)
        target_BT = np.empty((count, T), dtype=np.int64)
        document_BT = None if self.attend_across_documents else np.empty((count, T), dtype=np.int32)
        for source, store in enumerate(self.stores):
            # All rows as a slice: numpy copies into a slice several times faster than into rows by index.
            rows = np.flatnonzero(sources == source) if len(self.stores) > 1 else slice(None)
            here = starts[rows].tolist()
            if not here:
                continue
            tokens = store.rows(here, T + 1)
            if int(tokens.max()) >= self.vocab_size:
                self._refuse(store, tokens, here)
            ids_BT[rows], target_BT[rows] = tokens[:, :-1], tokens[:, 1:]
            if self.masked and store.masked:
                counted = store.counted([start + 1 for start in here], T)
                target_BT[rows] = np.where(counted, target_BT[rows], NO_TARGET)
            if document_BT is not None:
                begins = [store.document_starts_between(s + 1, s + T) - s for s in here]
                document_BT[rows] = numbered(begins, T)
        return Batch(
            torch.from_numpy(ids_BT),
            torch.from_numpy(target_BT),
            None if document_BT is None else torch.from_numpy(document_BT),
        )

    def places(self, position: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(store, first token in it) of each of `count` samples from the run's `position` on, int64."""
        T = self.sequence_length
        sources = np.zeros(count, dtype=np.int64)
        if self._blend is None:
            (n,) = self.samples_of
            return sources, sample_indices(position, count, seed=self.seed, samples_per_epoch=n) * T
        sources, numbers = self._blend.locate_many(np.arange(position, position + count))
        starts = np.empty(count, dtype=np.int64)
        for source, (seed, n) in enumerate(zip(self._seeds, self.samples_of, strict=True)):
            rows = np.flatnonzero(sources == source)
            if rows.size:
                # A source's samples are consecutive, so those of a range of positions are a range too.
                indices = sample_indices(int(numbers[rows[0]]), rows.size, seed=seed, samples_per_epoch=n)
                starts[rows] = indices * T
        return sources, starts

    def _refuse(self, store: TokenStore, tokens: Tokens, starts: list[int]) -> None:
        row, column = (int(i) for i in np.argwhere(tokens >= self.vocab_size)[0])
        file, position = store.locate(starts[row] + column)
        raise InputError(
            Diagnostic(
                f"token {position} is id {tokens[row, column]}, beyond the vocabulary of {self.vocab_size}",
                file=file,
                hint=f"check the store with: seatrial data verify {store.place}",
            )
        )
