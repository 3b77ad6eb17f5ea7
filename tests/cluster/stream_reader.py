"""A rank that reads streamed batches: `python stream_reader.py URL CACHE`; the sums of five batches on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from seatrial.base.batches import BatchSizes
from seatrial.data.loader import BatchLoader
from seatrial.data.stream import AHEAD, StreamedStore


def main(url: str, cache: str) -> None:
    store = StreamedStore.stream(url, Path(cache), 1 << 30)
    loader = BatchLoader(
        store, sequence_length=1000, batches=BatchSizes.of(32), seed=3, vocab_size=1 << 22, ahead=AHEAD
    )
    # As tensor-parallel ranks do: all of them read the same rows.
    print(json.dumps([int(loader.batch(step, 0, 32).ids_BT.sum()) for step in range(1, 6)]))
    loader.close()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
