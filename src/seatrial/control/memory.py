"""Read control/state.json: what the previous coordinator knew. Only plausible values are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from seatrial.base.complain import complain
from seatrial.base.files import parse_json, read_bytes
from seatrial.control.machine_types import How
from seatrial.control.spec import AgentSpec
from seatrial.job.shapes import Shape

Pairs = list[tuple[int, int]]


class _World(BaseModel):
    generation: int
    index: int
    slots: dict[str, int]


class _Roster(BaseModel):
    nodes: list[tuple[int, Literal["evicted", "resetting"] | None, str, int, int]]
    running: Pairs


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
    finished: list[tuple[int, How]]
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
    machine: MachineMemory


def recall(spec: AgentSpec, shapes: Sequence[Shape]) -> dict[str, Any] | None:
    """The state stored by the previous coordinator; None if this launch had none, or it is implausible.

    Without it a coordinator learns from the agents what runs. Written by `Executor.remember`.
    """
    try:
        data = read_bytes(spec.folder.control_state)
        memory: dict[str, Any] = parse_json(data)
        # Ignore the state of an earlier launch: its failures were handled by starting again.
        if not isinstance(memory, dict) or memory.get("launch") != spec.generation:
            return None
        checked = _Memory.model_validate_json(data, strict=True)
        _check_numbers(checked, spec.nodes + spec.spares, len(shapes))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        complain(f"{spec.folder.control_state} is not used: {error}")
        return None
    return memory


def _check_numbers(memory: _Memory, nodes: int, shapes: int) -> None:
    machine, world = memory.machine, memory.world
    named = {node for _, node in machine.slots} | {node for node, *_ in machine.roster.nodes}
    named |= {node for node, _ in machine.roster.running + machine.finished} | set(map(int, memory.roster))
    indices = {machine.shape}
    if world is not None:
        named |= set(world.slots.values()) | set(map(int, world.slots))
        indices.add(world.index)
    if not named <= set(range(nodes)) or not indices <= set(range(shapes)):
        raise ValueError("it names nodes or shapes that this run does not have")
