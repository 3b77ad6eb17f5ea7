"""Hosts that share one folder over a file system with caches, and a launcher that starts agents in them.

Each host is a network, mount and UTS namespace with its own /dev/shm and TMPDIR. Inside it a FUSE file system (bindfs)
lies over the shared folder, at the same path, and the kernel keeps what it has looked up there for CACHED_S: names,
names that were not there, and attributes. Exclusive creation, links and renames are decided by the folder below, and
an opened file is read anew (direct_io): what NFS does, with caches that nothing invalidates.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import TIMEOUT_S
from seatrial.launch.netns import Hosts, Unavailable, isolated

CACHED_S = 20
_CACHES = f"entry_timeout={CACHED_S},negative_timeout={CACHED_S},attr_timeout={CACHED_S},direct_io"
_TMPDIR = "/dev/shm/tmp"  # see `isolated`
COMMANDS = "SEATRIAL_TEST_HOSTS"  # JSON: for each node the command that executes the rest of its line there

# Starts `seatrial agent` in the hosts as a scheduler does: the agents are on their own, and it only knows who lives.
_LAUNCHER = f'''
import json, os, signal, subprocess
from seatrial.base import process
from seatrial.base.errors import InputError
from seatrial.launch.base import Status


class Apart:
    name = "apart"
    restarts = False

    def check(self, job):
        pass

    def render(self, job, folder, generation=1):
        run = str(folder.path.absolute())
        agent = process.python("seatrial") + ["agent", "--run", run, "--node"]
        count = job.cluster.nodes + job.cluster.spares
        hosts = json.loads(os.environ["{COMMANDS}"])[:count]
        return {{"agents.json": json.dumps([[*host, *agent, str(n)] for n, host in enumerate(hosts)])}}

    def identity(self, environment):
        raise InputError("agents of this launcher are told their index")

    def submit(self, files):
        script = files["agents.json"]
        pids = []
        for node, command in enumerate(json.loads(script.read_text())):
            with open(script.with_name(f"out{{node}}"), "w") as out:
                agent = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
            pids.append(str(agent.pid))
        return ",".join(pids)

    def status(self, handle):
        alive = process.living()
        count = sum(int(pid) in alive for pid in handle.split(","))
        return Status("running" if count else "gone", f"{{count}} agents")

    def signal(self, handle, how):
        for pid in handle.split(","):
            os.kill(int(pid), signal.SIGTERM if how == "preempt" else signal.SIGKILL)

    def warnings(self, grace_s):
        return []

    def logs(self, handle):
        return []
'''


def install(site: Path) -> None:
    """Put the launcher there as pip installs a package: a module, and metadata with an entry point."""
    info = site / "seatrial_apart-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "seatrial_apart.py").write_text(_LAUNCHER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seatrial-apart\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[seatrial.launchers]\napart = seatrial_apart:Apart\n")


def skip_unless_possible() -> None:
    """Skip the test where there can be no such hosts; the reason names what is missing."""
    for tool in ("bindfs", "setpriv", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    try:
        with Hosts(1):
            pass
    except Unavailable as error:
        pytest.skip(str(error))


class ApartHosts(Hosts):
    """`count` hosts with `folder` mounted over itself in each of them. Everything in them ends with the context."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count)
        self.folder = folder
        self._mounts: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ApartHosts:
        super().__enter__()
        try:
            for host in range(self.count):
                self._mounts.append(self._mount(host))
            for host in range(self.count):
                _wait(lambda host=host: self._mounted(host), f"no bindfs in host {host}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        for host in range(len(self._mounts)):
            self.kill(host)
        super().__exit__(None, None, None)

    def command(self, host: int) -> list[str]:
        """The command that executes the rest of its line in `host`, in the shared folder, in the same process."""
        enter = ["nsenter", f"--target={self._mounts[host].pid}", "--mount", "--uts", "--net"]
        return [*enter, f"--wdns={self.folder}", "env", f"TMPDIR={_TMPDIR}"]

    def output(self, host: int, script: str) -> str:
        """What a shell in `host` prints on stdout."""
        return subprocess.run(
            [*self.command(host), "sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def processes(self, host: int) -> list[int]:
        """All that run in `host`, its bindfs included."""
        namespace = self._namespace(self._mounts[host].pid)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if namespace is not None and self._namespace(pid) == namespace]

    def kill(self, host: int) -> None:
        """kill -9 of all that runs in `host`. The file system goes last: nothing ends with an error of its own."""
        mount = self._mounts[host]
        if mount.poll() is None:
            _wait(lambda: not self._kill(host), f"host {host} does not end")
            mount.kill()
        mount.wait()

    def _kill(self, host: int) -> list[int]:
        others = [pid for pid in self.processes(host) if pid != self._mounts[host].pid]
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return others

    def _mount(self, host: int) -> subprocess.Popen[bytes]:
        # Ends with this process, however that ends.
        bindfs = ["setpriv", "--pdeathsig", "KILL", "bindfs", "-f", "--multithreaded", "-o", _CACHES]
        folder = os.fspath(self.folder)
        return subprocess.Popen([*self.prefix(host), *isolated(f"host{host}"), *bindfs, folder, folder])

    def _mounted(self, host: int) -> bool:
        assert self._mounts[host].poll() is None, f"bindfs of host {host} has ended"
        with contextlib.suppress(OSError):  # it is not in its namespaces yet
            mounts = Path(f"/proc/{self._mounts[host].pid}/mounts").read_text()
            return f" {self.folder} fuse" in mounts
        return False

    @staticmethod
    def _namespace(pid: int) -> str | None:
        """None: it has ended."""
        try:
            return os.readlink(f"/proc/{pid}/ns/mnt")
        except OSError:
            return None


def _wait(done: Callable[[], object], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.01)
