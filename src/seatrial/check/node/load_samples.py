"""Clocks, links and power of GPUs under load: sampled in a thread, by NVML, else by nvidia-smi."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from statistics import median
from types import TracebackType
from typing import Any, Self

from seatrial.check.node.nvml import Nvml
from seatrial.hardware.xid import address

_INTERVAL_S = 0.1
_FIELDS = {
    "sm_mhz": "clocks.sm",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
    "reasons": "clocks_throttle_reasons.active",
}
_LIMITS = {"sm_mhz": "clocks.max.sm", "pcie_gen": "pcie.link.gen.max", "pcie_width": "pcie.link.width.max"}


class Sampler:
    """Samples all GPUs while the context is entered. `problem` is the reason if there are no samples."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._limits: dict[str, dict[str, Any]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            nvml = Nvml()
            self._thread = threading.Thread(target=self._by_nvml, args=(nvml,), daemon=True)
        except OSError as error:
            self.problem = str(error)
            self._by_tool()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._child is not None:
            self._child.kill()
        if self._thread is not None:
            self._thread.join(timeout=10.0)  # a hanging driver shows as missing samples
        if self._child is not None and self._child.stdout is not None:
            self._child.wait()
            self._child.stdout.close()

    def summary(self) -> dict[str, dict[str, Any]]:
        """By PCI address: sample count, median and lowest SM clock, all reasons (bits), highest link, °C and watts."""
        found = {}
        for pci, samples in self._samples.items():
            # The first quarter may be from before the load.
            under = samples[len(samples) // 4 :]

            def known(name: str, under: list[dict[str, Any]] = under) -> list[float]:
                return [s[name] for s in under if s.get(name) is not None]

            reasons = 0
            for sample in under:
                reasons |= int(sample.get("reasons") or 0)
            clocks = known("sm_mhz")
            found[pci] = {
                "samples": len(under),
                "sm_mhz": median(clocks) if clocks else None,
                "least_sm_mhz": min(clocks, default=None),
                "reasons": reasons if known("reasons") else None,
                # The highest: a link speeds up with the load, and its first samples may be from before.
                "pcie_gen": max(known("pcie_gen"), default=None),
                "pcie_width": max(known("pcie_width"), default=None),
                "temperature_c": max(known("temperature_c"), default=None),
                "power_w": max(known("power_w"), default=None),
                "limits": self._limits.get(pci, {}),
            }
        return found

    def _by_nvml(self, nvml: Nvml) -> None:
        handles = {}
        for index in range(nvml.count()):
            with contextlib.suppress(OSError):
                handle = nvml.handle(index)
                if pci := address(nvml.pci(handle) or ""):
                    handles[pci] = handle
                    self._limits[pci] = nvml.limits(handle)
        while not self._over.wait(_INTERVAL_S):
            for pci, handle in handles.items():
                self._samples.setdefault(pci, []).append(nvml.now(handle))

    def _by_tool(self) -> None:
        fields = ",".join(["pci.bus_id", *_FIELDS.values(), *_LIMITS.values()])
        argv = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", "200"]
        with contextlib.suppress(OSError):
            # It ends with this process: as part of its group, and at the latest when its next write finds no reader.
            self._child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        for line in self._child.stdout:
            pci, *values = [v.strip() for v in line.split(",")]
            if (at := address(pci)) is None or len(values) != len(_FIELDS) + len(_LIMITS):
                continue
            numbers = [_number(v) for v in values]
            self._samples.setdefault(at, []).append(dict(zip(_FIELDS, numbers, strict=False)))
            self._limits[at] = dict(zip(_LIMITS, numbers[len(_FIELDS) :], strict=True))
            self.problem = None


def _number(text: str) -> float | None:
    try:
        return int(text, 16) if text.startswith("0x") else float(text)
    except ValueError:
        return None
