"""A rank's dump: its collectives and its position."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from seatrial.parallel import collectives
from seatrial.train.supervision import flight

TIMEOUT_S = 20.0


def entry(seq: int, **changes: Any) -> dict[str, Any]:
    values = {
        "process_group": ["g", "undefined"],
        "collective_seq_id": seq,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "state": "scheduled",
        "retired": True,
        "input_sizes": [[4]],
        "time_created_ns": seq * 10**9,
    }
    return {**values, **changes}


def test_last_collective_and_pending_ones_per_group() -> None:
    entries = [
        entry(1),
        entry(2, profiling_name="gloo:all_gather", retired=False),
        entry(3, retired=False),
        entry(
            5, process_group=["h", "x"], state="completed", retired=False, profiling_name="nccl:all_reduce"
        ),
    ]
    g, h = flight.group_states(entries, {"g": [4, 6], "h": [0]}, now_ns=10 * 10**9)
    assert (g["group"], g["ranks"], g["last"], g["op"]) == ("g", [4, 6], 3, "all_reduce")
    assert [(p["seq"], p["op"], p["age_s"]) for p in g["pending"]] == [
        (2, "all_gather", 8.0),
        (3, "all_reduce", 7.0),
    ]
    assert (h["last"], h["pending"]) == (5, [])


def test_recorded_receive_names_the_global_rank_of_its_peer() -> None:
    p2p = entry(0, is_p2p=True, retired=False, state="started", profiling_name="nccl:recv 1<-0")
    (g,) = flight.group_states([p2p], {"g": [3, 7]}, now_ns=0)
    assert g["last"] == 0
    assert [p["peer"] for p in g["p2p"]] == [3]
    (unknown,) = flight.group_states([p2p], {}, now_ns=0)
    assert unknown["ranks"] is None
    assert [p["peer"] for p in unknown["p2p"]] == [None]


@pytest.fixture
def frame_in() -> Iterator[Callable[..., dict[int, FrameType]]]:
    """Frames of threads that stand in a function which seems to be in the given file of torch."""
    stop, threads = threading.Event(), []

    def start(file: str, function: str, **values: Any) -> dict[int, FrameType]:
        inside = threading.Event()
        scope: dict[str, Any] = {"_begin": inside.set, "_stay": stop.wait}
        names = ", ".join(values)
        source = f"def {function}({names}):\n    _begin()\n    _stay()\n"
        exec(compile(source, f"{Path(torch.__file__).parent}/{file}", "exec"), scope)  # noqa: S102
        thread = threading.Thread(target=scope[function], kwargs=values)
        threads.append(thread)
        thread.start()
        assert inside.wait(TIMEOUT_S)
        frame: FrameType | None = sys._current_frames()[thread.ident or 0]
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        assert frame is not None
        return {1: frame}

    yield start
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("file", "function", "waiting", "wanted"),
    [
        ("distributed/distributed_c10d.py", "all_reduce", True, "communication"),
        ("distributed/distributed_c10d.py", "init_process_group", False, "communication"),
        ("distributed/rendezvous.py", "_create_c10d_store", False, "communication"),
        ("distributed/fsdp/_fully_shard/_fsdp_collectives.py", "gather", True, "communication"),
        ("distributed/fsdp/_fully_shard/_fsdp_collectives.py", "copy", False, "python"),
        ("distributed/pipelining/schedules.py", "_wait_batch_p2p", False, "communication"),
        ("distributed/pipelining/schedules.py", "step", False, "python"),
        ("cuda/streams.py", "synchronize", True, "device"),
        ("nn/functional.py", "linear", True, "python"),
    ],
)
def test_position_separates_communication_from_computation(
    frame_in: Callable[..., dict[int, FrameType]], file: str, function: str, waiting: bool, wanted: str
) -> None:
    at = flight.position(frame_in(file, function), 1, waiting=waiting)
    assert at["in"] == wanted
    assert at["frame"].endswith(f"in {function}")
    assert "test_supervisor_client" not in at["frame"]


def test_waiting_for_an_async_collective_counts_as_communication() -> None:
    """Asynchronous tensor parallel waits in our own code, which otherwise counts as computing."""
    lock = threading.Lock()
    lock.acquire()
    work = SimpleNamespace(wait=lock.acquire)  # no frame of Python's inside, as in torch
    thread = threading.Thread(target=collectives.wait, args=(work,), daemon=True)
    thread.start()
    deadline = time.monotonic() + TIMEOUT_S
    while sys._current_frames()[thread.ident or 0].f_code is not collectives.wait.__code__:
        assert time.monotonic() < deadline
    frames = sys._current_frames()
    try:
        assert flight.position(frames, thread.ident or 0, waiting=True)["in"] == "communication"
        assert flight.position(frames, thread.ident or 0, waiting=False)["in"] == "python"
    finally:
        lock.release()
        thread.join()


def test_peer_of_a_send_or_receive_is_read_from_the_stack(
    frame_in: Callable[..., dict[int, FrameType]],
) -> None:
    at = flight.position(frame_in("distributed/distributed_c10d.py", "recv", src=5), 1, waiting=False)
    assert (at["in"], at["peers"]) == ("communication", [5])
    nobody = flight.position(frame_in("distributed/distributed_c10d.py", "recv", src=None), 1, waiting=False)
    assert (nobody["in"], nobody["peers"]) == ("communication", None)
