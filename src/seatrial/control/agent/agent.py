"""The agent of one node: carries out the coordinator's orders, monitors the node, and coordinates if it has the lease.

It never loads torch, has one thread, and waits on sockets, signals and deadlines. It kills what it started when it has
lost its launcher, and when it may no longer run anything because no coordinator answers. A signal means that its node
is leaving: it notifies the coordinator, and exits when it is released or its grace period is over.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from seatrial.base import atomic, process
from seatrial.base.complain import complain
from seatrial.base.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    InputError,
)
from seatrial.base.event_loop import EventLoop
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue
from seatrial.control.agent.errors import tail_of, with_error
from seatrial.control.agent.inspect import Inspection
from seatrial.control.agent.journal import Journal
from seatrial.control.agent.launcher_link import LauncherLink
from seatrial.control.agent.local_settings import resolve_auto
from seatrial.control.agent.member import Member
from seatrial.control.agent.ports import free_port
from seatrial.control.agent.watchdog import Watchdog
from seatrial.control.agent.worker import Worker
from seatrial.control.agent.workers import Workers
from seatrial.control.coordinator.coordinator import Coordinator
from seatrial.control.hardware.hardware_monitor import HardwareMonitor
from seatrial.control.net.acceptor import Acceptor
from seatrial.control.net.lease import Hold
from seatrial.control.net.wire import Incoming, Link, Listener
from seatrial.control.node.environment import NodeEnvironment, assignments
from seatrial.control.node.spec import AgentSpec, parse_agent_arguments
from seatrial.control.snapshots.snapshot_service import SnapshotService
from seatrial.control.telemetry.telemetry import Telemetry
from seatrial.job import Job
from seatrial.record import inputs
from seatrial.record import messages as msg
from seatrial.record.launches import read_outcome
from seatrial.record.secret import read_secret

_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_EXIT_RESERVE_S = 1.0  # part of the grace period kept for receiving the outcome and for killing
_LOOK_S = 0.5


class Agent:
    """Runs until the run has an outcome, its node has left, or the connection to its launcher is lost."""

    def __init__(self, spec: AgentSpec, launcher: Channel | None) -> None:
        """`launcher`: the channel to the launcher, None for an unattended agent."""
        self.spec = spec
        self.over: str | None = None  # why it ends
        self.outcome: msg.Outcome | None = None
        self.generation = 0  # the one that its workers run
        self.stopping: int | None = None  # generation that is to stop
        self.left: msg.GenerationLeft | None = (
            None  # how all its workers left this generation, once they have
        )
        self._hello_sent: msg.AgentJoins | None = None  # our last hello
        self.resigned = -1  # term in which we resigned as coordinator because we could reach too few nodes
        self.wanted: msg.Why | None = None  # how its launcher wants the run to end
        self.leaving: str | None = None  # the signal that announced that this node leaves
        self.ends_at = float("inf")  # when it exits in any case because of that signal
        self._asked_to_end: list[int] = []  # each SIGTERM and SIGINT
        self._look_at = 0.0  # when to look again for an outcome in the run folder
        self.sources = EventLoop()
        self.watch, self.unwatch = self.sources.watch, self.sources.unwatch
        self.signals = SignalQueue((signal.SIGCHLD, *_LEAVE))
        self.launcher = None if launcher is None else LauncherLink(launcher)
        self.watch(self.signals, self._on_signals)
        if self.launcher is not None:
            self.watch(self.launcher, self._on_launcher)
        process.become_subreaper()
        self.inputs = inputs.frozen(spec.folder)
        self.job: Job = inputs.job_of(spec.folder, self.inputs)
        environment = spec.node_environment(self.job, os.environ)
        os.environ.update(assignments(environment.variables))
        self._write(environment)
        self.workers = Workers(spec, self._on_rank, self._on_fork_server, self.watch, self.unwatch)
        self.snapshot_service = SnapshotService(spec, self._send)
        self.workers.snapshot_fds = self.snapshot_service.fds()
        self.workers.cpus = {local: gpu.cpus for local, gpu in enumerate(environment.gpus)}
        self.workers.start_fork_server()  # early: it takes two seconds, in which the agents find each other
        self.secret = read_secret(spec.folder)
        self.snapshot_service.set_secret(self.secret)
        self.listener = Listener(spec.address, self.secret)
        self.acceptor = Acceptor(self.listener, self.watch, self.unwatch, self._on_incoming)
        self.coordinator: Coordinator | None = None
        resilience = self.job.resilience
        self.member = Member(
            node=spec.node,
            address=spec.address,
            port=self.listener.port,
            secret=self.secret,
            folder=spec.folder.leases,
            heartbeat_s=resilience.heartbeat_s,
            silence_s=resilience.silence_s,
            hello=self._hello,
            became=self._became_coordinator,
            joined=self._resend,
            release=self._release_member,
        )
        self.journal = Journal(self.member)
        self._member_source: Link | Any | None = None
        self.inspection: Inspection | None = None
        self.watchdog = Watchdog(
            self.workers,
            self._helpers,
            os.getppid() if self.launcher is not None else None,
            rank_stopped=self._rank_stopped,
            report=self._process_stalled,
        )
        self.telemetry = Telemetry(spec, self.job, self.journal.send_once, self.watch, self.unwatch)
        self.hardware_monitor = HardwareMonitor(
            spec, resilience, self.journal.send_once, self.watch, self.unwatch, self.telemetry.update
        )

    def _write(self, environment: NodeEnvironment) -> None:
        try:
            text = atomic.json_text(environment.as_dict())
            atomic.write_text(self.spec.environment_json, text, durable=False)
        except OSError as error:  # a full disk must not prevent training
            complain(f"could not write {self.spec.environment_json}: {error}")

    # -- the loop

    def run(self) -> int:
        """Run until the end, then kill all that it started; returns the exit status."""
        self._to_launcher(msg.AgentStarted(self.spec.node, os.getpid()))
        try:
            while self.over is None:
                self._sync_member()
                self.sources.wait(self._timeout_s())
                self._on_time()
        finally:
            self._clean_up()
        self._to_launcher(msg.AgentFinished())
        return self._status()

    def _status(self) -> int:
        """The exit status. A connected launcher has received the outcome by message; a scheduler sees only this."""
        if self.launcher is not None:
            return EXIT_DONE if self.outcome is not None or self.over == "left" else EXIT_FAILED
        if self.outcome is not None:
            return self.outcome.exit_code
        if self.over == "signal" and self._asked_to_end[-1] == signal.SIGINT:
            return EXIT_INTERRUPTED
        # Even after a clean exit only the node has left and the run is not done: a scheduler may replace the node.
        return EXIT_PREEMPTED if self.over in ("left", "grace", "signal") else EXIT_INTERNAL

    def _timeout_s(self) -> float:
        now = time.monotonic()
        deadlines = [
            None if self.launcher is None else self.launcher.deadline,
            self.member.deadline,
            self.workers.deadline,
            self.hardware_monitor.deadline,
            self.acceptor.deadline,
            self.watchdog.deadline,
            self.ends_at,
        ]
        if self.coordinator is not None:
            deadlines.append(self.coordinator.deadline)
        if self.inspection is not None:
            deadlines.append(self.inspection.deadline)
        return max(0.0, min(d for d in deadlines if d is not None) - now)

    def _on_time(self) -> None:
        now = time.monotonic()
        if now >= self.ends_at:
            self.over = self.over or "grace"
        if self.member.link is None and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._find_outcome()
        if self.over is not None:
            return
        if self.launcher is not None and not self.launcher.tick():
            self.over = self.over or "the launcher is silent"
        self.workers.meet_deadlines()
        if not self.member.tick(self._beat):
            # The coordinator counts us as lost from now on: our ranks must not run in parallel with their successors.
            self.snapshot_service.cancel_start()
            self.workers.kill_ranks()
            # If it was only slow it still counts us as connected: reconnect and report that nothing runs here.
            self.member.leave()
            self.member.valid_until = time.monotonic() + 1e9
        self._inspect()
        self.hardware_monitor.tick()
        self.telemetry.coordinates(self.coordinator is not None)
        self.watchdog.tick()
        self.acceptor.tick()
        if self.coordinator is not None:
            self.coordinator.tick()
            if self.coordinator.deposed:
                if self.coordinator.resigned:
                    self.member.resign()
                    self.resigned = self.coordinator.hold.lease.term
                self.coordinator.close()
                self.coordinator = None

    def _sync_member(self) -> None:
        """Watch the member's current socket for its current events; both change over time, and there may be none."""
        source = self.member.source
        if self._member_source is not source:
            self._release_member()
            self._member_source = source
            if source is not None:
                self.watch(source, self._on_member, source.events)
        elif source is not None:
            self.sources.wait_for(source, source.events)

    def _release_member(self) -> None:
        if self._member_source is not None:
            self.unwatch(self._member_source)
            self._member_source = None

    # -- other agents

    def _on_incoming(self, incoming: Incoming) -> None:
        try:
            hello: msg.Hello = msg.decode(incoming.hello, msg.Hello)
        except ValueError as error:
            complain(f"protocol error in the first line of a connection: {error}")
            incoming.close()
            return
        match hello:
            case msg.AgentJoins() if self.coordinator is not None:
                self.coordinator.join(hello, incoming.link())
            case msg.Probe(lease) if lease is not None:
                incoming.close()
                self.member.learn_of(lease)
            case msg.GivesSnapshot() | msg.WantsSnapshot():
                self.snapshot_service.serve(incoming, hello)
            case _:
                incoming.close()

    def _became_coordinator(self, hold: Hold, dead: int | None) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
        self.coordinator = Coordinator(
            self.spec,
            self.job,
            self.inputs,
            hold,
            self.secret,
            self.watch,
            self.unwatch,
            dead=dead,
            alone=hold.lease.term == self.resigned + 1,
        )

    def _on_member(self) -> None:
        for order in self.member.receive():
            self._on_order(order)

    def _hello(self, term: int) -> msg.AgentJoins:
        self._hello_sent = msg.AgentJoins(
            term=term,
            node=self.spec.node,
            address=self.spec.address,
            port=self.listener.port,
            pid=os.getpid(),
            incarnation=self.spec.incarnation or self.journal.name,
            order=self.spec.order,
            leaving=self._leaving_now(),
            told=self.journal.name,
            ready=self.workers.fork_server_ready,
            running=self.generation if self._has_workers() else None,
            left=self.left,
            offer_port=free_port(),
            held=self.snapshot_service.held(),
        )
        return self._hello_sent

    def _beat(self, number: int) -> msg.Beat:
        workers = self.workers.workers.values()
        step, validating = min(((w.step, w.validating) for w in workers if w.runs), default=(0, 0))
        return msg.Beat(
            number=number,
            generation=self.generation,
            step=step,
            validating=validating,
            failed=sum(w.generation == self.generation and w.failed for w in workers),
        )

    def _send(self, message: msg.FromAgent) -> None:
        self.member.send(message)

    def _resend(self) -> None:
        """Send a newly found coordinator what changed since our hello was written, and what must be resent."""
        hello, leaving = self._hello_sent, self._leaving_now()
        assert hello is not None
        if self.workers.fork_server_ready and not hello.ready:
            self._send(msg.Ready())
        held = self.snapshot_service.held()
        if held != hello.held:
            self._send(msg.HeldSnapshots(held))
        if leaving is not None and hello.leaving is None:
            self._send(leaving)
        if self.wanted is not None:
            self._send(msg.EndRequested(self.wanted))
        self.journal.resend()

    def _has_workers(self) -> bool:
        """Whether any worker of this generation is alive here, parked, or failed; the journal reports failures.

        A worker that exited cleanly has no state to lose, and one that we have killed counts as dead.
        """
        workers = self.workers.workers.values()
        return any(w.signalled is None and w.state != "finished" and w.status != 0 for w in workers)

    def _helpers(self) -> dict[int, str]:
        found = self.snapshot_service.transfers()
        if self.coordinator is not None:
            found |= self.coordinator.snapshots.transfers() | self.coordinator.monitor.helpers()
        return found

    def _rank_stopped(self, worker: Worker, why: str) -> None:
        self.journal.send(msg.RankStopped(worker.generation, worker.rank, worker.local, why))

    def _process_stalled(self, message: str, data: dict[str, Any]) -> None:
        message = f"node {self.spec.node}: {message}"
        self.journal.send_once(msg.ExternalEvent("process_stopped", message, data))

    # -- orders

    def _on_order(self, order: msg.ToAgent) -> None:
        match order:
            case msg.Start():
                self.generation, self.stopping, self.left = order.generation, None, None
                self.journal.forget_generation()
                self.snapshot_service.guard(order, lambda: self._start(order))
            case msg.Idle():
                # A generation starts without this node: kill what is parked here, as it gets no further rank.
                self.journal.forget_generation()
                self.workers.start(order.generation, {}, in_place=False)
            case msg.Distrust():
                self.snapshot_service.generation_started(order.generation + 1, order.step)
            case msg.RolledBack():
                self.snapshot_service.forget(order.generation, order.step)
            case msg.Stop():
                self._stop(order)
            case msg.Yield():
                self.workers.leave(order)
            case msg.Inspect():
                self.inspection = Inspection(order.id, order.seconds, self.workers.workers.values())
            case msg.ResetGpu():
                self.workers.kill_ranks()  # parked ones would keep the GPU open
                self.hardware_monitor.order(order)
            case msg.Requalify() | msg.Drain():
                self.hardware_monitor.order(order)
            case msg.Flush():
                self.snapshot_service.flush(order)
            case msg.Settled():
                self.workers.settled(order)
            case msg.Outcome():
                self._end(order)
            case msg.ReleaseAgent():
                self.over = "left"
            case msg.Replaced():
                complain(f"another agent has joined as node {self.spec.node}: this one exits")
                self.over = "replaced"

    def _start(self, order: msg.Start) -> None:
        rank_specs = {
            local: msg.RankSpec(
                generation=order.generation,
                rank=rank,
                local_rank=local,
                node=self.spec.node,
                slot=order.slot,
                slots=order.slots,
                world_size=order.world_size,
                layout=order.layout,
                master_addr=order.master_addr,
                master_port=order.master_port,
                again=order.again,
                inputs=order.inputs,
                snapshots=self.snapshot_service.entries_for(local, rank, order.layout),
                log=str(self.spec.rank_log(order.generation, rank)),
            )
            for local, rank in enumerate(order.ranks)
        }
        self.workers.start(order.generation, rank_specs, in_place=order.in_place)

    def _stop(self, order: msg.Stop) -> None:
        self.stopping = order.generation
        if (
            order.generation >= self.generation
        ):  # the end of an older generation does not affect the current one
            self.snapshot_service.cancel_start()  # of a start that still waits for snapshots
            for rank in order.kill:
                self.workers.signal(rank, signal.SIGKILL)
        self.workers.stop(order.generation, order.grace_s, park=order.park)
        self._report_stopped()

    def _inspect(self) -> None:
        if self.inspection is not None and self.inspection.over():
            self._send(self.inspection.result())
            self.inspection = None

    def _end(self, outcome: msg.Outcome) -> None:
        self.outcome = outcome
        self._to_launcher(msg.RunOver(**vars(outcome)))
        self.over = "outcome"

    def _find_outcome(self) -> None:
        """Look for an outcome in the run folder: the run may be over with no coordinator left to send it."""
        found = read_outcome(self.spec.folder, self.spec.generation)
        if found is not None and found.term >= self.member.term:
            self._end(msg.Outcome(found.exit_code, found.term, found.failure))

    # -- workers

    def _on_rank(self, worker: Worker, message: msg.FromRank | msg.RankStarted | msg.RankExited) -> None:
        """Handle what `Workers` reports of a rank."""
        about = (worker.generation, worker.rank, worker.local)
        match message:
            case msg.RankStarted():
                self._send(message)
            case msg.Parked(step=step, message=text):
                self.journal.send(msg.RankParked(*about, step, text))
            case msg.StepFinding():
                of: dict[str, Any] = {"rank": worker.rank, "local": worker.local}
                self.journal.send(msg.RankFinding(**of, **vars(message)))
            case msg.RankRecord():
                self.journal.send_once(msg.Record(**vars(message)))
            case msg.RankSettle(pid=pid, count=count):
                self.journal.send_once(msg.Settle(worker.local, pid, count))
            case msg.RankBeat(first=True, step=step):
                self.snapshot_service.generation_started(worker.generation, step - 1)
            case msg.SnapshotFilled():
                self.snapshot_service.rank_filled(worker.local, message)
            case msg.Dump() if self.inspection is not None:
                self.inspection.add_answer(worker.rank, message)
                self._inspect()
            case msg.RankExited():
                if message.status != 0 and not message.never_began:
                    message = with_error(message, self.spec.folder, worker)
                self.journal.send(message)
        if isinstance(message, msg.Parked | msg.Finished | msg.RankExited):
            self._report_stopped()
            self._report_left()

    def _on_fork_server(self, message: msg.Ready | msg.ForkServerExited) -> None:
        """Handle what `Workers` reports of the fork server."""
        match message:
            case msg.Ready():
                self._send(message)
            case msg.ForkServerExited():
                log = self.spec.fork_server_log
                whole = replace(message, generation=self.generation, log=str(log), tail=tail_of(log))
                self.journal.send(whole)
                self._report_stopped()
                self._report_left()

    def _report_stopped(self) -> None:
        """Report the stop once nothing of the generation to be stopped runs any more."""
        if self.stopping is not None and not self.workers.at_work(self.stopping):
            parked = sum(w.waits for w in self.workers.workers.values())
            self.journal.send(msg.Stopped(self.stopping, parked, free_port()))
            self.stopping = None

    def _report_left(self) -> None:
        """Report the end of this generation once all its workers have finished cleanly."""
        workers = list(self.workers.workers.values())
        if not workers or self.left is not None or self.stopping is not None:
            return
        endings: set[msg.Ending] = set()
        for worker in workers:
            if worker.generation != self.generation:
                continue
            if not worker.left:
                return
            endings.add(worker.how)
        if len(endings) == 1:
            self.left = msg.GenerationLeft(self.generation, endings.pop(), free_port())
            self.journal.send(self.left)

    # -- launcher, signals, end

    def _on_launcher(self) -> None:
        assert self.launcher is not None
        for message in self.launcher.receive():
            match message:
                case msg.EndRun("now"):
                    self.over = "now"
                case msg.EndRun(why):
                    self._on_end_request(why)
                case msg.LauncherRecord():
                    self.journal.send_once(msg.Record(**vars(message)))
        if self.launcher.closed:
            self.unwatch(self.launcher)
            self.over = self.over or "the launcher has exited"

    def _on_end_request(self, why: msg.Why) -> None:
        self.wanted = why  # the next coordinator must receive it too
        if not self.member.send(msg.EndRequested(why)) and why != "preempt":
            self.over = why  # there is no coordinator and nothing to save: stop at once

    def _on_signals(self) -> None:
        arrived = self.signals.read()
        if signal.SIGCHLD in arrived:
            process.reap(self._reaped)
        asked = [s for s in arrived if s in _LEAVE]
        if asked and self.launcher is not None and not self.launcher.closed:
            self._on_launcher()  # a launcher's exit also sends us a signal: then we only exit
        if asked and self.over is None:
            self._asked_to_end += [s for s in asked if s in (signal.SIGTERM, signal.SIGINT)]
            if len(self._asked_to_end) > 1:
                self.over = "signal"
            elif self.leaving is None:
                self._leave(signal.Signals(asked[0]).name)

    def _leave(self, signal_name: str) -> None:
        grace_s = self.job.resilience.preempt_grace_s
        self.ends_at = time.monotonic() + grace_s
        self.leaving = signal_name
        leaving = self._leaving_now()
        assert leaving is not None
        self._send(leaving)  # a later coordinator gets it with our hello

    def _leaving_now(self) -> msg.NodeLeaving | None:
        """The leave notice, if any. Its grace period ends slightly early, so that the outcome still arrives here."""
        if self.leaving is None:
            return None
        left_s = self.ends_at - time.monotonic()
        grace_s = round(max(0.0, left_s - min(_EXIT_RESERVE_S, left_s / 4)), 3)
        return msg.NodeLeaving(self.leaving, grace_s, told=f"{self.journal.name}-leaving")

    def _reaped(self, pid: int, status: int) -> None:
        ours = self.workers.reaped(pid, status) or self.snapshot_service.reaped(pid, status)
        if not ours and self.coordinator is not None:
            self.coordinator.reaped(pid, status)

    def _to_launcher(self, message: msg.ToLauncher) -> None:
        if self.launcher is not None:
            self.launcher.send(message)

    def _clean_up(self) -> None:
        """Kill all processes of this agent that are still alive, including those that its ranks left behind."""
        if self.coordinator is not None:
            self.coordinator.flush()
        self.hardware_monitor.close()
        self.telemetry.close()
        self.workers.kill_ranks()
        if self.coordinator is not None:
            self.coordinator.monitor.close()
        mark = os.environ[process.MARK]

        def remaining() -> set[int]:
            return process.descendants(os.getpid()) | process.marked(mark)

        # The fork server last: should this agent be killed meanwhile, it kills the rest.
        process.kill_all(lambda: remaining() - {self.workers.fork_server})
        process.kill_all(remaining)
        process.reap(lambda pid, status: None)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m seatrial.control.agent`."""
    spec, attended = parse_agent_arguments(sys.argv[1:] if argv is None else argv)
    mark = os.environ.setdefault(process.MARK, f"{os.getpid()}/node{spec.node}")
    # An earlier agent of this node may still run because it did not notice the loss of its launcher.
    process.kill_all(lambda: process.marked(mark))
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    launcher = None
    if attended:
        log = process.open_log(spec.log)
        launcher = Channel.stdio(log)
        os.close(log)
    try:
        spec = resolve_auto(spec, os.environ)
    except InputError as error:
        complain(error.render())
        return error.exit_code
    process.allow_many_files()
    return Agent(spec, launcher).run()
