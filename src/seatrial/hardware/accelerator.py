"""All queries to torch about the device that a rank computes on: a CPU or an accelerator. No other module asks.

An accelerator runs asynchronously: work is queued in streams, and a result or an asynchronous copy is complete once
an event recorded after it in the same stream has been passed. Imported only by code that may load torch.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seatrial.base.errors import InputError
from seatrial.hardware.catalogue import FLASH_HEAD_DIM, AttentionKernel
from seatrial.hardware.devices import Device

_PORTABLE = 1  # cudaHostRegisterPortable


def default_kind() -> Device:
    """The default device kind of a rank. NVIDIA GPUs are the only supported accelerators."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cuda" if found is not None and found.type == "cuda" else "cpu"


def claim(kind: str, index: int) -> torch.device:
    """Make accelerator number `index`, or the CPU, the device of this process; returns it."""
    if kind == "cpu":
        return torch.device(kind)
    device = torch.device(kind, index)
    torch.accelerator.set_device_index(device)
    return device


def make_deterministic() -> None:
    """Only operators that give the same bits each time; one that cannot raises RuntimeError. Before the first use of CUDA.

    torch then leaves out cuDNN's attention and NCCL's reductions in the switch (NVLS). In NCCL's trees the order of a sum is
    NCCL's choice, in a ring it follows from the ranks' order. Raises InputError if the environment chooses another algorithm.
    """
    algorithm = os.environ["NCCL_ALGO"] = os.environ.get("NCCL_ALGO") or "Ring"
    if algorithm.lower() != "ring":
        raise InputError(
            f"NCCL_ALGO={algorithm} does not fix the order in which ranks are summed, as train.deterministic needs",
            hint="unset it, or set it to Ring",
        )
    # Otherwise cuBLAS may split a product differently from call to call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Otherwise torch.compile tries kernels, and takes the fastest, which may sum in another order. Read when it is imported.
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    # A debugging aid, which writes to all memory that is allocated. A property that mypy does not see.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_compiler(device: str) -> None:
    """Raises InputError if torch.compile lacks something on this node: a compiler (Triton's for C, on CPUs Inductor's for C++), Python.h."""
    variable, names = ("CXX", ("g++",)) if device == "cpu" else ("CC", ("gcc", "clang"))
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not os.environ.get(variable) and not any(map(shutil.which, names)):
        lacks, hint = " or ".join(names), f"install it, name another compiler in {variable},"
    elif not header.exists():
        lacks, hint = str(header), "install Python's headers (python3-dev),"
    else:
        return
    raise InputError(
        f"train.compile needs a compiler and Python's headers on each node, and this one has no {lacks}",
        hint=f"{hint} or set train.compile = false",
    )


def is_accelerator(device: torch.device) -> bool:
    """Whether work on `device` is asynchronous to the host. On a CPU it is finished when a call returns."""
    return device.type != "cpu"


def has_flash_attention(device: torch.device) -> bool:
    """Whether torch has its flash attention there, and not only as `scaled_dot_product_attention` may choose it."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on `device`. The copy to an accelerator is asynchronous."""
    return values.pin_memory().to(device, non_blocking=True) if is_accelerator(device) else values


_flash_allowed = True  # by `choose_attention`


def choose_attention(kernel: AttentionKernel, *, deterministic: bool) -> None:
    """Let `scaled_dot_product_attention` use this kernel on GPUs, or the first that can.

    Never the one that keeps all scores, unless only that has the same bits each time: without any other torch raises
    RuntimeError.
    """
    global _flash_allowed
    allowed = {"flash", "cudnn", "efficient"} if kernel == "auto" else {kernel}
    if deterministic:
        allowed -= {"cudnn", "efficient"}
    _flash_allowed = "flash" in allowed
    torch.backends.cuda.enable_flash_sdp("flash" in allowed)
    torch.backends.cuda.enable_cudnn_sdp("cudnn" in allowed)
    torch.backends.cuda.enable_mem_efficient_sdp("efficient" in allowed)
    torch.backends.cuda.enable_math_sdp(deterministic)


def flash_takes(query: Tensor, *, biased: bool) -> bool:
    """Whether flash attention can be used, which of the fused kernels alone takes fewer heads of keys than of queries."""
    return not biased and query.dtype != torch.float32 and query.shape[-1] <= FLASH_HEAD_DIM


def needs_equal_heads(query: Tensor, *, biased: bool) -> bool:
    """Whether attention's kernel needs as many heads of keys as of queries.

    Given fewer, torch would silently use the kernel that keeps all scores (pytorch/pytorch#154363).
    """
    flash = _flash_allowed and flash_takes(query, biased=biased)
    return is_accelerator(query.device) and not flash


# -- streams and events


def record(*, timing: bool = False) -> torch.Event:
    """An event after all work queued so far in the current stream of this process's accelerator."""
    event = torch.Event(enable_timing=timing)
    event.record()
    return event


def new_stream(device: torch.device) -> torch.Stream:
    """A stream beside the current one; as a context manager it is the current one."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> int:
    """The id of the current stream of `device`."""
    return torch.accelerator.current_stream(device).stream_id


def stream_type(device: torch.device) -> type:
    """The class of the streams that torch's own modules use on `device`."""
    found: type = torch.get_device_module(device).Stream
    return found


# -- host memory for asynchronous copies (DMA)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised host memory for copies from `device`; pinned if that is an accelerator."""
    return torch.empty(shape, dtype=dtype, pin_memory=is_accelerator(device))


def pin(address: int, size: int, device: torch.device) -> int:
    """Pin existing memory; returns CUDA's error, 0 if there is none. May be called from any thread."""
    with torch.accelerator.device_index(device.index):
        return int(_runtime().cudaHostRegister(address, size, _PORTABLE))


def unpin(address: int) -> None:
    """Undo `pin`, before the memory is freed."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


# -- memory of the device, in bytes


def peak_memory(device: torch.device) -> int:
    """Peak of torch's allocations."""
    return torch.accelerator.max_memory_allocated(device)


def free_memory(device: torch.device) -> int:
    """Memory available to allocations other than torch's."""
    return torch.accelerator.get_memory_info(device)[0]


def release_cached_memory() -> None:
    """Return unused memory of torch's allocator to the device."""
    torch.accelerator.empty_cache()


# -- not available through torch.accelerator


def name(device: torch.device) -> str:
    """The device's name as the driver reports it, such as "NVIDIA H200"."""
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
    """A host copy of the device's random number generator state."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore a state from `random_state`."""
    torch.get_device_module(device).set_rng_state(state, device)
