"""A worker without torch that does steps without end, and leaves in order when it is asked to."""

from __future__ import annotations

import os
import select
import sys

from seatrial.base.lines import Channel


def main(argv: list[str]) -> int:
    agent = Channel.connect(os.environ["SEATRIAL_SUPERVISOR"])
    agent.send({"hello": {"pid": os.getpid(), "token": os.environ["SEATRIAL_SUPERVISOR_TOKEN"]}})
    generation = step = 0
    while not agent.closed:
        select.select([agent], [], [], 0.1)
        for message in agent.receive():
            match message:
                case {"rank_spec": rank_spec}:
                    generation = rank_spec["generation"]
                case {"yield": {"how": how}}:
                    agent.send({"finished": {"generation": generation, "how": how, "step": step}})
                    generation = 0
                case {"exit": _}:
                    return 0
        if generation:
            step += 1
            beat = {"step": step, "seconds": 0.1, "generation": generation, "first": step == 1}
            agent.send({"beat": beat})
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
