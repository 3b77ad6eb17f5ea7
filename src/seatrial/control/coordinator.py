"""The coordinator: carries events to the machine and its decisions to the agents. It holds the lease of one term.

It runs inside an agent's loop and never waits. What it must not forget lies in the run folder (control/state.json)
before it acts on it, so that the holder of the next term goes on from there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from seatrial.checkpoint.place import checkpoint_urls
from seatrial.control import lease as leases
from seatrial.control import machine_types as m
from seatrial.control.absent import Absent
from seatrial.control.confirm import Confirmations
from seatrial.control.ending import Ending
from seatrial.control.executor import Executor
from seatrial.control.hangs import Culprit, HangWatch
from seatrial.control.lease import Lease
from seatrial.control.links import RoundTrips
from seatrial.control.machine import Machine
from seatrial.control.memory import recall
from seatrial.control.peers import Peer, Peers
from seatrial.control.policy import rule_for
from seatrial.control.recorder import Recorder
from seatrial.control.settings import machine_settings
from seatrial.control.snapshots import SnapshotMap
from seatrial.control.spec import AgentSpec
from seatrial.control.verdicts import Verdicts
from seatrial.control.wire import Link, Message
from seatrial.control.world import World
from seatrial.job import Job
from seatrial.job.shapes import shapes
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import Digests

_RENEW_S = 0.25  # nobody hears of us for longer than this after the next term has begun

_PEERS_GONE_S = (
    1.5  # a rank that says its peers are gone: so long until we believe it without knowing who failed
)


class Coordinator:
    """One term of coordination."""

    def __init__(
        self,
        spec: AgentSpec,
        job: Job,
        inputs: Digests,
        lease: Lease,
        secret: bytes,
        watch: Callable[..., None],
        unwatch: Callable[[Any], None],
        *,
        dead: int | None = None,
        alone: bool = False,
    ) -> None:
        """`inputs`: digests of the job and the plan that every rank must read.

        `dead`: the previous coordinator's node, if its process is known to be dead. `alone`: this node has resigned and
        nobody has taken over in time: it continues with the nodes it hears, however few.
        """
        self.spec, self.job, self.lease = spec, job, lease
        self.folder: RunFolder = spec.folder
        self.shapes = shapes(job)
        self.peers = Peers(
            secret=secret,
            silence_s=job.resilience.silence_s,
            watch=watch,
            unwatch=unwatch,
            told=self._on_message,
            lost=lambda peer, certain, cause: self._lost(peer.node, certain, cause),
        )
        self._alone = alone
        self.deposed = False
        self.resigned = False
        self.round_trips = RoundTrips(self.lease.node)
        self._confirmed = Confirmations()
        self._silent: set[int] = set()  # lost, perhaps only to us
        self._kill: dict[int, list[int]] = {}  # node -> ranks that will not stop by themselves
        self._events: deque[m.Event] = deque()  # the first is being handled
        self._renew_at = 0.0
        self._peers_gone: tuple[float, int, int | None, str] | None = (
            None  # when believed, node, rank, message
        )
        memory = recall(spec, self.shapes)
        settings = machine_settings(spec, job, self.shapes)
        self.machine = Machine(settings, None if memory is None else memory["machine"], rule_for)
        self.recorder = Recorder(self.folder, spec.generation, lease)
        self.verdicts = Verdicts(self.folder)
        places = checkpoint_urls(job.checkpoint, job.name, self.folder)
        self.snapshots = SnapshotMap(
            self.folder, places, job.checkpoint.read_back, self.peers.send, self._flushed
        )
        self.hangs = HangWatch(job.resilience, self.peers.send, self.recorder, last_step=job.train.steps)
        self.executor = Executor(spec, job, inputs, self.shapes, self.peers, self.snapshots, self.recorder)
        self.ending = Ending(spec.node, lease.term, self.peers, self.executor, self.verdicts)
        if memory is not None and memory.get("world"):
            world = World.from_dict(memory["world"], self.shapes, spec.ranks_per_node)
            self.executor.world, self.recorder.generation = world, world.generation
            self.verdicts.began(world.generation)
            self.executor.roster = {
                int(node): (address, port) for node, (address, port) in memory["roster"].items()
            }
        awaited = self.world.nodes if self.world is not None else []
        self.absent = Absent(
            {n: w for n, w in self.executor.roster.items() if n in awaited and n not in (dead, lease.node)},
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
            self._lost(dead, True, "its agent ended")

    @property
    def world(self) -> World | None:
        """The generation that runs, or ran last."""
        return self.executor.world

    # -- the loop's side

    @property
    def deadline(self) -> float | None:
        deadlines = [self._renew_at, self.machine.deadline(), self.hangs.deadline]
        deadlines += [self.peers.deadline, self.absent.deadline, self.ending.deadline]
        if self._peers_gone is not None:
            deadlines.append(self._peers_gone[0])

        return min((d for d in deadlines if d is not None), default=None)

    def tick(self) -> None:
        """What time demands."""
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + _RENEW_S
            if not leases.renew(self.folder.leases, self.lease.term):
                self.deposed = True
                return
        self.peers.tick(now)
        self.absent.tick(now)
        if self._peers_gone is not None and now >= self._peers_gone[0]:
            _, node, rank, message = self._peers_gone
            self._fail(node, rank, "peer_lost", message)
        at = self.machine.deadline()
        if at is not None and now >= at:
            self._handle(m.Tick(now))
        self._fail_for_hang(self.hangs.tick(now, self.world, self.round_trips.slowest()))
        self.ending.tick(now)

    def close(self) -> None:
        """Another term has begun: let go of everybody, change nothing."""
        self.peers.close()
        self.absent.close()

    def flush(self) -> None:
        """The agent ends: pass on what the others have still to hear."""
        self.peers.flush()

    def reaped(self, pid: int, status: int) -> None:
        self.snapshots.reaped(pid)

    # -- agents

    def join(self, hello: dict[str, Any], link: Link) -> None:
        """An agent has connected, for the first time or again."""
        node = int(hello["node"])
        old = self.peers.get(node)
        peer = Peer(node, link, hello["address"], hello["port"], hello["offer_port"], hello["pid"])
        self.peers.add(peer)
        self.absent.came(node)
        self._silent.discard(node)
        self.executor.roster[node] = (peer.address, peer.port)
        self.snapshots.held(node, hello["held"])
        if old is None or old.pid != peer.pid:
            data = {"pid": peer.pid, "told": hello.get("told")}
            self.recorder.event("agent_started", f"agent of node {node} started", node=node, data=data)
        spare = node >= self.spec.nodes
        self.recorder.event("node_joined", f"node {node} joined", node=node, data={"spare": spare})
        if self.ending.outcome is not None:
            link.send({"outcome": self.ending.outcome})
            return
        if hello["left"] is not None:
            self._on_left(peer, hello["left"])  # first: a node that runs nothing has otherwise lost its ranks
        self._handle(m.Joined(time.monotonic(), node, bool(hello["ready"]), hello["running"]))

    def _on_message(self, peer: Peer, message: Message) -> None:
        if self.deposed:
            return  # to answer would prolong what we may no longer allow
        if "beat" in message:
            peer.link.send({"beat": message["beat"]})
            self._beat(peer, message)
            return
        for kind, values in message.items():
            getattr(self, f"_on_{kind}")(peer, values)

    def _lost(self, node: int, certain: bool, cause: str) -> None:
        self.round_trips.forget(node)
        if self.ending.outcome is not None or (not certain and not self._alone and self._cut_off(node)):
            return
        self.snapshots.lost(node)
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
        """Whether it is we who are cut off, now that `node` is silent too; then we resign.

        Our own agent always hears us. With fewer than half of them left, the others go on without us: nothing keeps
        them from claiming the next term once this one is not renewed. Where it is one against one we stay.
        """
        self._silent.add(node)
        heard = len([n for n in self.peers.nodes() if n not in self._silent])
        if heard >= len(self._silent):
            return False
        self.recorder.event(
            "coordinator_resigned",
            f"node {self.lease.node} hears {heard} of {heard + len(self._silent)} nodes, and resigns",
            severity="warning",
            node=self.lease.node,
            data={"term": self.lease.term, "silent": sorted(self._silent)},
        )
        self.deposed = self.resigned = True
        return True

    # -- what agents tell

    def _beat(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.generation, peer.step = message["generation"], message["step"]
        slow = self.round_trips.add(peer.node, peer.link.round_trip_s)
        if slow is not None:
            values = {"signal": "congestion", "message": str(slow), "evidence": asdict(slow)}
            self.recorder.finding(values, peer.node, rule_for("congestion"))
        self._confirm(peer.node, message)
        self._progress()

    def _confirm(self, node: int, beat: dict[str, Any]) -> None:
        if not self.machine.works(node):
            self._confirmed.forget(node)
            return
        wanted, now = self.machine.generation, time.monotonic()
        wrong = self._confirmed.beat(node, wanted, beat["generation"], beat["failed"], now)
        if wrong is not None:
            self._fail(node, None, "worker_exit", wrong)

    def _progress(self) -> None:
        world = self.world
        if world is None:
            return
        nodes = [self.peers.get(n) for n in world.nodes]
        steps = [p.step if p is not None and p.generation == world.generation else 0 for p in nodes]
        now = time.monotonic()
        if self.hangs.progress(min(steps), now):
            self._handle(m.Progress(now, world.generation, min(steps)))

    def _on_ready(self, peer: Peer, values: dict[str, Any]) -> None:
        self._handle(m.Ready(time.monotonic(), peer.node))

    def _on_worker(self, peer: Peer, values: dict[str, Any]) -> None:
        kind, rank, generation = values["kind"], values["rank"], values["generation"]
        if kind == "started":
            self.recorder.event(
                "rank_started",
                f"rank {rank} on node {peer.node} started",
                node=peer.node,
                rank=rank,
                data={"pid": values["pid"], "in_place": values["in_place"]},
            )
            return
        if kind == "finding":
            self._on_finding(peer, values)
            return
        current = self._current(generation)
        if kind == "stopped":
            if current:
                self._fail_for_hang(self.hangs.stopped(peer.node, rank, values))
            return
        if kind == "parked":
            if current and self._peers_gone is None:
                message = f"rank {rank} lost its peers: {values['message']}"
                self._peers_gone = (time.monotonic() + _PEERS_GONE_S, peer.node, rank, message)
            return
        failure = self.verdicts.ended(peer.node, values)
        if failure is None:
            return
        self.recorder.event(
            failure.event,
            failure.message,
            severity="info" if failure.consequence else "error",
            node=peer.node,
            rank=rank,
            data={key: values.get(key) for key in ("status", "pid", "log", "told")},
        )
        if current and failure.consequence and self._peers_gone is None:
            self._peers_gone = (time.monotonic() + _PEERS_GONE_S, peer.node, rank, failure.message)
        elif current and not failure.consequence:
            self._fail(peer.node, rank, failure.signal, failure.cause)

    def _on_finding(self, peer: Peer, values: dict[str, Any]) -> None:
        blamed = [int(r) for r in values.get("blamed") or []]
        node = self._node_of(blamed[0]) if blamed else None
        rule = rule_for(values["signal"])
        self.recorder.finding(values, node, rule, rank=blamed[0] if blamed else None)
        if values["signal"] == "storage_wait":
            self.hangs.waits_for_storage(int(values["step"]), time.monotonic())
        good = (values.get("data") or {}).get("last_good_step")
        if good is not None:
            # What was copied since then may be as wrong as what was found.
            for other in self.peers.nodes():
                self.peers.send(other, {"distrust": {"generation": values["generation"], "step": good}})
        back = (values.get("data") or {}).get("went_back_to")
        if back is not None:
            for other in self.peers.nodes():
                self.peers.send(other, {"forget": {"generation": values["generation"], "step": back}})
        if rule.action in ("ignore", "record") or not self._current(values["generation"]):
            return
        for rank in blamed:
            at = self._node_of(rank)
            if at is not None:
                self._fail(at, rank, values["signal"], values["message"])

    def _on_signals(self, peer: Peer, signals: list[dict[str, Any]]) -> None:
        for values in signals:
            rule = rule_for(values["signal"])
            self.recorder.finding(values, peer.node, rule)
            if rule.action not in ("ignore", "record"):
                if values["gpu"] is not None:
                    self.executor.gpus[peer.node] = values["gpu"]
                self._fail(peer.node, None, values["signal"], values["message"])

    def _on_stopped(self, peer: Peer, values: dict[str, Any]) -> None:
        peer.offer_port = values["offer_port"]
        self._handle(m.Stopped(time.monotonic(), values["generation"], peer.node))
        self.ending.stopped(peer.node)

    def _on_left(self, peer: Peer, values: dict[str, Any]) -> None:
        peer.offer_port = values["offer_port"]
        self._handle(m.Finished(time.monotonic(), values["generation"], peer.node, values["how"]))

    def _on_held(self, peer: Peer, held: list[dict[str, Any]]) -> None:
        self.snapshots.held(peer.node, held)

    def _on_part(self, peer: Peer, values: dict[str, Any]) -> None:
        self.snapshots.part(values)

    def _on_inspected(self, peer: Peer, values: dict[str, Any]) -> None:
        self.hangs.inspected(peer.node, values)

    def _on_requalified(self, peer: Peer, values: dict[str, Any]) -> None:
        ok = bool(values["ok"])
        self.recorder.event(
            "node_requalified",
            f"node {peer.node} passed its test"
            if ok
            else f"node {peer.node} did not qualify: {values['message']}",
            severity="info" if ok else "error",
            node=peer.node,
            data=values,
        )
        self._handle(m.Requalified(time.monotonic(), peer.node, ok))

    def _on_external(self, peer: Peer, values: dict[str, Any]) -> None:
        data = {**values["data"], "told": values.get("told")}
        self.recorder.event(values["kind"], values["message"], severity="warning", node=peer.node, data=data)

    def _on_asked(self, peer: Peer, why: m.Why) -> None:
        self._handle(m.StopAsked(time.monotonic(), why))

    def _flushed(self, step: int, ok: bool, message: str) -> None:
        if message:  # without one there was nothing to write
            severity, data = ("info", {"step": step}) if ok else ("warning", {"step": None})
            self.recorder.event("snapshot_flushed", message, severity=severity, data=data)
        self._handle(m.Flushed(time.monotonic(), step, ok))

    # -- decisions

    def _node_of(self, rank: int) -> int | None:
        return self.world.node_of(rank) if self.world is not None else None

    def _current(self, generation: int) -> bool:
        """Whether that generation is at work, as far as we have decided."""
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
        """Take an event, and then what came of carrying out the actions: that a connection is gone, for instance."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events and not self.deposed:
            actions = self.machine.handle(self._events[0])
            if actions:
                self.recorder.log(self._events[0], actions)
            if any(not isinstance(action, m.Note) for action in actions):
                self.executor.remember(self.machine.memory())  # before any of it is done
            if self.machine.phase == "running" and not self.hangs.watching:
                self.hangs.began(time.monotonic(), whole=True)  # what an earlier coordinator started runs on
            for action in actions:
                if not self.deposed:
                    self._do(action)
            self._events.popleft()

    def _do(self, action: m.Action) -> None:
        match action:
            case m.Start() | m.Finish() if leases.last_term(self.folder.leases) > self.lease.term:
                self.deposed = True  # somebody else decides by now
            case m.Start():
                self._peers_gone = None
                self.executor.start(action, self.machine.memory())
                self.hangs.began(time.monotonic(), whole=not action.in_place)
                self.verdicts.began(action.generation)
            case m.Stop():
                self.executor.stop(action, self._kill, self.machine.memory())
                if not self.machine.at_work(self.machine.generation):
                    # Otherwise the node only has to stop an older generation; the current one continues.
                    self._peers_gone = None
                    self.hangs.ended()
            case m.Yield():
                self.executor.do(action)
                self.hangs.ended()  # saving takes its time; the machine has a limit of its own for it
            case m.Flush():
                self.snapshots.flush(self.world)
            case m.Finish():
                self.hangs.ended()
                if action.how == "preempted":
                    self.recorder.event("preempted", action.message, severity="warning")
                self.ending.begin(action)
            case _:
                self.executor.do(action)
