"""An agent that does what a test wrote down for it: a JSON list of actions, its first argument."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

from seatrial.base.lines import Channel


def wait_for(channel: Channel, key: str) -> Any:
    """The value of the next message that has `key`; ends with the launcher."""
    while not channel.closed:
        select.select([channel], [], [])
        for message in channel.receive():
            if key in message:
                return message[key]
    sys.exit(9)


def main() -> int:
    actions = json.loads(sys.argv[1])
    channel = Channel.stdio(2)
    print("an agent says hello", flush=True)
    for action in actions:
        match action:
            case {"say": message}:
                channel.send(message)
            case {"wait": key}:
                wait_for(channel, key)
                channel.send({"agent_started": {"node": -1, "pid": os.getpid()}})
            case {"repeat": key}:
                channel.send({"heard": wait_for(channel, key)})
            case {"record": path, "count": count}:  # as whoever coordinates would
                while count:
                    select.select([channel], [], [])
                    for message in channel.receive():
                        with open(path, "a") as f:
                            f.write(json.dumps(message["record"], separators=(",", ":")) + "\n")
                        count -= 1
            case {"spawn": path}:
                daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                with open(path, "w") as f:
                    f.write(str(daemon.pid))
            case {"exit": code}:
                os._exit(code)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
