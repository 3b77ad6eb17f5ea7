"""The worker of a rank on the test device (tests/late_device.py): `python -m late_rank RUN_FOLDER --generation N`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import late_device
from seatrial.train import worker


def main(argv: Sequence[str] | None = None) -> int:
    late_device.install()
    try:
        return worker.main(argv)
    finally:
        print(f"late device: {late_device.seen}, {late_device.left()} left", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
