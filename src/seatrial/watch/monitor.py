"""The monitor of a live run: `python -m seatrial.watch.monitor RUN`, started by the coordinator's agent.

It follows the run folder, evaluates the alert rules, and runs the other tasks of `monitor_tasks`. It writes
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
from seatrial.watch.columns import ColumnCacheWriter
from seatrial.watch.monitor_task import MonitorTask, Send
from seatrial.watch.trackers.feeders import Feeders

_EVERY_S = 1.0


def monitor_tasks(folder: RunFolder, job: Job, send: Send) -> list[MonitorTask]:
    """All tasks of the monitor."""
    following: list[MonitorTask] = [Alerting(folder, job, send), ColumnCacheWriter(folder)]
    if job.file.watch.trackers:
        following.append(Feeders(folder, job.file.watch.trackers, send))
    return following


def main(argv: Sequence[str] | None = None) -> int:
    (run,) = sys.argv[1:] if argv is None else argv
    channel = Channel.stdio(os.dup(2))
    folder = RunFolder(Path(run))
    job = inputs.job_of(folder, inputs.frozen(folder))

    def send(message: msg.FromMonitor) -> None:
        channel.send(msg.encode(message))

    following = monitor_tasks(folder, job, send)
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
    os._exit(status)  # do not wait for threads blocked on the network
