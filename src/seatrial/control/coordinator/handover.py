"""Read `control/leases/00000007.state`: the state of the previous coordinator. Only plausible values are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from seatrial.base.complain import complain
from seatrial.base.files import parse_json, read_bytes
from seatrial.control.node.spec import AgentSpec
from seatrial.job.shapes import Shape
from seatrial.record.messages import Ending

Pairs = list[tuple[int, int]]


class _World(BaseModel):
    generation: int
    index: int
    slots: dict[str, int]


class _Roster(BaseModel):
    nodes: list[tuple[int, Literal["evicted", "resetting"] | None, str, int, int, bool]]
    running: Pairs
    fenced: list[int]


class _Counts(BaseModel):
    restarts: int
    best: int
    seen: list[tuple[str, int, int]]
    same: list[tuple[str, str, int, int]]


class MachineMemory(BaseModel):
    """`State.memory`: the state of the control machine that passes from one term to the next."""

    phase: Literal["idle", "flushing", "adopting", "running", "finished"]
    generation: int
    highest: int
    shape: int
    slots: Pairs
    started: bool
    finished: list[tuple[int, Ending]]
    reason: str
    saved: bool
    progressed: bool
    leaving: Literal["yielded", "preempted"] | None
    preempting: bool
    outgoing: list[tuple[int, str, int | None, bool]]
    ending: tuple[str, str] | None
    roster: _Roster
    counts: _Counts


class _Memory(BaseModel):
    launch: int
    world: _World | None
    roster: dict[str, tuple[str, int]]
    incarnations: dict[str, list[str]]
    machine: MachineMemory


def recall(spec: AgentSpec, shapes: Sequence[Shape], state: Path) -> dict[str, Any] | None:
    """The state stored by the previous coordinator; None if this launch had none, or it is implausible.

    Without it a coordinator learns from the agents what runs. Written by `Executor.remember`.
    """
    try:
        data = read_bytes(state)
        if not data:
            return None
        memory: dict[str, Any] = parse_json(data)
        # Ignore the state of an earlier launch: its failures were handled by starting again.
        if not isinstance(memory, dict) or memory.get("launch") != spec.generation:
            return None
        checked = _Memory.model_validate_json(data, strict=True)
        _check_numbers(checked, spec.nodes, len(shapes))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        complain(f"{state} is not used: {error}")
        return None
    return memory


def _check_numbers(memory: _Memory, slots: int, shapes: int) -> None:
    machine, world = memory.machine, memory.world
    named = {node for _, node in machine.slots} | {node for node, *_ in machine.roster.nodes}
    named |= {node for node, _ in machine.roster.running + machine.finished} | set(machine.roster.fenced)
    named |= set(map(int, memory.roster)) | set(map(int, memory.incarnations))
    places, indices = {slot for slot, _ in machine.slots}, {machine.shape}
    if world is not None:
        named |= set(world.slots.values())
        places |= set(map(int, world.slots))
        indices.add(world.index)
    # Node numbers have no upper limit: more spares may join than were configured.
    known = places <= set(range(slots)) and indices <= set(range(shapes))
    if not known or min(named, default=0) < 0:
        raise ValueError("it names nodes, slots or shapes that this run does not have")
