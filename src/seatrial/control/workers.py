"""The ranks of one node: started, told what to do, watched, stopped. Their agent decides nothing about them itself.

A worker is a process; which rank it is changes with the generation. Where there is no CUDA a nursery forks them. One
whose peers went away can stay ("parked") and be given a rank of the next generation.
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
from seatrial.control.grace import Grace
from seatrial.control.oom import OomWatch
from seatrial.control.spec import AgentSpec, clean_environment
from seatrial.control.wire import ACCEPT_AT_ONCE
from seatrial.control.worker import Leg, Worker, check_message

Tell = Callable[[str, Worker, dict[str, Any]], None]
Watch = Callable[[Any, Callable[[], None]], None]


class Workers:
    """The processes of one agent; `tell(kind, worker, values)` hears of each change."""

    def __init__(self, spec: AgentSpec, tell: Tell, watch: Watch, unwatch: Callable[[Any], None]) -> None:
        self.spec = spec
        self.tell = tell
        self.workers: dict[int, Worker] = {}  # by local number
        self.snapshot_fds: dict[int, tuple[int, int]] = {}  # by local number
        self.nursery: int | None = None  # pid
        self.nursery_ready = spec.device != "cpu"
        self._nursery_channel: Channel | None = None
        self._nursery_owes = 0  # unanswered calls of `ask_nursery`
        self._watch, self._unwatch = watch, unwatch
        self._oom = OomWatch()
        self._grace: Grace | None = None  # for workers to stop; those still running at the end are killed
        self._stopping = -1  # workers up to this generation must stop
        # An abstract socket: no file is left behind, and it ends with this process.
        self._name = f"seatrial-{os.getpid()}-{secrets.token_hex(8)}"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind("\0" + self._name)
        self._server.listen(256)
        self._server.setblocking(False)
        watch(self._server, self._on_connection)

    # -- starting

    def start_nursery(self) -> None:
        """Begin to import torch, once, for all ranks of this node. Nothing where each rank does it itself."""
        if self.spec.device != "cpu":
            return
        ours, theirs = Channel.pair()
        options = [
            *("--channel", str(theirs.fileno())),
            *("--parent", str(os.getpid())),
            *("--mark", os.environ[process.MARK]),
        ]
        command = self.spec.nursery_command() + options
        kept = [theirs.fileno(), *(fd for pair in self.snapshot_fds.values() for fd in pair)]
        try:
            self.nursery = process.fork(partial(_execute, command, kept), log=self.spec.nursery_log)
        except OSError as error:  # no memory, or no process left for this user: the next start tries again
            complain(f"could not start the nursery: {error}")
            ours.close()
            return
        finally:
            theirs.close()
        self._nursery_channel, self._nursery_owes = ours, 0
        self._watch(ours, self._on_nursery)

    def ask_nursery(self) -> int:
        """Ping the fork server if it is ready; returns the number of unanswered pings."""
        if self._nursery_channel is None or not self.nursery_ready:
            return 0
        self._nursery_channel.post({"ping": {}})
        self._nursery_owes += 1
        return self._nursery_owes

    def start(self, generation: int, legs: Mapping[int, Leg], *, in_place: bool) -> None:
        """Have each local number work on its leg. Parked workers go on in place, where allowed; others are new."""
        self._grace = None
        if self.nursery is None:
            self.start_nursery()
        for local, worker in list(self.workers.items()):
            if local not in legs:
                self._kill(worker)  # there is no rank for it in this generation
        for local, leg in legs.items():
            old = self.workers.get(local)
            if old is not None and in_place and old.waits and old.listens:
                self._go_on(old, generation, leg)
                continue
            if old is not None:
                self._kill(old)  # its place is taken; whoever reaps it finds it replaced
            self._fork(local, generation, leg)

    def _go_on(self, worker: Worker, generation: int, leg: Leg) -> None:
        assert worker.channel is not None
        worker.generation, worker.rank, worker.leg, worker.log = (
            generation,
            leg["rank"],
            leg,
            Path(leg["log"]),
        )
        worker.state, worker.how, worker.signalled, worker.step = "running", "done", None, 0
        worker.channel.post({"leg": leg})
        self.tell("started", worker, {"in_place": True})

    def _fork(self, local: int, generation: int, leg: Leg) -> None:
        worker = Worker(local, generation, leg["rank"], secrets.token_hex(16), leg)
        worker.log = Path(leg["log"])
        try:
            worker.log.parent.mkdir(parents=True, exist_ok=True)
        except (
            OSError
        ) as error:  # a full disk, most likely: the worker itself will fail at it, and be reported
            complain(f"could not make {worker.log.parent}: {error}")
        self.workers[local] = worker
        environment = self.spec.worker_environment(
            rank=leg["rank"],
            local_rank=local,
            world_size=leg["world_size"],
            slot=leg["slot"],
            slots=leg["slots"],
            master_addr=leg["master_addr"],
            master_port=leg["master_port"],
        )
        environment |= {"SEATRIAL_ATTENDANT": self._name, "SEATRIAL_ATTENDANT_TOKEN": worker.token}
        fds = self.snapshot_fds.get(local)
        if fds is not None:
            environment["SEATRIAL_SNAPSHOT_FDS"] = ",".join(map(str, fds))
        arguments = self.spec.worker_arguments(generation)
        if self.spec.device == "cpu":
            if self._nursery_channel is None:
                # If there is a nursery it is about to end, and that will be reported.
                self._exited(worker, 1, time.time(), never_began=self.nursery is not None)
                return
            # The request lies in the socket until the nursery has imported torch: no round trip is lost.
            order = {"rank": leg["rank"], "log": str(worker.log), "env": environment, "argv": arguments}
            self._nursery_channel.send({"fork": {**order, "token": worker.token}})
        else:
            command = [*self.spec.worker_command_prefix(), *arguments]
            body = partial(_execute, command, list(fds or ()), clean_environment(os.environ) | environment)
            try:
                worker.pid = process.fork(body, log=worker.log)
            except OSError as error:
                complain(f"could not start rank {worker.rank}: {error}")
                self._exited(worker, 1, time.time())
                return
            self.tell("started", worker, {"in_place": False})

    # -- orders

    def send_all(self, message: dict[str, Any]) -> None:
        """Pass `message` on to every worker that runs."""
        for worker in self.workers.values():
            if worker.runs and worker.channel is not None:
                worker.channel.post(message)

    def stop(self, generation: int, grace_s: float, *, park: bool) -> None:
        """Stop the work on `generation` and older ones: parked, or killed after `grace_s` (see grace.py)."""
        self._stopping = generation
        if park:
            self.send_all({"abandon": {"generation": generation}})
        if self._grace is None:
            self._grace = Grace(grace_s, patient=park)
        else:
            self._grace.shorten(grace_s, patient=park)
        for worker in self.at_work(generation):
            if worker.state == "starting":
                self._kill(worker)  # it has not heard of its leg yet: nothing can be lost
        self.meet_deadlines()

    def at_work(self, generation: int) -> list[Worker]:
        """The workers that still work on `generation` or an older one."""
        return [w for w in self.workers.values() if w.runs and w.generation <= generation]

    def kill_ranks(self) -> None:
        """SIGKILL to every worker, now."""
        for worker in list(self.workers.values()):
            self._kill(worker)

    def kill_all(self) -> None:
        """SIGKILL to every worker and the nursery, now."""
        self.kill_ranks()
        if self.nursery is not None:
            process.signal_group(self.nursery, signal.SIGKILL)

    def _kill(self, worker: Worker) -> None:
        if worker.alive and worker.pid is not None:
            self._signal(worker, signal.SIGKILL)
        elif worker.alive:
            # The nursery has still to fork it, perhaps to import torch before. Its leg waits for it here, not there: it
            # cannot do anything, and is killed as soon as it is there.
            worker.signalled = worker.signalled or time.time()
            self._exited(worker, 1, time.time(), never_began=True)

    def signal(self, rank: int, signum: int) -> None:
        """Send `signum` to the process that is `rank` now; nothing if there is none."""
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
        """Kill whoever has had its time to stop."""
        if self._grace is not None and self._grace.over():
            self._grace = None
            for worker in self.at_work(self._stopping):
                self._signal(worker, signal.SIGKILL)

    # -- what happens

    def _on_connection(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _address = self._server.accept()
            except OSError:  # nobody waits any more; or no descriptor is free
                return
            if _user_of(sock) != os.geteuid():  # an abstract socket has no permissions
                sock.close()
                continue
            channel = Channel(sock)
            self._watch(channel, partial(self._on_stranger, channel))

    def _on_stranger(self, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except ValueError:
            messages = [{}]  # nobody of ours
        if not messages and not channel.closed:
            return
        self._unwatch(channel)
        hello = messages[0].get("hello") if messages else None
        token = hello.get("token") if isinstance(hello, dict) else None
        worker = next((w for w in self.workers.values() if w.token == token), None)
        if worker is None or worker.channel is not None or not worker.alive:
            channel.close()  # of an earlier generation, or nobody of ours
            return
        worker.channel = channel
        if worker.state == "starting":
            worker.state = "running"
        self._watch(channel, lambda: self._on_worker(worker))
        channel.post({"leg": worker.leg})
        self._hear(worker, lambda: messages[1:])

    def _on_worker(self, worker: Worker) -> None:
        channel = worker.channel
        assert channel is not None
        self._hear(worker, channel.receive)
        if worker.channel is not None and channel.closed:
            self._hang_up(worker)

    def _hear(self, worker: Worker, receive: Callable[[], list[dict[str, Any]]]) -> None:
        try:
            self._take(worker, receive())
        except ValueError as error:
            # Whatever happened to it, it must not go on; and its end counts as its own failure.
            complain(f"rank {worker.rank} talks nonsense: {error}")
            self._hang_up(worker)
            if worker.alive and worker.pid is not None:
                process.signal_group(worker.pid, signal.SIGKILL)

    def _hang_up(self, worker: Worker) -> None:
        assert worker.channel is not None
        self._unwatch(worker.channel)
        worker.channel.close()
        worker.channel = None

    def _take(self, worker: Worker, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            for kind, values in message.items():
                check_message(kind, values)
                if kind in ("beat", "parked", "finished") and values["generation"] != worker.generation:
                    continue  # told before it heard of its next leg
                if kind == "beat":
                    worker.step = values["step"]
                elif kind == "parked" and worker.runs:
                    worker.state = "parked"
                elif kind == "finished" and worker.runs:
                    worker.state, worker.how = "finished", values["how"]
                    worker.done = worker.how == "done"
                self.tell(kind, worker, values)

    def _on_nursery(self) -> None:
        channel = self._nursery_channel
        if channel is None:
            return
        for message in channel.receive():
            match message:
                case {"ready": _pid}:
                    self.nursery_ready = True
                    self.tell("nursery_ready", _NOBODY, {})
                case {"pong": _}:
                    self._nursery_owes = 0
                case {"forked": {"token": token, "pid": pid}}:
                    self._forked(token, pid)
                case {"exited": {"pid": pid, "status": status, "time": when}}:
                    self._process_ended(pid, status, when)
        if channel.closed:
            self._drop_nursery_channel()

    def _drop_nursery_channel(self) -> None:
        if self._nursery_channel is not None:
            self._unwatch(self._nursery_channel)
            self._nursery_channel.close()
            self._nursery_channel = None

    def _forked(self, token: str, pid: int) -> None:
        worker = next((w for w in self.workers.values() if w.token == token and w.alive), None)
        if worker is None:
            process.signal_group(pid, signal.SIGKILL)  # it was called off meanwhile
            return
        worker.pid = pid
        self.tell("started", worker, {"in_place": False})

    def reaped(self, pid: int, status: int) -> bool:
        """A child of the agent has ended; whether it was one of ours."""
        now = time.time()
        if pid == self.nursery:
            self._nursery_ended(pid, status, now)
            return True
        for worker in self.workers.values():
            if worker.pid == pid and worker.alive and self.spec.device == "cpu" and worker.signalled is None:
                worker.signalled = now  # it became our child by its nursery's death, which took it along
        return self._process_ended(pid, status, now)

    def _process_ended(self, pid: int, status: int, when: float) -> bool:
        for worker in self.workers.values():
            if worker.pid == pid and worker.alive:
                self._exited(worker, status, when)
                return True
        return False

    def _exited(self, worker: Worker, status: int, when: float, *, never_began: bool = False) -> None:
        if worker.channel is not None:
            self._on_worker(worker)  # its last words
        ran = worker.runs
        worker.state, worker.status = "exited", status
        oom = self._oom.struck() if status == -signal.SIGKILL else False
        self.tell(
            "exited",
            worker,
            {
                "status": status,
                "time": when,
                "signalled": worker.signalled,
                "oom_killed": oom,
                "ran": ran,
                "never_began": never_began,
            },
        )

    def _nursery_ended(self, pid: int, status: int, now: float) -> None:
        self._on_nursery()  # what it said before it died
        self._drop_nursery_channel()  # also where a child that it had just forked holds its side open still
        was_ready = self.nursery_ready
        self.nursery, self.nursery_ready = None, False
        for worker in self.workers.values():
            worker.signalled = worker.signalled or now  # they die with it
        values = {"pid": pid, "status": status, "time": now, "signalled": None}
        values["oom_killed"] = self._oom.struck() if status == -signal.SIGKILL else False
        for worker in list(self.workers.values()):
            if worker.alive and worker.pid is None:
                self._exited(worker, 1, now, never_began=True)
        self.tell("nursery_exited", _NOBODY, values)
        if was_ready:
            # At once, for whoever is started next. One that could not even begin is left to the next start.
            self.start_nursery()


_NOBODY = Worker(-1, 0, -1, "", {}, state="exited")


def _user_of(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def _execute(command: list[str], keep: list[int], environment: dict[str, str] | None = None) -> int:
    for fd in keep:
        os.set_inheritable(fd, True)
    os.execve(command[0], command, clean_environment(os.environ) if environment is None else environment)
