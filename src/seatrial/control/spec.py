"""What one agent is told when it is started, and the commands and environments of what it starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.record.folder import RunFolder

WORKER_MODULE = "seatrial.train.worker"
NURSERY_MODULE = "seatrial.train.nursery"
AGENT_MODULE = "seatrial.control.agent"

# Each of these starts a thread pool at import or at first use. One thread: ranks share the cores, a process that
# forks must have no second thread, and sums in another order would not be bit-equal from run to run.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

# Collectives that are remembered, so that a hang can be told from what each rank entered last.
_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}


@dataclass(frozen=True)
class AgentSpec:
    """The orders of one node's agent. They travel as its command line, so `ps` and `render` show them.

    Which ranks it runs is not among them: the coordinator says so, generation by generation.
    """

    run: Path
    generation: int  # the first of this launch
    node: int  # counts spares too: 0 .. nodes + spares - 1
    nodes: int  # places in the layout; who takes which is decided at each start
    ranks_per_node: int
    device: str  # "cpu" or "cuda"
    spares: int = 0
    address: str = "127.0.0.1"  # where this agent and its ranks can be reached by the others
    interface: str | None = None  # network interface for gloo; None lets it choose
    worker_module: str = WORKER_MODULE

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.run)

    @property
    def log(self) -> Path:
        """stdout and stderr of the agent itself."""
        return self.folder.rank_log(self.generation, self.node, 0).with_name("agent.log")

    @property
    def nursery_log(self) -> Path:
        """stdout and stderr of the nursery: the traceback when the worker module cannot be imported."""
        return self.log.with_name("nursery.log")

    def rank_log(self, generation: int, rank: int) -> Path:
        """stdout and stderr of a rank that this node started for `generation`."""
        return self.folder.rank_log(generation, self.node, rank)

    def agent_command(self) -> list[str]:
        """The agent's command line, without the options that only a launcher on this machine adds."""
        command = [
            *_python(AGENT_MODULE),
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

    def nursery_command(self) -> list[str]:
        return [*_python(NURSERY_MODULE), "--worker-module", self.worker_module]

    def worker_arguments(self, generation: int) -> list[str]:
        """What a rank that begins in `generation` is given, forked or not."""
        return [str(self.run), "--generation", str(generation)]

    def worker_command_prefix(self) -> list[str]:
        """The command of one rank that is not forked, before its arguments."""
        return _python(self.worker_module)

    def node_environment(self) -> dict[str, str]:
        """What the environment of every process of this node has beyond the agent's own."""
        environment = {"SEATRIAL_DEVICE": self.device, "PYTHONUNBUFFERED": "1", **_FLIGHT_RECORDER}
        if self.device == "cpu":
            environment |= _ONE_THREAD
        elif "OMP_NUM_THREADS" not in os.environ:
            # Each rank would start a pool over all cores of the host.
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.ranks_per_node))
        if self.interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = self.interface
        return environment

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
    ) -> dict[str, str]:
        """torchrun's variables for a rank in `slot` of `slots` places, beyond `node_environment`."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(slot),
            "GROUP_WORLD_SIZE": str(slots),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what an outer torchrun left: with it torch would join the wrong store."""
    return {k: v for k, v in environment.items() if not k.startswith("TORCHELASTIC_")}


def _python(module: str) -> list[str]:
    # -P: the folder we are started in is not searched, so that a `random.py` lying there is not imported.
    return [sys.executable, "-P", "-m", module]


@dataclass(frozen=True)
class LocalOptions:
    """What a launcher on the same machine adds: the channel between them, and whose death to watch for."""

    channel: int | None
    parent: int | None


def parse_agent_arguments(argv: Sequence[str]) -> tuple[AgentSpec, LocalOptions]:
    """The inverse of `AgentSpec.agent_command`, without the part that names the interpreter and the module."""
    parser = argparse.ArgumentParser(
        prog=AGENT_MODULE, description="Starts and watches the ranks of one node."
    )
    parser.add_argument("--run", type=Path, required=True)
    for name in ("--generation", "--node", "--nodes", "--spares", "--ranks-per-node"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--interface")
    parser.add_argument("--worker-module", default=WORKER_MODULE)
    parser.add_argument("--channel", type=int, metavar="FD")
    parser.add_argument("--parent", type=int, metavar="PID")
    values = vars(parser.parse_args(argv))
    options = LocalOptions(values.pop("channel"), values.pop("parent"))
    return AgentSpec(**values), options
