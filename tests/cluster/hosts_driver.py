"""A run whose nodes are hosts with networks of their own; each line on stdin does something to one of them.

`python hosts_driver.py JOB`: what `seatrial train` shows on stderr; "down 1", "up 1", "slow 1 20" (Mbit/s), "fast 1".
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from seatrial.base import process
from seatrial.job import load_job
from seatrial.launch import LocalLauncher
from seatrial.launch.netns import Hosts
from seatrial.launch.session import prepare_session
from seatrial.ui.console import TrainConsole


def main() -> int:
    process.die_with_parent(os.getppid())
    job = load_job(Path(sys.argv[1]))
    with Hosts(job.cluster.nodes + job.cluster.spares) as hosts:
        actions = {"down": hosts.down, "up": hosts.up, "slow": hosts.slow, "fast": hosts.fast}
        session = prepare_session(job, Path("runs"))
        with (
            session.opened as opened,
            TrainConsole(
                opened.folder, total_steps=job.train.steps, generation=opened.generation, plain=True
            ) as console,
        ):

            def tick() -> None:
                console.poll()
                while select.select([sys.stdin], [], [], 0)[0] and (line := sys.stdin.readline()):
                    what, host, *rate = line.split()
                    actions[what](int(host), *map(float, rate))
                    print(f"did {line.strip()}", file=sys.stderr, flush=True)

            return session.run(tick, launcher=LocalLauncher(hosts)).exit_code


if __name__ == "__main__":
    sys.exit(main())
