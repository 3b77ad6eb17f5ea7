"""Prepares a corpus in small parts and writes a byte to stdout at each progress: for test_prepare_kill.py.

prepare_driver.py CORPUS OUT WORKERS
"""

import os
import sys

from seatrial.data import parts, readers
from seatrial.data.prepare import prepare


def main() -> None:
    parts._FEWEST_BYTES = parts._MOST_BYTES = 2048
    readers.PIECE_BYTES = 256
    corpus, out, workers = sys.argv[1:]

    def progress(done: int, total: int, name: str) -> None:
        os.write(1, b".")

    prepare([corpus], "bytes", out, shard_tokens=9000, workers=int(workers), progress=progress)


if __name__ == "__main__":
    main()
