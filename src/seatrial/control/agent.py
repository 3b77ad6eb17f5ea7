"""The agent of one node: carries out what the coordinator orders, watches the node, and coordinates if it is its turn.

It never loads torch, has one thread, and waits on sockets, signals and deadlines. It kills what it started when its
launcher is gone, and when it may no longer run anything because no coordinator answers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from seatrial.base import process
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue
from seatrial.control.coordinator import Coordinator
from seatrial.control.errors import error_of, tail_of
from seatrial.control.inspect import Inspection
from seatrial.control.journal import Journal
from seatrial.control.lease import Lease
from seatrial.control.member import Member
from seatrial.control.ports import free_port
from seatrial.control.reception import Reception
from seatrial.control.spec import AgentSpec, LocalOptions, parse_agent_arguments
from seatrial.control.vault import Vault
from seatrial.control.warden import Warden
from seatrial.control.watchdog import Watchdog
from seatrial.control.watching import Watching, allow_files
from seatrial.control.wire import Incoming, Link, Listener
from seatrial.control.worker import Worker
from seatrial.control.workers import Workers
from seatrial.job import Job
from seatrial.record import inputs
from seatrial.record.secret import read_secret


class Agent:
    """Runs until the run has an outcome, or its launcher is gone."""

    def __init__(self, spec: AgentSpec, options: LocalOptions) -> None:
        self.spec = spec
        self.over: str | None = None  # why it ends
        self.outcome: dict[str, Any] | None = None
        self.generation = 0  # that its workers work on
        self.stopping: int | None = None  # generation that is to stop
        self.left: dict[str, Any] | None = None  # how all its workers left this generation, once they have
        self.resigned = -1  # term in which we resigned as coordinator because we heard too few
        self.wanted: str | None = None  # how its launcher wants the run to end
        self.sources = Watching()
        self.watch, self.unwatch = self.sources.watch, self.sources.unwatch
        self.signals = SignalQueue((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        self.launcher = None if options.channel is None else Channel.from_fd(options.channel)
        self.watch(self.signals, self._on_signals)
        if self.launcher is not None:
            self.watch(self.launcher, self._on_launcher)
        if options.parent is not None:
            # SIGTERM, not SIGKILL: what the ranks started themselves has no such bond, and is ours to kill.
            process.die_with_parent(options.parent, signal.SIGTERM)
        process.become_subreaper()
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        os.environ.update(spec.node_environment())
        self.workers = Workers(spec, self._on_worker, self.watch, self.unwatch)
        self.vault = Vault(spec, self._tell)
        self.workers.snapshot_fds = self.vault.fds()
        self.workers.start_nursery()  # first: it needs two seconds, during which we find each other
        self.inputs = inputs.frozen(spec.folder)
        self.job: Job = inputs.job_of(spec.folder, self.inputs)
        self.secret = read_secret(spec.folder)
        self.vault.unlock(self.secret)
        self.listener = Listener(spec.address, self.secret)
        self.reception = Reception(self.listener, self.watch, self.unwatch, self._on_visitor)
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
            joined=self._tell_again,
            release=self._release_member,
        )
        self.journal = Journal(self.member)
        self._member_source: Link | Any | None = None
        self.inspection: Inspection | None = None
        self.watchdog = Watchdog(
            self.workers,
            self._transfers,
            options.parent,
            rank_stopped=lambda worker, why: self._on_worker("stopped", worker, {"message": why}),
            tell=self._stood_still,
        )
        self.warden = Warden(spec, resilience, self.journal.tell_once, self.watch, self.unwatch)

    # -- the loop

    def run(self) -> int:
        """Until it is over; nothing that it started is left then."""
        self._to_launcher({"agent_started": {"node": self.spec.node, "pid": os.getpid()}})
        try:
            while self.over is None:
                self._sync_member()
                self.sources.wait(self._patience())
                self._on_time()
        finally:
            self._clean_up()
        self._to_launcher({"bye": True})
        return 0 if self.outcome is not None else 1

    def _patience(self) -> float:
        now = time.monotonic()
        deadlines = [
            self.member.deadline,
            self.workers.deadline,
            self.warden.deadline,
            self.reception.deadline,
            self.watchdog.deadline,
        ]
        if self.coordinator is not None:
            deadlines.append(self.coordinator.deadline)
        if self.inspection is not None:
            deadlines.append(self.inspection.deadline)
        return max(0.0, min(d for d in deadlines if d is not None) - now)

    def _on_time(self) -> None:
        self.workers.meet_deadlines()
        if not self.member.tick(self._beat):
            # Whoever coordinates counts us as lost from now on: our ranks must not go on beside their successors.
            self.vault.call_off()
            self.workers.kill_ranks()
            # It may have been slow only, and count us as well: we connect anew and say that nothing runs here.
            self.member.leave()
            self.member.valid_until = time.monotonic() + 1e9
        self._inspect()
        self.warden.tick()
        self.watchdog.tick()
        self.reception.tick()
        if self.coordinator is not None:
            self.coordinator.tick()
            if self.coordinator.deposed:
                if self.coordinator.resigned:
                    self.member.resign()
                    self.resigned = self.coordinator.lease.term
                self.coordinator.close()
                self.coordinator = None

    def _sync_member(self) -> None:
        """The member's socket comes, changes and goes: watch the one that it has now, for what it waits for now."""
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

    # -- the others

    def _on_visitor(self, incoming: Incoming) -> None:
        role = incoming.hello.get("role")
        if role == "agent" and self.coordinator is not None:
            self.coordinator.join(incoming.hello, incoming.link())
        elif role in ("snapshot", "fetch"):
            self.vault.serve(incoming)
        else:
            incoming.close()

    def _became_coordinator(self, lease: Lease, dead: int | None) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
        self.coordinator = Coordinator(
            self.spec,
            self.job,
            self.inputs,
            lease,
            self.secret,
            self.watch,
            self.unwatch,
            dead=dead,
            alone=lease.term == self.resigned + 1,
        )

    def _on_member(self) -> None:
        for message in self.member.receive():
            for kind, values in message.items():
                getattr(self, f"_order_{kind}")(values)

    def _hello(self) -> dict[str, Any]:
        return {
            "node": self.spec.node,
            "address": self.spec.address,
            "port": self.listener.port,
            "pid": os.getpid(),
            "told": self.journal.name,
            "ready": self.workers.nursery_ready,
            "running": self.generation if self._has_workers() else None,
            "left": self.left,
            "offer_port": free_port(),
            "held": self.vault.held(),
        }

    def _beat(self) -> dict[str, Any]:
        workers = self.workers.workers.values()
        return {
            "generation": self.generation,
            "step": min((w.step for w in workers if w.runs), default=0),
            "failed": sum(w.generation == self.generation and w.failed for w in workers),
        }

    def _tell(self, message: dict[str, Any]) -> None:
        self.member.send(message)

    def _tell_again(self) -> None:
        if self.wanted is not None:
            self._tell({"asked": self.wanted})
        self.journal.tell_again()

    def _has_workers(self) -> bool:
        """Whether anything of this generation lives here, be it parked, or failed: of that the journal tells.

        What left in order has nothing to lose, and what we have killed is as good as dead.
        """
        workers = self.workers.workers.values()
        return any(w.signalled is None and w.state != "finished" and w.status != 0 for w in workers)

    def _transfers(self) -> dict[int, str]:
        found = self.vault.transfers()
        return found if self.coordinator is None else found | self.coordinator.snapshots.transfers()

    def _stood_still(self, message: str, data: dict[str, Any]) -> None:
        message = f"node {self.spec.node}: {message}"
        self.journal.tell_once({"external": {"kind": "process_stopped", "message": message, "data": data}})

    # -- orders

    def _order_start(self, order: dict[str, Any]) -> None:
        self.generation, self.stopping, self.left = order["generation"], None, None
        self.journal.forget_generation()
        self.vault.guard(order, lambda: self._start(order))

    def _start(self, order: dict[str, Any]) -> None:
        legs = {}
        common = (
            "generation",
            "again",
            "slot",
            "slots",
            "world_size",
            "layout",
            "master_addr",
            "master_port",
            "inputs",
        )
        for local, rank in enumerate(order["ranks"]):
            legs[local] = {key: order[key] for key in common} | {
                "rank": rank,
                "local_rank": local,
                "node": self.spec.node,
                "snapshots": self.vault.entries_for(local, rank, order["layout"]),
                "log": str(self.spec.rank_log(order["generation"], rank)),
            }
        self.workers.start(order["generation"], legs, in_place=order["in_place"])

    def _order_idle(self, order: dict[str, Any]) -> None:
        """A generation begins without us: what still waits here for another leg has none."""
        self.journal.forget_generation()
        self.workers.start(order["generation"], {}, in_place=False)

    def _order_distrust(self, order: dict[str, Any]) -> None:
        self.vault.began(order["generation"] + 1, order["step"])

    def _order_forget(self, order: dict[str, Any]) -> None:
        self.vault.forget(order["generation"], order["step"])

    def _order_stop(self, order: dict[str, Any]) -> None:
        generation = order["generation"]
        self.stopping = generation
        if generation >= self.generation:  # the end of an older generation does not affect the current one
            self.vault.call_off()  # of a start that still waits for snapshots
            for rank in order.get("kill", ()):
                self.workers.signal(rank, signal.SIGKILL)
        self.workers.stop(generation, order["grace_s"], park=order["park"])
        self._tell_stopped()

    def _order_yield(self, order: dict[str, Any]) -> None:
        self.workers.send_all({"yield": order})

    def _order_inspect(self, order: dict[str, Any]) -> None:
        self.inspection = Inspection(order["id"], order["seconds"], self.workers.workers.values())

    def _inspect(self) -> None:
        if self.inspection is not None and self.inspection.over():
            self._tell({"inspected": self.inspection.result()})
            self.inspection = None

    def _order_external(self, order: dict[str, Any]) -> None:
        if order["what"] == "reset_gpu":
            self.workers.kill_ranks()  # parked ones would keep the GPU open
        self.warden.order(order)

    def _order_flush(self, order: dict[str, Any]) -> None:
        self.vault.flush(order)

    def _order_outcome(self, outcome: dict[str, Any]) -> None:
        self.outcome = outcome
        self._to_launcher({"outcome": outcome})
        self.over = "outcome"

    # -- workers

    def _on_worker(self, kind: str, worker: Worker, values: dict[str, Any]) -> None:
        """What `Workers` tells."""
        about = {"rank": worker.rank, "generation": worker.generation, "local": worker.local}
        match kind:
            case "nursery_ready":
                self._tell({"ready": {}})
            case "started":
                self._tell({"worker": {"kind": "started", **about, **values, "pid": worker.pid}})
            case "parked" | "finding" | "stopped":
                self.journal.tell({"worker": {"kind": kind, **about, **values}})
            case "beat":
                if values["first"]:
                    self.vault.began(worker.generation, values["step"] - 1)
            case "snapshot":
                self.vault.took(worker.local, values)
            case "dump":
                if self.inspection is not None:
                    self.inspection.take(worker.rank, values)
                    self._inspect()
            case "exited":
                failed = values["status"] != 0 and not values["never_began"]
                if failed:
                    values |= error_of(self.spec.folder, worker)
                self.journal.tell({"worker": {"kind": "exited", **about, **values, "pid": worker.pid}})
            case "nursery_exited":
                values["tail"], values["log"] = tail_of(self.spec.nursery_log), str(self.spec.nursery_log)
                nobody = {"kind": kind, "rank": None, "generation": self.generation}
                self.journal.tell({"worker": {**nobody, **values}})
        if kind in ("parked", "finished", "exited", "nursery_exited"):
            self._tell_stopped()
            self._tell_left()

    def _tell_stopped(self) -> None:
        """Once nothing of the generation that was to stop runs any more."""
        if self.stopping is not None and not self.workers.at_work(self.stopping):
            parked = sum(w.waits for w in self.workers.workers.values())
            stopped = {"generation": self.stopping, "parked": parked, "offer_port": free_port()}
            self.journal.tell({"stopped": stopped})
            self.stopping = None

    def _tell_left(self) -> None:
        """Once every worker of this generation has left in order."""
        workers = list(self.workers.workers.values())
        if not workers or self.left is not None or self.stopping is not None:
            return
        ways = set()
        for worker in workers:
            if worker.generation != self.generation:
                continue
            if not worker.left:
                return
            ways.add(worker.how)
        if len(ways) == 1:
            self.left = {"generation": self.generation, "how": ways.pop(), "offer_port": free_port()}
            self.journal.tell({"left": self.left})

    # -- launcher, signals, end

    def _on_launcher(self) -> None:
        assert self.launcher is not None
        for message in self.launcher.receive():
            match message:
                case {"stop": "now"}:
                    self.over = "now"
                case {"stop": "preempt" | "interrupt" as why}:
                    self._asked(why)
        if self.launcher.closed:
            self.unwatch(self.launcher)
            self.over = self.over or "the launcher is gone"

    def _asked(self, why: str) -> None:
        self.wanted = why  # whoever coordinates next must hear it too
        if not self.member.send({"asked": why}) and why != "preempt":
            self.over = why  # nobody coordinates, and nothing is to be saved: stop at once

    def _on_signals(self) -> None:
        arrived = self.signals.read()
        if any(s in arrived for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
            self.over = "signal"
        if signal.SIGCHLD in arrived:
            process.reap(self._reaped)

    def _reaped(self, pid: int, status: int) -> None:
        ours = self.workers.reaped(pid, status) or self.vault.reaped(pid, status)
        if not ours and self.coordinator is not None:
            self.coordinator.reaped(pid, status)

    def _to_launcher(self, message: dict[str, Any]) -> None:
        if self.launcher is not None and not self.launcher.closed:
            self.launcher.send(message)

    def _clean_up(self) -> None:
        """Kill whatever still lives of this node, and what the ranks started and left behind."""
        if self.coordinator is not None:
            self.coordinator.flush()
        self.warden.close()
        self.workers.kill_all()
        mark = os.environ[process.MARK]
        process.kill_all(lambda: process.descendants(os.getpid()) | process.marked(mark))
        process.reap(lambda pid, status: None)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m seatrial.control.agent`."""
    spec, options = parse_agent_arguments(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault(process.MARK, f"{os.getpid()}/node{spec.node}")
    allow_files()
    return Agent(spec, options).run()


if __name__ == "__main__":
    sys.exit(main())
