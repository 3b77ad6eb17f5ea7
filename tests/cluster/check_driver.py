"""A check of three hosts on this machine, for tests that end it: `python check_driver.py MARK`; progress on stdout."""

from __future__ import annotations

import os
import sys

from seatrial.base import process
from seatrial.check.live.conductor import LiveOptions, check_live
from seatrial.check.live.hosts import LOOPBACK, Host
from seatrial.check.node.node_stage import NodeOptions


def main() -> int:
    process.die_with_parent(os.getppid())
    environment = {"SEATRIAL_TEST_CHECK": sys.argv[1]}
    hosts = [Host(f"node{n}", LOOPBACK, environment=environment) for n in range(3)]
    options = LiveOptions(NodeOptions(seconds=20.0, rates=False))
    try:
        check_live(hosts, options, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
