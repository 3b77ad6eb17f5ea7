"""The monitor of a live run: `python -m seatrial.watch.monitor RUN`, started by the coordinator's agent.

It follows the run folder, evaluates the alert rules, and runs what else follows a live run (`followers`). It writes
nothing to the records: it sends the coordinator what to record, over its stdin and stdout. It ends when asked to, or
with its agent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from seatrial.base.lines import Channel
from seatrial.job import Job
from seatrial.record import inputs
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.watch.alerts.alerting import Alerting
from seatrial.watch.columns import KeptColumns
from seatrial.watch.follows import Follows, Tell
from seatrial.watch.trackers.feeders import Feeders

_EVERY_S = 1.0


def followers(folder: RunFolder, job: Job, tell: Tell) -> list[Follows]:
    """Everything that follows a live run: the one place where it is started."""
    following: list[Follows] = [Alerting(folder, job, tell), KeptColumns(folder)]
    if job.file.watch.trackers:
        following.append(Feeders(folder, job.file.watch.trackers, tell))
    return following


def main(argv: Sequence[str] | None = None) -> int:
    (run,) = sys.argv[1:] if argv is None else argv
    channel = Channel.stdio(os.dup(2))
    folder = RunFolder(Path(run))
    job = inputs.job_of(folder, inputs.frozen(folder))

    def tell(message: msg.FromMonitor) -> None:
        channel.send(msg.encode(message))

    following = followers(folder, job, tell)
    end: msg.EndMonitor | None = None
    while end is None and not channel.closed:
        for each in following:
            each.poll(time.time())
        channel.readable(_EVERY_S)
        for message in channel.receive():
            end = msg.decode(message, msg.EndMonitor)
    if end is not None:
        until = time.monotonic() + end.within_s
        for each in following:
            each.poll(time.time())
        for each in following:
            each.close(until)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads that still wait for a network must not hold up the end
