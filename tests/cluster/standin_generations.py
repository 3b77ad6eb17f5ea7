"""A worker without torch that is supervised: it takes generations from its agent, parks, and obeys its test in between.

What it is told by the agent it passes on to the test; what it says to the agent, the test has told it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from typing import Any

from seatrial.base.lines import Channel


def main(argv: list[str]) -> int:
    hub = socket.socket(socket.AF_UNIX)
    hub.connect(os.environ["STANDIN_HUB"])
    test = Channel(hub)
    agent = Channel.connect(os.environ["SEATRIAL_SUPERVISOR"])
    test.send({"pid": os.getpid(), "argv": argv, "env": {"RANK": os.environ["RANK"]}})
    agent.send({"hello": {"pid": os.getpid(), "token": os.environ["SEATRIAL_SUPERVISOR_TOKEN"]}})
    generation = -1

    def leave(how: str) -> None:
        agent.send({"finished": {"generation": generation, "how": how, "step": 1}})

    while not (agent.closed or test.closed):
        select.select([agent, test], [], [])
        for message in agent.receive():
            match message:
                case {"rank_spec": rank_spec}:
                    generation = rank_spec["generation"]
                case {"abandon": {"generation": given_up}} if given_up >= generation:
                    parked: dict[str, Any] = {"generation": generation, "step": 1, "message": "abandoned"}
                    agent.send({"parked": parked})
                case {"yield": {"how": how}}:
                    leave(how)
            test.send(message)
            if "exit" in message:
                return 0
        for order in test.receive():
            match order:
                case {"beat": step}:
                    beat = {"step": step, "seconds": 0.1, "generation": generation, "first": step == 1}
                    agent.send({"beat": beat})
                case {"say": message}:
                    agent.send(message)
                case {"finish": how}:
                    leave(how)
                    if how == "done":
                        return 0
                case {"exit": code}:
                    os._exit(code)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
