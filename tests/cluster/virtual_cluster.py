"""A virtual cluster under a test's control: a driver process, its agents, and stand-in ranks on a socket."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder

HERE = Path(__file__).parent
TIMEOUT_S = 30.0  # nothing waits that long unless it is broken


class RankLine:
    """The connection to one stand-in rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(TIMEOUT_S)
        self.lines = connection.makefile("r")
        self.hello = self.hear()
        self.rank = int(self.hello["env"]["RANK"])
        self.pid = int(self.hello["pid"])

    def tell(self, what: Any) -> None:
        self.connection.sendall(json.dumps(what).encode() + b"\n")

    def ask(self, what: Any) -> Any:
        self.tell(what)
        return self.hear()

    def hear(self) -> Any:
        return json.loads(self.lines.readline())

    def wait_end(self) -> None:
        """Until the rank has closed its end, which it does by ending."""
        assert self.lines.readline() == ""

    def close(self) -> None:
        self.lines.close()
        self.connection.close()


class VirtualCluster:
    """Starts at once; `close` kills what a failed test left."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        per_node: int = 2,
        spares: int = 0,
        device: str = "cpu",
        port: int | None = None,
        worker_module: str = "standins",
        generation: int = 3,
        max_restarts: int = 0,
        resilience: tuple[str, ...] = (),
        returns: dict[int, float] | None = None,
        quiet: bool = False,
    ) -> None:
        """`resilience`: more keys of that section, as KEY=VALUE. `quiet`: what the driver says is expected."""
        self.folder = RunFolder(folder / "run")
        self.folder.path.mkdir()
        self.world = nodes * per_node
        self.per_node = per_node
        self.generation = generation
        self.pidfds: dict[int, str] = {}
        self.ranks: dict[int, RankLine] = {}
        self.hub = socket.socket(socket.AF_UNIX)
        self.hub.settimeout(TIMEOUT_S)
        self.hub.bind(str(folder / "hub"))
        self.hub.listen(64)
        overrides = [
            f"cluster.nodes={nodes}",
            f"cluster.gpus_per_node={per_node}",
            f"cluster.spares={spares}",
            f"cluster.device={device}",
            f"resilience.max_restarts={max_restarts}",
            *(f"resilience.{entry}" for entry in resilience),
        ]
        if port is not None:
            overrides.append(f"cluster.port={port}")
        request = {
            "overrides": overrides,
            "run": str(self.folder.path),
            "worker_module": worker_module,
            "generation": generation,
            "returns": returns or {},
        }
        environment = os.environ | {
            "STANDIN_HUB": str(folder / "hub"),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")]),
        }
        self.driver = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env=environment,
            text=True,
            process_group=0,
        )

    def wait_ranks(self, count: int | None = None) -> None:
        """Until every rank (or `count` processes) has said hello; from then on `left` knows all processes."""
        while len(self.ranks) < (count or self.world):
            line = self.next_rank()
            self.ranks[line.rank] = line
        self.remember(process.descendants(self.driver.pid))

    def wait_event(self, kind: str) -> None:
        """Until the run has recorded an event of `kind`."""
        until = time.monotonic() + TIMEOUT_S
        while not any(event.kind == kind for event in read_events(self.folder)[0]):
            assert self.driver.poll() is None, f"the driver ended before any {kind}"
            assert time.monotonic() < until, f"no {kind} within {TIMEOUT_S} s"
            time.sleep(0.005)  # a file tells nobody that it grew

    def next_rank(self) -> RankLine:
        """The next process that says hello; fails at once where the driver has ended before."""
        pidfd = os.pidfd_open(self.driver.pid)
        try:
            ready, _, _ = select.select([self.hub, pidfd], [], [], TIMEOUT_S)
        finally:
            os.close(pidfd)
        assert self.hub in ready, f"no rank, but: {self.driver.communicate() if ready else 'silence'}"
        return RankLine(self.hub.accept()[0])

    def remember(self, pids: set[int] | list[int]) -> None:
        """Count these processes among those that must be gone at the end."""
        for pid in pids:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            self.pidfds[os.pidfd_open(pid)] = f"{pid} {command}"

    def find(self, module: str, node: int = 0) -> int:
        """The pid of one node's agent or fork server."""
        ranks_ancestors = set()
        parents = process.living()
        pid = self.ranks[node * self.per_node].pid
        while (pid := parents[pid]) != self.driver.pid:
            ranks_ancestors.add(pid)
        found = [
            p
            for p in ranks_ancestors
            if module.encode() in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")
        ]
        assert len(found) == 1
        return found[0]

    def result(self) -> dict[str, Any]:
        """What the driver printed, once it has ended."""
        out, _ = self.driver.communicate(timeout=TIMEOUT_S)
        return json.loads(out)

    def left(self, timeout_s: float = 5.0) -> list[str]:
        """The processes that have not ended after `timeout_s`."""
        remaining = dict(self.pidfds)
        waiting = select.poll()
        for fd in remaining:
            waiting.register(fd, select.POLLIN)
        while remaining:
            ended = waiting.poll(timeout_s * 1000)
            if not ended:
                break
            for fd, _ in ended:
                waiting.unregister(fd)
                del remaining[fd]
        return list(remaining.values())

    def close(self) -> None:
        process.kill_all(
            lambda: process.descendants(self.driver.pid) | {self.driver.pid} & set(process.living())
        )
        self.driver.wait()
        assert self.driver.stdout is not None
        self.driver.stdout.close()
        for line in self.ranks.values():
            line.close()
        for fd in self.pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        self.hub.close()
