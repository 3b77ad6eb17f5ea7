"""A worker module whose import does not end until the test says so: what importing torch is, but for certain."""

from __future__ import annotations

import json
import os
import socket

with socket.socket(socket.AF_UNIX) as _hub:
    _hub.connect(os.environ["STANDIN_HUB"])
    _hub.sendall(json.dumps({"pid": os.getpid(), "env": {"RANK": os.getpid()}}).encode() + b"\n")
    _hub.recv(1)


def main(argv: list[str]) -> int:
    return 0
