"""Carrying out what the machine decided: orders to the agents, and what must lie on disk before they are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.base import atomic
from seatrial.base.complain import complain
from seatrial.control import machine_types as m
from seatrial.control.peers import Peers
from seatrial.control.recorder import Recorder
from seatrial.control.snapshots import SnapshotMap
from seatrial.control.spec import AgentSpec
from seatrial.control.world import World
from seatrial.job import Job
from seatrial.job.shapes import Shape
from seatrial.record.inputs import Digests


class Executor:
    """The coordinator's hands."""

    def __init__(
        self,
        spec: AgentSpec,
        job: Job,
        inputs: Digests,
        shapes: Sequence[Shape],
        peers: Peers,
        snapshots: SnapshotMap,
        recorder: Recorder,
    ) -> None:
        self.world: World | None = None  # that was started last
        self.roster: dict[int, tuple[str, int]] = {}  # where each agent listens, or did last
        self.gpus: dict[int, str] = {}  # node -> PCI address of the GPU that a signal last named
        self._spec, self._job, self._inputs, self._shapes = spec, job, inputs, shapes
        self._peers, self._snapshots, self._recorder = peers, snapshots, recorder

    def start(self, action: m.Start, memory: dict[str, Any]) -> None:
        """Begin a generation. `memory` is the machine's, from which the next coordinator would go on."""
        world = World.make(
            action.generation, action.slots, self._shapes, action.shape, self._spec.ranks_per_node
        )
        layout = world.shape.layout
        self.world = world
        # Before anybody hears of it: nobody may begin it a second time, nor publish for an earlier one.
        self._write(self._spec.folder.generation_file, f"{action.generation}\n")
        self.remember(memory)
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
        order = {
            "generation": action.generation,
            "slots": world.shape.slots,
            "world_size": layout.world_size,
            "layout": layout.as_dict(),
            "master_addr": first.address,
            "master_port": self._job.cluster.port or first.offer_port,
            "in_place": action.in_place,
            "inputs": dict(self._inputs),
            "again": action.generation > self._spec.generation,
        }
        for slot, node in sorted(action.slots.items()):
            apart = self._job.resilience.copies > 1
            buddy, guarded = (world.beside(slot, 1), world.beside(slot, -1)) if apart else (None, None)
            own = {
                "slot": slot,
                "ranks": world.ranks[node],
                "buddy": None if buddy is None else self._where(buddy),
                "guards": [] if guarded is None else world.ranks[guarded],
                "fetch": self._snapshots.fetches(node, world.ranks[node], layout, self._peers),
            }
            self._peers.send(node, {"start": {**order, **own}})
        for node in self._peers.nodes():
            if node not in world.ranks:
                self._peers.send(node, {"idle": {"generation": action.generation}})

    def _where(self, node: int) -> dict[str, Any]:
        peer = self._peers[node]
        return {"node": node, "address": peer.address, "port": peer.port}

    def stop(self, action: m.Stop, kill: Mapping[int, list[int]], memory: dict[str, Any]) -> None:
        """End a generation; of the ranks in `kill`, by node, nothing is to be expected any more."""
        for node in action.nodes:
            order = {"generation": action.generation, "grace_s": action.grace_s, "park": True}
            self._peers.send(node, {"stop": {**order, "kill": kill.get(node, [])}})
        self.remember(memory)

    def end(self, nodes: Sequence[int], grace_s: float) -> None:
        """The run is over: nobody parks, all end."""
        assert self.world is not None
        for node in nodes:
            order = {"generation": self.world.generation, "grace_s": grace_s, "park": False}
            self._peers.send(node, {"stop": order})

    def do(self, action: m.Action) -> None:
        """Any of the other actions."""
        match action:
            case m.Yield():
                for node in self.world.nodes if self.world is not None else []:
                    order = {"generation": action.generation, "how": action.how}
                    self._peers.send(node, {"yield": order})
            case m.ResetGpu():
                gpu = self.gpus.pop(action.node, None) if action.gpu is None else action.gpu
                reset = {"what": "reset_gpu", "gpu": gpu, "cause": action.cause}
                self._peers.send(action.node, {"external": reset})
            case m.Requalify():
                self._peers.send(action.node, {"external": {"what": "requalify"}})
            case m.Drain():
                self._peers.send(action.node, {"external": {"what": "drain", "cause": action.cause}})
            case m.Evict():
                self._recorder.event(
                    "node_evicted",
                    f"node {action.node} is left out of this run: {action.cause}",
                    severity="error",
                    node=action.node,
                    data={"cause": action.cause},
                )
            case m.Note(kind="signal"):
                pass  # recorded with its evidence when it came
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
                raise AssertionError(f"not ours to do: {action}")

    def remember(self, memory: dict[str, Any]) -> None:
        """Put into the run folder what the holder of the next term must know."""
        world = None if self.world is None else self.world.to_dict()
        roster = {str(node): list(where) for node, where in self.roster.items()}
        launch = self._spec.generation
        values = {"launch": launch, "world": world, "roster": roster, "machine": memory}
        self._write(self._spec.folder.control_state, json.dumps(values))

    def _write(self, path: Path, text: str) -> None:
        try:
            # Another process of this run must see it, no more: the next launch believes its own.
            atomic.write_text(path, text, durable=False)
        except OSError as error:
            # A full disk must not stop the supervision that it needs. Only a second fault, the loss of this
            # coordinator, would meet old memory; the agents' own word corrects that.
            complain(f"could not write {path}: {error}")
