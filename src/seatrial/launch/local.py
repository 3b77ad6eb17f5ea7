"""The virtual cluster: every node is an agent process on this machine, and its ranks are processes below it."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from seatrial.base import process
from seatrial.base.errors import InputError
from seatrial.control.agent.ports import check_loopback, check_port
from seatrial.control.node.environment import Variable
from seatrial.control.node.spec import WORKER_MODULE, AgentSpec, spec_of
from seatrial.hardware.devices import choose_device, visible_devices
from seatrial.hardware.topology import cpu_list
from seatrial.launch.agents import AgentHandle, start_agent
from seatrial.launch.attended import attend
from seatrial.launch.base import Outcome
from seatrial.launch.netns import Hosts, Unavailable, check_available, isolated
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.job import Job

_LOOPBACK = "127.0.0.1"
# Files per process: each gloo process group connects its ranks (measured: 4 ranks need 50, 8 need 70).
_FILES, _FILES_A_RANK = 32, 6


class LocalLauncher:
    """Starts one agent per node and per spare on this machine."""

    name = "local"

    def __init__(
        self,
        hosts: Hosts | None = None,
        *,
        returns: Mapping[int, float] | None = None,
        worker_module: str = WORKER_MODULE,
    ) -> None:
        """`hosts` gives each agent its own network, as on separate machines; without it `cluster.namespaces` does.

        `returns`: node -> seconds until its agent, once ended, is started again, as if the node came back.
        `worker_module`: what ranks run.
        """
        self.hosts = hosts
        self.returns = dict(returns or {})
        self.worker_module = worker_module
        self._made: Hosts | None = None  # for `cluster.namespaces`

    def check(self, job: Job) -> None:
        """Raise InputError if the port is taken, the device is unavailable, or the open-file limit is too low."""
        if not sys.platform.startswith("linux"):
            raise InputError(
                f"the virtual cluster needs Linux, not {sys.platform}",
                hint="run it in a Linux container or virtual machine",
            )
        if job.cluster.namespaces:
            try:
                check_available("ip", "tc", "unshare")
            except Unavailable as error:
                raise job.refusal("cluster.namespaces", error.message, "remove it, or run as root") from None
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

    def specs(self, job: Job, folder: RunFolder, generation: int) -> list[AgentSpec]:
        """The spec of each agent; spares come last."""
        device, _reason = choose_device(job.cluster)
        cluster, hosts = job.cluster, self._hosts_of(job)
        return [
            spec_of(
                job,
                folder,
                generation,
                node,
                address=_LOOPBACK if hosts is None else hosts.address(node),
                device=device,
                interface="lo" if hosts is None else hosts.interface,
                worker_module=self.worker_module,
            )
            for node in range(cluster.nodes + cluster.spares)
        ]

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        """The agents' commands, with what each starts as comments: the text of `commands.sh`."""
        cluster = job.cluster
        blocks = []
        specs = self.specs(job, folder, generation)
        for spec in specs:
            extra = " ".join(f"{k}={shlex.quote(v)}" for k, v in _gpus_of(spec).items())
            command = shlex.join([*self._prefix(job, spec.node), *spec.agent_command()])
            worker = [*spec.worker_command_prefix(), *spec.worker_arguments(generation)]
            node = spec.node_environment(job, os.environ | _gpus_of(spec))
            block = (
                f"{extra} {command}\n".lstrip()
                + f"# starts {shlex.join(spec.fork_server_command())}   # forks its ranks, each as if by\n"
                + f"#   {shlex.join(worker)}\n"
                + "# every rank of it:\n"
                + _comments(node.variables)
            )
            block += "".join(
                f"# local rank {i}: {'CPUs ' + cpu_list(gpu.cpus) if gpu.cpus else 'any CPU'} ({gpu.reason})\n"
                for i, gpu in enumerate(node.gpus)
            )
            block += "".join(f"# {fact}\n" for fact in node.facts)
            if spec.node < cluster.nodes:
                first = spec.node * cluster.gpus_per_node
                environment = spec.worker_environment(
                    rank=first,
                    local_rank=0,
                    world_size=cluster.nodes * cluster.gpus_per_node,
                    slot=spec.node,
                    slots=cluster.nodes,
                    master_addr=specs[0].address,
                    master_port=cluster.port or 0,
                )
                block += f"# rank {first} at first (port 0: chosen at the start):\n" + _comments(environment)
                block += f"# its log: {spec.rank_log(generation, first)}\n"
            else:
                block += "# a spare: it has no ranks until it replaces a lost node\n"
            blocks.append(block)
        return {"commands.sh": "\n".join(blocks)}

    def launch(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        *,
        tick: Callable[[], None] | None = None,
    ) -> Outcome:
        """Run the job to its end on this machine. No process it started is left when it returns or raises.

        Call it from the main thread: SIGTERM and SIGHUP then save the state and end the run (outcome 75), SIGINT ends
        it (130), and a second signal ends it at once. Raises InputError like `check`, and if the log folder cannot
        be made.
        """
        if job.cluster.port is not None:
            check_port(job.cluster.port)
        hosts = self._hosts_of(job)
        specs = self.specs(job, folder, generation)
        launch_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        numbers = itertools.count()  # each start of an agent has its own mark

        def start(node: int) -> AgentHandle:
            spec = specs[node]
            return start_agent(
                spec,
                f"{launch_id}/{next(numbers)}/node{node}",
                [*self._prefix(job, node), *spec.agent_command(), "--attended"],
                environment=_gpus_of(spec),
            )

        with contextlib.nullcontext() if hosts is None or self.hosts is not None else hosts:
            return attend(
                job,
                folder,
                generation,
                specs,
                start,
                returns=lambda agent: self.returns.get(agent.spec.node),
                tick=tick,
            )

    def _hosts_of(self, job: Job) -> Hosts | None:
        """The hosts of the nodes, created or not yet; None if they share this machine's network."""
        cluster = job.cluster
        if self.hosts is None and cluster.namespaces and self._made is None:
            self._made = Hosts(cluster.nodes + cluster.spares)
        return self.hosts or self._made

    def _prefix(self, job: Job, node: int) -> list[str]:
        hosts = self._hosts_of(job)
        apart = isolated(f"node{node}") if job.cluster.namespaces else []
        return apart if hosts is None else [*hosts.prefix(node), *apart]


def _comments(variables: Sequence[Variable]) -> str:
    """Variables as comments, with the reason for each."""
    return "".join(
        f"#   {v.name}={v.value}   # {'yours: ' if v.source == 'yours' else ''}{v.reason}\n"
        for v in variables
    )


def _check_spare_gpus(job: Job, device: str) -> None:
    """Check that virtual spares have GPUs of their own, as spare machines do."""
    cluster = job.cluster
    need, have = (cluster.nodes + cluster.spares) * cluster.gpus_per_node, len(visible_devices())
    if device == "cuda" and cluster.spares and need > have:
        raise InputError(
            f"spares = {cluster.spares}: {cluster.nodes} + {cluster.spares} nodes x {cluster.gpus_per_node} GPUs = {need}, "
            f"but there are {have} on this machine",
            hint='remove `spares`, or set device = "cpu" to try it out',
        )


def _gpus_of(spec: AgentSpec) -> dict[str, str]:
    """Virtual nodes share one machine's GPUs: each sees its own part, so that LOCAL_RANK names different GPUs."""
    if spec.device != "cuda" or spec.nodes + spec.spares == 1:
        return {}
    first = spec.node * spec.ranks_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_devices()[first : first + spec.ranks_per_node])}
