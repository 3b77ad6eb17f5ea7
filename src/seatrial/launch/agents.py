"""The agents of one launch as processes: started, told to stop, outlived."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seatrial.base import process
from seatrial.base.lines import Channel
from seatrial.control.spec import AgentSpec, clean_environment


@dataclass
class AgentHandle:
    """One running agent, as its launcher holds it."""

    spec: AgentSpec
    mark: str
    popen: subprocess.Popen[bytes]
    channel: Channel
    pidfd: int
    bye: bool = False  # said that nothing of its node is left
    killed: bool = False  # by us
    status: int | None = None  # once it has ended
    ended_at: float = 0.0  # unix seconds

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def gone(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.ended or self.bye

    @property
    def died(self) -> bool:
        """Whether it ended of itself and without having said so."""
        return self.ended and not self.bye and not self.killed

    @property
    def cause(self) -> str:
        """What ended it: "was killed by SIGKILL"."""
        assert self.status is not None
        return process.status_text(self.status)

    def kill(self) -> None:
        if not self.ended:
            self.killed = True
            self.popen.kill()

    def kill_rest(self) -> None:
        """Kill what it started and left behind, whoever is the parent of that now."""
        process.kill_all(lambda: process.marked(self.mark))

    def take_end(self) -> None:
        """Note how it ended; waits for that."""
        self.status = self.popen.wait()
        self.ended_at = time.time()

    def close(self) -> None:
        self.channel.close()
        os.close(self.pidfd)


def start_agent(
    spec: AgentSpec, mark: str, *, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AgentHandle:
    """Start an agent below this process. `prefix` is a command that executes the rest of its line. Raises OSError."""
    ours, theirs = Channel.pair()
    command = [
        *prefix,
        *spec.agent_command(),
        *("--channel", str(theirs.fileno())),
        *("--parent", str(os.getpid())),
    ]
    try:
        with open(process.open_log(spec.log), "ab") as log:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment(os.environ) | dict(environment or {}) | {process.MARK: mark},
                pass_fds=(theirs.fileno(),),
                # Ctrl-C in the terminal is for us alone: we stop the agents in order. A group and not a session: when
                # we die, the kernel continues a stopped agent in what is then an orphaned group, and it can clean up.
                process_group=0,
            )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return AgentHandle(spec, mark, popen, ours, os.pidfd_open(popen.pid))


def end_agents(agents: Sequence[AgentHandle]) -> None:
    """Kill what still lives of `agents` and of everything they started, and free what they held here."""
    for agent in agents:
        if not agent.ended:
            agent.popen.kill()
            agent.popen.wait()
    if agents:
        process.kill_all(lambda: process.marked(*(a.mark for a in agents)))
    for agent in agents:
        agent.close()
