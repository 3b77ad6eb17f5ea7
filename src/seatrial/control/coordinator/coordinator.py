"""The coordinator of one term: passes events to the state machine, and its decisions to the agents.

It runs inside an agent's event loop and never blocks. It writes its state to the run folder (the state of its term)
before it acts on it, so that the coordinator of the next term can continue.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from seatrial.base.complain import complain
from seatrial.checkpoint.place import checkpoint_urls
from seatrial.control.coordinator.confirm import Confirmations
from seatrial.control.coordinator.ending import Ending
from seatrial.control.coordinator.executor import Executor
from seatrial.control.coordinator.handover import recall
from seatrial.control.coordinator.hang_watch import Culprit, HangWatch
from seatrial.control.coordinator.links import RoundTrips
from seatrial.control.coordinator.monitor import MonitorProcess
from seatrial.control.coordinator.peers import Peer, Peers
from seatrial.control.coordinator.recorder import Recorder
from seatrial.control.coordinator.rejoin_probe import RejoinProbe
from seatrial.control.coordinator.settings import machine_settings
from seatrial.control.coordinator.snapshot_map import SnapshotMap
from seatrial.control.coordinator.steps import Steps
from seatrial.control.coordinator.verdicts import Verdicts
from seatrial.control.machine import types as m
from seatrial.control.machine.machine import Machine
from seatrial.control.machine.policy import rule_for
from seatrial.control.machine.world import World
from seatrial.control.net.lease import Hold, Succeeded
from seatrial.control.net.wire import Link
from seatrial.control.node.spec import AgentSpec
from seatrial.control.telemetry.targets import write_targets
from seatrial.job import Job
from seatrial.job.shapes import shapes
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import Digests
from seatrial.record.launches import StartOutcome, encoded, end_event, known_launch

_PEERS_GONE_S = 1.5  # a rank's report of lost peers counts as the failure itself after this time


class Coordinator:
    """One term of coordination."""

    def __init__(
        self,
        spec: AgentSpec,
        job: Job,
        inputs: Digests,
        hold: Hold,
        secret: bytes,
        watch: Callable[..., None],
        unwatch: Callable[[Any], None],
        *,
        dead: int | None = None,
        alone: bool = False,
    ) -> None:
        """`inputs`: digests of the job and the plan that every rank must read.

        `dead`: the previous coordinator's node, if its process is known to be dead. `alone`: this node has resigned and
        no other has taken over in time: it continues with the nodes that it can reach, however few.
        """
        self.spec, self.job, self.hold = spec, job, hold
        self.lease = lease = hold.lease
        self.folder: RunFolder = spec.folder
        self.shapes = shapes(job)
        self.peers = Peers(
            secret=secret,
            silence_s=job.resilience.silence_s,
            watch=watch,
            unwatch=unwatch,
            received=self._on_message,
            lost=lambda peer, certain, cause: self._lost(peer.node, certain, cause),
        )
        self._alone = alone
        self.deposed = False
        self.resigned = False
        self.round_trips = RoundTrips(self.lease.node)
        self._confirmed = Confirmations()
        self._steps = Steps()
        self._silent: set[int] = set()  # lost, or only unreachable from here
        self._kill: dict[int, list[int]] = {}  # node -> ranks that will not stop by themselves
        self._events: deque[m.Event] = deque()  # the first is being handled
        # Deadline of `_PEERS_GONE_S`, node, rank, message.
        self._peers_gone: tuple[float, int, int | None, str] | None = None
        memory = recall(spec, self.shapes, hold.state)
        settings = machine_settings(spec, job, self.shapes)
        self.machine = Machine(settings, None if memory is None else memory["machine"], rule_for)
        self.recorder = Recorder(self.folder, spec.generation, lease)
        self.monitor = MonitorProcess(
            self.folder.path, self.folder.monitor_log, self.recorder, watch, unwatch
        )
        self.verdicts = Verdicts(self.folder)
        places = checkpoint_urls(job.checkpoint, job.name, self.folder)
        self.snapshots = SnapshotMap(
            self.folder, places, job.checkpoint.read_back, self.peers.send, self._flushed
        )
        train = job.train
        self.hangs = HangWatch(
            job.resilience, self.peers.send, self.recorder, last_step=train.steps, batches=train.batches
        )
        self.executor = Executor(
            spec, job, inputs, self.shapes, self.peers, self.snapshots, self.recorder, hold
        )
        self.ending = Ending(
            spec.node, lease.term, self.peers, self.executor, self.verdicts, self._record_outcome
        )
        self._turned_away: dict[str, Link] = {}  # replaced incarnation -> link, until it is notified
        if memory is not None:
            self.executor.incarnations = {int(node): seen for node, seen in memory["incarnations"].items()}
        if memory is not None and memory.get("world"):
            world = World.from_dict(memory["world"], self.shapes, spec.ranks_per_node)
            self.executor.world, self.recorder.generation = world, world.generation
            self.verdicts.generation_started(world.generation)
            self.monitor.generation_started(time.monotonic())
            self.executor.roster = {
                int(node): (address, port) for node, (address, port) in memory["roster"].items()
            }
        awaited = self.world.nodes if self.world is not None else []
        self.rejoin_probe = RejoinProbe(
            {n: w for n, w in self.executor.roster.items() if n in awaited and n not in (dead, lease.node)},
            lease=lease,
            secret=secret,
            silence_s=job.resilience.silence_s,
            watch=watch,
            unwatch=unwatch,
            lost=self._lost,
        )
        self.recorder.event(
            "coordinator_elected",
            f"node {lease.node} coordinates (term {lease.term})",
            node=lease.node,
            data={"term": lease.term, "address": lease.address, "port": lease.port},
        )
        if dead is not None and memory is not None:
            self._lost(dead, True, "its agent exited")

    @property
    def world(self) -> World | None:
        """The generation that runs, or ran last."""
        return self.executor.world

    # -- called by the event loop

    @property
    def deadline(self) -> float | None:
        deadlines = [self.hold.renew_at, self.machine.deadline(), self.hangs.deadline]
        deadlines += [self.peers.deadline, self.rejoin_probe.deadline, self.ending.deadline]
        deadlines += [self.monitor.deadline]
        if self._peers_gone is not None:
            deadlines.append(self._peers_gone[0])
        return min((d for d in deadlines if d is not None), default=None)

    def tick(self) -> None:
        """Handle everything that is due."""
        now = time.monotonic()
        self._holds()
        if self.deposed:
            return
        self.peers.tick(now)
        self.rejoin_probe.tick(now)
        if self._peers_gone is not None and now >= self._peers_gone[0]:
            _, node, rank, message = self._peers_gone
            self._fail(node, rank, "peer_lost", message)
        at = self.machine.deadline()
        if at is not None and now >= at:
            self._handle(m.Tick(now))
        self._fail_for_hang(self.hangs.tick(now, self.world, self.round_trips.slowest()))
        self.ending.tick(now)
        self.monitor.tick(now)

    def _holds(self, *, since: float | None = None) -> bool:
        """Whether no later term has begun, by a recent proof or, if given, one made after `since`."""
        try:
            return self.hold.holds(since=since)
        except Succeeded:
            self.deposed = True
            return False

    def close(self) -> None:
        """Another term has begun: close all connections, change nothing."""
        self.peers.close()
        self.rejoin_probe.close()
        self.monitor.close()
        for link in self._turned_away.values():
            link.close()

    def flush(self) -> None:
        """Send pending messages to the other agents before this agent exits."""
        self.peers.flush()

    def reaped(self, pid: int, status: int) -> None:
        if not self.monitor.reaped(pid, status):
            self.snapshots.reaped(pid)

    # -- agents

    def join(self, hello: msg.AgentJoins, link: Link) -> None:
        """An agent has connected, for the first time or again."""
        node, incarnation, leaving = hello.node, hello.incarnation, hello.leaving
        seen = self.executor.incarnations.setdefault(node, [])
        if incarnation in seen[:-1]:
            link.send(msg.encode(msg.Replaced()))
            self._turned_away[incarnation] = link
            return
        replaces = incarnation not in seen and bool(seen)
        if replaces:
            self._replace(node)
        if incarnation not in seen:
            seen.append(incarnation)
        old = self.peers.get(node)
        peer = Peer(node, link, hello.address, hello.port, hello.offer_port, incarnation)
        self.peers.add(peer)
        self.rejoin_probe.joined(node)
        self._silent.discard(node)
        self.executor.roster[node] = (peer.address, peer.port)
        if self.job.file.watch.metrics_port is not None:
            write_targets(self.folder, self.job, {n: where for n, (where, _) in self.executor.roster.items()})
        self.snapshots.held(node, hello.held)
        if old is None or old.incarnation != incarnation:
            data = {"pid": hello.pid, "incarnation": incarnation, "told": hello.told}
            self.recorder.event("agent_started", f"agent of node {node} started", node=node, data=data)
        spare = node >= self.spec.nodes
        self.recorder.event("node_joined", f"node {node} joined", node=node, data={"spare": spare})
        if self.ending.outcome is not None:
            link.send(msg.encode(self.ending.outcome))
            return
        if hello.left is not None:
            self._left(peer, hello.left)  # first: otherwise a node that runs nothing has lost its ranks
        if leaving is not None:
            self._report_leaving(node, leaving)
        grace_s = None if leaving is None else leaving.grace_s
        now = time.monotonic()
        self._handle(m.Joined(now, node, hello.ready, hello.running, hello.order, grace_s, replaces))
        if replaces:
            self.executor.remember(self.machine.memory())  # a successor must not mix up old and new

    def _replace(self, node: int) -> None:
        """Another agent has joined with this node's number: notify the previous one, which exits if it is alive."""
        self.recorder.event(
            "node_replaced",
            f"another agent has joined as node {node}: it replaces the previous one",
            severity="warning",
            node=node,
        )
        self.peers.send(node, msg.Replaced())
        self.snapshots.lost(node)

    def _on_message(self, peer: Peer, message: msg.FromAgent) -> None:
        if self.deposed:
            return  # an answer would extend the agent's right to run, which we may no longer grant
        now = time.monotonic()
        match message:
            case msg.Beat():
                if self._holds():  # otherwise as above
                    age_s = max(0.0, now - self.hold.proven_at)
                    peer.link.send(msg.encode(msg.BeatReturned(message.number, age_s)))
                    self._beat(peer, message)
            case msg.Ready():
                self._handle(m.Ready(now, peer.node))
            case msg.RankStarted():
                self._rank_started(peer, message)
            case msg.RankFinding():
                self._finding(peer, message)
            case msg.RankStopped():
                if self._current(message.generation):
                    self._fail_for_hang(self.hangs.stopped(peer.node, message))
            case msg.RankParked():
                lost = f"rank {message.rank} lost its peers: {message.message}"
                self._lost_peers(peer.node, message.generation, message.rank, lost)
            case msg.RankExited() | msg.ForkServerExited():
                self._exited(peer, message)
            case msg.HardwareSignal():
                self._signal(peer, message)
            case msg.Stopped():
                peer.offer_port = message.offer_port
                self._handle(m.Stopped(now, message.generation, peer.node))
                self.ending.stopped(peer.node)
            case msg.GenerationLeft():
                self._left(peer, message)
            case msg.HeldSnapshots():
                self.snapshots.held(peer.node, message.snapshots)
            case msg.Part():
                self.snapshots.part(message)
            case msg.Inspected():
                self.hangs.inspected(peer.node, message)
            case msg.Requalified():
                self._requalified(peer, message)
            case msg.ExternalEvent():
                data = {**message.data, "told": message.told}
                self.recorder.event(
                    message.kind, message.message, severity="warning", node=peer.node, data=data
                )
            case msg.Record():
                self.recorder.record(message)
            case msg.Settle():
                self._settle(peer, message)
            case msg.NodeLeaving():
                self._report_leaving(peer.node, message)
                self._handle(m.Leaving(now, peer.node, message.grace_s))
            case msg.EndRequested():
                self._handle(m.StopAsked(now, message.why))

    def _lost(self, node: int, certain: bool, cause: str) -> None:
        self.round_trips.forget(node)
        if self.ending.outcome is not None or (not certain and not self._alone and self._cut_off(node)):
            return
        self.snapshots.lost(node)
        if not self.machine.roster.node(node).released:
            self.recorder.event(
                "node_lost",
                f"node {node} is lost: {cause}",
                severity="error",
                node=node,
                data={"cause": cause, "certain": certain},
            )
            self.verdicts.node_lost(node, cause)
        self._handle(m.Lost(time.monotonic(), node, certain, cause))
        self.ending.stopped(node)

    def _cut_off(self, node: int) -> bool:
        """Resign if we are the ones cut off, now that `node` is silent too; return whether that is so.

        Our own agent is always reachable. With fewer than half of the nodes left, the others continue without us: they
        can claim the next term once this one is no longer renewed. With one node on each side we stay.
        """
        self._silent.add(node)
        heard = len([n for n in self.peers.nodes() if n not in self._silent])
        if heard >= len(self._silent):
            return False
        self.recorder.event(
            "coordinator_resigned",
            f"node {self.lease.node} reaches {heard} of {heard + len(self._silent)} nodes, and resigns",
            severity="warning",
            node=self.lease.node,
            data={"term": self.lease.term, "silent": sorted(self._silent)},
        )
        self.deposed = self.resigned = True
        return True

    # -- messages from agents

    def _beat(self, peer: Peer, beat: msg.Beat) -> None:
        peer.generation, peer.done = beat.generation, (beat.step, beat.validating)
        slow = self.round_trips.add(peer.node, peer.link.round_trip_s)
        if slow is not None:
            rule = rule_for("congestion")
            self.recorder.finding("congestion", str(slow), rule, evidence=asdict(slow), node=peer.node)
        self._confirm(peer.node, beat)
        self._progress(peer)

    def _confirm(self, node: int, beat: msg.Beat) -> None:
        if not self.machine.works(node):
            self._confirmed.forget(node)
            return
        wanted, now = self.machine.generation, time.monotonic()
        wrong = self._confirmed.beat(node, wanted, beat.generation, beat.failed, now)
        if wrong is not None:
            self._fail(node, None, "worker_exit", wrong)

    def _progress(self, peer: Peer) -> None:
        world = self.world
        if world is None:
            return
        done, now = self._steps.beat(world, peer.node, peer.generation, peer.done), time.monotonic()
        if self.hangs.progress(done[0], now):
            self.monitor.stepped(now)
            self._handle(m.Progress(now, world.generation, done[0]))
        self.hangs.validating(done, now)

    def _rank_started(self, peer: Peer, started: msg.RankStarted) -> None:
        self.recorder.event(
            "rank_started",
            f"rank {started.rank} on node {peer.node} started",
            node=peer.node,
            rank=started.rank,
            data={"pid": started.pid, "in_place": started.in_place},
        )

    def _exited(self, peer: Peer, exited: msg.RankExited | msg.ForkServerExited) -> None:
        failure = self.verdicts.process_ended(peer.node, exited)
        if failure is None:
            return
        self.recorder.event(
            failure.event,
            failure.message,
            severity="info" if failure.consequence else "error",
            node=peer.node,
            rank=exited.rank,
            data={"status": exited.status, "pid": exited.pid, "log": exited.log, "told": exited.told},
        )
        if failure.consequence:
            self._lost_peers(peer.node, exited.generation, exited.rank, failure.message)
        elif self._current(exited.generation):
            self._fail(peer.node, exited.rank, failure.signal, failure.cause)

    def _lost_peers(self, node: int, generation: int, rank: int | None, message: str) -> None:
        """The first rank that lost its peers: their own failure is expected to be reported within `_PEERS_GONE_S`."""
        if self._current(generation) and self._peers_gone is None:
            self._peers_gone = (time.monotonic() + _PEERS_GONE_S, node, rank, message)

    def _finding(self, peer: Peer, finding: msg.RankFinding) -> None:
        blamed = finding.blamed
        rule = rule_for(finding.signal)
        self.recorder.finding(
            finding.signal,
            finding.message,
            rule,
            evidence=finding.data,
            node=self._node_of(blamed[0]) if blamed else None,
            rank=blamed[0] if blamed else None,
            step=finding.step,
            told=finding.told,
        )
        if finding.signal == "storage_wait":
            self.hangs.waits_for_storage(finding.step, time.monotonic())
        good = finding.data.get("last_good_step")
        if good is not None:
            # Snapshots taken since then may be corrupt as well.
            for other in self.peers.nodes():
                self.peers.send(other, msg.Distrust(finding.generation, good))
        back = finding.data.get("went_back_to")
        if back is not None:
            for other in self.peers.nodes():
                self.peers.send(other, msg.RolledBack(finding.generation, back))
        if rule.action in ("ignore", "record") or not self._current(finding.generation):
            return
        for rank in blamed:
            at = self._node_of(rank)
            if at is not None:
                self._fail(at, rank, finding.signal, finding.message)

    def _signal(self, peer: Peer, signal: msg.HardwareSignal) -> None:
        rule = rule_for(signal.signal)
        self.recorder.finding(
            signal.signal,
            signal.message,
            rule,
            evidence=signal.evidence or None,
            node=peer.node,
            gpu=signal.gpu,
            port=signal.port,
            told=signal.told,
        )
        if rule.action not in ("ignore", "record"):
            if signal.gpu is not None:
                self.executor.gpus[peer.node] = signal.gpu
            self._fail(peer.node, None, signal.signal, signal.message)

    def _left(self, peer: Peer, left: msg.GenerationLeft) -> None:
        peer.offer_port = left.offer_port
        self._handle(m.Finished(time.monotonic(), left.generation, peer.node, left.how))

    def _requalified(self, peer: Peer, result: msg.Requalified) -> None:
        self.recorder.event(
            "node_requalified",
            f"node {peer.node} passed its test"
            if result.ok
            else f"node {peer.node} did not qualify: {result.message}",
            severity="info" if result.ok else "error",
            node=peer.node,
            data=vars(result),
        )
        self._handle(m.Requalified(time.monotonic(), peer.node, result.ok))

    def _settle(self, peer: Peer, asked: msg.Settle) -> None:
        # Everything sent before it is written: messages of one node keep their order.
        number = None
        try:
            self.recorder.sync()
        except OSError as error:
            number = error.errno or errno.EIO
        self.peers.send(peer.node, msg.Settled(asked.local, asked.pid, asked.count, number))

    def _report_leaving(self, node: int, leaving: msg.NodeLeaving) -> None:
        message = f"node {node} is leaving: its agent received {leaving.signal}"
        self.recorder.event("node_leaving", message, severity="warning", node=node, data=vars(leaving))

    def _flushed(self, step: int, ok: bool, message: str) -> None:
        if message:  # without one there was nothing to write
            severity, data = ("info", {"step": step}) if ok else ("warning", {"step": None})
            self.recorder.event("snapshot_flushed", message, severity=severity, data=data)
        self._handle(m.Flushed(time.monotonic(), step, ok))

    def _record_outcome(self, outcome: msg.Outcome, message: str) -> None:
        """Write control/outcome.json for processes without a message, and the event if no launcher stays to do it."""
        launch = known_launch(self.folder)
        found = StartOutcome(
            generation=self.spec.generation,
            term=self.lease.term,
            exit_code=outcome.exit_code,
            message=message,
            time=time.time(),
            failure=outcome.failure,
        )
        if launch is not None and launch.scheduled:
            end = end_event(found.exit_code, found.failure, self.job.train.steps)
            # A node that was cut off when the run ended may take the next term and record the same end again.
            end["data"] = {**(end.get("data") or {}), "told": f"end-{self.spec.generation}"}
            self.recorder.event(**end)
        try:
            self.hold.write(self.folder.outcome_json, encoded(found))  # last: readers stop once it exists
        except OSError as error:
            complain(f"could not write {self.folder.outcome_json}: {error}")
        except Succeeded:
            self.deposed = True  # another coordinator decides by now

    # -- decisions

    def _node_of(self, rank: int) -> int | None:
        return self.world.node_of(rank) if self.world is not None else None

    def _current(self, generation: int) -> bool:
        """Whether that generation is running, according to our own decisions."""
        return self.world is not None and self.machine.at_work(generation)

    def _fail(self, node: int, rank: int | None, signal: str, cause: str) -> None:
        if self.world is None or self.ending.outcome is not None:
            return
        self._peers_gone = None
        self.verdicts.blamed(node, rank, cause)
        step = max(self.hangs.step, 0)
        self._handle(m.Failed(time.monotonic(), self.world.generation, node, rank, signal, cause, step))

    def _fail_for_hang(self, culprits: Sequence[Culprit]) -> None:
        for culprit in culprits:
            if culprit.rank is not None:
                self._kill.setdefault(culprit.node, []).append(culprit.rank)
        for culprit in culprits:
            self._fail(culprit.node, culprit.rank, culprit.signal, culprit.cause)
        self._kill = {}

    def _handle(self, event: m.Event) -> None:
        """Process an event, then the events caused by executing its actions, such as a closed connection."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events and not self.deposed:
            try:
                self._process_next()
            except Succeeded:
                self.deposed = True  # another coordinator decides by now
            self._events.popleft()

    def _process_next(self) -> None:
        """Process the first queued event. Raises Succeeded."""
        started_at = time.monotonic()
        actions = self.machine.handle(self._events[0])
        if actions:
            self.recorder.log(self._events[0], actions)
        for action in actions:
            if isinstance(action, m.Start):
                self.executor.prepare(action)
        if any(not isinstance(action, m.Note) for action in actions):
            self.executor.remember(self.machine.memory())  # before any action is executed
        if self.machine.phase == "running" and not self.hangs.watching:
            self.hangs.generation_started(time.monotonic(), whole=True)  # started by an earlier coordinator
        for action in actions:
            if not self.deposed:
                self._execute(action, started_at)

    def _execute(self, action: m.Action, started_at: float) -> None:
        """Execute an action. `started_at`: when handling of its event began, on the monotonic clock."""
        match action:
            case m.Start() | m.Finish() if not self._holds(since=started_at):
                self.deposed = True  # or the file system gave no proof
            case m.Start():
                self._peers_gone = None
                self.executor.start(action)
                self.hangs.generation_started(time.monotonic(), whole=not action.in_place)
                self.verdicts.generation_started(action.generation)
                self.monitor.generation_started(time.monotonic())
            case m.Stop():
                self.executor.stop(action, self._kill)
                if not self.machine.at_work(self.machine.generation):
                    # Otherwise the node only has to stop an older generation; the current one continues.
                    self._peers_gone = None
                    self.hangs.generation_ended()
            case m.Yield():
                self.executor.do(action)
                self.hangs.generation_ended()  # saving may take long; the machine has its own timeout for it
            case m.Flush():
                self.snapshots.flush(self.world)
            case m.Finish():
                self.hangs.generation_ended()
                if action.how == "preempted":
                    self.recorder.event("preempted", action.message, severity="warning")
                self.monitor.end()
                self.ending.begin(action)
            case _:
                self.executor.do(action)
