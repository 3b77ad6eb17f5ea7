"""Time for 2,048 agents to join one coordinator and have their records written, and the coordinator's CPU time.

    python bench/joining.py [--agents 2048] [--ranks 8] [--records 4] [--processes 2] [--rest 5] [--profile FILE]

The coordinator is the real one with the real listener, in its own process. The agents are connections with the
real handshake, hello, heartbeats and journal (`control.agent.agent.member`, `control.agent.agent.journal`) in a few processes; they start
no ranks. All look for the coordinator at the same time. Once it orders the first generation, each reports that its ranks have started, sends
its records, and waits until they are written; then they are fsynced. Afterwards they only send heartbeats for `--rest` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.base.event_loop import EventLoop
from seatrial.base.lines import Channel
from seatrial.control.agent.journal import Journal
from seatrial.control.agent.member import Member
from seatrial.control.coordinator.coordinator import Coordinator
from seatrial.control.net.acceptor import Acceptor
from seatrial.control.net.lease import Hold, Lease, Leases
from seatrial.control.net.wire import Incoming, Listener
from seatrial.control.node.spec import AgentSpec
from seatrial.job import Job, job_from_text
from seatrial.record import messages as msg
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder

SECRET = b"s" * 32
LIMIT_S = 10.0  # of issue 13, for both figures
_TICK_S = 0.05  # how often a process of agents looks at all their deadlines


def make_job(agents: int, ranks: int, folder: Path) -> Job:
    """A job with this many nodes, which is never trained."""
    text = f"""
name = "joining"
[model]
vocab_size = 264
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
[data]
train = "builtin:python-library"
[cluster]
nodes = {agents}
gpus_per_node = {ranks}
device = "cpu"
[parallel]
replicate = {agents}
shard = {ranks}
[train]
steps = 100
sequence_length = 32
global_batch = {agents * ranks}
[optimizer]
lr = 1e-2
[checkpoint]
every_steps = 50
"""
    return job_from_text(text, name="job.toml", base_folder=folder)


# -- the coordinator


def coordinate(folder: RunFolder, job: Job, hold: Hold, listener: Listener, bench: Channel) -> None:
    """Coordinate, as an agent would, until the bench closes the channel; replies with CPU seconds on request."""
    spec = AgentSpec(
        run=folder.path,
        generation=1,
        node=0,
        nodes=job.cluster.nodes,
        ranks_per_node=job.cluster.gpus_per_node,
        device="cpu",
    )
    sources = EventLoop()

    def proven(incoming: Incoming) -> None:
        hello: msg.Hello = msg.decode(incoming.hello, msg.Hello)
        if isinstance(hello, msg.AgentJoins):
            coordinator.join(hello, incoming.link())
        else:
            incoming.close()

    acceptor = Acceptor(listener, sources.watch, sources.unwatch, proven)
    coordinator = Coordinator(spec, job, {}, hold, SECRET, sources.watch, sources.unwatch)

    def asked() -> None:
        for message in bench.receive():
            if "sync" in message:
                coordinator.recorder.sync()
            used = resource.getrusage(resource.RUSAGE_SELF)
            bench.send({"cpu_s": used.ru_utime + used.ru_stime})

    sources.watch(bench, asked)
    bench.send({"ready": True})
    while not bench.closed:
        now = time.monotonic()
        deadlines = [acceptor.deadline, coordinator.deadline]
        sources.wait(max(0.0, min(d for d in deadlines if d is not None) - now))
        acceptor.tick()
        coordinator.tick()
        assert not coordinator.deposed, "another process has taken the lease"


# -- the agents


class Simulated:
    """One simulated agent, without ranks."""

    def __init__(
        self, node: int, lease: Lease, folder: RunFolder, job: Job, records: int, sources: EventLoop
    ) -> None:
        self.node, self.sources, self.records = node, sources, records
        self.joins = 0
        self.recorded = False
        self._told_at: int | None = None
        self._generation = 0
        self._source: Any = None
        self._listener = socket.socket()  # probes must find a listener
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(1)
        self.member = Member(
            node=node,
            address="127.0.0.1",
            port=lease.port if node == lease.node else self._listener.getsockname()[1],
            secret=SECRET,
            folder=folder.leases,
            heartbeat_s=job.resilience.heartbeat_s,
            silence_s=job.resilience.silence_s,
            hello=self._hello,
            became=self._became,
            joined=self._joined,
            release=self._release,
        )
        self.journal = Journal(self.member)

    def _hello(self, term: int) -> msg.AgentJoins:
        return msg.AgentJoins(
            term=term,
            node=self.node,
            address=self.member.address,
            port=self.member.port,
            pid=os.getpid() * 10_000 + self.node,
            incarnation=self.journal.name,
            order="",
            leaving=None,
            told=self.journal.name,
            ready=True,
            running=self._generation or None,
            left=None,
            offer_port=7000,
            held=[],
        )

    def _became(self, hold: Hold, dead: int | None) -> None:
        raise AssertionError(f"node {self.node} took the lease: the coordinator was too slow")

    def _joined(self) -> None:
        self.joins += 1
        self.journal.resend()

    def _release(self) -> None:
        if self._source is not None:
            self.sources.unwatch(self._source)
            self._source = None

    def tick(self) -> None:
        self.member.tick(lambda number: msg.Beat(number, self._generation, step=0, failed=0))
        source = self.member.source
        if source is not self._source:
            self._release()
            self._source = source
            if source is not None:
                self.sources.watch(source, self._on_member, source.events)
        elif source is not None:
            self.sources.wait_for(source, source.events)

    def _on_member(self) -> None:
        for message in self.member.receive():
            if isinstance(message, msg.Start):
                self._start(message)
            if isinstance(message, msg.Stop):
                raise AssertionError(f"a node was lost: coordinator or agents were too slow: {message}")
        # A beat after the records has come back: whoever returned it has written them.
        self.recorded = self._told_at is not None and self.member.beats_returned > self._told_at
        self.tick()

    def _start(self, order: msg.Start) -> None:
        self._generation = order.generation
        for local, rank in enumerate(order.ranks):
            self.member.send(msg.RankStarted(self._generation, rank, local, pid=rank, in_place=False))
        for number in range(self.records):
            told = f"checkpoint of step {number} saved by node {self.node}"
            about = (time.time(), self._generation, "checkpoint_saved", "info", told, None, 0)
            self.journal.send_once(msg.Record(*about, data={"step": number}))
        self._told_at = self.member.beats_sent


def simulate(nodes: range, lease: Lease, folder: RunFolder, job: Job, records: int, bench: Channel) -> None:
    """Simulate the agents of `nodes`, from the bench's start message until it closes the channel."""
    sources = EventLoop()
    agents = [Simulated(node, lease, folder, job, records, sources) for node in nodes]
    sources.watch(bench, lambda: None)
    bench.send({"ready": True})
    bench.readable(None)
    bench.receive()
    told, look_at = False, 0.0
    while not bench.closed:
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _TICK_S
            for agent in agents:
                agent.tick()
        sources.wait(max(0.0, look_at - time.monotonic()))
        if not told and all(a.recorded for a in agents):
            bench.send({"done": True, "joins": sum(a.joins for a in agents)})
            told = True
        bench.receive()


# -- the bench


def child(body: Any, profile: Path | None = None) -> tuple[int, Channel]:
    """A process that runs `body(channel)`, and our end of the channel."""
    ours, theirs = Channel.pair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    os.setsid()  # its own scheduling group, if the kernel has them: in reality agents run on other hosts
    code = 1
    try:
        if profile is not None:
            profiler = cProfile.Profile(time.process_time)
            with contextlib.suppress(SystemExit):
                profiler.runcall(body, theirs)
            profiler.dump_stats(profile)
        else:
            body(theirs)
        code = 0
    except BaseException:  # noqa: BLE001  the fork ends here, whatever it was
        traceback.print_exc()
    finally:
        os._exit(code)


def hear(channel: Channel, timeout_s: float) -> dict[str, Any]:
    """The next message."""
    if not channel.readable(timeout_s) or not (messages := channel.receive()):
        raise SystemExit(f"no word within {timeout_s:g} s")
    (message,) = messages
    return message


def cpu_s(coordinator: Channel, ask: str = "cpu") -> float:
    coordinator.send({ask: {}})
    return float(hear(coordinator, 60)["cpu_s"])


def measure(arguments: argparse.Namespace, folder: RunFolder) -> bool:
    agents, ranks, records = arguments.agents, arguments.ranks, arguments.records
    job = make_job(agents, ranks, folder.path.parent)
    listener = Listener("127.0.0.1", SECRET)
    lease = Lease(1, 0, "127.0.0.1", listener.port, time.time())
    hold = Leases(folder.leases).claim(lease, job.resilience.silence_s)
    assert hold is not None
    pids: list[int] = []
    try:
        pid, coordinator = child(lambda c: coordinate(folder, job, hold, listener, c), arguments.profile)
        pids.append(pid)
        hear(coordinator, 120)
        share = -(-agents // arguments.processes)
        others = []
        for first in range(0, agents, share):
            nodes = range(first, min(first + share, agents))
            pid, channel = child(lambda c, n=nodes: simulate(n, lease, folder, job, records, c))
            pids.append(pid)
            others.append(channel)
        for channel in others:
            hear(channel, 120)
        before, began = cpu_s(coordinator), time.monotonic()
        for channel in others:
            channel.send({"go": {}})
        joins = sum(hear(channel, 300)["joins"] for channel in others)
        used = cpu_s(coordinator, "sync") - before
        seconds = time.monotonic() - began
        time.sleep(arguments.rest)
        rest = cpu_s(coordinator) - before - used
        events, problems = read_events(folder)
        for channel in [*others, coordinator]:
            channel.close()
        for pid in list(pids):
            _, status = os.waitpid(pid, 0)
            pids.remove(pid)
            assert status == 0, f"process {pid} ended with status {status}"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    counts = {kind: sum(e.kind == kind for e in events) for kind in ("rank_started", "checkpoint_saved")}
    assert not problems
    assert counts == {"rank_started": agents * ranks, "checkpoint_saved": agents * records}, counts
    lost = sum(e.kind == "node_lost" for e in events)
    print(f"{agents} agents joined and sent {agents * (ranks + records)} records: {len(events)} events")
    print(f"  until all were on disk   {seconds:6.2f} s, coordinator {used:6.2f} s of CPU")
    print(f"  connections {joins}, nodes counted as lost {lost}")
    print(f"  heartbeats only          {rest / arguments.rest:6.2f} of one core")
    return seconds <= LIMIT_S and used <= LIMIT_S and not lost


def main() -> int:
    """Print the figures; exit 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--records", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rest", type=float, default=5.0)
    parser.add_argument("--profile", type=Path)
    arguments = parser.parse_args()
    process.allow_many_files()
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / "joining")
        folder.leases.mkdir(parents=True)
        return 0 if measure(arguments, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
