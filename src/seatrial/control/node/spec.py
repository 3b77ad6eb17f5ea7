"""The start parameters of an agent, and the commands and environments of the processes that it starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.base import process
from seatrial.control.node.environment import Facts, NodeEnvironment, Variable, node_variables
from seatrial.hardware.topology import Ports, local_gpus, rdma_ports, transport_facts, usable_cores
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.job import Job

WORKER_MODULE = "seatrial.train.worker"
FORK_SERVER_MODULE = "seatrial.train.supervision.fork_server"
AGENT_MODULE = "seatrial.control.agent"
AUTO = "auto"  # determined by the agent on its own host


@dataclass(frozen=True)
class AgentSpec:
    """The start parameters of one node's agent. A launcher that attends it passes them on the command line.

    The ranks that it runs are not among them: the coordinator assigns them in each generation.
    """

    run: Path
    generation: int  # the first of this launch
    node: int  # 0 .. nodes + spares - 1; higher: a spare beyond the configured ones
    nodes: int  # slots in the layout; each start decides which node gets which
    ranks_per_node: int
    device: str  # "cpu", "cuda", or AUTO
    spares: int = 0
    address: str = "127.0.0.1"  # where the others reach this agent and its ranks, or AUTO
    interface: str | None = None  # network interface for gloo and NCCL; None lets them choose
    worker_module: str = WORKER_MODULE
    # Not on the command line:
    route_reason: str = "the other nodes reach this node there"  # why this address and interface
    incarnation: str = ""  # unique to each agent started with this node number; "": the agent generates one
    order: str = ""  # sorts the nodes into slots at the first start; equal ones by their numbers

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.run)

    @property
    def log(self) -> Path:
        """stdout and stderr of the agent itself."""
        return self.folder.rank_log(self.generation, self.node, 0).with_name("agent.log")

    @property
    def environment_json(self) -> Path:
        """The environment of this node's ranks, with reasons."""
        return self.log.with_name("environment.json")

    @property
    def fork_server_log(self) -> Path:
        """stdout and stderr of the fork server: the traceback when the worker module cannot be imported."""
        return self.log.with_name("nursery.log")

    def rank_log(self, generation: int, rank: int) -> Path:
        """stdout and stderr of a rank that this node started for `generation`."""
        return self.folder.rank_log(generation, self.node, rank)

    def agent_command(self, interpreter: str | None = None) -> list[str]:
        """The agent's command line, without `--attended`."""
        command = [
            *process.python(AGENT_MODULE, interpreter=interpreter),
            *("--run", str(self.run)),
            *("--generation", str(self.generation)),
            *("--node", str(self.node)),
            *("--nodes", str(self.nodes)),
            *("--spares", str(self.spares)),
            *("--ranks-per-node", str(self.ranks_per_node)),
            *("--address", self.address),
            *("--device", self.device),
        ]
        if self.interface is not None:
            command += ["--interface", self.interface]
        if self.worker_module != WORKER_MODULE:
            command += ["--worker-module", self.worker_module]
        return command

    def fork_server_command(self) -> list[str]:
        return process.python(FORK_SERVER_MODULE, "--worker-module", self.worker_module)

    def worker_arguments(self, generation: int) -> list[str]:
        """Arguments of a rank that starts in `generation`, forked or not."""
        return [str(self.run), "--generation", str(generation)]

    def worker_command_prefix(self) -> list[str]:
        """The command of one rank that is not forked, before its arguments."""
        return process.python(self.worker_module)

    def node_environment(self, job: Job, yours: Mapping[str, str]) -> NodeEnvironment:
        """What every rank of this node gets beyond `yours`, the agent's own environment; inspects the local host."""
        cuda = self.device == "cuda"
        gpus = local_gpus(yours, os.sched_getaffinity(0))[: self.ranks_per_node] if cuda else []
        ports = rdma_ports(gpus) if cuda else Ports((), "not used by ranks on CPU")
        facts = Facts(
            device=self.device,
            ranks=self.ranks_per_node,
            cores=usable_cores(),
            address=self.address,
            interface=self.interface,
            route_reason=self.route_reason,
            collective_timeout_s=job.collective_timeout_s,
            dumps=str(self.log.with_name("flight-rank")),
            ports=ports,
            deterministic=job.train.deterministic,
        )
        entries = [f"InfiniBand and RoCE: {ports.reason}", *transport_facts()] if cuda else []
        return NodeEnvironment(node_variables(facts, yours), gpus, entries)

    def worker_environment(
        self,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        slot: int,
        slots: int,
        master_addr: str,
        master_port: int,
    ) -> list[Variable]:
        """torchrun's variables for a rank in `slot` of `slots` places, beyond `node_environment`."""
        return [
            Variable("RANK", str(rank), "its place in the layout"),
            Variable("LOCAL_RANK", str(local_rank), "which of its node's ranks, and of its GPUs"),
            Variable("WORLD_SIZE", str(world_size), "ranks of this generation"),
            Variable("LOCAL_WORLD_SIZE", str(self.ranks_per_node), "cluster.gpus_per_node"),
            Variable("GROUP_RANK", str(slot), "the slot of its node"),
            Variable("GROUP_WORLD_SIZE", str(slots), "slots of this generation"),
            Variable("MASTER_ADDR", master_addr, "the node of slot 0, where rank 0 serves the store"),
            Variable("MASTER_PORT", str(master_port), "cluster.port, or a free one of that node"),
        ]


def spec_of(job: Job, folder: RunFolder, generation: int, node: int, **more: Any) -> AgentSpec:
    """The spec for the agent of `node` in the start whose first generation is `generation`; `more`: further fields."""
    cluster = job.cluster
    return AgentSpec(
        run=folder.path.absolute(),
        generation=generation,
        node=node,
        nodes=cluster.nodes,
        spares=cluster.spares,
        ranks_per_node=cluster.gpus_per_node,
        **more,
    )


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables of an outer torchrun, with which torch would join the wrong store."""
    return {k: v for k, v in environment.items() if not k.startswith("TORCHELASTIC_")}


def parse_agent_arguments(argv: Sequence[str]) -> tuple[AgentSpec, bool]:
    """The inverse of `AgentSpec.agent_command`, without the part that names the interpreter and the module.

    Also returns whether the agent is attended: its stdin and stdout lead to its launcher, and it exits with it.
    """
    parser = argparse.ArgumentParser(
        prog=AGENT_MODULE, description="Starts and watches the ranks of one node."
    )
    parser.add_argument("--run", type=Path, required=True)
    for name in ("--generation", "--node", "--nodes", "--spares", "--ranks-per-node"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda", AUTO), required=True)
    parser.add_argument("--interface")
    parser.add_argument("--worker-module", default=WORKER_MODULE)
    parser.add_argument(
        "--attended", action="store_true", help="stdin and stdout are connected to a launcher"
    )
    values = vars(parser.parse_args(argv))
    attended = values.pop("attended")
    return AgentSpec(**values), attended
