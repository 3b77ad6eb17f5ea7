"""One run of a drill: the copy of the job, its processes, and every fault that can be injected into them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.base import process
from seatrial.checkpoint.manifest import complete, read_manifest, step_of
from seatrial.control.node.spec import FORK_SERVER_MODULE, WORKER_MODULE
from seatrial.data.manifest import MANIFEST
from seatrial.drill import run as runs
from seatrial.drill.injection import Injection, Planted, record_injection
from seatrial.drill.run_state import RunState, kernel_log
from seatrial.launch.netns import Hosts
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.job import Job

_RUN = "SEATRIAL_DRILL_RUN"  # environment variable that every process of a run inherits
_POLL_S = 0.05
_CYCLES = 32  # stop/continue cycles of a slowed rank between two polls of the run
_ENDING_S = 5.0  # for processes whose parents have exited to end too


class RunEnded(Exception):
    """The run ended before the scenario did."""


class Overdue(Exception):
    """The run has neither ended nor reached the point that the scenario waits for."""


class DrillRun:
    """One run of a drill. `close` leaves no process of it running."""

    def __init__(
        self,
        root: Path,
        job: Job,
        *,
        limit_s: float,
        hosts: Hosts | None = None,
        on_poll: Callable[[RunState], None] | None = None,
    ) -> None:
        """`root`: the drill's folder; the run folder is `root`/NAME of the job. `limit_s`: for the whole run.

        `hosts`: a separate network for each node.
        """
        self.root = root
        self.job = job
        self.folder = RunFolder(root / job.name)
        self.state = RunState(self.folder, job.train.steps)
        self.exits: list[int] = []
        self.injections: list[Injection] = []
        self.planted: list[Planted] = []
        self.left: list[str] = []
        self.log = root / f"{job.name}.log"
        self.seconds = 0.0  # from the first start to the last end
        self.started_at = time.monotonic()
        self._injections = root / f"{job.name}.injections.jsonl"
        self._kernel = root / f"{job.name}.kernel"
        self._job_file = root / f"{job.name}.toml"
        self.token = uuid.uuid4().hex
        self._deadline = time.monotonic() + limit_s
        self._on_poll = on_poll
        self._returns: dict[int, float] = {}
        self._hosts = hosts
        self._process: subprocess.Popen[bytes] | None = None

    # -- the run

    def start(self, planted: Sequence[Planted] = (), returns: dict[int, float] | None = None) -> None:
        """Start the run. `returns`: node -> seconds until its agent, once dead, is started again."""
        self.planted = list(planted)
        self._returns = returns or {}
        self._job_file.write_text(self.job.to_toml(), encoding="utf-8")
        self._kernel.mkdir(exist_ok=True)
        for node in range(self.job.cluster.nodes + self.job.cluster.spares):
            kernel_log(self._kernel, node).touch()
        self.rerun()

    def rerun(self) -> None:
        """Run the same command, as a person would after the run has ended."""
        environment = {
            **os.environ,
            _RUN: self.token,
            "SEATRIAL_KERNEL_LOG": str(kernel_log(self._kernel, "{node}")),
        }
        module = WORKER_MODULE
        if self.planted:
            plan = self.root / f"{self.job.name}.faults.json"
            plan.write_text(json.dumps({"faults": [vars(p) for p in self.planted]}), encoding="utf-8")
            environment["SEATRIAL_DRILL"] = str(plan)
            module = "seatrial.drill.worker"
        words = runs.command(
            self._job_file,
            self.root,
            parent=os.getpid(),
            worker_module=module,
            returns=self._returns,
            hosts=self._hosts,
        )
        with open(process.open_log(self.log), "ab") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )

    def running(self) -> bool:
        """Whether the run's own process is alive; records its exit code once."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        self.exits.append(code)
        self.seconds = time.monotonic() - self.started_at
        self._process = None
        return False

    def wait_end(self) -> int:
        """Wait until the run's process has ended; its exit code. Raises Overdue."""
        while self.running():
            self._pause()
        self.poll()
        return self.exits[-1]

    def poll(self) -> None:
        """Read the run's new records, and check for faults that ranks injected into themselves."""
        self.state.poll()
        for fault in list(self.planted):
            fired = fault.fired()
            known = {(i.kind, i.time) for i in self.injections}
            if fired is not None and (fired.kind, fired.time) not in known:
                self._note(replace(fired, node=self.state.node_of(fault.rank, fired.time)))
        if self._on_poll is not None:
            self._on_poll(self.state)

    def _pause(self) -> None:
        if time.monotonic() > self._deadline:
            raise Overdue
        time.sleep(_POLL_S)
        self.poll()

    def wait_until(self, happened: Callable[[RunState], bool]) -> None:
        """Wait until `happened` holds for the run's records. Raises RunEnded or Overdue."""
        self.poll()
        while not happened(self.state):
            if not self.running():
                self.poll()
                if happened(self.state):
                    return
                raise RunEnded
            self._pause()

    def wait_step(self, step: int) -> None:
        """Wait until `step` has been recorded."""
        self.wait_until(lambda state: state.furthest >= step)

    def wait_saved(self, checkpoints: int) -> None:
        """Wait until so many checkpoints are complete: storage may take many steps to write one beside training."""
        self.wait_until(lambda state: sum(e.kind == "checkpoint_saved" for e in state.events) >= checkpoints)

    def wait_gone(self, within_s: float = _ENDING_S) -> None:
        """Wait until no process of the run is left; any left after `within_s` are recorded and killed."""
        end = time.monotonic() + within_s
        while processes_of(self.token) and time.monotonic() < end:
            time.sleep(_POLL_S)
        found = processes_of(self.token)
        self.left += [describe(pid) for pid in sorted(found)]
        if found:
            process.kill_all(lambda: processes_of(self.token))

    def close(self) -> None:
        """Kill whatever is left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        process.kill_all(lambda: processes_of(self.token))

    # -- faults

    def note(
        self, kind: str, message: str, *, node: int | None = None, rank: int | None = None, **data: Any
    ) -> None:
        """Log that a fault is injected now."""
        self._note(Injection(time.time(), kind, message, self.state.step, node, rank, data or None))

    def _note(self, injection: Injection) -> None:
        self.injections.append(injection)
        record_injection(self._injections, injection)

    def kill_rank(self, rank: int, *, before: str = "") -> None:
        """SIGKILL one rank. `before`: what was done already, for the log."""
        place = self.state.ranks[rank]
        message = f"{before}SIGKILL to rank {rank}"
        self.note("kill_rank", message, node=place.node, rank=rank, pid=place.pid)
        self._signal(place.pid, signal.SIGKILL)

    def freeze_rank(self, rank: int) -> None:
        """SIGSTOP one rank."""
        place = self.state.ranks[rank]
        self.note("freeze_rank", f"SIGSTOP to rank {rank}", node=place.node, rank=rank, pid=place.pid)
        self._signal(place.pid, signal.SIGSTOP)

    def kill_agent(self, node: int) -> None:
        """SIGKILL a node's agent alone; what happens to its ranks is up to the agent's provisions for its death."""
        pid = self.state.agents[node]
        self.note("kill_agent", f"SIGKILL to the agent of node {node}", node=node, pid=pid)
        self._signal(pid, signal.SIGKILL)

    def pause_agent(self, node: int, seconds: float) -> None:
        """SIGSTOP a node's agent, and SIGCONT it after `seconds`."""
        pid = self.state.agents[node]
        self.note("pause_agent", f"the agent of node {node} is stopped for {seconds:g} s", node=node, pid=pid)
        self._signal(pid, signal.SIGSTOP)
        end = time.monotonic() + seconds
        try:
            self.wait_until(lambda state: time.monotonic() >= end)
        finally:
            self._signal(pid, signal.SIGCONT)

    def signal_fork_server(self, node: int, signum: signal.Signals) -> None:
        """Send a signal to the fork server of a node."""
        parents, agent = process.living(), self.state.agents[node]
        pid = next(
            p for p, parent in parents.items() if parent == agent and FORK_SERVER_MODULE in describe(p)
        )
        message = f"{signum.name} to the fork server of node {node}"
        self.note("signal_fork_server", message, node=node, pid=pid)
        self._signal(pid, signum)

    def edit_job(self) -> str:
        """Change the learning rate in the run's own copy of the job file; returns a text for the log."""
        text = self.folder.job_toml.read_text(encoding="utf-8")
        lr = self.job.optimizer.lr
        edited = re.sub(r"(?m)^lr = .*$", f"lr = {10 * lr!r}", text)
        assert edited != text
        self.folder.job_toml.write_text(edited, encoding="utf-8")
        return f"lr {lr:g} -> {10 * lr:g} in the run's job.toml, then "

    @contextlib.contextmanager
    def remade_data(self) -> Iterator[str]:
        """Change the manifest of the first token store, as if it had been recreated; yields a text for the log."""
        path = Path(self.job.data.sources[0]) / MANIFEST
        text = path.read_text(encoding="utf-8")
        path.write_text(json.dumps({**json.loads(text), "source": {"drill": "made anew"}}), encoding="utf-8")
        try:
            yield "the token store recreated, then "
        finally:
            path.write_text(text, encoding="utf-8")

    def kill_nodes(self, nodes: Sequence[int]) -> None:
        """SIGKILL all processes of some nodes at once, like a power failure."""
        agents = {node: self.state.agents[node] for node in nodes}
        victims = {node: {pid, *process.descendants(pid)} for node, pid in agents.items()}
        for node in nodes:
            self.note("kill_node", f"SIGKILL to all processes of node {node}", node=node, pid=agents[node])
        for pids in victims.values():
            for pid in pids:
                self._signal(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def slowed_rank(self, rank: int, *, stopped_s: float, going_s: float) -> Iterator[Callable[[], None]]:
        """Keep one rank stopped for a share of the time, unnoticed by it. Call the yielded function repeatedly."""
        place = self.state.ranks[rank]
        share = stopped_s / (stopped_s + going_s)
        message = f"rank {rank} gets {1 - share:.0%} of its time (SIGSTOP and SIGCONT in turns)"
        self.note("slow_rank", message, node=place.node, rank=rank, pid=place.pid)

        def cycle() -> None:
            """Run some cycles and leave the rank stopped, so that the time until the next call counts as stopped."""
            for _ in range(_CYCLES):
                self._signal(place.pid, signal.SIGCONT)
                time.sleep(going_s)
                self._signal(place.pid, signal.SIGSTOP)
                time.sleep(stopped_s)

        try:
            yield cycle
        finally:
            self._signal(place.pid, signal.SIGCONT)

    def write_kernel_log(self, node: int, code: int, text: str) -> None:
        """Append a driver message to the file that the node reads instead of its kernel's log."""
        path = kernel_log(self._kernel, node)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.note(f"xid_{code}", f"Xid {code} in the kernel log of node {node}", node=node, xid=code)
        # The record format of /dev/kmsg: priority and facility, number, microseconds since boot, flags; then the text.
        with open(path, "a", encoding="ascii") as file:
            file.write(f"4,{int(now * 10)},{int(now * 1e6)},-;NVRM: Xid (PCI:0000:3b:00): {code}, {text}\n")

    def damage_newest_checkpoint(self) -> None:
        """Invert some bytes in the middle of one of the newest checkpoint's files."""
        folder = complete(self.folder.checkpoints)[0]
        name = max(read_manifest(folder).files, key=lambda f: f.bytes).file
        with open(folder / name, "r+b") as file:
            at = file.seek(0, os.SEEK_END) // 2
            file.seek(at)
            old = file.read(16)
            file.seek(at)
            file.write(bytes(b ^ 0xFF for b in old))
        step = step_of(folder)
        self.note("damaged_checkpoint", f"16 bytes of {folder.name}/{name} inverted", checkpoint_step=step)

    def cut_network(self, node: int) -> None:
        """Cut a node's network in both directions."""
        assert self._hosts is not None
        self.note("cut_network", f"the network of node {node} is cut", node=node)
        self._hosts.down(node)

    def slow_network(self, node: int, rate_mbit: float) -> None:
        """Limit the bandwidth of a node's network."""
        assert self._hosts is not None
        self.note("slow_network", f"the network of node {node} carries {rate_mbit:g} Mbit/s", node=node)
        self._hosts.slow(node, rate_mbit)

    def restore_network(self, node: int) -> None:
        """Undo `cut_network` and `slow_network`."""
        assert self._hosts is not None
        self._hosts.up(node)
        self._hosts.fast(node)

    def expect_gone(self, pids: Sequence[int], what: str) -> None:
        """Record those of `pids` that are still alive as left over: they should have ended."""
        alive = processes_of(self.token) & set(pids)
        self.left += [f"{pid} {what}" for pid in sorted(alive)]

    def alive(self, rank: int) -> bool:
        """Whether the process last known as `rank` is alive."""
        place = self.state.ranks.get(rank)
        return place is not None and place.pid in processes_of(self.token)

    def _signal(self, pid: int, signum: int) -> None:
        """Signal a process of this run only: if it has ended, its pid may have been reused."""
        if _has_token(pid, self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def kill_everything(self) -> None:
        """SIGKILL the run's own process: everything else must end by itself."""
        assert self._process is not None
        self._process.kill()

    def ask_to_leave(self) -> None:
        """SIGTERM the run, as a scheduler does before it takes the nodes away."""
        assert self._process is not None
        self.note("preemption", "SIGTERM to the run", pid=self._process.pid)
        self._process.terminate()


def processes_of(token: str) -> set[int]:
    """Live processes that were started, directly or not, by a run with this token."""
    return {pid for pid in process.living() if _has_token(pid, token)}


def _has_token(pid: int, token: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            return f"{_RUN}={token}".encode() in f.read().split(b"\0")
    except OSError:  # ended in the meantime, or another user's
        return False


def describe(pid: int) -> str:
    """Describe a process for the report."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = "ended meanwhile"
    return f"{pid} {command.strip()[:120]}"
