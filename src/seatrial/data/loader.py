"""A step's number to its batch: the whole state of the loader is that number.

Letters in names: B rows of the batch, T tokens of a sequence.
"""

from __future__ import annotations

import numpy as np
import torch

from seatrial.base.errors import Diagnostic, InputError
from seatrial.data.order import sample_index
from seatrial.data.store import TokenStore


class BatchLoader:
    """Batches of `global_batch` sequences in an order that depends on `seed` alone, never on the world size.

    Sample i is the tokens [i T, i T + T + 1) of the store: neighbours share one token, which one of them
    predicts and the other reads. Steps count from 1; step N is positions [(N-1) global_batch, N global_batch)
    of the endless sequence of samples, which passes from one epoch to the next in the middle of a batch.
    """

    def __init__(
        self, store: TokenStore, *, sequence_length: int, global_batch: int, seed: int, vocab_size: int
    ) -> None:
        self.store = store
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self.seed = seed
        self.vocab_size = vocab_size
        self.n_samples = max(0, store.n_tokens - 1) // sequence_length
        if self.n_samples == 0:
            raise InputError(
                f"{store.folder} holds {store.n_tokens} tokens: not one sample of {sequence_length}",
                hint="give more data or a smaller train.sequence_length",
            )

    def samples(self, step: int) -> tuple[int, int]:
        """(first, end) positions of step's global batch."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        return (step - 1) * self.global_batch, step * self.global_batch

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that the first sample of `step` belongs to."""
        return self.samples(step)[0] // self.n_samples

    def batch(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs_BT, targets_BT), int64 on the CPU: rows [first, first + count) of step's global batch.

        Reads those rows only. InputError names file and position of an id beyond the vocabulary.
        """
        begin, end = self.samples(step)
        if first < 0 or count < 1 or begin + first + count > end:
            raise ValueError(f"rows [{first}, {first + count}) are outside a batch of {self.global_batch}")
        starts = []
        for position in range(begin + first, begin + first + count):
            _, index = sample_index(position, seed=self.seed, samples_per_epoch=self.n_samples)
            starts.append(index * self.sequence_length)
        tokens_BT = self.store.read_rows(starts, self.sequence_length + 1)
        if int(tokens_BT.max()) >= self.vocab_size:
            self._refuse(tokens_BT, starts)
        both_BT = torch.from_numpy(tokens_BT)
        return both_BT[:, :-1].contiguous(), both_BT[:, 1:].contiguous()

    def _refuse(self, tokens_BT: np.ndarray, starts: list[int]) -> None:
        row, column = (int(i) for i in np.argwhere(tokens_BT >= self.vocab_size)[0])
        file, position = self.store.locate(starts[row] + column)
        raise InputError(
            Diagnostic(
                f"token {position} is id {tokens_BT[row, column]}, beyond the vocabulary of {self.vocab_size}",
                file=str(file),
                hint=f"check the store with: seatrial data verify {self.store.folder}",
            )
        )
