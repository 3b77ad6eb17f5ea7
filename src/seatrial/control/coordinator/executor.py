"""Executes the machine's decisions: orders to the agents, and the files that must be written before them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.base.complain import complain
from seatrial.control.coordinator.peers import Peers
from seatrial.control.coordinator.recorder import Recorder
from seatrial.control.coordinator.snapshot_map import SnapshotMap
from seatrial.control.machine import types as m
from seatrial.control.machine.world import World
from seatrial.control.net.lease import Hold
from seatrial.control.node.spec import AgentSpec
from seatrial.job import Job
from seatrial.job.shapes import Shape
from seatrial.record import messages as msg
from seatrial.record.inputs import Digests


class Executor:
    """Executes the actions of one coordinator."""

    def __init__(
        self,
        spec: AgentSpec,
        job: Job,
        inputs: Digests,
        shapes: Sequence[Shape],
        peers: Peers,
        snapshots: SnapshotMap,
        recorder: Recorder,
        hold: Hold,
    ) -> None:
        self.world: World | None = None  # the generation that was started last
        self.roster: dict[int, tuple[str, int]] = {}  # node -> where its agent listens, or listened last
        self.incarnations: dict[int, list[str]] = {}  # node -> its agents; all but the last were replaced
        self.gpus: dict[int, str] = {}  # node -> PCI address of the GPU that a signal last named
        self._spec, self._job, self._inputs, self._shapes = spec, job, inputs, shapes
        self._peers, self._snapshots, self._recorder = peers, snapshots, recorder
        self._hold = hold

    def prepare(self, action: m.Start) -> None:
        """Set the world of a generation that is about to start, so that `remember` includes it."""
        self.world = World.make(
            action.generation, action.slots, self._shapes, action.shape, self._spec.ranks_per_node
        )

    def start(self, action: m.Start) -> None:
        """Start the prepared generation."""
        assert self.world is not None
        world, layout = self.world, self.world.shape.layout
        # Before any agent receives it: from now on no earlier generation may publish.
        self._write(self._spec.folder.generation_file, f"{action.generation}\n")
        self._recorder.generation = action.generation
        self._recorder.event(
            "generation_started",
            f"generation {action.generation}: {action.reason}",
            data={
                "layout": layout.as_dict(),
                "slots": {str(s): n for s, n in sorted(action.slots.items())},
                "reason": action.reason,
                "in_place": action.in_place,
            },
        )
        first = self._peers[action.slots[0]]
        fetches = self._snapshots.fetches(world.ranks, layout, self._peers)
        for slot, node in sorted(action.slots.items()):
            apart = self._job.resilience.copies > 1
            buddy, guarded = (world.neighbour(slot, 1), world.neighbour(slot, -1)) if apart else (None, None)
            start = msg.Start(
                generation=action.generation,
                slot=slot,
                slots=world.shape.slots,
                ranks=world.ranks[node],
                world_size=layout.world_size,
                layout=layout.as_dict(),
                master_addr=first.address,
                master_port=self._job.cluster.port or first.offer_port,
                in_place=action.in_place,
                again=action.generation > self._spec.generation,
                inputs=dict(self._inputs),
                buddy=None if buddy is None else self._peers.address(buddy),
                guards=[] if guarded is None else world.ranks[guarded],
                fetch=fetches[node],
            )
            self._peers.send(node, start)
        for node in self._peers.nodes():
            if node not in world.ranks:
                self._peers.send(node, msg.Idle(action.generation))

    def stop(self, action: m.Stop, kill: Mapping[int, list[int]]) -> None:
        """Stop a generation; the ranks in `kill`, by node, are killed at once as they no longer respond."""
        for node in action.nodes:
            order = msg.Stop(action.generation, action.grace_s, park=True, kill=kill.get(node, []))
            self._peers.send(node, order)

    def end(self, nodes: Sequence[int], grace_s: float) -> None:
        """Stop all ranks at the end of the run; none of them parks."""
        assert self.world is not None
        for node in nodes:
            self._peers.send(node, msg.Stop(self.world.generation, grace_s, park=False))

    def do(self, action: m.Action) -> None:
        """Execute any other action."""
        match action:
            case m.Yield():
                for node in self.world.nodes if self.world is not None else []:
                    self._peers.send(node, msg.Yield(action.generation, action.how))
            case m.ResetGpu():
                gpu = self.gpus.pop(action.node, None) if action.gpu is None else str(action.gpu)
                self._peers.send(action.node, msg.ResetGpu(gpu, action.cause))
            case m.Requalify():
                self._peers.send(action.node, msg.Requalify())
            case m.Drain():
                self._peers.send(action.node, msg.Drain(action.cause))
            case m.Release():
                self._recorder.event("node_left", f"node {action.node} leaves cleanly", node=action.node)
                self._peers.send(action.node, msg.ReleaseAgent())
            case m.Evict():
                self._recorder.event(
                    "node_evicted",
                    f"node {action.node} is excluded from this run: {action.cause}",
                    severity="error",
                    node=action.node,
                    data={"cause": action.cause},
                )
            case m.Note(kind="signal"):
                pass  # already recorded, with its evidence
            case m.Note():
                self._recorder.event(
                    action.kind,
                    action.message,
                    severity=action.severity,
                    node=action.node,
                    rank=action.rank,
                    data=action.data,
                )
            case _:
                raise AssertionError(f"not an action of the executor: {action}")

    def remember(self, memory: dict[str, Any]) -> None:
        """Write to the run folder what the holder of the next term must know."""
        world = None if self.world is None else self.world.to_dict()
        roster = {str(node): list(where) for node, where in self.roster.items()}
        values = {
            "launch": self._spec.generation,
            "world": world,
            "roster": roster,
            "incarnations": {str(node): seen for node, seen in self.incarnations.items()},
            "machine": memory,
        }
        self._write(self._hold.state, json.dumps(values))

    def _write(self, path: Path, text: str) -> None:
        """Raises Succeeded."""
        try:
            # Visible to other processes of this run is enough, without fsync: the next launch uses only its own state.
            self._hold.write(path, text.encode())
        except OSError as error:
            # A full disk must not stop the supervision. Only after a second fault, the loss of this coordinator, would
            # its successor read stale state, which the agents' own reports correct.
            complain(f"could not write {path}: {error}")
