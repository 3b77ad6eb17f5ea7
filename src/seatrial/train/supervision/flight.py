"""The state of a rank when a dump is requested: its collectives, from torch's flight recorder, and its stacks.

Measured on torch 2.13 with gloo: an operation's `state` stays "scheduled" forever, but `retired` shows that it has
finished; sends and receives are not recorded, so the peer that a pipeline stage waits for is read from its stack.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from seatrial.parallel import blocked, collectives

_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTED = f"{_TORCH}/distributed/"
# Waits for other ranks without a recorded collective: a store, a rendezvous, creation of a group.
_RENDEZVOUS = (f"{_DISTRIBUTED}distributed_c10d.py", f"{_DISTRIBUTED}rendezvous.py")
_PIPELINING = f"{_DISTRIBUTED}pipelining/"
# Torch's own code in which the main thread waits: for the device, or for a collective in compiled code.
_DEVICE = (
    f"{_TORCH}/cuda/",
    f"{_TORCH}/autograd/",
    f"{_TORCH}/_ops.py",
    f"{_TORCH}/_inductor/",
    "torchinductor",
)
# Our own wait for a collective in flight.
_WAIT = (collectives.__file__, collectives.wait.__name__)
_P2P = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "_batch_p2p", "_wait_batch_p2p"}
_P2P_NAME = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")

_PENDING = 4  # unfinished operations reported per group, the oldest
_LONGEST_TEXT = 20_000  # characters of stacks: enough to read

# The flight recorders that a build of torch may have: one for all backends and, with CUDA, NCCL's own.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def describe(main_thread: int, since_ns: int) -> dict[str, Any]:
    """The answer to a dump request: plain values of bounded size. Entries before `since_ns` (unix time) are ignored."""
    groups = group_states(_entries(since_ns), _members(), time.time_ns())
    frames = sys._current_frames()
    waiting = any(g["pending"] or g["p2p"] for g in groups)
    return {
        "time": time.time(),
        "flight": groups,
        "at": position(frames, main_thread, waiting=waiting),
        "python": stacks(frames),
    }


def _entries(since_ns: int) -> list[dict[str, Any]]:
    found = []
    for name in _RECORDERS:
        dump = getattr(c10d, name, None)
        if dump is not None:
            found += json.loads(dump()).get("entries", [])
    return [e for e in found if e["time_created_ns"] >= since_ns]


def _members() -> dict[str, list[int]]:
    """Group name -> its global ranks, in the group's order."""
    world = dist.distributed_c10d._world
    ranks = dict(world.pg_group_ranks)
    return {
        name: sorted(ranks[group], key=lambda r, g=group: ranks[g][r])  # type: ignore[misc]
        for group, name in dict(world.pg_names).items()
        if group in ranks
    }


def group_states(
    entries: list[dict[str, Any]], members: dict[str, list[int]], now_ns: int
) -> list[dict[str, Any]]:
    """This rank's progress in each group: the last collective entered, and the unfinished operations."""
    states: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda e: e["time_created_ns"]):
        name = entry["process_group"][0]
        ranks = members.get(name)
        state = states.setdefault(
            name, {"group": name, "ranks": ranks, "last": 0, "op": "", "pending": [], "p2p": []}
        )
        ended = entry["retired"] or entry["state"] == "completed"
        op = entry["profiling_name"].partition(":")[2]
        values = {
            "op": op,
            "state": entry["state"],
            "sizes": entry["input_sizes"][:1],
            "age_s": round((now_ns - entry["time_created_ns"]) / 1e9, 3),
        }
        if entry["is_p2p"]:
            if not ended and len(state["p2p"]) < _PENDING:
                state["p2p"].append({**values, "peer": _peer(op, ranks)})
            continue
        sequence = entry["collective_seq_id"]
        if sequence >= state["last"]:
            state["last"], state["op"] = sequence, op
        if not ended and len(state["pending"]) < _PENDING:
            state["pending"].append({"seq": sequence, **values})
    return list(states.values())


def _peer(op: str, ranks: list[int] | None) -> int | None:
    """Global rank of the other side of "send 0->1" or "recv 1<-0", whose numbers are ranks within the group."""
    match = _P2P_NAME.search(op)
    if match is None or ranks is None:
        return None
    peer = int(match[3])
    return ranks[peer] if peer < len(ranks) else None


def position(frames: dict[int, FrameType], main_thread: int, *, waiting: bool) -> dict[str, Any]:
    """The position of the main thread, and whether it waits for other ranks there.

    `in` is "communication", "device" or "python"; `peers` are the ranks of a send or receive there, None if it is
    neither. `waiting`: some operation of this rank has not ended.
    """
    frames = {thread: _inside(frame) for thread, frame in frames.items()}
    frame = frames[main_thread]
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    kind, peers = "python", None
    if function in _P2P and file.startswith(_DISTRIBUTED):
        kind, peers = "communication", _peers(frame)
    elif file in _RENDEZVOUS or (waiting and _may_wait(frame)):
        kind = "communication"
    elif any(part in file for part in _DEVICE):
        # A backward pass on a device runs in its own thread, and the main thread only waits for it.
        elsewhere = waiting and any(_may_wait(f) for t, f in frames.items() if t != main_thread)
        kind = "communication" if elsewhere else "device"
    return {"in": kind, "frame": _place(frame), "caller": _place(_caller(frame)), "peers": peers}


def _inside(frame: FrameType) -> FrameType:
    """The frame that called torch, without the timing wrapper of `parallel.blocked`."""
    while frame.f_code.co_filename == blocked.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _may_wait(frame: FrameType) -> bool:
    """Whether `frame` may be waiting for a collective."""
    code = frame.f_code
    return code.co_filename.startswith(_DISTRIBUTED) or (code.co_filename, code.co_name) == _WAIT


def _caller(frame: FrameType) -> FrameType:
    """The innermost frame outside torch: our line, or the user's."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _peers(frame: FrameType) -> list[int] | None:
    """Global ranks that the send or receive in `frame` may be with; None if that cannot be determined.

    Too many are harmless: the rank that blocks all others waits for none itself, so none of the others is blamed.
    """
    found: set[int] = set()
    for inner in _outward(frame):
        if not inner.f_code.co_filename.startswith(_DISTRIBUTED):
            break
        values = inner.f_locals
        found |= {r for r in (values.get("src"), values.get("dst")) if isinstance(r, int)}
        peer = values.get("group_src", values.get("group_dst"))
        if isinstance(peer, int):
            found |= _global_rank(values.get("group"), peer)
        for value in list(values.values()):
            for op in value if isinstance(value, list | tuple) else ():
                if isinstance(op, dist.P2POp):
                    found.add(op.peer)
        if not found and inner.f_code.co_filename.startswith(_PIPELINING):
            found |= _neighbours(values.get("self"))
        if found:
            break
    return sorted(found) or None


def _global_rank(group: Any, peer: int) -> set[int]:
    group = group or dist.group.WORLD
    try:
        return {dist.get_global_rank(group, peer)}
    except (ValueError, RuntimeError):
        return set()  # the group is being destroyed


def _neighbours(schedule: Any) -> set[int]:
    """All ranks of a pipeline schedule's group."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    group = getattr(stages[0], "group", None)
    return set(dist.get_process_group_ranks(group)) if group is not None else set()


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def stacks(frames: dict[int, FrameType]) -> str:
    """The stacks of all Python threads, innermost frame last. Reads no source: the file system may be what hangs."""
    names = {t.ident: t.name for t in threading.enumerate()}
    parts = []
    for ident, frame in frames.items():
        lines = [f"thread {names.get(ident, ident)}:"]
        summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
        lines += [f"  {f.filename}:{f.lineno} in {f.name}" for f in reversed(summary)]
        parts.append("\n".join(lines))
    return "\n".join(parts)[-_LONGEST_TEXT:]
