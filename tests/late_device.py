"""A test device: made of the CPU, but behind the host as a GPU is, so that a missing wait changes what a run computes.

Our code sees an accelerator of type "cuda" with pinned memory, streams and events; its tensors are the CPU's, so results
are those of the CPU, bit for bit. What it simulates:

- An asynchronous copy into pinned host memory leaves rubbish there until the host has waited for an event recorded after
  it. `.item()` and other blocking reads do not count as waits: stricter than CUDA.
- An asynchronous copy from pinned host memory is an error if that memory changes before the host has waited.
- Pinned memory that is unpinned while a copy to it is under way is an error.
- Memory that a second copy goes to before the first was waited for holds rubbish until the second was.
- An event is complete when the host has waited for a later one, or LAG_S after its recording; the time between events that
  are not complete cannot be asked for.

The main stream's own work is the CPU's, done when it is queued. Memory that is not pinned is copied at once, as CUDA does.
A side stream only copies, and as late as it may: when the main stream waits for an event of it, or the host does.

- Until then the target is rubbish, on the device and on the host. A source or a target on the device that has been freed by
  then is an error.
- A copy that did not wait for the main stream copies rubbish: what it reads may not have been computed, and what it writes
  to may still be read.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from seatrial.hardware import accelerator

LAG_S = 0.005
_RUBBISH = 0xAB

_copy_now = torch.Tensor.copy_
_lock = threading.RLock()


class LateDevice(str):
    """Stands in for `torch.device("cuda", index)`; torch takes it for "cpu"."""

    __slots__ = ("index",)
    type = "cuda"
    index: int

    def __new__(cls, index: int = 0) -> LateDevice:
        self = super().__new__(cls, "cpu")
        self.index = index
        return self


@dataclass(eq=False)
class _Copy:
    """An asynchronous copy, until the host has waited for it."""

    target: Tensor
    source: Tensor
    values: Tensor  # of the source when the copy was queued: later work of the stream comes after it
    to_host: bool

    def complete(self) -> None:
        if self.to_host:
            with torch.no_grad():
                _copy_now(self.target, self.values)
        elif not torch.equal(_bytes(self.source), _bytes(self.values)):
            raise RuntimeError("pinned memory was changed before the device had copied it")


class Stream:
    """The only one of the device."""

    stream_id = device_index = 0

    def __init__(self) -> None:
        self.under_way: list[tuple[int, _Copy | _SideCopy]] = []
        self.count = 0  # copies and events queued so far
        self.passed = 0  # of these, those that the host has waited for

    def add(self, copy: _Copy) -> None:
        begin = copy.target.data_ptr()
        with _lock:
            self.under_way = [
                u for u in self.under_way if not u[1].to_host or u[1].target.data_ptr() != begin
            ]
            self.count += 1
            self.under_way.append((self.count, copy))

    def pass_until(self, count: int) -> None:
        """The host has waited for the first `count` of what was queued."""
        with _lock:
            self.passed = max(self.passed, count)
            while self.under_way and self.under_way[0][0] <= count:
                self.under_way.pop(0)[1].complete()

    def wait_event(self, event: Event) -> None:
        """It is in order anyway."""


class SideStream(Stream):
    """Another one, for copies."""

    def __init__(self) -> None:
        super().__init__()
        self.after_main = False  # it has waited for the main stream since its last copy

    def __enter__(self) -> SideStream:
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.pop()

    def queue(self, target: Tensor, source: Tensor, *, to_host: bool) -> None:
        seen["copies"] += 1
        on_device = source if to_host else target
        alias = on_device.data  # must not keep alive what is to be found freed
        ends = (target, alias) if to_host else (alias, source)
        with _lock:
            self.count += 1
            self.under_way.append(
                (self.count, _SideCopy(*ends, weakref.ref(on_device), to_host, self.after_main))
            )
        self.after_main = False
        _fill_with_rubbish(target)


@dataclass(eq=False)
class _SideCopy:
    """A copy of a side stream that nothing has waited for."""

    target: Tensor
    source: Tensor
    on_device: weakref.ref[Tensor]
    to_host: bool
    in_order: bool

    def complete(self) -> None:
        if self.on_device() is None:
            raise RuntimeError("memory was freed while a side stream copied it")
        with torch.no_grad():
            _copy_now(self.target, self.source)
        if not self.in_order:
            _fill_with_rubbish(self.target)


class Event:
    """As `torch.Event`."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._timing = enable_timing
        self._number: int | None = None  # its place in the stream, once it is recorded
        self._stream = stream
        self._at = 0.0

    def record(self) -> None:
        with _lock:
            self._stream = current()
            self._stream.count += 1
            self._number, self._at = self._stream.count, time.perf_counter()

    def wait(self) -> None:
        """The current stream does."""
        if self._number is None:
            return
        here = current()
        if isinstance(self._stream, SideStream):
            self._stream.pass_until(self._number)
        elif isinstance(here, SideStream):
            here.after_main = True

    def synchronize(self) -> None:
        seen["waits"] += 1
        if self._number is not None:
            self._stream.pass_until(self._number)

    def query(self) -> bool:
        return self._complete()

    def _complete(self) -> bool:
        if self._number is None:
            return True
        if self._stream.passed < self._number and time.perf_counter() - self._at < LAG_S:
            return False
        self._stream.pass_until(self._number)
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self._timing and end._timing):
            raise RuntimeError("both events must be created with enable_timing")
        if not (self._complete() and end._complete()):
            raise RuntimeError("both events must be completed before the time between them is known")
        return (end._at - self._at) * 1e3


stream = Stream()
_current: list[Stream] = []  # side streams that are entered
_pinned: dict[int, int] = {}  # address -> end
_generator = torch.Generator().manual_seed(5)
seen = {"copies": 0, "waits": 0}


def left() -> int:
    """Copies that nothing has waited for."""
    return len(stream.under_way)


def current() -> Stream:
    return _current[-1] if _current else stream


# -- memory


def _fill_with_rubbish(values: Tensor) -> None:
    values.detach().view(-1).view(torch.uint8).fill_(_RUBBISH)


def _bytes(values: Tensor) -> Tensor:
    return values.detach().contiguous().view(-1).view(torch.uint8)


def _is_pinned(values: Tensor) -> bool:
    at = values.data_ptr()
    return any(begin <= at < end for begin, end in list(_pinned.items()))


def _pinning(memory: Tensor) -> Tensor:
    begin = memory.data_ptr()
    _pinned[begin] = begin + memory.nbytes
    weakref.finalize(memory, _pinned.pop, begin, None)
    return memory


def host_memory(shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
    memory = torch.empty(shape, dtype=dtype)
    return _pinning(memory) if accelerator.is_accelerator(device) and memory.nbytes else memory


def pin(address: int, size: int, device: Any) -> int:
    _pinned[address] = address + size
    return 0


def unpin(address: int) -> None:
    end = _pinned.pop(address)
    with _lock:
        for _, copy in stream.under_way:
            if copy.to_host and address <= copy.target.data_ptr() < end:
                raise RuntimeError("memory was unpinned while the device copies to it")


# -- copies


def _copy(target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    if not non_blocking or not isinstance(source, Tensor) or not source.numel():
        return _copy_now(target, source, non_blocking)
    here = current()
    if isinstance(here, SideStream):
        assert _is_pinned(target) != _is_pinned(source)
        here.queue(target, source, to_host=_is_pinned(target))
        return target
    if _is_pinned(target):
        assert target.is_contiguous()
        assert target.dtype == source.dtype, "the device converts nothing while it copies"
        seen["copies"] += 1
        with _lock:
            stream.add(_Copy(target, source, source.detach().clone(), to_host=True))
            _fill_with_rubbish(target)
        return target
    _copy_now(target, source)
    if _is_pinned(source):
        _watch_source(target, source)
    return target


def _watch_source(target: Tensor, source: Tensor) -> None:
    seen["copies"] += 1
    stream.add(_Copy(target, source, source.detach().clone(), to_host=False))


def _to(move: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved = move(values, *args, **kwargs)
        if not any(isinstance(a, LateDevice) for a in (*args, *kwargs.values())):
            return moved
        if moved is values:  # to torch both are on the CPU
            moved = values.clone()
        if kwargs.get("non_blocking") and _is_pinned(values):
            _watch_source(moved, values)
        return moved

    return to


def install(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace what `hardware.accelerator` uses of torch, and its claim to a device. `patch` as `monkeypatch.setattr`."""
    stream.under_way.clear()
    stream.count = stream.passed = 0

    def claim(kind: str, index: int) -> Any:
        return torch.device("cpu") if kind == "cpu" else LateDevice(index)

    patch(accelerator, "claim", claim)
    patch(accelerator, "host_memory", host_memory)
    patch(accelerator, "new_stream", lambda device: SideStream())
    patch(accelerator, "pin", pin)
    patch(accelerator, "unpin", unpin)
    patch(torch, "Event", Event)
    patch(torch.accelerator, "current_stream", lambda device: current())
    patch(torch.accelerator, "max_memory_allocated", lambda device: 7 << 20)
    patch(torch.accelerator, "get_memory_info", lambda device: (1 << 36, 1 << 36))
    patch(torch.accelerator, "empty_cache", lambda: None)
    patch(torch.Tensor, "copy_", _copy)
    patch(torch.Tensor, "to", _to(torch.Tensor.to))
    patch(torch.Tensor, "pin_memory", lambda values: _pinning(values.clone()) if values.numel() else values)
    device_module = torch.get_device_module
    own = SimpleNamespace(
        Stream=Stream,
        get_device_name=lambda device: "late test device",
        get_device_properties=lambda device: SimpleNamespace(),
        get_rng_state=lambda device: _generator.get_state(),
        set_rng_state=lambda state, device: _generator.set_state(state),
    )
    patch(torch, "get_device_module", lambda d=None: own if isinstance(d, LateDevice) else device_module(d))
    _replace_communication(patch)


def _replace_communication(patch: Callable[[Any, str, Any], None]) -> None:
    """NCCL is gloo, and FSDP2 works on a CPU."""
    join, from_group = dist.init_process_group, DeviceMesh.from_group

    def init_process_group(backend: str, *, device_id: Any = None, **given: Any) -> None:
        torch.set_num_threads(1)
        assert (backend == "nccl") == isinstance(device_id, LateDevice)
        join("gloo", **given)

    def from_cpu_group(group: Any, device_type: str, *args: Any, **given: Any) -> DeviceMesh:
        return from_group(group, "cpu", *args, **given)

    patch(dist, "init_process_group", init_process_group)
    patch(DeviceMesh, "from_group", staticmethod(from_cpu_group))
