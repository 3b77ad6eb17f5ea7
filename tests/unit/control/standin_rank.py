"""A rank without torch whose generations tell it what to do: a list of actions beside its log, done one after the other."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from seatrial.base.lines import Channel

if (gate := os.environ.get("STANDIN_GATE")) is not None:
    with open(gate) as f:  # a pipe: the import takes until the test opens it too
        f.read()
if os.environ.get("STANDIN_BROKEN"):
    raise ImportError("as the test asked")


def main(argv: list[str]) -> int:
    agent = Channel.connect(os.environ["SEATRIAL_SUPERVISOR"])
    agent.send({"hello": {"pid": os.getpid(), "token": os.environ["SEATRIAL_SUPERVISOR_TOKEN"]}})
    generation, deaf = -1, False
    while not agent.closed:
        select.select([agent], [], [])
        for message in agent.receive():
            match message:
                case {"rank_spec": rank_spec}:
                    generation = rank_spec["generation"]
                    print(f"generation {generation}", flush=True)
                    for action in json.loads(Path(rank_spec["log"]).with_suffix(".do").read_text()):
                        if action == "deaf":
                            deaf = True
                        elif (code := act(agent, generation, action)) is not None:
                            return code
                case {"abandon": {"generation": given_up}} if given_up >= generation and not deaf:
                    agent.send({"parked": {"generation": generation, "step": 1, "message": "abandoned"}})
                case {"yield": {"generation": left, "how": how}} if left == generation:
                    agent.send({"finished": {"generation": generation, "how": how, "step": 1}})
    return 1


def act(agent: Channel, generation: int, action: Any) -> int | None:
    """Do it; the exit code where it is the last thing to do."""
    match action:
        case "beat":
            beat = {"step": 1, "seconds": 0.1, "generation": generation, "first": True}
            agent.send({"beat": beat})
        case {"beat": step}:
            agent.send({"beat": {"step": step, "seconds": 0.1, "generation": generation, "first": False}})
        case "park":
            agent.send({"parked": {"generation": generation, "step": 1, "message": "peers gone"}})
        case {"finish": how}:
            agent.send({"finished": {"generation": generation, "how": how, "step": 1}})
        case {"say": message}:
            agent.send(message)
        case {"raw": text}:
            agent._socket.sendall(text.encode())
        case "close":
            agent.close()
            signal.pause()
        case {"exit": code}:
            return int(code)
        case {"die": signum}:
            os.kill(os.getpid(), signum)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
