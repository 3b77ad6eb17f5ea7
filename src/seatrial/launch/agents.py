"""The agents of one launch as child processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.base import process
from seatrial.base.lines import Channel
from seatrial.control.node.spec import AgentSpec, clean_environment


@dataclass
class AgentHandle:
    """A running agent process, as its launcher sees it."""

    spec: AgentSpec
    mark: str  # of every process that was started here for it
    popen: subprocess.Popen[bytes]
    channel: Channel
    pidfd: int
    log: Path  # stderr of its process on this machine
    status_text: Callable[[int], str]
    connected: bool = False  # has sent a message
    heard: float | None = None  # its last heartbeat on the monotonic clock, if it sends any
    closed: bool = False
    bye: bool = False  # has reported that nothing of its node is left running
    killed: bool = False  # by us
    status: int | None = None  # once it has ended
    ended_at: float = 0.0  # unix seconds

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def gone(self) -> bool:
        """Whether it has ended, or reported that nothing of its node is left."""
        return self.ended or self.bye

    @property
    def died(self) -> bool:
        """Whether it exited without sending `bye` and without being killed by us."""
        return self.ended and not self.bye and not self.killed

    @property
    def cause(self) -> str:
        """How it ended: "was killed by SIGKILL"."""
        assert self.status is not None
        return self.status_text(self.status)

    def kill(self) -> None:
        if not self.ended:
            self.killed = True
            self.popen.kill()

    def kill_rest(self) -> None:
        """Kill the processes it started and left behind, whatever their parent is now."""
        process.kill_all(lambda: process.marked(self.mark))

    def reap(self) -> None:
        """Wait for its process and note how and when it ended."""
        self.status = self.popen.wait()
        self.ended_at = time.time()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.channel.close()
            os.close(self.pidfd)


def start_agent(
    spec: AgentSpec,
    mark: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    status_text: Callable[[int], str] = process.status_text,
    own_session: bool = False,
) -> AgentHandle:
    """Start an agent by `command` as a child process, with the channel as its stdin and stdout. Raises OSError.

    `log` takes its stderr, by default the agent's own log; `status_text` describes how it ended. `own_session`: without the
    controlling terminal of this process, so that it cannot prompt for a password there.
    """
    ours, theirs = Channel.pair()
    ours.greeting = True
    log = log or spec.log
    try:
        with open(process.open_log(log), "ab") as log_file:
            popen = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=log_file,
                env=clean_environment(os.environ) | dict(environment or {}) | {process.MARK: mark},
                # Ctrl-C in the terminal is for us only: we stop the agents cleanly. A group and not a session: if we
                # die, it is orphaned, the kernel continues an agent that was stopped in it, and that one can clean up.
                process_group=None if own_session else 0,
                start_new_session=own_session,
            )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return AgentHandle(spec, mark, popen, ours, os.pidfd_open(popen.pid), log, status_text)


def end_agents(agents: Sequence[AgentHandle]) -> None:
    """Kill those of `agents` that are still alive and everything they started, and release their resources here."""
    for agent in agents:
        if not agent.ended:
            agent.popen.kill()
            agent.popen.wait()
    if agents:
        process.kill_all(lambda: process.marked(*(a.mark for a in agents)))
    for agent in agents:
        agent.close()
