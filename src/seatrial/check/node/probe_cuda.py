"""Rates of this node's CUDA devices: bf16 products with clocks, memory, host copies, and each pair. Imports torch.

For probe_rates.py. One device after the other, except for the sustained products: all at once, because they share power
and cooling.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from seatrial.check.node.load_samples import Sampler
from seatrial.hardware.xid import address

Send = Callable[[dict[str, Any]], None]

# Rows, columns, inner: shapes of published maxima (stas00/ml-engineering, mamf-finder: H100, A100), and a plain one.
_SHAPES = ((8192, 8192, 8192), (6144, 17920, 2816), (2048, 2048, 13312))
_REPEAT_S = 0.02  # one product takes a millisecond, and its launch would count
_GUESS_FLOP_S = 5e14  # to choose how many products that is
_SUSTAIN_S = 2.0  # clocks drop within a second under a load that is too much for power or cooling
_WINDOW_S = 0.1
_HBM_BYTES = 2 << 30
_HOST_BYTES = 256 << 20
_PAIR_BYTES = 256 << 20
_PAIR_COPIES = 20
_REPEATS = 5
_LEAST_FREE = 8 << 30


def measure_cuda(seconds: float, send: Send) -> None:
    """Send {"gpu": {"pci", ...}} and {"pair": ...} of all visible devices; {"skipped"} if `seconds` are too few.

    TFLOP/s of bf16 products, GB/s: "hbm" is a copy within the memory (read and write added), all others are one
    direction but "both_gb_s", which adds both. {"failed"} is a part that ended with an error: "hardware" if it was
    CUDA's.
    """
    deadline = time.monotonic() + seconds
    send({"doing": "starting CUDA"})
    if torch.version.cuda is None:
        send({"failed": "starting CUDA", "problem": "the installed PyTorch has no CUDA", "hardware": False})
        return
    try:
        torch.cuda.init()
    except RuntimeError as error:
        send({"failed": "starting CUDA", "problem": _error_text(error), "hardware": True})
        return
    usable = []
    for number in range(torch.cuda.device_count()):
        device = _Device(number)
        problem, broken = device.start()
        known = {"pci": device.pci, "index": number, "name": device.name}
        send({"gpu": known | {"problem": problem, "broken": broken}})
        if problem is None:
            usable.append(device)
    parts: tuple[tuple[str, Callable[[], None]], ...] = (
        ("bf16 products", lambda: _products(usable, send)),
        ("sustained bf16 GEMMs", lambda: _sustain(usable, send)),
        ("copies within the memory", lambda: _memory(usable, send)),
        ("copies from and to the host", lambda: _host(usable, send)),
        ("copies between GPUs", lambda: _pairs(usable, deadline, send)),
    )
    for name, part in parts:
        if time.monotonic() > deadline:
            send({"skipped": name})
            continue
        send({"doing": name})
        try:
            part()
        except torch.OutOfMemoryError as error:  # another program has taken the memory meanwhile
            send({"failed": name, "problem": _error_text(error), "hardware": False})
        except RuntimeError as error:
            # A CUDA error as torch raises it: after one, no further result can be trusted.
            send({"failed": name, "problem": _error_text(error), "hardware": True})
            return


class _Device:
    def __init__(self, number: int) -> None:
        found: Any = torch.cuda.get_device_properties(number)  # its stub lacks the address
        self.name: str = found.name
        text = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
        self.pci = address(text) or text
        self.device = torch.device("cuda", number)

    def start(self) -> tuple[str | None, bool]:
        """The reason if it cannot be measured, else None; and whether that is a fault of the device."""
        try:
            free, _ = torch.cuda.mem_get_info(self.device)
        except RuntimeError as error:
            return _error_text(error), True
        if free < _LEAST_FREE:
            return f"only {free >> 20} MiB of its memory are free: another program uses it", False
        return None, False


def _error_text(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _best(device: _Device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several repeats, after one warm-up."""
    with torch.cuda.device(device.device):
        work()
        marks = [(_event(), _event()) for _ in range(_REPEATS)]
        for begin, end in marks:
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return min(begin.elapsed_time(end) for begin, end in marks) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class _Product:
    """A bf16 product of random matrices on a device; a call runs as many as take about `seconds`."""

    def __init__(self, device: _Device, shape: tuple[int, int, int], seconds: float) -> None:
        rows, columns, inner = shape
        self._a = torch.randn(rows, inner, device=device.device, dtype=torch.bfloat16)
        self._b = torch.randn(inner, columns, device=device.device, dtype=torch.bfloat16)
        self._c = torch.empty(rows, columns, device=device.device, dtype=torch.bfloat16)
        one = 2 * rows * columns * inner
        self._many = max(1, round(seconds * _GUESS_FLOP_S / one))
        self.flop = one * self._many

    def __call__(self) -> None:
        for _ in range(self._many):
            torch.mm(self._a, self._b, out=self._c)


def _products(devices: list[_Device], send: Send) -> None:
    for device in devices:
        best = 0.0
        for shape in _SHAPES:
            product = _Product(device, shape, _REPEAT_S)
            best = max(best, product.flop / _best(device, product) / 1e12)
        send({"gpu": {"pci": device.pci, "gemm_tflop_s": best}})


def _sustain(devices: list[_Device], send: Send) -> None:
    """All devices at once, while the clocks are sampled; the rate is the median of short windows."""
    rates: dict[str, list[float]] = {device.pci: [] for device in devices}
    problems: list[RuntimeError] = []
    until = time.monotonic() + _SUSTAIN_S

    def load(device: _Device) -> None:
        try:
            with torch.cuda.device(device.device):
                product = _Product(device, _SHAPES[0], _WINDOW_S)
                while time.monotonic() < until:
                    begin, end = _event(), _event()
                    begin.record()
                    product()
                    end.record()
                    end.synchronize()
                    rates[device.pci].append(product.flop / begin.elapsed_time(end) / 1e9)
        except RuntimeError as error:  # raised below, in the calling thread
            problems.append(error)

    threads = [threading.Thread(target=load, args=(device,)) for device in devices]
    with Sampler() as sampler:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if problems:
        raise problems[0]
    samples = sampler.summary()
    for device in devices:
        windows = sorted(rates[device.pci])
        rate = windows[len(windows) // 2] if windows else None
        values = {"pci": device.pci, "sustained_tflop_s": rate, "load": samples.get(device.pci)}
        send({"gpu": values | {"load_problem": sampler.problem}})


def _memory(devices: list[_Device], send: Send) -> None:
    for device in devices:
        source = torch.ones(_HBM_BYTES // 4, device=device.device)
        target = torch.empty_like(source)
        duration_s = _best(device, partial(target.copy_, source))
        send({"gpu": {"pci": device.pci, "hbm_gb_s": 2 * _HBM_BYTES / duration_s / 1e9}})


def _host(devices: list[_Device], send: Send) -> None:
    if not devices:
        return
    host = torch.ones(_HOST_BYTES // 4).pin_memory()
    for device in devices:
        there = torch.empty(_HOST_BYTES // 4, device=device.device)
        to = _best(device, partial(there.copy_, host, non_blocking=True))
        back = _best(device, partial(host.copy_, there, non_blocking=True))
        rates = {"h2d_gb_s": _HOST_BYTES / to / 1e9, "d2h_gb_s": _HOST_BYTES / back / 1e9}
        send({"gpu": {"pci": device.pci, **rates}})


def _pairs(devices: list[_Device], deadline: float, send: Send) -> None:
    """Every pair in each direction and in both at once. torch copies on the stream of the source's device."""
    for i, one in enumerate(devices):
        for other in devices[i + 1 :]:
            if time.monotonic() > deadline:
                send({"skipped": f"copies between GPUs from {one.device} and {other.device} on"})
                return
            peers = torch.cuda.can_device_access_peer(one.device, other.device)
            here = [torch.ones(_PAIR_BYTES // 4, device=one.device) for _ in range(2)]
            there = [torch.ones(_PAIR_BYTES // 4, device=other.device) for _ in range(2)]
            forth = _best(one, partial(there[0].copy_, here[0], non_blocking=True))
            back = _best(other, partial(here[1].copy_, there[1], non_blocking=True))
            pair = {"from": one.pci, "to": other.pci, "peer_access": peers}
            rates = {"gb_s": _PAIR_BYTES / forth / 1e9, "back_gb_s": _PAIR_BYTES / back / 1e9}
            send({"pair": pair | rates | {"both_gb_s": _both((one, other), here, there)}})


def _both(devices: tuple[_Device, _Device], here: list[torch.Tensor], there: list[torch.Tensor]) -> float:
    """GB/s of both directions together, by the host's clock over enough copies that launch overhead does not count."""
    for device in devices:
        torch.cuda.synchronize(device.device)
    started_at = time.perf_counter()
    for _ in range(_PAIR_COPIES):
        there[0].copy_(here[0], non_blocking=True)
        here[1].copy_(there[1], non_blocking=True)
    for device in devices:
        torch.cuda.synchronize(device.device)
    return 2 * _PAIR_COPIES * _PAIR_BYTES / (time.perf_counter() - started_at) / 1e9
