"""A worker without torch that does what a test tells it: the stand-in for seatrial.train.worker.

It connects to the test's socket, says who it is, and obeys one JSON line after another.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from seatrial.record.folder import RunFolder


def spawn() -> list[int]:
    """What a rank may start itself: a forked worker, a command in a session of its own, and a daemon."""
    forked = os.fork()
    if forked == 0:
        signal.pause()
        os._exit(0)
    session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.write(writer, str(daemon.pid).encode())
        os._exit(0)
    daemon_pid = int(os.read(reader, 32))
    os.waitpid(between, 0)
    return [forked, session.pid, daemon_pid]


def fail(argv: list[str], exit_code: int, consequence: bool, message: str) -> int:
    """End as the worker does after an exception."""
    node, rank = int(os.environ["GROUP_RANK"]), int(os.environ["RANK"])
    path = RunFolder(Path(argv[0])).rank_error(int(argv[2]), node, rank)
    error = {
        "time": time.time(),
        "rank": rank,
        "node": node,
        "type": "ValueError",
        "message": message,
        "traceback": f"Traceback (most recent call last):\nValueError: {message}",
        "consequence": consequence,
        "exit_code": exit_code,
        "hint": "do it otherwise",
    }
    path.write_text(json.dumps(error))
    return exit_code


def main(argv: list[str]) -> int:
    hub = socket.socket(socket.AF_UNIX)
    hub.connect(os.environ["STANDIN_HUB"])
    lines = hub.makefile("r")

    def say(value: Any) -> None:
        hub.sendall(json.dumps(value).encode() + b"\n")

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    names += ("MASTER_ADDR", "MASTER_PORT", "SEATRIAL_DEVICE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    names += ("CUDA_VISIBLE_DEVICES",)
    print(f"rank {os.environ['RANK']} says hello")
    say({"pid": os.getpid(), "argv": argv, "env": {n: os.environ.get(n) for n in names}})
    for line in lines:
        match json.loads(line):
            case "finish":
                return 0
            case "spawn":
                say(spawn())
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                say("deaf")
            case "raise":
                raise ZeroDivisionError("as the test asked")
            case {"exit": code}:
                os._exit(code)
            case {"fail": arguments}:
                return fail(argv, **arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
