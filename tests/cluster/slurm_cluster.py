"""A real Slurm on this machine: munged, slurmctld and a few slurmd, all in one folder, and ended with it."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "scontrol")
_READY_S = 60.0


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if absent:
        return f"needs {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "needs root: slurmd and munged run as the user of their folders"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@dataclass(frozen=True)
class Slurm:
    """A cluster that answers. `environment` is what its commands need."""

    nodes: tuple[str, ...]
    environment: dict[str, str]

    def run(self, *words: str) -> str:
        """What a command prints; an error of it is one of the test."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def show(self, node: str) -> dict[str, str]:
        """What `scontrol show node` says of State and Reason."""
        text = self.run("scontrol", "show", "node", node, "--oneliner")
        words = dict(w.split("=", 1) for w in text.split() if "=" in w)
        reason = text.partition("Reason=")[2].partition(" [")[0]
        return {"state": words["State"], "reason": reason.strip()}


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def slurm(folder: Path, nodes: tuple[str, ...], switches: Mapping[str, str] | None = None) -> Iterator[Slurm]:
    """`switches`: leaf switch -> its nodes, as Slurm writes lists. Start it, wait until every node is idle, and end it. A daemon that does not come up ends with its log in the error."""
    for name in ("state", "spool", "log"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    here = folder / "munge.socket"
    control = _port()
    lines = [
        "ClusterName=check",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={control}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={here}",
        "CryptoType=crypto/munge",
        "MpiDefault=none",
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "SchedulerType=sched/builtin",
        "SelectType=select/linear",
        "ReturnToService=2",
        "SlurmctldParameters=enable_configless",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd.%n.log",
        *(
            f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={_port()} CPUs=1 State=UNKNOWN"
            for n in nodes
        ),
        f"PartitionName=all Nodes={','.join(nodes)} Default=YES State=UP",
    ]
    if switches:
        lines.append("TopologyPlugin=topology/tree")
        leaves = [f"SwitchName={name} Nodes={below}" for name, below in switches.items()]
        (folder / "topology.conf").write_text(
            "\n".join([*leaves, f"SwitchName=top Switches={','.join(switches)}\n"])
        )
    conf = folder / "slurm.conf"
    conf.write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(conf)}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={here}"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    with _Daemons(environment, folder / "log") as daemons:
        daemons.start("munged", *munged)
        daemons.wait(here.exists)
        daemons.start("slurmctld", "slurmctld", "-D", "-f", str(conf))
        for node in nodes:
            daemons.start(node, "slurmd", "-D", "-N", node, "-f", str(conf))
        cluster = Slurm(nodes, environment)
        daemons.wait(lambda: _idle(cluster))
        yield cluster


def _idle(cluster: Slurm) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.split() == ["idle"] * len(cluster.nodes)


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again and again; AssertionError where it does not come to that."""
    end = time.monotonic() + _READY_S
    while not condition():
        assert time.monotonic() < end, "Slurm did not come to that"
        select.select([], [], [], 0.1)


class _Daemons(ExitStack):
    """Daemons that end in the opposite order of their start."""

    def __init__(self, environment: dict[str, str], logs: Path) -> None:
        super().__init__()
        self._environment, self._logs = environment, logs
        self._handles: list[int] = []  # readable when a daemon has ended

    def start(self, name: str, *command: str) -> None:
        with (self._logs / f"{name}.out").open("wb") as out:
            child = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.callback(_end, child)
        self._handles.append(os.pidfd_open(child.pid))
        self.callback(os.close, self._handles[-1])

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until `ready`; AssertionError with the logs if a daemon ends, or none gets ready in time."""
        end = time.monotonic() + _READY_S
        while not ready():
            ended, _, _ = select.select(self._handles, [], [], 0.05)
            if ended or time.monotonic() > end:
                logs = {p.name: p.read_text(errors="replace")[-600:] for p in self._logs.iterdir()}
                raise AssertionError(f"Slurm did not come up: {logs}")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
