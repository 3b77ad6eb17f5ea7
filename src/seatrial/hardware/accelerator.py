"""What torch is asked about the device that a rank computes on: a CPU, or an accelerator. The only place that asks.

An accelerator works behind the host: work is queued in streams, and a result or an asynchronous copy is complete once
an event recorded after it in the same stream has been passed. Imported only by code that may load torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seatrial.hardware.devices import Device

_PORTABLE = 1  # cudaHostRegisterPortable


def default_kind() -> Device:
    """The kind of device of a rank whose environment names none. Of accelerators only NVIDIA's GPUs are supported."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cuda" if found is not None and found.type == "cuda" else "cpu"


def claim(kind: str, index: int) -> torch.device:
    """The device of this process from now on: the accelerator number `index`, or the CPU."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, index)
    torch.accelerator.set_device_index(device)
    return device


def is_accelerator(device: torch.device) -> bool:
    """Whether the host queues its work and is ahead of it. A CPU has finished when a call returns."""
    return device.type != "cpu"


# -- streams and events


def record(*, timing: bool = False) -> torch.Event:
    """An event after all work queued so far in the current stream of this process's accelerator."""
    event = torch.Event(enable_timing=timing)
    event.record()
    return event


def current_stream(device: torch.device) -> int:
    """The id of the stream that work for `device` is queued in now."""
    return torch.accelerator.current_stream(device).stream_id


def stream_type(device: torch.device) -> type:
    """The class of the streams that torch's own modules use on `device`."""
    found: type = torch.get_device_module(device).Stream
    return found


# -- host memory that an accelerator copies to or from by DMA, while the host goes on


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory of the host for copies from `device`, not initialised; pinned if that is an accelerator."""
    return torch.empty(shape, dtype=dtype, pin_memory=is_accelerator(device))


def pin(address: int, size: int, device: torch.device) -> int:
    """Pin existing memory; returns CUDA's error, 0 if there is none. May be called from any thread."""
    with torch.accelerator.device_index(device.index):
        return int(_runtime().cudaHostRegister(address, size, _PORTABLE))


def unpin(address: int) -> None:
    """The inverse of `pin`, before the memory is returned."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


# -- memory of the device, in bytes


def peak_memory(device: torch.device) -> int:
    """The most that torch has allocated at once."""
    return torch.accelerator.max_memory_allocated(device)


def free_memory(device: torch.device) -> int:
    """What other allocations than torch's may still take."""
    return torch.accelerator.get_memory_info(device)[0]


def release_cached_memory() -> None:
    """Return memory to the device that torch holds and does not use."""
    torch.accelerator.empty_cache()


# -- what torch.accelerator does not know


def name(device: torch.device) -> str:
    """The driver's name: "NVIDIA H200"."""
    return str(torch.get_device_module(device).get_device_name(device))


def pci_address(device: torch.device) -> str | None:
    """The PCI address, "0000:3b:00"; None for a CPU, or in a version of torch that does not report it."""
    if not is_accelerator(device):
        return None
    found = torch.get_device_module(device).get_device_properties(device)
    domain, bus, slot = (getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}"


def random_state(device: torch.device) -> Tensor:
    """A copy, on the host, of the state of the device's random number generator."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.get_device_module(device).set_rng_state(state, device)
