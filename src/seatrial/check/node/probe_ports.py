"""Read the tree of RDMA devices: `python -m seatrial.check.node.probe_ports [FOLDER]`. "PATH:VALUE" lines, as by grep.

A separate process, because reading a port's counters queries its firmware, which may not answer.
"""

from __future__ import annotations

import sys
from pathlib import Path

from seatrial.check.outputs.sysfs import FILES

ROOT = "/sys/class/infiniband"
_LARGEST_BYTES = 4096  # a file of sysfs is a page


def main(root: str = ROOT) -> int:
    """Entry; the exit code. No device gives no output."""
    folder = Path(root)
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        for path in sorted(p for pattern in FILES for p in device.glob(pattern) if p.is_file()):
            try:
                with path.open("rb") as f:
                    value = f.read(_LARGEST_BYTES).decode("ascii", "replace")
            except OSError:
                continue  # such as counters that this device does not have
            print(f"{path}:{value.partition(chr(10))[0].strip()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
