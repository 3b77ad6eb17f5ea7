"""torch's check of accesses by several streams, for a rank whose NCCL works in streams of its own.

Imported only where it is used: the import alone makes torch call back at every event and allocation.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from null_runtime import NO_STREAM, ours, runtime
from torch.cuda import _gpu_trace as gpu_trace
from torch.cuda import _sanitizer as sanitizer
from torch.utils._pytree import tree_leaves

from seatrial.train.dryrun.recorder import IMPLEMENTATIONS


class Sanitizer(sanitizer.CUDASanitizerDispatchMode):
    """Collects accesses that no event puts in order, with the lines of src that make them."""

    def __init__(self) -> None:
        super().__init__()
        self.races: Counter[str] = Counter()
        self._collective: tuple[Any, ...] | None = (
            None  # launched by the call in progress, if its stream is not known yet
        )
        handler = self.event_handler
        launch, record = handler._handle_kernel_launch, handler._handle_event_record

        def launch_and_note(*access: Any) -> list[Any]:
            for race in launch(*access):
                now, before = race.current_access, race.previous_access
                self.races[f"{_text(now)}, unordered after {_text(before)}"] += 1
            return []

        def record_after_collective(event: int, stream: int) -> None:
            self._launch_collective()
            record(event, stream)

        handler._handle_kernel_launch = launch_and_note  # type: ignore[method-assign]
        gpu_trace.register_callback_for_event_record(record_after_collective)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = IMPLEMENTATIONS.get(func)
        if inside is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        if not func._schema.name.startswith("c10d::"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        accesses = sanitizer.ArgumentHandler()
        for argument, value in sanitizer.zip_arguments(func._schema, args, kwargs or {}):
            # The schemas do not say which of them are written to.
            name = argument.name
            writes = name.startswith("output") or (name == "tensors" and func._schema.name != "c10d::send")
            for tensor in tree_leaves(value):
                accesses._handle_argument(tensor, is_write=writes, metadata_only=False, name=name)
        written = accesses.dataptrs_written
        self._collective = (
            accesses.dataptrs_read - written,
            written,
            set(),
            func._schema,
            accesses.tensor_aliases,
        )
        runtime.null_nccl_stream()  # forget an earlier one
        result = func(*args, **(kwargs or {}))
        self._launch_collective()
        return result

    def _launch_collective(self) -> None:
        """Once NCCL was called; before the event that says when it is done, if there is one."""
        stream = runtime.null_nccl_stream() if self._collective is not None else NO_STREAM
        if stream != NO_STREAM:
            launched, self._collective = self._collective, None
            self.event_handler._handle_kernel_launch(stream, *launched)  # type: ignore[misc]


def _text(access: Any) -> str:
    name = str(access.operator).partition("(")[0]
    return f"{name} {access.type} at {ours(access.stack_trace)}"
