"""The virtual cluster: every node is an agent process on this machine, every rank a process below it."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from seatrial.base import process
from seatrial.base.errors import InputError
from seatrial.base.signals import SignalQueue
from seatrial.control.ports import check_loopback, check_port
from seatrial.control.spec import WORKER_MODULE, AgentSpec
from seatrial.hardware.devices import choose_device, visible_devices
from seatrial.launch.agents import AgentHandle, start_agent
from seatrial.launch.base import Outcome
from seatrial.launch.gather import Gathering
from seatrial.launch.netns import Hosts
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.job import Job

_LOOPBACK = "127.0.0.1"
# Files per process: each gloo group connects its ranks (measured: 4 ranks need 50, 8 need 70).
_FILES, _FILES_A_RANK = 32, 6


class LocalLauncher:
    """Starts one agent for each node and each spare on this machine."""

    name = "local"

    def __init__(self, hosts: Hosts | None = None, *, returns: Mapping[int, float] | None = None) -> None:
        """`hosts` gives each agent a network of its own, as on separate machines.

        `returns`: node -> seconds after which an agent of it that ended is started again, as if the node came back.
        """
        self.hosts = hosts
        self.returns = dict(returns or {})

    def check(self, job: Job) -> None:
        """Raise InputError if the port is taken, the device is unavailable, or the open-file limit is too low."""
        if not sys.platform.startswith("linux"):
            raise InputError(
                f"the virtual cluster needs Linux, and this is {sys.platform}",
                hint="run it in a Linux container or virtual machine",
            )
        with job.about("cluster.device"):
            device, _reason = choose_device(job.cluster)
        with job.about("cluster.spares"):
            _check_spare_gpus(job, device)
        ranks = job.cluster.nodes * job.cluster.gpus_per_node
        process.allow_files(_FILES + _FILES_A_RANK * ranks, "the ranks")
        check_loopback()
        if job.cluster.port is not None:
            with job.about("cluster.port"):
                check_port(job.cluster.port)

    def specs(
        self, job: Job, folder: RunFolder, generation: int, *, worker_module: str = WORKER_MODULE
    ) -> list[AgentSpec]:
        """The orders for each agent; those of the spares come last."""
        device, _reason = choose_device(job.cluster)
        cluster, hosts = job.cluster, self.hosts
        return [
            AgentSpec(
                run=folder.path.absolute(),
                generation=generation,
                node=node,
                nodes=cluster.nodes,
                spares=cluster.spares,
                ranks_per_node=cluster.gpus_per_node,
                address=_LOOPBACK if hosts is None else hosts.address(node),
                device=device,
                interface="lo" if hosts is None else hosts.interface,
                worker_module=worker_module,
            )
            for node in range(cluster.nodes + cluster.spares)
        ]

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> str:
        """The agents' commands and, as comments, what each starts."""
        cluster = job.cluster
        blocks = []
        for spec in self.specs(job, folder, generation):
            extra = " ".join(f"{k}={shlex.quote(v)}" for k, v in _gpus_of(spec).items())
            command = shlex.join([*self._prefix(spec.node), *spec.agent_command()])
            if spec.device == "cpu":
                starts = f"{shlex.join(spec.nursery_command())}   # forks its ranks, each as if by"
            else:
                starts = "its ranks, each by"
            worker = [*spec.worker_command_prefix(), *spec.worker_arguments(generation)]
            node_env = _assignments(spec.node_environment())
            block = (
                f"{extra} {command}\n".lstrip()
                + f"# starts {starts}\n"
                + f"#   {shlex.join(worker)}\n"
                + f"# every rank: {node_env}\n"
            )
            if spec.node < cluster.nodes:
                first = spec.node * cluster.gpus_per_node
                environment = spec.worker_environment(
                    rank=first,
                    local_rank=0,
                    world_size=cluster.nodes * cluster.gpus_per_node,
                    slot=spec.node,
                    slots=cluster.nodes,
                    master_addr=_LOOPBACK if self.hosts is None else self.hosts.address(0),
                    master_port=cluster.port or 0,
                )
                block += (
                    f"# rank {first} at first (port 0: chosen at the start): {_assignments(environment)}\n"
                )
                block += f"# its log: {spec.rank_log(generation, first)}\n"
            else:
                block += "# a spare: it has no ranks until it takes the place of a lost node\n"
            blocks.append(block)
        return "\n".join(blocks)

    def launch(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        *,
        tick: Callable[[], None] | None = None,
        worker_module: str = WORKER_MODULE,
    ) -> Outcome:
        """Run the job to its end on this machine. Nothing that was started is left when it returns or raises.

        Call it from the main thread: SIGTERM and SIGHUP then save the state and end the run (outcome 75), SIGINT ends
        it (130), and a second signal does not wait. Raises InputError as `check` does, and where the log folder cannot
        be made.
        """
        if job.cluster.port is not None:
            check_port(job.cluster.port)
        specs = self.specs(job, folder, generation, worker_module=worker_module)
        for spec in specs:
            try:
                spec.log.parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise InputError(
                    f"cannot make the log folder {spec.log.parent}: {e.strerror}",
                    hint="choose a folder that you may write to",
                ) from e
        launch_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        numbers = itertools.count()  # an agent that comes back is another one

        def start(node: int) -> AgentHandle:
            spec = specs[node]
            return start_agent(
                spec,
                f"{launch_id}/{next(numbers)}/node{node}",
                prefix=self._prefix(node),
                environment=_gpus_of(spec),
            )

        with _queued_signals() as signals:
            gathering = Gathering(
                folder,
                generation,
                start,
                preempt_grace_s=job.resilience.preempt_grace_s,
                returns=self.returns,
                tick=tick,
            )
            try:
                for spec in specs:
                    gathering.start(spec.node)
                return gathering.follow(signals)
            finally:
                gathering.close()

    def _prefix(self, node: int) -> list[str]:
        return [] if self.hosts is None else self.hosts.prefix(node)


def _assignments(environment: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in environment.items())


def _check_spare_gpus(job: Job, device: str) -> None:
    """Virtual spares need GPUs of their own, as spare machines have them."""
    cluster = job.cluster
    need, have = (cluster.nodes + cluster.spares) * cluster.gpus_per_node, len(visible_devices())
    if device == "cuda" and cluster.spares and need > have:
        raise InputError(
            f"spares = {cluster.spares}: {cluster.nodes} + {cluster.spares} nodes x {cluster.gpus_per_node} GPUs = {need}, "
            f"but there are {have} on this machine",
            hint='remove `spares`, or set device = "cpu" to try it out',
        )


def _gpus_of(spec: AgentSpec) -> dict[str, str]:
    """Virtual nodes share one machine's GPUs: each sees its own part, so that LOCAL_RANK names different ones."""
    if spec.device != "cuda" or spec.nodes + spec.spares == 1:
        return {}
    first = spec.node * spec.ranks_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_devices()[first : first + spec.ranks_per_node])}


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
