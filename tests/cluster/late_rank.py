"""The worker of a rank on the test device (tests/late_device.py): `python -m late_rank RUN_FOLDER --generation N`.

LATE_DEVICE_WITHOUT names a wait to remove, see tests/missing_waits.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import late_device
from missing_waits import JOB_WAITS
from seatrial.train import worker


def main(argv: Sequence[str] | None = None) -> int:
    late_device.install()
    without = os.environ.get("LATE_DEVICE_WITHOUT")
    if without is not None:
        JOB_WAITS[without](setattr)
        late_device.LAG_S = float("inf")
    try:
        return worker.main(argv)
    finally:
        print(f"late device: {late_device.seen}, {late_device.left()} left", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
