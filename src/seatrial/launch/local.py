"""The virtual cluster: every node is an agent process on this machine, every rank a process below it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from seatrial.base import process
from seatrial.base.errors import InputError
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue
from seatrial.control.reports import Report
from seatrial.control.spec import WORKER_MODULE, AgentSpec, clean_environment
from seatrial.hardware.devices import choose_device, visible_devices
from seatrial.launch.base import Outcome
from seatrial.launch.gather import AgentHandle, Gathering, end_agents
from seatrial.launch.ports import check_loopback, check_port, free_port
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.job import Job

_LOOPBACK = "127.0.0.1"


class LocalLauncher:
    """Starts one agent a node on this machine."""

    name = "local"

    def check(self, job: Job) -> None:
        """Raise InputError if the port is taken or the device cannot be had; changes nothing."""
        if not sys.platform.startswith("linux"):
            raise InputError(
                f"the virtual cluster needs Linux, and this is {sys.platform}",
                hint="run it in a Linux container or virtual machine",
            )
        choose_device(job.cluster)
        check_loopback()
        if job.cluster.port is not None:
            check_port(job.cluster.port)

    def specs(
        self, job: Job, folder: RunFolder, generation: int, *, port: int, worker_module: str = WORKER_MODULE
    ) -> list[AgentSpec]:
        """The orders for each node's agent."""
        device, _reason = choose_device(job.cluster)
        return [
            AgentSpec(
                run=folder.path.absolute(),
                generation=generation,
                node=node,
                nodes=job.cluster.nodes,
                ranks_per_node=job.cluster.gpus_per_node,
                master_addr=_LOOPBACK,
                master_port=port,
                device=device,
                interface="lo",
                worker_module=worker_module,
            )
            for node in range(job.cluster.nodes)
        ]

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> str:
        """The agents' commands and, as comments, what each starts; a port that is chosen at launch is shown as 0."""
        blocks = []
        for spec in self.specs(job, folder, generation, port=job.cluster.port or 0):
            extra = " ".join(f"{k}={shlex.quote(v)}" for k, v in _gpus_of(spec).items())
            node_env, rank_env = (
                " ".join(f"{k}={v}" for k, v in env.items())
                for env in (spec.node_environment(), spec.rank_environment(spec.ranks[0]))
            )
            if spec.device == "cpu":
                starts = (
                    f"{shlex.join(spec.nursery_command())}   # forks {len(spec.ranks)} ranks, each as if by"
                )
            else:
                starts = f"{len(spec.ranks)} ranks, each by"
            blocks.append(
                f"{extra} {shlex.join(spec.agent_command())}\n".lstrip()
                + f"# starts {starts}\n"
                + f"#   {shlex.join(spec.worker_command())}\n"
                + f"# every rank: {node_env}\n"
                + f"# rank {spec.ranks[0]}: {rank_env}\n"
                + f"# its log: {spec.rank_log(spec.ranks[0])}\n"
            )
        return "\n".join(blocks)

    def launch(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        *,
        on_report: Callable[[Report], None] | None = None,
        tick: Callable[[], None] | None = None,
        worker_module: str = WORKER_MODULE,
    ) -> Outcome:
        """Run the job to its end on this machine. Nothing that was started is left when it returns or raises.

        Call it from the main thread: SIGINT, SIGTERM and SIGHUP then stop the run in order (outcome 130).
        Raises InputError as `check` does, and where the log folder cannot be made.
        """
        if job.cluster.port is not None:
            check_port(job.cluster.port)
        port = job.cluster.port or free_port()
        specs = self.specs(job, folder, generation, port=port, worker_module=worker_module)
        for spec in specs:
            try:
                spec.log.parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise InputError(
                    f"cannot make the log folder {spec.log.parent}: {e.strerror}",
                    hint="choose a folder that you may write to",
                ) from e
        launch_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        agents: list[AgentHandle] = []
        with _queued_signals() as signals:
            try:
                for spec in specs:
                    agents.append(_start_agent(spec, f"{launch_id}/node{spec.node}"))
            except BaseException:
                end_agents(agents)
                raise
            return Gathering(folder, generation, agents, on_report, tick).follow(signals)


def _gpus_of(spec: AgentSpec) -> dict[str, str]:
    """Virtual nodes share one machine's GPUs: each sees its own part, so that LOCAL_RANK names different ones."""
    if spec.device != "cuda" or spec.nodes == 1:
        return {}
    devices = visible_devices()
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[rank] for rank in spec.ranks)}


def _start_agent(spec: AgentSpec, mark: str) -> AgentHandle:
    ours, theirs = Channel.pair()
    command = [*spec.agent_command(), "--channel", str(theirs.fileno()), "--parent", str(os.getpid())]
    try:
        with open(spec.log, "ab") as log:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment(os.environ) | _gpus_of(spec) | {process.MARK: mark},
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


@contextlib.contextmanager
def _queued_signals() -> Iterator[SignalQueue | None]:
    """The signals that end a run, as a queue; None outside the main thread, where Python takes no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    queue = SignalQueue((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield queue
    finally:
        queue.close()
