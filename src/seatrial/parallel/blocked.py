"""Measures exposed communication: how long a rank is blocked in collectives, and their bytes, by layout dimension.

torch issues and waits for most collectives itself (FSDP2, pipelines), but always by the methods of two classes,
`ProcessGroup` and `Work`: these are wrapped. Compiled code calls them from C++; what it waits for cannot be seen here.
On a GPU only the compute stream counts: a collective on another stream is exposed where it waits for that one's event.

While torch.profiler is active, what a collective launches is in a range "DIMENSION METHOD bytes=N ranks=N": gloo's own
entries in a trace have neither group nor size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.autograd import profiler

from seatrial.hardware import accelerator
from seatrial.parallel.mesh import Mesh
from seatrial.parallel.stage_clock import StageClock
from seatrial.record.stages import (
    CONTEXT,
    EXPERT,
    PIPELINE,
    REPLICATE,
    SAVE,
    SHARD,
    STAGES,
    STEP_SUM,
    TENSOR,
    VALIDATION,
)

# Some were renamed in torch 2.13; those that the installed torch lacks are ignored.
_ISSUING = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "reduce_scatter", "barrier"),
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall_base", "all_to_all_single"),
    *("send", "recv", "recv_anysource", "_end_coalescing"),
)
_INCLUDING_COLLECTIVES = (SAVE, STEP_SUM, VALIDATION)  # stages that include their own collectives


class Blocked:
    """While installed, time that this rank is blocked in a collective counts for its dimension's stage of `clock`.

    One at a time in a process. It keeps no reference to a group, which must stay releasable.
    """

    def __init__(self, clock: StageClock, mesh: Mesh) -> None:
        self._clock = clock
        groups = {
            SHARD: [mesh.stage, mesh.shard, mesh.expert_shard],  # first: `stage` may be one of the others
            TENSOR: [mesh.tensor],
            EXPERT: [mesh.expert],
            CONTEXT: [mesh.context],
            REPLICATE: [mesh.replicate],
        }
        groups[PIPELINE] = [mesh.pipeline, mesh.ends]
        self._stages = {
            g.group_name: stage for stage, of_it in groups.items() for g in of_it if g is not None
        }
        # On a GPU FSDP2 has streams of its own, where sums over shards and replicas follow each other.
        layout = mesh.layout
        self._gradients = SHARD if layout.shard > 1 else REPLICATE if layout.replicate > 1 else None
        self._device = mesh.device
        self._compute = accelerator.current_stream(mesh.device) if clock.on_accelerator else None
        self._in_flight: dict[int, int] = {}  # id of a Work -> its stage, until it is waited for
        self._counts = [[0, 0] for _ in STAGES]  # calls, bytes
        self._undo: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """Wrap torch's methods."""
        for name in _ISSUING:
            if hasattr(ProcessGroup, name):
                self._wrap(ProcessGroup, name, self._issuing)
        self._wrap(Work, "wait", self._waiting)
        if self._clock.on_accelerator and self._gradients is not None:
            self._wrap(accelerator.stream_type(self._device), "wait_event", self._waiting_for_event)

    def remove(self) -> None:
        """Restore torch's methods."""
        for owner, name, original in reversed(self._undo):
            setattr(owner, name, original)
        self._undo.clear()
        self._in_flight.clear()

    def counted(self) -> dict[str, tuple[int, int]]:
        """Stage -> (calls, bytes) of the collectives issued since the last call; those without bytes do not count.

        Bytes are those of an all-gather's output, a reduce-scatter's input, an all-reduce's tensor, the larger side of an
        all-to-all, a sent or received tensor.
        """
        found = {name: (c[0], c[1]) for name, c in zip(STAGES, self._counts, strict=True) if c[0]}
        for count in self._counts:
            count[:] = 0, 0
        return found

    def _wrap(self, owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]  # `getattr` unwraps it: restoring that would not restore a method
        setattr(owner, name, wraps(original)(wrapper(original)))
        self._undo.append((owner, name, original))

    def _issuing(self, call: Any) -> Any:
        clock, stages, in_flight, counts = self._clock, self._stages, self._in_flight, self._counts

        def issue(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            stage = stages.get(group.group_name)
            counts_for = clock.stage if clock.stage in _INCLUDING_COLLECTIVES else stage
            if counts_for is None:
                return call(group, *args, **kwargs)
            size = _bytes(args[:2])  # the larger of input and output
            if size:
                count = counts[counts_for]
                # A gather on gloo is a broadcast of each rank's part: one call with the bytes of all.
                count[0] += call.__name__ != "broadcast" or args[1].rootRank == group.rank()
                count[1] += size
            if profiler._is_profiler_enabled:
                label = f"{STAGES[counts_for]} {call.__name__} bytes={size} ranks={group.size()}"
                with profiler.record_function(label):
                    return timed(stage, counts_for, group, args, kwargs)
            return timed(stage, counts_for, group, args, kwargs)

        def timed(stage: int | None, counts_for: int, group: ProcessGroup, args: Any, kwargs: Any) -> Any:
            if stage is None or stage != counts_for:
                return call(group, *args, **kwargs)
            before = clock.enter(stage) if self._computes() else None
            try:
                work = call(group, *args, **kwargs)
            finally:
                if before is not None:
                    clock.enter(before)
            if work is not None:
                in_flight[id(work)] = stage
            return work

        return issue

    def _waiting(self, call: Any) -> Any:
        clock, in_flight = self._clock, self._in_flight

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            stage = in_flight.pop(id(work), None)
            if stage is None or not self._computes():
                return call(work, *args, **kwargs)
            before = clock.enter(stage)
            try:
                return call(work, *args, **kwargs)
            finally:
                clock.enter(before)

        return wait

    def _waiting_for_event(self, call: Any) -> Any:
        clock, stage = self._clock, self._gradients
        assert stage is not None

        def wait_event(stream: torch.Stream, event: Any) -> None:
            if stream.stream_id != self._compute or clock.stage in _INCLUDING_COLLECTIVES:
                call(stream, event)
                return
            before = clock.enter(stage)
            try:
                call(stream, event)
            finally:
                clock.enter(before)

        return wait_event

    def _computes(self) -> bool:
        """Whether what is launched now goes to the stream that the clock measures."""
        return self._compute is None or accelerator.current_stream(self._device) == self._compute


def _bytes(values: Sequence[Any]) -> int:
    """Bytes of the largest of `values`, each a tensor or a list of tensors; other values count as 0."""
    largest = 0
    for value in values:
        size = 0
        if type(value) is list:  # checked first: isinstance(option, Tensor) is slow
            for each in value:
                size += each.nbytes if isinstance(each, Tensor) else _bytes((each,))
        elif isinstance(value, Tensor):
            size = value.nbytes
        largest = max(largest, size)
    return largest
