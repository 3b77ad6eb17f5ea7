"""The ranks of one node: started, sent orders, watched, stopped. Their agent makes no decisions about them itself.

A worker is a process; its rank changes with the generation. A fork server forks the workers. A worker that lost its
peers can stay ("parked") and be given a rank of the next generation.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.base.complain import complain
from seatrial.base.lines import Channel
from seatrial.control.agent.grace import Grace
from seatrial.control.agent.oom import OomWatch
from seatrial.control.agent.worker import Worker
from seatrial.control.net.wire import ACCEPT_AT_ONCE
from seatrial.control.node.environment import THREADS, assignments
from seatrial.control.node.spec import AgentSpec, clean_environment
from seatrial.record import messages as msg

ReportRank = Callable[[Worker, msg.FromRank | msg.RankStarted | msg.RankExited], None]
ReportNode = Callable[[msg.Ready | msg.ForkServerExited], None]
Watch = Callable[[Any, Callable[[], None]], None]


class Workers:
    """The processes of one agent."""

    def __init__(
        self,
        spec: AgentSpec,
        report: ReportRank,
        report_node: ReportNode,
        watch: Watch,
        unwatch: Callable[[Any], None],
    ) -> None:
        """`report(worker, message)` is called with the messages of a rank and its start and exit, `report_node(message)` with
        the same of the fork server, without the node's generation and the end of its log."""
        self.spec = spec
        self.report, self.report_node = report, report_node
        self.workers: dict[int, Worker] = {}  # by local number
        self.snapshot_fds: dict[int, tuple[int, int]] = {}  # by local number
        self.cpus: dict[int, frozenset[int]] = {}  # by local number: CPUs that a new process is bound to
        self.fork_server: int | None = None  # pid
        self.fork_server_ready = False
        self._fork_server_channel: Channel | None = None
        self._unanswered_pings = 0  # unanswered calls of `ask_fork_server`
        self._watch, self._unwatch = watch, unwatch
        self._oom = OomWatch()
        self._grace: Grace | None = None  # for workers to stop; those still running at the end are killed
        self._stopping = -1  # workers up to this generation must stop
        self._yield: msg.RankYield | None = None  # the last order passed to `leave`
        # An abstract socket: no file is left behind, and it ends with this process.
        self._name = f"seatrial-{os.getpid()}-{secrets.token_hex(8)}"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind("\0" + self._name)
        self._server.listen(256)
        self._server.setblocking(False)
        watch(self._server, self._on_connection)

    # -- starting

    def start_fork_server(self) -> None:
        """Start the fork server, which imports torch once for all ranks of this node."""
        ours, theirs = Channel.pair()
        options = [
            *("--channel", str(theirs.fileno())),
            *("--parent", str(os.getpid())),
            *("--mark", os.environ[process.MARK]),
        ]
        command = self.spec.fork_server_command() + options
        kept = [theirs.fileno(), *(fd for pair in self.snapshot_fds.values() for fd in pair)]
        try:
            self.fork_server = process.fork(
                partial(_execute_fork_server, command, kept), log=self.spec.fork_server_log
            )
        except OSError as error:  # no memory, or no process left for this user: the next start tries again
            complain(f"could not start the fork server: {error}")
            ours.close()
            return
        finally:
            theirs.close()
        self._fork_server_channel, self._unanswered_pings = ours, 0
        self._watch(ours, self._on_fork_server)

    def ask_fork_server(self) -> int:
        """Ping the fork server if it is ready; returns the number of unanswered pings."""
        if self._fork_server_channel is None or not self.fork_server_ready:
            return 0
        self._fork_server_channel.post(msg.encode(msg.Ping()))
        self._unanswered_pings += 1
        return self._unanswered_pings

    def start(self, generation: int, rank_specs: Mapping[int, msg.RankSpec], *, in_place: bool) -> None:
        """Start each local number on its generation. Parked workers continue in place where allowed; others are new."""
        self._grace = None
        if self.fork_server is None:
            self.start_fork_server()
        for local, worker in list(self.workers.items()):
            if local not in rank_specs:
                self._kill(worker)  # there is no rank for it in this generation
        for local, rank_spec in rank_specs.items():
            old = self.workers.get(local)
            if old is not None and in_place and old.waits and old.listens:
                self._continue(old, generation, rank_spec)
                continue
            if old is not None:
                self._kill(old)  # replaced, and no longer listed when it is reaped
            self._fork(local, generation, rank_spec)

    def _continue(self, worker: Worker, generation: int, rank_spec: msg.RankSpec) -> None:
        worker.generation, worker.rank = generation, rank_spec.rank
        worker.rank_spec, worker.log = rank_spec, Path(rank_spec.log)
        worker.state, worker.how, worker.signalled = "running", "done", None
        worker.step = worker.validating = 0
        self._post_rank_spec(worker)
        self._started(worker, in_place=True)

    def _post_rank_spec(self, worker: Worker) -> None:
        _post(worker, worker.rank_spec)
        if self._yield is not None and self._yield.generation == worker.generation:
            _post(worker, self._yield)

    def _started(self, worker: Worker, *, in_place: bool) -> None:
        about = (worker.generation, worker.rank, worker.local, worker.pid)
        self.report(worker, msg.RankStarted(*about, in_place=in_place))

    def _fork(self, local: int, generation: int, rank_spec: msg.RankSpec) -> None:
        worker = Worker(local, generation, rank_spec.rank, secrets.token_hex(16), rank_spec)
        worker.log = Path(rank_spec.log)
        try:
            process.make_log_folder(worker.log)
        except (
            OSError
        ) as error:  # most likely a full disk: the worker itself will fail on it, and be reported
            complain(f"could not make {worker.log.parent}: {error}")
        self.workers[local] = worker
        environment = assignments(
            self.spec.worker_environment(
                rank=rank_spec.rank,
                local_rank=local,
                world_size=rank_spec.world_size,
                slot=rank_spec.slot,
                slots=rank_spec.slots,
                master_addr=rank_spec.master_addr,
                master_port=rank_spec.master_port,
            )
        )
        environment |= {"SEATRIAL_SUPERVISOR": self._name, "SEATRIAL_SUPERVISOR_TOKEN": worker.token}
        fds = self.snapshot_fds.get(local)
        if fds is not None:
            environment["SEATRIAL_SNAPSHOT_FDS"] = ",".join(map(str, fds))
        if self._fork_server_channel is None:
            # If there is a fork server it is about to exit, and that will be reported.
            self._exited(worker, 1, time.time(), never_began=self.fork_server is not None)
            return
        order = msg.Fork(
            rank=worker.rank,
            log=str(worker.log),
            env=environment | _threads(),
            argv=self.spec.worker_arguments(generation),
            token=worker.token,
            cpus=sorted(self.cpus.get(local, ())),
        )
        # The request stays in the socket until the fork server has imported torch: no round trip is lost.
        self._fork_server_channel.send(msg.encode(order))

    # -- orders

    def leave(self, order: msg.Yield) -> None:
        """Have the workers save and leave the order's generation at the end of a step.

        Workers that are still starting, or have yet to start, receive it with their generation spec.
        """
        self._yield = msg.RankYield(order.generation, order.how)
        for worker in self.workers.values():
            if worker.runs:
                _post(worker, self._yield)

    def settled(self, settled: msg.Settled) -> None:
        """Send a worker the result for the events that it recorded; it checks whether it is the addressee."""
        worker = self.workers.get(settled.local)
        if worker is not None:
            _post(worker, msg.RankSettled(settled.pid, settled.count, settled.errno))

    def stop(self, generation: int, grace_s: float, *, park: bool) -> None:
        """Stop work on `generation` and older ones: workers park, or are killed after `grace_s` (see grace.py)."""
        self._stopping = generation
        for worker in self.workers.values():
            if park and worker.runs:
                _post(worker, msg.Abandon(generation))
        if self._grace is None:
            self._grace = Grace(grace_s, extend=park)
        else:
            self._grace.shorten(grace_s, extend=park)
        for worker in self.at_work(generation):
            if worker.state == "starting":
                self._kill(worker)  # it has not received its generation spec yet: nothing can be lost
        self.meet_deadlines()

    def at_work(self, generation: int) -> list[Worker]:
        """The workers that still work on `generation` or an older one."""
        return [w for w in self.workers.values() if w.runs and w.generation <= generation]

    def kill_ranks(self) -> None:
        """SIGKILL to every worker, now."""
        for worker in list(self.workers.values()):
            self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        if worker.alive and worker.pid is not None:
            self._signal(worker, signal.SIGKILL)
        elif worker.alive:
            # The fork server has yet to fork it, perhaps after importing torch. It gets its generation spec from here,
            # not from there, so it cannot do anything, and is killed as soon as it exists.
            worker.signalled = worker.signalled or time.time()
            self._exited(worker, 1, time.time(), never_began=True)

    def signal(self, rank: int, signum: int) -> None:
        """Send `signum` to the process that is `rank` now, if there is one."""
        for worker in self.workers.values():
            if worker.rank == rank and worker.alive:
                self._signal(worker, signum)

    def _signal(self, worker: Worker, signum: int) -> None:
        if worker.pid is not None:
            worker.signalled = worker.signalled or time.time()
            process.signal_group(worker.pid, signum)

    @property
    def deadline(self) -> float | None:
        if self._grace is None or not self.at_work(self._stopping):
            return None
        return self._grace.deadline

    def meet_deadlines(self) -> None:
        """Kill the workers that have not stopped within their grace period."""
        if self._grace is not None and self._grace.over():
            self._grace = None
            for worker in self.at_work(self._stopping):
                self._signal(worker, signal.SIGKILL)

    # -- what happens

    def _on_connection(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _address = self._server.accept()
            except OSError:  # no pending connection, or no free descriptor
                return
            if _user_of(sock) != os.geteuid():  # an abstract socket has no permissions
                sock.close()
                continue
            channel = Channel(sock)
            self._watch(channel, partial(self._on_new_connection, channel))

    def _on_new_connection(self, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except ValueError:
            messages = [{}]  # not one of our workers
        if not messages and not channel.closed:
            return
        self._unwatch(channel)
        worker = self._worker_of(messages[0]) if messages else None
        if worker is None or worker.channel is not None or not worker.alive:
            channel.close()  # of an earlier generation, or not one of our workers
            return
        worker.channel = channel
        if worker.state == "starting":
            worker.state = "running"
        self._watch(channel, lambda: self._on_worker(worker))
        self._post_rank_spec(worker)
        self._receive(worker, lambda: messages[1:])

    def _worker_of(self, values: dict[str, Any]) -> Worker | None:
        try:
            hello: msg.FromRank = msg.decode(values, msg.FromRank)
        except ValueError:
            return None
        token = hello.token if isinstance(hello, msg.RankHello) else None
        return next((w for w in self.workers.values() if w.token == token), None)

    def _on_worker(self, worker: Worker) -> None:
        channel = worker.channel
        assert channel is not None
        self._receive(worker, channel.receive)
        if worker.channel is not None and channel.closed:
            self._close_channel(worker)

    def _receive(self, worker: Worker, receive: Callable[[], list[dict[str, Any]]]) -> None:
        try:
            self._on_messages(worker, receive())
        except ValueError as error:
            # Whatever happened to it, it must not continue; and its exit counts as its own failure.
            complain(f"protocol error from rank {worker.rank}: {error}")
            self._close_channel(worker)
            if worker.alive and worker.pid is not None:
                process.signal_group(worker.pid, signal.SIGKILL)

    def _close_channel(self, worker: Worker) -> None:
        assert worker.channel is not None
        self._unwatch(worker.channel)
        worker.channel.close()
        worker.channel = None

    def _on_messages(self, worker: Worker, messages: list[dict[str, Any]]) -> None:
        for values in messages:
            message: msg.FromRank = msg.decode(values, msg.FromRank)
            match message:
                case msg.RankBeat() | msg.RankValidating() | msg.Parked() | msg.Finished() if (
                    message.generation != worker.generation
                ):
                    continue  # sent before it received its next generation spec
                case msg.RankBeat():
                    worker.step, worker.validating = message.step, 0
                case msg.RankValidating():
                    worker.validating = message.batch
                case msg.Parked() if worker.runs:
                    worker.state = "parked"
                case msg.Finished() if worker.runs:
                    worker.state, worker.how = "finished", message.how
                    worker.done = worker.how == "done"
            self.report(worker, message)

    def _on_fork_server(self) -> None:
        channel = self._fork_server_channel
        if channel is None:
            return
        try:
            for values in channel.receive():
                self._on_fork_server_message(msg.decode(values, msg.FromForkServer))
        except ValueError as error:
            complain(f"protocol error from the fork server: {error}")
            self._drop_fork_server_channel()
            if self.fork_server is not None:
                process.signal_group(self.fork_server, signal.SIGKILL)  # its end counts as its own failure
        if channel.closed:
            self._drop_fork_server_channel()

    def _on_fork_server_message(self, message: msg.FromForkServer) -> None:
        match message:
            case msg.ForkServerReady():
                self.fork_server_ready = True
                self.report_node(msg.Ready())
            case msg.Pong():
                self._unanswered_pings = 0
            case msg.Forked():
                self._forked(message.token, message.pid)
            case msg.ForkedExited():
                self._process_ended(message.pid, message.status, message.time)

    def _drop_fork_server_channel(self) -> None:
        if self._fork_server_channel is not None:
            self._unwatch(self._fork_server_channel)
            self._fork_server_channel.close()
            self._fork_server_channel = None

    def _forked(self, token: str, pid: int) -> None:
        worker = next((w for w in self.workers.values() if w.token == token and w.alive), None)
        if worker is None:
            process.signal_group(pid, signal.SIGKILL)  # it was cancelled meanwhile
            return
        worker.pid = pid
        self._started(worker, in_place=False)

    def reaped(self, pid: int, status: int) -> bool:
        """Handle the exit of a child of the agent; return whether it was one of ours."""
        now = time.time()
        if pid == self.fork_server:
            self._fork_server_ended(pid, status, now)
            return True
        for worker in self.workers.values():
            if worker.pid == pid and worker.alive and worker.signalled is None:
                worker.signalled = now  # reparented to us as its fork server died, which killed it too
        return self._process_ended(pid, status, now)

    def _process_ended(self, pid: int, status: int, when: float) -> bool:
        for worker in self.workers.values():
            if worker.pid == pid and worker.alive:
                self._exited(worker, status, when)
                return True
        return False

    def _exited(self, worker: Worker, status: int, when: float, *, never_began: bool = False) -> None:
        if worker.channel is not None:
            self._on_worker(worker)  # receive its last messages
        ran = worker.runs
        worker.state, worker.status = "exited", status
        oom = self._oom.struck() if status == -signal.SIGKILL else False
        exited = msg.RankExited(
            generation=worker.generation,
            rank=worker.rank,
            local=worker.local,
            pid=worker.pid,
            status=status,
            time=when,
            signalled=worker.signalled,
            oom_killed=oom,
            ran=ran,
            never_began=never_began,
        )
        self.report(worker, exited)

    def _fork_server_ended(self, pid: int, status: int, now: float) -> None:
        self._on_fork_server()  # receive its last messages
        self._drop_fork_server_channel()  # even if a child that it had just forked still holds its end open
        was_ready = self.fork_server_ready
        self.fork_server, self.fork_server_ready = None, False
        for worker in self.workers.values():
            worker.signalled = worker.signalled or now  # they die with it
        oom = self._oom.struck() if status == -signal.SIGKILL else False
        for worker in list(self.workers.values()):
            if worker.alive and worker.pid is None:
                self._exited(worker, 1, now, never_began=True)
        self.report_node(msg.ForkServerExited(pid=pid, status=status, time=now, oom_killed=oom))
        if was_ready:
            # At once, for the workers started next. One that never became ready is retried by the next start.
            self.start_fork_server()


def _post(worker: Worker, message: msg.ToRank) -> None:
    if worker.channel is not None:
        worker.channel.post(msg.encode(message))


def _user_of(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _execute_fork_server(command: list[str], keep: list[int]) -> int:
    for fd in keep:
        os.set_inheritable(fd, True)
    # Libraries start theirs on import, and the server could not fork.
    one_thread = dict.fromkeys(THREADS, "1")
    os.execve(command[0], command, clean_environment(os.environ) | one_thread)


def _threads() -> dict[str, str]:
    """The ranks' own numbers of threads, in place of the fork server's."""
    return {name: os.environ[name] for name in THREADS if name in os.environ}
